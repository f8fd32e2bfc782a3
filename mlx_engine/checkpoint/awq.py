"""AWQ: layers with `qweight`, `qzeros` and `scales`. `weight[n, k] = scale[n, g] * (q[n, k] - zero[n, g])`.

g is the group of column k, `k // group_size`. `qweight` (K, N / 8) int32 packs the 4-bit quants of 8 outputs into a
word, in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits up; `qzeros` (G, N / 8) packs zero points in the same
way; `scales` is (G, N). This is the version "gemm"; other versions pack for other kernels.

Source: `dequantize_gemm`, github.com/casper-hansen/AutoAWQ, awq/utils/packing_utils.py.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mlx_engine.checkpoint.groups import Groups, equal_groups, fields
from mlx_engine.checkpoint.quantized import Files, Layer, QuantConfig, check_shape, floats, named, part
from mlx_engine.quant.weight import Weight

BITS = 4
# Where the 8 outputs of a word lie in it.
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_KNOWN = (
    "backend", "bits", "desc_act", "do_fuse", "format", "fuse_max_seq_len", "group_size", "modules_to_fuse",
    "modules_to_not_convert", "q_group_size", "quant_method", "sym", "version", "w_bit", "zero_point",
)  # fmt: skip


def layers(config: QuantConfig, files: Files) -> dict[str, Layer]:
    """Return the quantised layers of a folder by the names of their weights.

    Raises:
        UnsupportedConfigError: the config asks for what is not implemented.
        FormatError: the tensors of a layer do not fit each other.
    """
    config.expect("bits", BITS)
    config.expect("w_bit", BITS)
    config.expect("desc_act", False, None)
    for key in ("version", "format"):
        config.expect(key, "gemm", "GEMM", None)
    key = "group_size" if "group_size" in config.values else "q_group_size"
    size = config.expect(key, 128, -1, 32, 64, 256)
    config.refuse_others(_KNOWN)
    return {f"{prefix}.weight": _layer(files, prefix, size) for prefix in named(files, ".qweight")}


def _layer(files: Files, prefix: str, size: int) -> Layer:
    names = tuple(f"{prefix}.{end}" for end in ("qweight", "qzeros", "scales"))
    packed, zeros = (part(files, name, "I32") for name in names[:2])
    k, n = len(packed), 8 * packed.shape[-1]
    n_groups = 1 if size == -1 else -(-k // size)
    check_shape(names[0], packed.shape, (k, n // 8))
    check_shape(names[1], zeros.shape, (n_groups, n // 8))
    check_shape(names[2], part(files, names[2], "F16", "BF16", "F32").shape, (n_groups, n))

    def read() -> Weight:
        def quants(first: int, last: int) -> NDArray[np.int16]:
            start = first // 8
            some = fields(packed[:, start : -(-last // 8)], BITS, ORDER)
            return some[:, first - 8 * start : last - 8 * start].T

        groups = equal_groups(k, n_groups, size)
        scales, zero_points = floats(files, names[2]).T, fields(zeros, BITS, ORDER).T
        return Groups(f"{prefix}.weight", BITS, scales, zero_points, groups, quants).weight()

    return Layer((n, k), names, read)
