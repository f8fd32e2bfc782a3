"""Qwen3's logits and greedy ids against transformers and against an independent NumPy model."""

import itertools
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from mlx_engine.cache import SequenceInput
from mlx_engine.loop.forward import forward
from tests.contract.check import EMULATED
from tests.golden.goldens import (
    BACKENDS,
    DATA,
    GOLDENS,
    Golden,
    check_close,
    disagreement,
    engine,
    greedy,
    in_chunks,
    logits_and_greedy,
)
from tests.golden.paper import Paper

MICRO = DATA / "qwen3-micro"
PROMPTS = [pytest.param(golden, i, id=f"{golden}-{i}") for golden in GOLDENS for i in range(golden.prompts())]
OF_VARIANTS = [param for param in PROMPTS if not param.id.startswith("micro")]
# A token takes these backends many milliseconds. The emulator computes this number of greedy ids.
SLOW, N_EMULATED = ("scalar", EMULATED), 6

# Half a unit in the last place of the largest logits: the difference of two float64 results, one saved as float32.
# The golden file of micro is float64 except for norms, RoPE and softmax, which transformers computes in float32.
ROUNDED, MICRO_ROUNDED = 3e-7, 2e-6
# Chunked against unchunked prefill: the same products, summed by BLAS in another order. Measured: 9e-7 and 7e-6.
CUT, CUT_OF_ONE = 1e-6, 1e-5

backends = pytest.mark.parametrize("backend", BACKENDS)


def is_spared(backend: str, name: str, i: int) -> bool:
    """Skip files that a slow backend dequantises to (nearly) the same floats, and most prompts of the other files."""
    seen = ("micro-f32", "micro-q8_0") if backend == "scalar" else ("micro-f32",)
    is_repeated = backend in SLOW and name.startswith("micro") and i != 1
    return is_repeated or (backend not in ("simd", "parallel") and name.startswith(seen))


everywhere = pytest.mark.parametrize(
    ("backend", "golden", "i"),
    [
        pytest.param(
            backend, golden, i, id=f"{backend}-{golden}-{i}",
            marks=[pytest.mark.slow] * is_spared(backend, golden.name, i),
        )
        for backend in BACKENDS
        for golden in GOLDENS
        for i in range(golden.prompts())
    ],
)  # fmt: skip


# ---- logits and greedy ids ----


@pytest.mark.some(2)
@everywhere
def test_logits_and_greedy_ids(backend: str, golden: Golden, i: int):
    n = N_EMULATED if backend == EMULATED else None
    logits, ids = logits_and_greedy(golden, i, backend, n)
    check_close(golden.logits(i), logits)
    assert ids == golden.greedy(i)[:n]


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("backend", "file"),
    [
        # The other files are also compared with the goldens.
        pytest.param(backend, file, marks=[pytest.mark.slow] * (backend in SLOW and file != "model-f16.gguf"))
        for backend in BACKENDS
        for file in ("model-f32.gguf", "model-f16.gguf", "model-q8_0.gguf")
    ],
)
def test_logits_against_a_second_opinion(backend: str, file: str):
    """The only reference for float16 weights; for others it also checks the golden file."""
    ids = Golden("micro", MICRO, MICRO / "golden.npz").prompt(2)
    found = engine(MICRO / file, backend).logits(ids)
    check_close(paper(MICRO / file).logits(ids), np.asarray(found))


@pytest.mark.parametrize("golden", [g for g in GOLDENS if g.checkpoint.suffix == ".gguf"], ids=str)
def test_the_second_opinion_and_the_goldens_agree(golden: Golden):
    """Equal to the last bit of float32: neither program rounds intermediate values."""
    bound = MICRO_ROUNDED if golden.name.startswith("micro") else ROUNDED
    for i in range(golden.prompts()):
        found = paper(golden.checkpoint).logits(golden.prompt(i))
        check_close(golden.logits(i), found, each=bound, all_=bound)


# ---- cutting the prompt ----


@pytest.mark.some(4)
@pytest.mark.parametrize(("golden", "i"), PROMPTS)
def test_chunks_equal_one_pass(golden: Golden, i: int):
    check_chunks(golden, i, "simd", 1, 3, 5)


@pytest.mark.some(2)
@pytest.mark.parametrize(("golden", "i"), OF_VARIANTS)
def test_chunks_equal_one_pass_on_scalar(golden: Golden, i: int):
    check_chunks(golden, i, "scalar", 3)


def check_chunks(golden: Golden, i: int, backend: str, *chunks: int) -> None:
    ids = golden.prompt(i)
    whole = in_chunks(golden.checkpoint, backend, ids, len(ids))
    for chunk in chunks:
        wrong = disagreement(whole, in_chunks(golden.checkpoint, backend, ids, chunk), each=CUT_OF_ONE, all_=CUT)
        assert wrong is None, f"chunks of {chunk}: {wrong}"


@pytest.mark.slow
def test_a_prompt_of_many_pages():
    """300 tokens: pages begin within chunks and between them."""
    ids = np.random.default_rng(0).integers(0, 512, 300).tolist()
    want = paper(MICRO / "model-q8_0.gguf").logits(ids)
    for chunk, page in itertools.product((7, 128, 300), (1, 48, 64, 512)):
        wrong = disagreement(want, in_chunks(MICRO / "model-q8_0.gguf", "simd", ids, chunk, page=page))
        assert wrong is None, f"chunks of {chunk}, pages of {page} tokens: {wrong}"


@pytest.mark.some(2)
@pytest.mark.parametrize("golden", GOLDENS, ids=str)
@backends
def test_the_last_rows_logits_alone_are_the_same(backend: str, golden: Golden):
    model = engine(golden.checkpoint, backend).model
    ids = golden.prompt(0)
    with model.backend.session():
        last = model.backend.host(forward(model, SequenceInput(ids, model.scratch_kv(len(ids)))))
    check_close(golden.logits(0)[-1:], last)


# ---- without a cache ----


@pytest.mark.some(4)
@pytest.mark.parametrize(("golden", "i"), PROMPTS)
def test_greedy_ids_without_a_cache(golden: Golden, i: int):
    assert greedy(golden, i, "simd", kv=False) == golden.greedy(i)


@pytest.mark.slow
def test_greedy_ids_on_scalar_without_a_cache():
    check_scalar(GOLDENS[0], 0)


@pytest.mark.slow
@pytest.mark.parametrize(("golden", "i"), PROMPTS[1:])
def test_greedy_ids_of_all_files_on_scalar_without_a_cache(golden: Golden, i: int):
    check_scalar(golden, i)


def check_scalar(golden: Golden, i: int) -> None:
    assert greedy(golden, i, "scalar", kv=False) == golden.greedy(i)


# ---- helpers ----


@cache
def paper(path: Path) -> Paper:
    return Paper(path)
