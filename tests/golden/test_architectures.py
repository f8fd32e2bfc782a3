"""Logits and greedy ids of all models except Qwen3 against transformers, from folders and from GGUF files."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.contract.check import EMULATED
from tests.decoding import prefill
from tests.golden.convert import convert
from tests.golden.goldens import (
    BACKENDS,
    DATA,
    Golden,
    check_close,
    disagreement,
    engine,
    greedy,
    in_chunks,
    logits_and_greedy,
)

ARCHITECTURES = (
    "gpt2",
    "gemma2",
    "gemma3",
    "lfm2",
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2moe",
    "qwen3moe",
    "qwen3_5",
    "qwen3_5moe",
)
WITH_TOKENIZER = ("gpt2", "gemma3")
NAMES = [f"{architecture}-{file}" for architecture in ARCHITECTURES for file in ("hf", "F32", "Q8_0")]
WITHOUT_JIT = "simd --no-jit"
# Chunked against unchunked prefill: the same products in another order of summation.
CUT, CUT_OF_ONE = 2e-6, 1e-5

# A checkpoint by name, converted on first use.
Goldens = Callable[[str], Golden]

names = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * name.endswith("F32")) for name in NAMES]
)


def is_spared(backend: str, name: str) -> bool:
    """Skip redundant runs: F32 GGUF has the folder's values, which `scalar` and NumPy also make of Q8_0.

    `simd` has the bits of `parallel`, which other tests compare.
    """
    expands = backend in ("scalar", WITHOUT_JIT)
    return backend == "simd" or name.endswith("F32") or (expands and name.endswith("Q8_0"))


def runs(of: Golden, backend: str) -> list[tuple[int, int | None]]:
    """Return prompts, and the number of greedy ids after each (None: all), that a backend computes by default.

    A token takes `scalar`, `mlx` and the emulator milliseconds. In the emulator, a prompt takes as long as a token.
    """
    if backend == EMULATED:
        return [(1, 8)] if of.name.endswith("Q8_0") else [(2, 1)]
    if backend == "scalar":
        return [(1, None)]
    return [(i, (8 if backend == "mlx" else None) if i == 1 else 1) for i in range(of.prompts())]


def cells(*, every: bool) -> pytest.MarkDecorator:
    """All backends and files; `every` cell is slow, or those that are spared."""
    params = [
        pytest.param(backend, name, marks=[pytest.mark.slow] * (every or is_spared(backend, name)))
        for backend in (*BACKENDS, WITHOUT_JIT)
        for name in NAMES
    ]
    return pytest.mark.parametrize(("backend", "name"), params)


@pytest.fixture(scope="module")
def goldens(tmp_path_factory: pytest.TempPathFactory) -> Goldens:
    made = tmp_path_factory.mktemp("gguf")
    return cache(lambda name: golden(name, made))


def golden(name: str, made: Path) -> Golden:
    architecture, file = name.split("-")
    folder = DATA / f"{architecture}-micro"
    if file == "hf":
        return Golden(name, folder / "hf", folder / "golden.npz")
    path = made / f"{name}.gguf"
    convert(folder / "hf", path, file)
    return Golden(name, path, folder / "golden.npz", "_q8" if file == "Q8_0" else "")


@pytest.mark.each_value
@cells(every=False)
def test_logits_and_greedy_ids(goldens: Goldens, backend: str, name: str):
    of = goldens(name)
    for i, n in runs(of, backend):
        logits, ids = logits_and_greedy(of, i, backend, n)
        wrong = disagreement(of.logits(i), logits)
        assert wrong is None, f"prompt {i}: {wrong}"
        assert ids == of.greedy(i)[:n], f"prompt {i}"


@cells(every=True)
def test_logits_and_greedy_ids_of_every_prompt(goldens: Goldens, backend: str, name: str):
    of = goldens(name)
    for i in range(of.prompts()):
        check_close(of.logits(i), np.asarray(engine(of.checkpoint, backend).logits(of.prompt(i))))
        assert greedy(of, i, backend, kv=True) == of.greedy(i)


@pytest.mark.some(3)
@names
def test_greedy_ids_without_a_cache(goldens: Goldens, name: str):
    of = goldens(name)
    for i in range(of.prompts()):
        assert greedy(of, i, "simd", kv=False) == of.greedy(i)


@pytest.mark.some(3)
@names
def test_chunks_equal_one_pass(goldens: Goldens, name: str):
    """41 tokens; Gemma's window is 8."""
    of = goldens(name)
    ids = of.prompt(2)
    whole = in_chunks(of.checkpoint, "simd", ids, len(ids))
    for chunk in (1, 3, 5, 7, 9):
        wrong = disagreement(whole, in_chunks(of.checkpoint, "simd", ids, chunk), each=CUT_OF_ONE, all_=CUT)
        assert wrong is None, f"chunks of {chunk}: {wrong}"


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("backend", "chunk", "page"),
    [
        *(("simd", 1, 64), ("simd", 7, 64), ("simd", 200, 64), ("simd", 7, 5), (WITHOUT_JIT, 7, 5)),
        *(("parallel", 64, 16), ("mlx", 35, 64), ("mlx", 64, 5)),
    ],
)
def test_a_prompt_over_which_the_window_slides_many_times(backend: str, chunk: int, page: int):
    """700 tokens; sliding-window layers have pages for a window of 8 and one pass, so pages are reused."""
    folder = DATA / "gemma3-micro" / "hf"
    ids = np.random.default_rng(0).integers(0, 512, 700).tolist()
    cut = in_chunks(folder, backend, ids, chunk, page=page)
    check_close(np.asarray(engine(folder, "simd").logits(ids)), cut, each=CUT_OF_ONE, all_=CUT)


def test_local_layers_keep_a_window_and_global_ones_all():
    model = engine(DATA / "gemma3-micro" / "hf", "simd").model
    kv = model.new_kv(4_000)
    page = 64 * 2 * 32 * 4  # bytes of the keys and values of 64 tokens in one layer
    # 4,000 tokens; a window of 8 and a pass of 512 tokens.
    assert kv.pool.nbytes == page * (63 + 7 * 10)
    prefill(model, [1] * 700, kv)
    assert kv.n_pages == 11 + 1


def test_text_comes_out():
    """The model has random weights, but the text passes through the folder's own tokenizer."""
    for architecture in WITH_TOKENIZER:
        made = engine(DATA / f"{architecture}-micro" / "hf", "simd")
        generation = made.generate("ab", max_tokens=4, ignore_eos=True)
        assert len(generation.token_ids) == 4
        assert made.tokenizer.encode("ab") == generation.prompt_ids[-len(made.tokenizer.encode("ab")) :]
