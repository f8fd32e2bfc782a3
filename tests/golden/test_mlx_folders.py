"""Logits and greedy ids of folders that mlx-lm has quantised, against mlx-lm's own float32 computation."""

import numpy as np
import pytest

from tests.contract.check import EMULATED
from tests.golden.goldens import BACKENDS, DATA, Golden, check_close, engine, greedy

FOLDERS = ("4bit", "mixed", "floats")
# These backends take seconds, so they run one prompt only.
SLOW = ("scalar", EMULATED)

folders = pytest.mark.parametrize("name", FOLDERS)
EVERY = (*BACKENDS, "simd --no-jit")


def golden(name: str) -> Golden:
    folder = DATA / f"mlx-{name}"
    return Golden(f"mlx-{name}", folder / "hf", folder / "golden.npz")


@pytest.mark.some(2)
@pytest.mark.parametrize("backend", EVERY)
@folders
def test_logits(backend: str, name: str):
    of = golden(name)
    for i in (1,) if backend in SLOW else range(of.prompts()):
        check_close(of.logits(i), np.asarray(engine(of.checkpoint, backend).logits(of.prompt(i))))


@pytest.mark.some(2)
@pytest.mark.parametrize("backend", [name for name in EVERY if name not in SLOW])
@folders
def test_greedy_ids(backend: str, name: str):
    of = golden(name)
    for i in range(of.prompts()):
        assert greedy(of, i, backend, kv=True) == of.greedy(i)
