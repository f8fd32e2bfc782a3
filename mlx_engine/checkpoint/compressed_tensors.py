"""compressed-tensors: integers or FP8 with a scale per row, per group of columns, or for the whole matrix.

`weight[n, k] = scale[n, g] * (q[n, k] - zero[n, g])`. The formats "int-quantized" and "naive-quantized" store 8-bit
integers as `weight`, I8; "float-quantized" stores `weight` as F8_E4M3 (`fp8.py`); "pack-quantized" stores 4- or 8-bit
integers as `weight_packed` (N, K * bits / 32) I32, the first column in the lowest bits, each plus 2**(bits - 1), with
their shape in `weight_shape`. `weight_scale` is (N, G), (N, 1) or (1,). Zero points are 0 unless the weights are
asymmetric: `weight_zero_point`, I8 of the scales' shape, or packed along N. `weight_g_idx` is the group of each column.

Source: github.com/vllm-project/compressed-tensors, src/compressed_tensors/compressors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_engine.checkpoint import fp8
from mlx_engine.checkpoint.groups import Groups, equal_groups, fields
from mlx_engine.checkpoint.quantized import Files, Layer, QuantConfig, check_shape, floats, named, part
from mlx_engine.errors import FormatError
from mlx_engine.quant.weight import Weight

FORMATS = ("int-quantized", "naive-quantized", "float-quantized", "pack-quantized")
_KNOWN = ("config_groups", "format", "global_compression_ratio", "ignore", "quant_method", "quantization_status",
          "sparsity_config", "version")  # fmt: skip
_OPTIONAL = ("weight_zero_point", "weight_g_idx", "input_scale", "input_zero_point")


def layers(config: QuantConfig, files: Files) -> dict[str, Layer]:
    """Return the quantised layers of a folder by the names of their weights.

    Raises:
        UnsupportedConfigError: the config asks for what is not implemented.
        FormatError: the tensors of a layer do not fit each other.
    """
    config.expect("format", *FORMATS, "dense", "mixed-precision")
    config.expect("quantization_status", "compressed", None)
    sparsity = config.values.get("sparsity_config") or {}
    if sparsity and (not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense"):
        raise config.error("sparsity_config", "absent or dense", sparsity)
    config.refuse_others(_KNOWN)
    block = None
    bits = set()
    for weights in _schemes(config):
        bits.add(weights.get("num_bits"))
        if weights.get("strategy") == "block":
            block = fp8.block_size(config, "config_groups", weights.get("block_structure"))
    packed = _packed_bits(config, bits) if named(files, ".weight_packed") else 8
    found = {f"{p}.weight": _packed(files, p, packed) for p in named(files, ".weight_packed")}
    for prefix in named(files, ".weight"):
        name = f"{prefix}.weight"
        dtype = files[name].tensors[name].dtype
        if dtype == "I8":
            found[name] = _integers(files, prefix)
        elif dtype == "F8_E4M3":
            found[name] = fp8.layer(files, prefix, block)
    return found


def _schemes(config: QuantConfig) -> list[Mapping[str, Any]]:
    """Return how the weights of each group of layers are quantised."""
    groups = config.values.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise config.error("config_groups", "a mapping of mappings", groups)
    schemes = [group.get("weights") for group in groups.values()]
    for weights in schemes:
        known = isinstance(weights, Mapping) and weights.get("type", "int") in ("int", "float")
        if not known or weights.get("num_bits") not in (4, 8):
            raise config.error("config_groups", "weights of 4 or 8 bits, of type int or float", weights)
    return schemes


def _packed_bits(config: QuantConfig, bits: set[Any]) -> int:
    if len(bits) != 1:
        raise config.error("config_groups", "one num_bits for all packed weights", sorted(bits))
    return int(bits.pop())


def _integers(files: Files, prefix: str) -> Layer:
    stored = part(files, f"{prefix}.weight", "I8")
    check_shape(f"{prefix}.weight", stored.shape, (len(stored), *stored.shape[1:2]))

    def quants(first: int, last: int) -> NDArray[np.int16]:
        return stored[first:last].astype(np.int16)

    return _layer(files, prefix, "weight", 8, stored.shape, quants)


def _packed(files: Files, prefix: str, bits: int) -> Layer:
    stored = part(files, f"{prefix}.weight_packed", "I32")
    shape = tuple(int(n) for n in part(files, f"{prefix}.weight_shape", "I64", "I32").reshape(-1))
    if len(shape) != 2 or min(shape) < 0:
        raise FormatError(where=f"{prefix}.weight_shape", expected="two sizes", found=str(shape), hint="convert again")
    n, k = shape
    check_shape(f"{prefix}.weight_packed", stored.shape, (n, -(-k * bits // 32)))
    middle = np.int16(1 << bits - 1)

    def quants(first: int, last: int) -> NDArray[np.int16]:
        return fields(stored[first:last], bits)[:, :k] - middle

    return _layer(files, prefix, "weight_packed", bits, (n, k), quants)


def _layer(files: Files, prefix: str, stored: str, bits: int, shape: tuple[int, ...], quants: Any) -> Layer:
    n, k = shape
    scale_shape = floats(files, f"{prefix}.weight_scale").shape
    rows, n_groups = scale_shape if len(scale_shape) == 2 else (1, 1)
    allowed = [(), (1,), (1, 1), (n, 1)] + ([(n, n_groups)] if n_groups and k % n_groups == 0 else [])
    check_shape(f"{prefix}.weight_scale", scale_shape, *allowed)
    others = [f"{prefix}.{end}" for end in _OPTIONAL if f"{prefix}.{end}" in files]
    shapes = [f"{prefix}.weight_shape"] if stored == "weight_packed" else []

    def read() -> Weight:
        scales = np.broadcast_to(floats(files, f"{prefix}.weight_scale").reshape(rows, n_groups), (n, n_groups))
        groups = equal_groups(k, n_groups, k // n_groups)
        if f"{prefix}.weight_g_idx" in files:
            groups = part(files, f"{prefix}.weight_g_idx", "I32", "I64").astype(np.int64)
            check_shape(f"{prefix}.weight_g_idx", groups.shape, (k,))
        zeros = _zeros(files, f"{prefix}.weight_zero_point", bits, (n, n_groups))
        return Groups(f"{prefix}.weight", bits, scales, zeros, groups, quants, -(1 << bits - 1)).weight()

    return Layer((n, k), (f"{prefix}.{stored}", f"{prefix}.weight_scale", *shapes, *others), read)


def _zeros(files: Files, name: str, bits: int, shape: tuple[int, int]) -> NDArray[np.int16]:
    """Return the zero points, (N, G): 0 if they are not stored."""
    if name not in files:
        return np.zeros(shape, dtype=np.int16)
    stored = part(files, name, "I8", "I32")
    if stored.dtype == np.int8:
        check_shape(name, stored.shape, shape, (1,), (1, 1), ())
        return np.broadcast_to(stored.astype(np.int16).reshape(-1, *stored.shape[1:2]), shape)
    n, n_groups = shape
    check_shape(name, stored.shape, (-(-n * bits // 32), n_groups))
    return fields(stored.T, bits)[:, :n].T - np.int16(1 << bits - 1)
