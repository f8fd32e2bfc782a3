"""The bytes of keys and values, computed beforehand: the formula, and what pools then really hold."""

from __future__ import annotations

import pytest

import mlx_engine
from mlx_engine.backends import create_backend
from mlx_engine.cache import KVLayer, KVPool
from mlx_engine.cache.pool import CacheSize, pool_nbytes, tokens_that_fit
from mlx_engine.commands.generate import kv_cache
from tests.golden.goldens import DATA

# Of the published sizes.
GEMMA3_1B = [KVLayer(1, 256, None if i % 6 == 5 else 512) for i in range(26)]
GPT2 = [KVLayer(12, 64)] * 12
QWEN3 = [KVLayer(8, 128)] * 28
MODELS = {"gemma3": GEMMA3_1B, "gpt2": GPT2, "qwen3": QWEN3}
MICRO = ("gemma2", "gemma3", "gemma4e", "gpt2", "llama", "mistral", "qwen2")


def test_figures_that_are_known():
    assert kv_cache(CacheSize(GPT2, 1024)) == "KV cache: 72.0 MiB (12 layers x 12 heads x 1,024 x 64 x f32 x 2)"
    gemma = CacheSize(GEMMA3_1B, 32_768)
    assert gemma.whole == 1664 * 2**20
    # 4 layers keep everything; 22 what a window of 512 and a pass of 512 tokens need, and a page for both edges.
    page = 64 * 2 * 256 * 4
    assert gemma.held == page * (4 * 512 + 22 * 17)
    assert gemma.saved == page * 22 * (512 - 17)
    line = kv_cache(gemma)
    assert line.startswith(
        "KV cache: 1.6 GiB (26 layers x 1 head x 32,768 x 256 x f32 x 2); sliding windows of 512 tokens in 22 "
    )
    assert line.endswith("layers save 1.3 GiB: 302.8 MiB are allocated")
    assert CacheSize(QWEN3, 1).whole == 28 * 8 * 128 * 4 * 2


@pytest.mark.each_value
@pytest.mark.parametrize("backend", ["simd", "mlx"])
@pytest.mark.parametrize(("page", "longest_pass"), [(64, 512), (64, 30), (1, 1), (100, 7)])
@pytest.mark.parametrize(("name", "n_tokens"), [("gemma3", 2000), ("gemma3", 40), ("gpt2", 1024), ("qwen3", 259)])
def test_it_is_what_a_pool_holds_and_what_a_text_needs(
    name: str, n_tokens: int, page: int, longest_pass: int, backend: str
):
    """The text is read in passes as long as they may be, then token by token."""
    layers = MODELS[name]
    pool = KVPool(create_backend(backend), layers, n_tokens, page=page, longest_pass=longest_pass)
    size = CacheSize(layers, n_tokens, page, longest_pass)
    assert pool.nbytes == size.held
    # No more than all tokens take, but for the slots behind the last one.
    assert size.whole <= size.held + size.saved < size.whole * (1 + page / n_tokens)
    kv, n_chunks = pool.sequence(), n_tokens * 2 // 3 // longest_pass
    for n in [longest_pass] * n_chunks + [1] * (n_tokens - n_chunks * longest_pass):
        kv.begin(n)
        kv.commit(n)
    assert kv.length == n_tokens


@pytest.mark.parametrize(("n_sequences", "page", "longest_pass"), [(1, 64, 512), (8, 16, 100), (3, 1, 1)])
@pytest.mark.parametrize("name", MODELS)
def test_the_most_tokens_in_some_bytes(name: str, n_sequences: int, page: int, longest_pass: int):
    layers = MODELS[name]
    for nbytes in (40 * 2**20, 300 * 2**20 + 12345):
        n = tokens_that_fit(layers, nbytes, n_sequences, page, longest_pass)
        sizes = [pool_nbytes(layers, n_tokens, n_sequences, page, longest_pass) for n_tokens in (n, n + 1)]
        assert sizes[0] <= nbytes < sizes[1]
    few = [KVLayer(1, 256)]  # its size is limited by memory alone
    n = tokens_that_fit(few, 12_345_678, n_sequences, page, longest_pass)
    pool = KVPool(create_backend("simd"), few, n, n_sequences=n_sequences, page=page, longest_pass=longest_pass)
    assert pool.nbytes <= 12_345_678 < pool.nbytes + pool.page_nbytes[0]
    assert pool.nbytes == pool.n_pages[0] * pool.page_nbytes[0]


def test_no_tokens_fit_in_few_bytes_and_any_number_in_windows():
    assert tokens_that_fit(QWEN3, 1000) == 0
    assert tokens_that_fit(QWEN3, 2**50, most=100) == 100
    assert tokens_that_fit([KVLayer(1, 64, 512)], 2**20, most=1 << 20) == 1 << 20


@pytest.mark.some(2)
@pytest.mark.parametrize("name", MICRO)
def test_a_model_says_what_its_layers_keep(name: str):
    model = mlx_engine.load(DATA / f"{name}-micro" / "hf", "simd").model
    size = CacheSize(model.kv_layers, 1000)
    assert model.new_kv(1000).pool.nbytes == size.held
    assert bool(size.saved) == (size.n_windows > 0) == name.startswith("gemma")


def test_windows_save_nothing_where_everything_fits_in_them():
    size = CacheSize(GEMMA3_1B, 300)
    assert size.saved == 0
    assert size.whole == 26 * 300 * 256 * 4 * 2
    assert "window" not in kv_cache(size)
