"""Generate the model file of a new dense architecture, and add the architecture to the lists of the tests.

    python -m tools.new_model TYPE                  # TYPE is transformers' `model_type`, such as seed_oss
    python -m tools.new_model TYPE --gguf NAME      # if gguf-py has it under another name

The command needs transformers and PyTorch (the extra `train`) and gguf (the extra `test`). It reads settings and
tensors from transformers' configuration class and a tiny model, and GGUF names from gguf-py's tensor map. The generated
file has the differences from Llama: rows of the tensor table, and under `expected` the settings that Llama does not
have and that may change the model, with their defaults. For each of these settings, decide whether it changes the
model: make it a field, leave it under `expected`, or list it as harmless. Then follow the printed steps.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_engine.commands.models import keys_of
from mlx_engine.config.settings import HARMLESS, OFF
from mlx_engine.models import llama

ROOT = Path(__file__).parents[1]
# Sizes of the tiny model. All products that occur as dimensions differ, so that a dimension determines its letters.
SIZES = {
    "hidden_size": 48, "intermediate_size": 56, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 72, "num_hidden_layers": 1, "max_position_embeddings": 64,
}  # fmt: skip
LETTERS = {48: "D", 56: "F", 96: "HE", 32: "GE", 16: "E", 72: "V"}
# The letters for models without a setting `head_dim`: there, a head has 48 / 6 = 8 elements. HE is then 48, like D;
# `rows` distinguishes the two by the tensor's name.
WITHOUT_HEAD_DIM = {**LETTERS, 16: "GE", 8: "E"}
NEXT = """
1. Compare transformers' modeling file with mlx_engine/models/{name}.py: which settings under `expected` must become
   fields, and what the standard decoder (models/standard.py) does not do. CONTRIBUTING.md, "Add a model", describes it.
2. python -m tests.golden.make_dense_goldens {name}
3. python -m pytest -n 0 -m "slow or not slow" tests/golden/test_dense.py tests/golden/test_table.py -k {name}
4. python -m tests.golden.compare_config_keys --write {name}, and reasons for new keys under `why`
5. The rest of "All places to edit" in CONTRIBUTING: `ARCHITECTURES` in tests/golden/test_dense.py, and items 4 to 8
6. python -m pytest -n 0 tests/golden/test_independent.py tests/unit/test_random_models.py \\
       tests/unit/test_config_keys.py tests/unit/test_models_command.py
"""


def rows(shapes: Mapping[str, tuple[int, ...]], names: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return (name in transformers, shape in axis letters) by GGUF name, with "*" for the layer.

    Args:
        shapes: the tensors of a model with the sizes of `SIZES` and one layer.
        names: their GGUF names.
    """
    letters = LETTERS if any(96 in shape for shape in shapes.values()) else WITHOUT_HEAD_DIM
    made = {}
    for name, shape in shapes.items():
        axes = [letters.get(n, str(n)) for n in shape]
        if "q_proj" in name:
            axes[0] = "HE"
        if "o_proj.weight" in name:
            axes[1] = "HE"
        made[names[name].replace("blk.0.", "blk.*.")] = name.replace("layers.0.", "layers.*."), " ".join(axes)
    return made


def settings(defaults: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of a configuration class that Llama does not have and that may change the model."""
    of_llama = keys_of("llama")
    known = set[str]() if of_llama is None else {key for field in of_llama.fields for key in field.hf}
    known |= (
        HARMLESS | set(OFF) | {"hidden_act", "tie_word_embeddings", "rope_parameters", "rope_scaling", "layer_types"}
    )
    return {key: value for key, value in defaults.items() if key not in known}


def frame(name: str, gguf: str, found: Mapping[str, tuple[str, str]], defaults: Mapping[str, object]) -> str:
    """Return the text of a model file."""
    usual = {key: (row.hf, row.shape) for key, row in llama.TENSORS.items() if row.when is None}
    lacking = sorted(key for key in usual if key not in found and key != "output.weight")
    new = {key: row for key, row in found.items() if usual.get(key) != row and key not in llama.TENSORS}
    new |= {key: row for key, row in found.items() if key in usual and usual[key] != row}
    table = "**llama.TENSORS,"
    if lacking:
        names = ", ".join(map(json.dumps, lacking))
        table = f"**{{name: row for name, row in llama.TENSORS.items() if name not in ({names},)}},"
    lines = [f'    "{key}": Row("{hf}", "{shape}"),' for key, (hf, shape) in new.items()]
    checked = [f'            "{key}": {value!r},'.replace("'", '"') for key, value in settings(defaults).items()]
    tied = ", tied=True" if defaults.get("tie_word_embeddings") else ""
    row_import = "\nfrom mlx_engine.weights.table import Row" if lines else ""
    text = f'''"""{name}.

Reference: Hugging Face transformers, models/{name}. Differences from Llama: ...
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_engine.config.declared import Expected
from mlx_engine.models import llama, standard{row_import}

ARCHITECTURES = ({", ".join(map(json.dumps, dict.fromkeys((name, gguf))))},)
GGUF_ARCHITECTURE = "{gguf}"


@dataclass(frozen=True)
class Config(llama.Config):
    expected = Expected(
        gguf={{"attention.causal": True}},
        hf={{
            "hidden_act": "{defaults.get("hidden_act", "silu")}",
{chr(10).join(checked)}
        }},
    )


TENSORS = {{
    {table}
{chr(10).join(lines)}
}}
Model = standard.Model
plan = standard.plan(Config, TENSORS{tied})
'''
    return re.sub(r"\n{2,}(?=        \}|\})", "\n", text)


def registered(name: str, kind: str, gguf: str, constant: str) -> None:
    """Add the model to the lists of the tests."""
    golden = f'    "{name}": {{"model_type": "{kind}", "rope_parameters": PLAIN}},\n'
    module = f"from transformers.models.{kind} import modeling_{kind}\n"
    settings_line = "SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {\n"
    arch_line = "ARCHITECTURES: dict[str, gguf.MODEL_ARCH] = {\n"
    for path, before, line in (
        ("tests/golden/make_dense_goldens.py", "MODELS: dict[str, dict[str, Any]] = {\n", golden),
        ("tests/golden/make_dense_goldens.py", "MODULES = (\n", f"    modeling_{kind},\n"),
        ("tests/golden/make_dense_goldens.py", import_before(module), module),
        ("tests/golden/goldens.py", "SAMPLED = (\n", f'    "{name}",\n'),
        ("tests/random_models.py", "SAMPLED = (\n", f'    "{gguf}",\n'),
        ("tests/random_models.py", settings_line, f'    "{gguf}": ("gguf", _DECODER),\n'),
        ("tests/golden/independent.py", arch_line, f'    "{kind}": ARCH.{constant},\n'),
    ):
        text = (ROOT / path).read_text()
        if before not in text:
            raise SystemExit(f"{path}: expected the line {before.strip()!r}; add {line.strip()!r} by hand")
        if line not in text:
            (ROOT / path).write_text(text.replace(before, before + line, 1))
            print(f"{path}: {line.strip()}")


def import_before(module: str) -> str:
    """Return the line of the goldens' script after which the import of a model's module is in order."""
    lines = (ROOT / "tests/golden/make_dense_goldens.py").read_text().splitlines(keepends=True)
    return max(line for line in lines if line.startswith("from transformers") and line < module)


def plain(name: str) -> str:
    """Return the letters and digits of a name, because gguf-py and transformers separate them by different marks."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def main(arguments: list[str]) -> int:
    """Write the files; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.new_model", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("type", help="transformers' model_type")
    parser.add_argument("--gguf", help="the architecture's name in gguf-py (default: TYPE)")
    options = parser.parse_args(arguments)
    kind, path = options.type, ROOT / "mlx_engine" / "models" / f"{options.type}.py"
    if path.exists():
        raise SystemExit(f"{path} exists; choose another type, or delete it first")
    import gguf
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    of = {plain(name): (arch, name) for arch, name in gguf.constants.MODEL_ARCH_NAMES.items()}
    arch, name = of.get(plain(options.gguf or kind), (None, None))
    if arch is None or kind not in CONFIG_MAPPING:
        raise SystemExit(f"{kind}: not in {'transformers' if arch else 'gguf-py; give its name there with --gguf'}")
    defaults: dict[str, Any] = CONFIG_MAPPING[kind]().to_dict()
    sizes = {key: value for key, value in SIZES.items() if key in defaults} | {"pad_token_id": None}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**sizes))
    tensors, known = gguf.get_tensor_name_map(arch, 1), dict[str, str]()
    for tensor in (stem for stem, _ in model.named_parameters()):
        found = tensors.get_name(tensor, try_suffixes=(".weight", ".bias"))
        if found is None:
            print(f"{tensor}: gguf-py has no name for it; the model file has its name in transformers")
        known[tensor] = found or tensor
    shapes = {stem: tuple(values.shape) for stem, values in model.named_parameters()}
    path.write_text(frame(kind, name, rows(shapes, known), defaults))
    print(f"{path.relative_to(ROOT)}: written, to be completed")
    registered(kind, kind, name, arch.name)
    print(NEXT.format(name=kind))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
