"""Gemma 4's keys in GGUF files: arrays with a value for each layer, where the model has two sizes.

Reference: llama.cpp, src/models/gemma4.cpp. `flat` replaces the arrays by the two sizes, under keys of this module, and
`arrays` does the opposite. llama.cpp finds from the tensors whether keys and values are one projection; here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.settings import MOST_LAYERS, Settings

if TYPE_CHECKING:
    from mlx_engine.models.gemma4 import Config

FFN, KV_HEADS, SHARED = "feed_forward_length", "attention.head_count_kv", "attention.shared_kv_layers"
PATTERN = "attention.sliding_window_pattern"
# Keys of this module, which no file has.
GLOBAL_KV_HEADS, IS_WIDE, K_IS_V = "global kv heads", "wide ffn", "k is v"


def flat(checkpoint: Checkpoint) -> Settings:
    """Return the settings of a GGUF file with whole numbers in place of arrays.

    Raises:
        UnsupportedConfigError: layers have other sizes than the two that the model has.
    """
    found = dict(checkpoint.settings)
    s = Settings(found, where=checkpoint.where)
    n = s.whole("block_count")
    if n > MOST_LAYERS:
        raise s.error("block_count", f"at most {MOST_LAYERS:,}", n)
    is_local, own = s.flags(PATTERN, n), n - s.whole_or_zero(SHARED)
    if is_local is None:
        raise s.error(PATTERN, f"{n} flags", "nothing")
    if own < 1:
        raise s.error(SHARED, f"fewer than all {n} layers", n - own)
    kv_heads, widths = (_each(s, found, key, n, checkpoint.where) for key in (KV_HEADS, FFN))
    local = {size for size, here in zip(kv_heads, is_local, strict=True) if here} or set(kv_heads)
    everywhere = {size for size, here in zip(kv_heads, is_local, strict=True) if not here} or set(kv_heads)
    if len(local) > 1 or len(everywhere) > 1:
        raise s.error(KV_HEADS, "one number for local layers and one for global layers", kv_heads)
    is_wide = own < n and widths[-1] == 2 * widths[0]
    if widths != [widths[0] * (2 if is_wide and i >= own else 1) for i in range(n)]:
        raise s.error(FFN, "one width, or twice the width in layers that share keys and values", widths)
    k_is_v = any(
        not here and f"blk.{i}.attn_v.weight" not in checkpoint.shapes for i, here in enumerate(is_local[:own])
    )
    found |= {FFN: widths[0], IS_WIDE: is_wide, K_IS_V: k_is_v}
    found |= {KV_HEADS: local.pop(), GLOBAL_KV_HEADS: everywhere.pop()}
    return Settings(found, where=checkpoint.where)


def _each(s: Settings, found: Mapping[str, object], key: str, n: int, where: str) -> list[int]:
    """Return n whole numbers: those of an array, or n times one number."""
    value: Any = found.get(key)
    values = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(values, list):
        return [s.whole(key)] * n
    each = Settings({str(i): size for i, size in enumerate(values)}, where=f"{where}: {key}")
    if len(values) != n:
        raise s.error(key, f"{n} whole numbers", value)
    return [each.whole(str(i)) for i in range(n)]


def arrays(config: Config, keys: Mapping[str, object]) -> dict[str, object]:
    """Return a config's keys with arrays in place of the keys of this module."""
    made = {key: value for key, value in keys.items() if key not in (GLOBAL_KV_HEADS, IS_WIDE, K_IS_V)}
    sizes = [config.of_layer(i) for i in range(config.n_layers)]
    if config.has_wide_ffn:
        made[FFN] = [of.intermediate_size for of in sizes]
    if config.n_global_kv_heads != config.n_kv_heads:
        made[KV_HEADS] = [of.n_kv_heads for of in sizes]
    return made
