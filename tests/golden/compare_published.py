"""Compare the reduced folders of tests/published.py with transformers: `python -m tests.golden.compare_published`.

Needs torch and transformers. A line for each config has the worst error of the logits of 30 tokens, relative to the
root mean square of the expected logits, against transformers in float32 and in float64. Exits with 1 if one of the
second kind is more than the project's tolerance.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import mlx_engine
from mlx_engine.errors import ModelError
from tests.golden.convert import read_safetensors, write_safetensors
from tests.golden.goldens import TOLERANCE_OF_ONE, relative_errors
from tests.published import PUBLISHED, VOCAB, write_folder

N_TOKENS = 30
# Prefixes of the text model's tensors in folders of models that also read images.
PREFIXES = (("language_model.model.", "model."), ("model.language_model.", "model."), ("language_model.", ""))


def text_only(folder: Path) -> Path:
    """Return a folder for transformers: without images, and without ids of tokens outside the small vocabulary."""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config) | {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": None}
    alone = folder.with_name("text")
    alone.mkdir()
    (alone / "config.json").write_text(json.dumps(config))
    tensors = read_safetensors(folder / "model.safetensors")
    write_safetensors(alone / "model.safetensors", {_text_name(name): values for name, values in tensors.items()})
    return alone


def _text_name(name: str) -> str:
    for prefix, short in PREFIXES:
        if name.startswith(prefix):
            return short + name.removeprefix(prefix)
    return name


def expected(folder: Path, ids: list[int], dtype: torch.dtype) -> np.ndarray:
    """Return transformers' logits (T, V); all weights must be used and present."""
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"], report["missing_keys"]
    with torch.no_grad():
        return np.asarray(model.eval()(torch.tensor([ids])).logits[0].numpy())


def compare(entry: Mapping[str, Any], folder: Path) -> str:
    """Return the two errors of a config, or the reason for which it is refused."""
    folder.mkdir()
    write_folder(folder / "model", entry)
    try:
        engine = mlx_engine.load(folder / "model", "simd", jit=False)
    except ModelError:
        if "refused" not in entry:
            raise
        return f"refused: {entry['refused']['setting']}"
    ids = np.random.default_rng(7).integers(0, VOCAB, N_TOKENS).tolist()
    found, alone = np.asarray(engine.logits(ids)), text_only(folder / "model")
    errors = [relative_errors(expected(alone, ids, dtype), found).max() for dtype in (torch.float32, torch.float64)]
    return "  ".join(f"{error:.1e}" for error in errors) + ("" if errors[1] <= TOLERANCE_OF_ONE else "  TOO MUCH")


def main() -> int:
    """Print the table; return the exit code."""
    bad = 0
    with tempfile.TemporaryDirectory() as made:
        for i, (name, entry) in enumerate(PUBLISHED.items()):
            try:
                line = compare(entry, Path(made) / str(i))
            except Exception as error:  # a table with a line for every config says more than the first error
                line = f"FAILED: {type(error).__name__}: {error}"
            bad += line.endswith("TOO MUCH") or line.startswith("FAILED")
            print(f"{name:48} {line}", flush=True)
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
