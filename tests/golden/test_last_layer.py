"""The last layer computes only the tokens whose logits are requested."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mlx_engine.backends.observed import tapped
from mlx_engine.cache import SequenceInput
from mlx_engine.loop.forward import forward
from tests.golden.goldens import DATA, Golden, check_close, engine, variant

MICRO = ("gpt2", "gemma2", "gemma3", "llama", "mistral", "qwen2")
GOLDENS = [variant("gqa"), *(Golden(m, DATA / f"{m}-micro/hf", DATA / f"{m}-micro/golden.npz") for m in MICRO)]

goldens = pytest.mark.parametrize("golden", GOLDENS, ids=str)
backends = pytest.mark.parametrize("backend", ["simd", "parallel", "mlx"])


def rows_of(
    golden: Golden, backend: str, parts: Callable[[Any], list[SequenceInput]]
) -> tuple[np.ndarray | None, dict[str, int], int]:
    """Return logits, the number of rows of every tap, and the last layer's index."""
    model, rows = copy.copy(engine(golden.checkpoint, backend).model), {}
    model.run_on(tapped(model.backend, lambda name, x: rows.setdefault(name, len(x))))
    with model.backend.session():
        logits = forward(model, *parts(model))
        return None if logits is None else np.asarray(model.backend.host(logits)), rows, len(model.layers) - 1


def longest(golden: Golden) -> int:
    return max(range(golden.prompts()), key=lambda i: len(golden.prompt(i)))


@pytest.mark.some(2)
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "scratch"])
@goldens
@backends
def test_one_row_leaves_the_last_layer(backend: str, golden: Golden, kept: bool):
    i = longest(golden)
    ids = golden.prompt(i)
    logits, rows, last = rows_of(
        golden,
        backend,
        lambda model: [SequenceInput(ids, model.new_kv(len(ids)) if kept else model.scratch_kv(len(ids)))],
    )
    assert rows[f"blk.{last - 1}.layer_out"] == len(ids)
    assert rows[f"blk.{last}.attn_out"] == rows[f"blk.{last}.layer_out"] == 1
    check_close(golden.logits(i)[-1:], logits)


@pytest.mark.some(5)
@goldens
@backends
def test_of_several_sequences_the_rows_that_are_wanted_leave_it(backend: str, golden: Golden):
    i = longest(golden)
    ids, wanted = golden.prompt(i), (3, 0, 1)

    def parts(model: Any) -> list[SequenceInput]:
        pool = model.new_pool(3 * len(ids), n_sequences=3)
        return [SequenceInput(ids[: len(ids) - n], pool.sequence(), want) for n, want in enumerate(wanted)]

    logits, rows, last = rows_of(golden, backend, parts)
    assert rows[f"blk.{last - 1}.layer_out"] == 3 * len(ids) - 3
    assert rows[f"blk.{last}.attn_k"] == 3 * len(ids) - 3
    assert rows[f"blk.{last}.attn_out"] == rows[f"blk.{last}.layer_out"] == 4
    check_close(np.concatenate((golden.logits(i)[-3:], golden.logits(i)[-3:-2])), logits)


@pytest.mark.some(5)
@goldens
@backends
def test_where_no_logits_are_wanted_it_ends_with_keys_and_values(backend: str, golden: Golden):
    ids = golden.prompt(longest(golden))
    logits, rows, last = rows_of(golden, backend, lambda model: [SequenceInput(ids, model.new_kv(len(ids)), wanted=0)])
    assert logits is None
    assert rows[f"blk.{last}.attn_v"] == len(ids)
    assert not rows.keys() & {f"blk.{last}.attn_out", f"blk.{last}.layer_out"}
