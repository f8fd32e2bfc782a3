"""Record which type llama.cpp gives to each matrix in its mixes: tests/data/llama-mixes.json.

    python -m tests.golden.make_llama_mixes --python PATH

PATH is a Python that has llama-cpp-python. llama.cpp quantises files with the names of a model's tensors, in which rows
are short and all weights are zeros. The record has one letter per layer for each matrix and mix.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mlx_engine.checkpoint.gguf import open_gguf
from mlx_engine.checkpoint.gguf_writer import write_gguf
from mlx_engine.convert.file_types import FILE_TYPES, MIXES
from mlx_engine.convert.gguf_form import from_folder
from mlx_engine.quant.types import BY_NAME, F32, GGMLType
from mlx_engine.quant.weight import Weight
from tests.golden.goldens import DATA
from tests.golden.test_dense import with_tokenizer

RECORD = DATA / "llama-mixes.json"
# The letters of types in the record; "." is the type of the source, and "-" a layer without such a matrix.
LETTERS = {"Q4_K": "4", "Q5_K": "5", "Q6_K": "6", "Q8_0": "8", "Q5_0": "a", "Q5_1": "b", "F16": "h", "F32": "."}
KEYS = ("block_count", "expert_count", "attention.head_count", "attention.head_count_kv")
_LAYER = re.compile(r"blk\.(\d+)\.")

_QUANTIZE = """
import ctypes, sys, llama_cpp as api
wanted = api.llama_model_quantize_default_params()
wanted.ftype, wanted.nthread = int(sys.argv[3]), 1
sys.exit(api.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(wanted)))
"""


@dataclass(frozen=True)
class Case:
    """A model of which names and settings matter.

    Attributes:
        model: the folder in tests/data with the names of tensors and the settings.
        n_layers: the number of layers like the first; None for those of the folder.
        columns: weights of a row, in all matrices but those in `wide`.
        settings: settings that replace the folder's.
        wide: columns of some matrices, by the end of their names.
        has_head: whether there is a matrix for the head; None for what the folder has.
    """

    model: str
    n_layers: int | None = None
    columns: int = 256
    settings: Mapping[str, int] = field(default_factory=dict)
    wide: Mapping[str, int] = field(default_factory=dict)
    has_head: bool | None = None


HEADS, HEADS_KV = "attention.head_count", "attention.head_count_kv"
CASES = {
    "llama 8B": Case("llama", 32, settings={HEADS: 32, HEADS_KV: 8}, has_head=True),
    "llama 70B": Case("llama", 80, settings={HEADS: 64, HEADS_KV: 8}, has_head=True),
    "llama 65B": Case("llama", 80, settings={HEADS: 64, HEADS_KV: 64}, has_head=True),
    "llama 135M, rows of 288": Case("llama", 30, 288, wide={"ffn_down.weight": 512}, has_head=False),
    "llama, rows of 40": Case("llama", 3, 40, has_head=True),
    "mixtral 8x7B": Case("mixtral", 32, settings={"expert_count": 8}),
    "mixtral with 4 experts": Case("mixtral", 12, settings={"expert_count": 4}),
    "qwen2 72B": Case("qwen2", 80, settings={HEADS: 64, HEADS_KV: 8}),
    "qwen3 0.6B": Case("qwen3", 28, has_head=False),
    "qwen3 30B": Case("qwen3moe", 48, settings={"expert_count": 128}),
    "gemma3 270M, rows of 320": Case("gemma3", 18, 320, wide={"ffn_down.weight": 512}),
    "gemma4 E": Case("gemma4e"),
    "phi3": Case("phi3", 32),
    "gpt2": Case("gpt2", 12),
    "lfm2": Case("lfm2"),
    "qwen3.5": Case("qwen3_5"),
    "gpt-oss": Case("gptoss", 24),
}  # fmt: skip


def main() -> None:
    """Write the record."""
    parser = argparse.ArgumentParser(prog="tests.golden.make_llama_mixes", description="Record llama.cpp's mixes.")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has llama-cpp-python")
    options = parser.parse_args()
    record = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            record[name] = _recorded(case, Path(folder), options.python)
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


def _recorded(case: Case, folder: Path, python: str) -> dict[str, Any]:
    """Return the settings of a model, the columns of its matrices, and their types in each mix."""
    source, target = folder / "in.gguf", folder / "out.gguf"
    metadata, shapes = _model(case, folder)
    write_gguf(source, metadata, [_zeros(name, shape) for name, shape in shapes.items()])
    architecture = metadata["general.architecture"]
    settings = {key: metadata[f"{architecture}.{key}"] for key in KEYS if f"{architecture}.{key}" in metadata}
    types: dict[str, dict[str, str]] = {}
    for mix in MIXES:
        command = [python, "-c", _QUANTIZE, str(source), str(target), str(FILE_TYPES[mix])]
        subprocess.run(command, check=True, capture_output=True)
        with open_gguf(target) as made:
            types[mix] = spelled({name: info.type for name, info in made.tensors.items()})
    columns = {"columns": case.columns, "wide": dict(case.wide)}
    return {"architecture": architecture, "settings": settings, **columns, **types}


def _model(case: Case, folder: Path) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Return the metadata and the shapes of a model, with one layer several times if the case says so."""
    form = from_folder(with_tokenizer(DATA / f"{case.model}-micro" / "hf", folder / case.model))
    metadata = {key: value for key, value in form.metadata.items() if not key.startswith("tokenizer.")}
    settings = dict(case.settings) | ({} if case.n_layers is None else {"block_count": case.n_layers})
    metadata |= {f"{metadata['general.architecture']}.{key}": value for key, value in settings.items()}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, part in form.parts.items():
        if len(part.shape) > 1:
            columns = next((n for end, n in case.wide.items() if name.endswith(end)), case.columns)
            shapes[name] = (*(1,) * (len(part.shape) - 2), 2, columns)
    if case.has_head is not None:
        shapes.pop("output.weight", None)
        shapes |= {"output.weight": (2, case.columns)} if case.has_head else {}
    return metadata, dict(_repeated(shapes, case.n_layers))


def _repeated(shapes: Mapping[str, tuple[int, ...]], n_layers: int | None) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, shape in shapes.items():
        layer = _LAYER.match(name)
        if n_layers is None or layer is None:
            yield name, shape
        elif layer[1] == "0":
            yield from ((name.replace("blk.0.", f"blk.{i}."), shape) for i in range(n_layers))


def _zeros(name: str, shape: tuple[int, ...]) -> Weight:
    return Weight.pack(name, np.zeros(shape, np.float32), F32)


def spelled(types: Mapping[str, GGMLType]) -> dict[str, str]:
    """Return the types of matrices as letters, one per layer, by names with "blk.*." for all layers."""
    found: dict[str, dict[int, str]] = {}
    for name, type_ in types.items():
        layer = _LAYER.match(name)
        found.setdefault(_LAYER.sub("blk.*.", name), {})[int(layer[1]) if layer else 0] = LETTERS[type_.name]
    return {name: "".join(by.get(i, "-") for i in range(max(by) + 1)) for name, by in found.items()}


def read(record: Mapping[str, Any], mix: str) -> dict[str, tuple[GGMLType, tuple[int, ...]]]:
    """Return the types and the shapes of a recorded model's matrices, by name."""
    names = {letter: name for name, letter in LETTERS.items()}
    found = {}
    for pattern, letters in record[mix].items():
        columns = next((n for end, n in record["wide"].items() if pattern.endswith(end)), record["columns"])
        shape = (1, 2, columns) if "_exps." in pattern else (2, columns)
        for i, letter in enumerate(letters):
            if letter != "-":
                found[pattern.replace("*", str(i))] = BY_NAME[names[letter]], shape
    return found


if __name__ == "__main__":
    main()
