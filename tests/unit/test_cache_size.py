"""The bytes of a cache, computed beforehand: the formula, and what caches then really hold."""

from types import SimpleNamespace

import numpy as np
import pytest

from mlx_engine.backends import create_backend
from mlx_engine.cache.size import CacheSize
from mlx_engine.commands.diagnostics import kv_cache
from mlx_engine.decode.loop import CHUNK
from mlx_engine.models import gemma3, gpt2, qwen3
from mlx_engine.models.rotation import Rotation

GEMMA3_1B = gemma3.Config(
    n_layers=26, hidden_size=1152, intermediate_size=6912, n_heads=4, n_kv_heads=1, head_dim=256, vocab_size=262_144,
    context_length=32_768, norm_eps=1e-6, rope=Rotation(1e6), local_rope=Rotation(1e4),
    attention_scale=256**-0.5, window=512, is_local=tuple((i + 1) % 6 != 0 for i in range(26)),
)  # fmt: skip
GPT2 = gpt2.Config(12, 768, 3072, 12, 50_257, 1024, 1e-5)
QWEN3 = qwen3.Config(28, 1024, 3072, 16, 8, 128, 151_936, 40_960, 1e-6, Rotation(1e6))
MODELS = {"gemma3": (gemma3, GEMMA3_1B), "gpt2": (gpt2, GPT2), "qwen3": (qwen3, QWEN3)}


def test_figures_that_are_known():
    assert (
        kv_cache(CacheSize.of(GPT2, 1024, CHUNK)) == "KV cache: 72.0 MB (12 layers x 12 heads x 1,024 x 64 x f32 x 2)"
    )
    gemma = CacheSize.of(GEMMA3_1B, 32_768, CHUNK)
    assert gemma.whole == 1664 * 2**20
    # 4 layers keep everything, 22 what a window of 512 and a chunk of 512 need, and 7 tokens to spare.
    assert gemma.held == 2 * 256 * 4 * (4 * 32_768 + 22 * 1031)
    line = kv_cache(gemma)
    assert line.startswith(
        "KV cache: 1,664.0 MB (26 layers x 1 head x 32,768 x 256 x f32 x 2); sliding windows of 512 tokens in 22 "
    )
    assert line.endswith("layers save 1,363.7 MB: 300.3 MB are allocated")
    assert CacheSize.of(QWEN3, 1, 1).whole == 28 * 8 * 128 * 4 * 2


@pytest.mark.parametrize("backend", ["simd", "mlx"])
@pytest.mark.parametrize(
    ("name", "n_prompt", "n_tokens"),
    [("gemma3", 512, 2000), ("gemma3", 30, 40), ("gemma3", 30, 900), ("gemma3", 700, 1500), ("gpt2", 9, 1024),
     ("qwen3", 3, 259)],
)  # fmt: skip
def test_it_is_what_the_model_s_own_cache_holds(name, n_prompt, n_tokens, backend):
    module, config = MODELS[name]
    cache = module.Model.new_cache(SimpleNamespace(config=config, backend=create_backend(backend)), n_tokens)
    chunks = [CHUNK] * (n_prompt // CHUNK) + [n_prompt % CHUNK or 1]
    for n in chunks + [1] * (n_tokens - sum(chunks)):
        cache.reserve(n)
        cache.advance(n)
    assert cache.length == n_tokens
    size = CacheSize.of(config, n_tokens, min(n_prompt, CHUNK))
    assert cache.nbytes == size.held <= size.whole


def test_windows_save_nothing_where_everything_fits_in_them():
    size = CacheSize.of(GEMMA3_1B, 300, 100)
    assert size.held == size.whole == np.prod([26, 300, 256, 4, 2])
    assert "window" not in kv_cache(size)
