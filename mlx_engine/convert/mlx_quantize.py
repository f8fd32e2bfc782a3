"""Quantise matrices with `mx.quantize`, so that the bits are those that mlx-lm writes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_engine.quant.group_weight import GroupWeight, Parts
from mlx_engine.quant.groups import GroupType
from mlx_engine.quant.weight import Weight

# Stored floats are quantised in their type, as mlx-lm does; all other weights in float32.
_DTYPES = {"F16": (np.float16, mx.float16), "BF16": (np.uint16, mx.bfloat16)}
# Weights quantised at a time.
_PIECE = 1 << 24


def quantize(stored: Weight, type_: GroupType) -> GroupWeight:
    """Return a tensor (..., N, K) in this type, computed by `mx.quantize` on the CPU from values in their own type."""
    *outer, columns = stored.shape
    rows = math.prod(outer)
    matrix = stored if len(outer) == 1 else Weight(stored.name, (rows, columns), stored.type, stored.data)
    step = max(1, _PIECE // columns)
    pieces = [_quantized(values, type_) for values in _values(matrix, step)]
    quants, scales, *biases = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
    n_groups = rows * columns // type_.block_size
    parts = Parts(
        quants.reshape(n_groups, -1), scales.reshape(n_groups, -1), biases[0].reshape(n_groups, -1) if biases else None
    )
    return GroupWeight(stored.name, stored.shape, type_, parts)


def _values(stored: Weight, step: int) -> Iterator[mx.array]:
    """Yield `step` rows at a time as MLX arrays: floats in their stored type, all other weights in float32."""
    rows, columns = stored.shape
    if stored.type.name in _DTYPES:
        storage, dtype = _DTYPES[stored.type.name]
        raw = np.ascontiguousarray(stored.data).view(storage).reshape(rows, columns)
        yield from (mx.array(raw[at : at + step]).view(dtype) for at in range(0, rows, step))
    else:
        yield from (mx.array(stored.rows(range(at, min(at + step, rows)))) for at in range(0, rows, step))


def _quantized(values: mx.array, type_: GroupType) -> list[NDArray[np.uint8]]:
    """Return the bytes of quants, scales and, if there are any, biases."""
    options = {"group_size": type_.block_size, "bits": type_.bits, "mode": type_.mode}
    # MLX returns two arrays in the modes without biases.
    found: Sequence[mx.array] = mx.quantize(values, **options, stream=mx.cpu)  # type: ignore[arg-type]
    return [np.array(mx.contiguous(array).view(mx.uint8)) for array in found]
