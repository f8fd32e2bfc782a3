"""Where only the last token's logits are asked for, the last layer works on no other token."""

import copy

import numpy as np
import pytest

from mlx_engine.backends.taps import tapped
from tests.golden.goldens import DATA, Golden, check_close, engine, variant

MICRO = ("gpt2", "gemma3", "llama", "mistral", "qwen2")
GOLDENS = [variant("gqa"), *(Golden(m, DATA / f"{m}-micro/hf", DATA / f"{m}-micro/golden.npz") for m in MICRO)]


@pytest.mark.parametrize("cached", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("golden", GOLDENS, ids=str)
@pytest.mark.parametrize("backend", ["simd", "parallel", "mlx"])
def test_one_row_leaves_the_last_layer(backend: str, golden: Golden, cached: bool):
    model, rows = copy.copy(engine(golden.checkpoint, backend).model), {}
    model.backend = tapped(model.backend, lambda name, x: rows.setdefault(name, len(x)))
    i = max(range(golden.prompts()), key=lambda i: len(golden.prompt(i)))
    ids, last = golden.prompt(i), len(model.layers) - 1
    cache = model.new_cache(len(ids)) if cached else model.no_cache()
    with model.backend.session():
        logits = np.asarray(model.backend.host(model.forward(ids, cache)))
    assert rows[f"blk.{last - 1}.layer_out"] == len(ids)
    assert rows[f"blk.{last}.attn_out"] == rows[f"blk.{last}.layer_out"] == 1
    check_close(golden.logits(i)[-1:], logits)
