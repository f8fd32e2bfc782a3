"""Read folders that other programs have quantised with AWQ, GPTQ, MXFP4, FP8 or compressed-tensors.

The config.json of such a folder has a `quantization_config` with a `quant_method`. A quantised layer consists of
several tensors: quants, scales, zero points. For each method, a function finds the layers, and returns each as one
weight with exactly the values that the method defines. Settings that quantise activations are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlx_engine.checkpoint.safetensors import SafetensorsFile
from mlx_engine.errors import FormatError, UnsupportedConfigError
from mlx_engine.kernels import blocks as layout
from mlx_engine.quant.group_weight import MLX, GroupWeight, Parts
from mlx_engine.quant.groups import E4M3
from mlx_engine.quant.packing import pack_halves
from mlx_engine.quant.types import F32, Q4_0, Q8_0, GGMLType
from mlx_engine.quant.weight import Weight

Files: TypeAlias = Mapping[str, SafetensorsFile]
CONFIG = "quantization_config"
# The types that scales may have; F8_E8M0 stores the exponent of a power of two.
SCALES = ("F32", "F16", "BF16", "F8_E8M0")


@dataclass(frozen=True)
class Layer:
    """A quantised weight, as it is stored.

    Attributes:
        shape: (N, K) or (experts, N, K).
        parts: the names of its tensors.
        read: returns the weight.
    """

    shape: tuple[int, ...]
    parts: tuple[str, ...]
    read: Callable[[], Weight]


class QuantConfig:
    """The `quantization_config` of a folder, with checks that raise an error for settings that are not implemented."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where, self.values = where, values

    def expect(self, key: str, *allowed: object) -> Any:
        """Return a setting, by default `allowed[0]`; raise UnsupportedConfigError if its value is not in `allowed`."""
        value = self.values.get(key, allowed[0])
        if not isinstance(value, str | int | float | None) or value not in allowed:
            raise self.error(key, " or ".join(map(repr, allowed)), value)
        return value

    def refuse_others(self, known: tuple[str, ...]) -> None:
        """Raise UnsupportedConfigError if a setting outside `known` has a value other than null, false or empty."""
        for key, value in self.values.items():
            if key not in known and value not in (None, False, {}, []):
                raise self.error(key, "absent", value)

    def error(self, key: str, expected: str, found: object) -> UnsupportedConfigError:
        """Return the error about one setting, for the caller to raise."""
        return UnsupportedConfigError(where=self.where, key=f"{CONFIG}.{key}", expected=expected, found=found)


def quant_method(values: Mapping[str, object]) -> str | None:
    """Return the method of a `quantization_config`; None if it names no method, as in folders of MLX."""
    # Before release 4.34, transformers did not write the name of the method for bitsandbytes.
    is_old = any(key.startswith(("load_in_", "bnb_")) for key in values)
    method = values.get("quant_method", "bitsandbytes" if is_old else None)
    return method if method is None else str(method)


def named(files: Files, ending: str) -> list[str]:
    """Return the names of tensors that end with `ending`, without this ending."""
    return [name.removesuffix(ending) for name in files if name.endswith(ending)]


def part(files: Files, name: str, *dtypes: str) -> NDArray[Any]:
    """Return a tensor of a quantised weight; raise FormatError if it is missing or its type is not among `dtypes`."""
    if name not in files:
        raise _damaged(name.rpartition(".")[0], f"a tensor {name!r}", "none")
    return files[name].array(name, *dtypes)


def floats(files: Files, name: str) -> NDArray[np.float32]:
    """Return scales, widened exactly to float32; raise FormatError if they are missing or their type is not allowed."""
    stored = part(files, name, *SCALES)
    dtype = files[name].tensors[name].dtype
    if dtype == "BF16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "F8_E8M0":
        return np.where(stored == 255, np.float32(np.nan), np.ldexp(np.float32(1), stored.astype(np.int32) - 127))
    with np.errstate(invalid="ignore"):  # NumPy warns of a signalling NaN
        return stored.astype(np.float32)


def check_shape(name: str, found: tuple[int, ...], *allowed: tuple[int, ...]) -> None:
    """Raise FormatError if the shape of a tensor is not among `allowed`."""
    if found not in allowed:
        raise _damaged(name, f"the shape {' or '.join(map(str, allowed))}", str(found))


def _damaged(where: str, expected: str, found: str) -> FormatError:
    return FormatError(where=where, expected=expected, found=found, hint="download or convert the folder again")


# Columns in a block of Q4_0 or Q8_0.
BLOCK = 32
# Weights are computed in pieces of this many values, so that temporary arrays need only a few megabytes.
_PIECE = 1 << 20


@dataclass(frozen=True)
class Groups:
    """A matrix (N, K) of `bits`-bit integers q in G groups of columns, with a scale and a zero point per row and group.

    A weight is `scale * (q - zero)`: one product in float32 of a widened scale and a small integer. The matrix is
    converted to Q4_0 or Q8_0, with the same values, under three conditions: each block of 32 columns is in one group,
    all scales are float16 values, and every possible `q - zero` is from -128 to 127. Backends multiply Q4_0
    and Q8_0 without expanding them. Other matrices are expanded to float32.

    Attributes:
        scales: float32 (N, G).
        zeros: int16 (N, G).
        groups: (K,) the group of each column.
        quants: function of (first, last) that returns rows [first, last) of the integers, (last - first, K) int16.
        lowest: the lowest possible q; the highest is `lowest + 2**bits - 1`.
    """

    name: str
    bits: int
    scales: NDArray[np.float32]
    zeros: NDArray[np.int16]
    groups: NDArray[np.int64]
    quants: Callable[[int, int], NDArray[np.int16]]
    lowest: int = 0

    def __post_init__(self) -> None:
        n_groups = self.scales.shape[1]
        if self.groups.size and not (self.groups.min() >= 0 and self.groups.max() < n_groups):
            found = f"groups {self.groups.min()} to {self.groups.max()}"
            raise _damaged(self.name, f"columns in groups 0 to {n_groups - 1}", found)

    def weight(self) -> Weight:
        """Return the matrix as Q4_0, Q8_0 or F32."""
        type_ = self._type()
        n, k = len(self.scales), len(self.groups)
        out = np.empty((n, type_.bytes_for(k)), dtype=np.uint8)
        step = max(1, _PIECE // max(k, 1))
        for first in range(0, n, step):
            last = min(first + step, n)
            out[first:last] = self._rows(type_, first, last)
        return Weight(self.name, (n, k), type_, out.reshape(-1))

    def _type(self) -> GGMLType:
        k = len(self.groups)
        if not self.zeros.size or k % BLOCK or (self.groups != np.repeat(self.groups[::BLOCK], BLOCK)).any():
            return F32
        with np.errstate(over="ignore", invalid="ignore"):
            is_half = np.array_equal(self.scales.astype(np.float16).astype(np.float32), self.scales, equal_nan=True)
        lowest = self.lowest - int(self.zeros.max())
        highest = self.lowest + (1 << self.bits) - 1 - int(self.zeros.min())
        if not is_half or lowest < -128 or highest > 127:
            return F32
        return Q4_0 if self.bits == 4 and (self.zeros == self.lowest + 8).all() else Q8_0

    def _rows(self, type_: GGMLType, first: int, last: int) -> NDArray[np.uint8]:
        differences = self.quants(first, last) - self.zeros[first:last, self.groups]
        if type_ == F32:
            with np.errstate(invalid="ignore", over="ignore"):  # files may have NaN and infinities
                values = self.scales[first:last, self.groups] * differences.astype(np.float32)
            return np.ascontiguousarray(values).view(np.uint8)
        made = np.empty(differences.size // BLOCK, layout.Q4_0 if type_ == Q4_0 else layout.Q8_0)
        with np.errstate(invalid="ignore"):  # NumPy warns of a signalling NaN
            made["d"] = self.scales[first:last, self.groups[::BLOCK]].astype(np.float16).reshape(-1)
        blocks = differences.reshape(-1, BLOCK)
        made["qs"] = pack_halves((blocks + 8).astype(np.uint8)) if type_ == Q4_0 else blocks.astype(np.int8)
        return made.view(np.uint8).reshape(last - first, -1)


def fields(words: NDArray[np.int32], bits: int, order: tuple[int, ...] | None = None) -> NDArray[np.int16]:
    """Split 32-bit words (n, m) into fields of `bits` bits; return them as numbers >= 0, (n, m * 32 / bits) int16.

    Field 0 of a word has the lowest bits. Number i of a word is its field `order[i]`, or field i if `order` is None.
    """
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    if order is not None:
        shifts = shifts[list(order)]
    unsigned = np.ascontiguousarray(words).view(np.uint32)
    found = unsigned[..., None] >> shifts & np.uint32((1 << bits) - 1)
    return found.astype(np.int16).reshape(len(words), -1)


def equal_groups(k: int, size: int) -> NDArray[np.int64]:
    """Return (k,) the group of each column. Groups have `size` columns; if `size` is -1, one group has all columns."""
    return np.arange(k) // (k if size == -1 else size) if k else np.zeros(0, np.int64)


AWQ_BITS = 4
# A 32-bit word has the quants of 8 outputs, output i in the 4-bit field `AWQ_ORDER[i]`. The lowest bits are field 0.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_AWQ_KNOWN = (
    "backend", "bits", "desc_act", "do_fuse", "format", "fuse_max_seq_len", "group_size", "modules_to_fuse",
    "modules_to_not_convert", "q_group_size", "quant_method", "sym", "version", "w_bit", "zero_point",
)  # fmt: skip


def awq_layers(config: QuantConfig, files: Files) -> dict[str, Layer]:
    """Find the layers of AWQ: `weight[n, k] = scale[n, g] * (q[n, k] - zero[n, g])`, where g is `k // group_size`.

    `qweight` (K, N / 8) int32 packs the 4-bit quants of 8 outputs into a 32-bit word, in `AWQ_ORDER`. `qzeros` (G,
    N / 8) packs zero points in the same way. `scales` is (G, N). Only AWQ's version "gemm" is read; other versions pack
    quants in another order.

    Source: `dequantize_gemm`, github.com/casper-hansen/AutoAWQ, awq/utils/packing_utils.py.
    """
    config.expect("bits", AWQ_BITS)
    config.expect("w_bit", AWQ_BITS)
    config.expect("desc_act", False, None)
    for key in ("version", "format"):
        config.expect(key, "gemm", "GEMM", None)
    key = "group_size" if "group_size" in config.values else "q_group_size"
    size = config.expect(key, 128, -1, 32, 64, 256)
    config.refuse_others(_AWQ_KNOWN)
    return {f"{prefix}.weight": _awq_layer(files, prefix, size) for prefix in named(files, ".qweight")}


def _awq_layer(files: Files, prefix: str, size: int) -> Layer:
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
            some = fields(packed[:, start : -(-last // 8)], AWQ_BITS, AWQ_ORDER)
            return some[:, first - 8 * start : last - 8 * start].T

        groups = equal_groups(k, size)
        scales, zero_points = floats(files, names[2]).T, fields(zeros, AWQ_BITS, AWQ_ORDER).T
        return Groups(f"{prefix}.weight", AWQ_BITS, scales, zero_points, groups, quants).weight()

    return Layer((n, k), names, read)


# Settings of the quantiser and of its kernels, which do not change what the stored tensors mean.
_GPTQ_HARMLESS = (
    "act_group_aware", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_auto_increment",
    "damp_percent", "dataset", "desc_act", "disable_exllama", "exllama_config", "lm_head", "max_input_length", "meta",
    "method", "model_file_base_name", "model_name_or_path", "model_seqlen", "module_name_preceding_first_block",
    "modules_in_block_to_quantize", "mse", "pad_token_id", "quant_method", "static_groups", "sym", "tokenizer",
    "true_sequential", "use_cuda_fp16", "use_exllama",
)  # fmt: skip


def gptq_layers(config: QuantConfig, files: Files) -> dict[str, Layer]:
    """Find the layers of GPTQ: `weight[n, k] = scale[n, g] * (q[n, k] - zero[n, g])`.

    The group g of column k is `g_idx[k]`, or `k // group_size` if there is no `g_idx`. `qweight` (K * bits / 32, N)
    int32 packs the quants of 32 / bits columns into a 32-bit word, the first in the lowest bits. `scales` is (G, N).
    `qzeros` (G, N * bits / 32) packs zero points in the same way, along N. The format "gptq_v2" stores zero points,
    "gptq" stores zero points minus 1. In "gptq", a zero point of 0 is stored as -1, which borrows 1 from the next
    field of the word. So 1 is added to all fields of a word in one 32-bit addition, as in GPTQModel: the carries
    undo the borrows.

    Source: `QuantLinear.pack` and `forward`, github.com/AutoGPTQ/AutoGPTQ,
    auto_gptq/nn_modules/qlinear/qlinear_cuda.py; `convert_gptq_v1_to_v2_format_module`,
    github.com/ModelCloud/GPTQModel, gptqmodel/utils/model.py.
    """
    bits = config.expect("bits", 4, 8)
    size = config.expect("group_size", 128, -1, 16, 32, 64, 256, 512, 1024)
    config.expect("pack_dtype", "int32")
    formats = [config.expect(key, "gptq", None, "gptq_v2") for key in ("checkpoint_format", "format")]
    config.refuse_others(("bits", "group_size", "pack_dtype", "checkpoint_format", "format", *_GPTQ_HARMLESS))
    is_v1 = "gptq_v2" not in formats
    return {f"{prefix}.weight": _gptq_layer(files, prefix, bits, size, is_v1) for prefix in named(files, ".qweight")}


def _gptq_layer(files: Files, prefix: str, bits: int, size: int, is_v1: bool) -> Layer:
    names = tuple(f"{prefix}.{end}" for end in ("qweight", "qzeros", "scales", "g_idx") if f"{prefix}.{end}" in files)
    packed, zeros = (part(files, f"{prefix}.{end}", "I32") for end in ("qweight", "qzeros"))
    scale_shape = part(files, f"{prefix}.scales", "F16", "BF16", "F32").shape
    check_shape(f"{prefix}.qweight", packed.shape, (len(packed), *scale_shape[1:2]))
    (rows, n), per_word = packed.shape, 32 // bits
    k = rows * per_word
    n_groups = 1 if size == -1 else -(-k // size)
    check_shape(f"{prefix}.scales", scale_shape, (n_groups, n))
    check_shape(f"{prefix}.qzeros", zeros.shape, (n_groups, -(-n // per_word)))
    if f"{prefix}.g_idx" in files:
        check_shape(f"{prefix}.g_idx", part(files, f"{prefix}.g_idx", "I32").shape, (k,))

    def read() -> Weight:
        whole = zeros.view(np.uint32) + np.uint32(0xFFFFFFFF // ((1 << bits) - 1)) if is_v1 else zeros
        groups = equal_groups(k, size)
        if f"{prefix}.g_idx" in files:
            groups = part(files, f"{prefix}.g_idx", "I32").astype(np.int64)

        def quants(first: int, last: int) -> NDArray[np.int16]:
            return fields(packed[:, first:last].T, bits)

        zero_points = fields(whole.view(np.int32), bits)[:, :n].T
        scales = floats(files, f"{prefix}.scales").T
        return Groups(f"{prefix}.weight", bits, scales, zero_points, groups, quants).weight()

    return Layer((n, k), names, read)


BLOCKS, BLOCK_SCALES = "_blocks", "_scales"


def mxfp4_layers(config: QuantConfig, files: Files) -> dict[str, Layer]:
    """Find the layers of MXFP4, the form in which gpt-oss is published: one weight has all experts of a layer.

    NAME_blocks (experts, N, K / 32, 16) has the quants of groups of 32 weights, two per byte, the even one in the low
    half. NAME_scales (experts, N, K / 32) has an exponent e per group, for the scale 2**(e - 127). The weight (experts,
    N, K) is named NAME_blocks, not NAME: in folders that are not quantised, the tensor NAME has another order of axes.

    Source: `convert_moe_packed_tensors`, Hugging Face transformers, integrations/mxfp4.py.
    """
    config.refuse_others(("quant_method", "modules_to_not_convert", "dequantize"))
    return {stem + BLOCKS: _mxfp4_layer(files, stem) for stem in named(files, BLOCKS)}


def _mxfp4_layer(files: Files, stem: str) -> Layer:
    blocks, scales = part(files, stem + BLOCKS, "U8"), part(files, stem + BLOCK_SCALES, "U8")
    n_bytes = MLX.block_bytes - MLX.scale_bytes
    check_shape(stem + BLOCKS, blocks.shape, (*blocks.shape[:3], n_bytes))  # exactly four axes
    check_shape(stem + BLOCK_SCALES, scales.shape, blocks.shape[:-1])
    shape = (*scales.shape[:-1], scales.shape[-1] * MLX.block_size)

    def read() -> GroupWeight:
        return GroupWeight(stem + BLOCKS, shape, MLX, Parts(blocks.reshape(-1, n_bytes), scales.reshape(-1, 1), None))

    return Layer(shape, (stem + BLOCKS, stem + BLOCK_SCALES), read)


_FP8_KNOWN = (
    "activation_scheme", "dequantize", "fmt", "ignored_layers", "modules_to_convert", "modules_to_not_convert",
    "quant_method", "scale_fmt", "weight_block_size",
)  # fmt: skip
_FP8_SCALES = ("weight_scale_inv", "weight_scale")
# Scales of activations, which are not used.
_FP8_UNUSED = ("input_scale", "activation_scale")


def fp8_layers(config: QuantConfig, files: Files) -> dict[str, Layer]:
    """Find weights of type F8_E4M3 with float scales: `weight[n, k] = float32(q[n, k]) * scale`, rounded to float32.

    There is one scale per block of rows and columns, per row, or per matrix. Published models have `weight_scale_inv`
    for blocks of 128 x 128; in spite of this name, the stored number is the scale, not its inverse.

    Source: `weight_dequant`, github.com/deepseek-ai/DeepSeek-V3, inference/kernel.py; OCP 8-bit Floating Point
    Specification (OFP8), revision 1.0, E4M3.
    """
    config.expect("fmt", "e4m3", "float8_e4m3fn", None)
    config.expect("scale_fmt", "float", "ue8m0", None)
    config.refuse_others(_FP8_KNOWN)
    size = config.values.get("weight_block_size")
    block = None if size is None else block_size(config, "weight_block_size", size)
    prefixes = [p for p in named(files, ".weight") if files[f"{p}.weight"].tensors[f"{p}.weight"].dtype == "F8_E4M3"]
    return {f"{prefix}.weight": fp8_layer(files, prefix, block) for prefix in prefixes}


def block_size(config: QuantConfig, key: str, value: object) -> tuple[int, int]:
    """Return (rows, columns) of a block; raise UnsupportedConfigError if `value` is not two whole numbers >= 1."""
    if isinstance(value, list) and len(value) == 2 and all(type(n) is int and n >= 1 for n in value):
        return value[0], value[1]
    raise config.error(key, "two whole numbers >= 1", value)


def fp8_layer(files: Files, prefix: str, block: tuple[int, int] | None) -> Layer:
    """Return the layer of `prefix.weight` (N, K), with a scale per `block` (rows, columns).

    If `block` is None, there is a scale per row or one for the matrix.

    Raises:
        FormatError: the scales are missing, or do not fit the weight.
    """
    scale = next((f"{prefix}.{end}" for end in _FP8_SCALES if f"{prefix}.{end}" in files), f"{prefix}.{_FP8_SCALES[0]}")
    quants = part(files, f"{prefix}.weight", "F8_E4M3")
    check_shape(f"{prefix}.weight", quants.shape, (len(quants), *quants.shape[1:2]))
    n, k = quants.shape
    shapes = [(n, 1), (n,), (1, 1), (1,), ()] if block is None else [(-(-n // block[0]), -(-k // block[1]))]
    check_shape(scale, floats(files, scale).shape, *shapes)
    unused = tuple(f"{prefix}.{end}" for end in _FP8_UNUSED if f"{prefix}.{end}" in files)

    def read() -> Weight:
        scales = floats(files, scale)
        column = scales.reshape(-1, 1)
        out = np.empty((n, k), dtype=np.float32)
        step = max(1, _PIECE // max(k, 1))
        for first in range(0, n, step):
            rows = np.arange(first, min(first + step, n))
            with np.errstate(invalid="ignore", over="ignore"):  # files may have NaN and infinities
                if block is None:
                    factors = column[rows] if len(column) > 1 else column
                else:
                    factors = np.repeat(scales[rows // block[0]], block[1], axis=1)[:, :k]
                np.multiply(E4M3[quants[rows]], factors, out=out[rows[0] : rows[-1] + 1])
        return Weight(f"{prefix}.weight", (n, k), F32, out.view(np.uint8).reshape(-1))

    return Layer((n, k), (f"{prefix}.weight", scale, *unused), read)


COMPRESSED_FORMATS = ("int-quantized", "naive-quantized", "float-quantized", "pack-quantized")
_COMPRESSED_KNOWN = (
    "config_groups", "format", "global_compression_ratio", "ignore", "quant_method", "quantization_status",
    "sparsity_config", "version",
)  # fmt: skip
_COMPRESSED_OPTIONAL = ("weight_zero_point", "weight_g_idx", "input_scale", "input_zero_point")


def compressed_layers(config: QuantConfig, files: Files) -> dict[str, Layer]:
    """Find the layers of compressed-tensors: FP8 or integers, with scales.

    For integers, `weight[n, k] = scale[n, g] * (q[n, k] - zero[n, g])`. The group g of column k is `weight_g_idx[k]`,
    or `k // (K / G)` if this tensor is absent. The formats are:
    - "int-quantized" and "naive-quantized" store 8-bit integers as `weight`, I8.
    - "float-quantized" stores `weight` as F8_E4M3 (see `fp8_layers`).
    - "pack-quantized" adds 2**(bits - 1) to 4- or 8-bit integers, and packs them into the I32 `weight_packed`
      (N, K * bits / 32), the first column in the lowest bits. `weight_shape` has the numbers N and K.
    For integers, `weight_scale` is (N, G), (N, 1) or one number. Asymmetric weights have `weight_zero_point`: I8 of the
    scales' shape, or I32, packed like `weight_packed` but along N. If this tensor is absent, zero points are 0.

    Source: github.com/vllm-project/compressed-tensors, src/compressed_tensors/compressors.
    """
    config.expect("format", *COMPRESSED_FORMATS, "dense", "mixed-precision")
    config.expect("quantization_status", "compressed", None)
    sparsity = config.values.get("sparsity_config") or {}
    if sparsity and (not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense"):
        raise config.error("sparsity_config", "absent or dense", sparsity)
    config.refuse_others(_COMPRESSED_KNOWN)
    block = None
    bits = set()
    for weights in _schemes(config):
        bits.add(weights.get("num_bits"))
        if weights.get("strategy") == "block":
            block = block_size(config, "config_groups", weights.get("block_structure"))
    packed = _packed_bits(config, bits) if named(files, ".weight_packed") else 8
    found = {f"{p}.weight": _compressed_packed(files, p, packed) for p in named(files, ".weight_packed")}
    for prefix in named(files, ".weight"):
        name = f"{prefix}.weight"
        dtype = files[name].tensors[name].dtype
        if dtype == "I8":
            found[name] = _compressed_integers(files, prefix)
        elif dtype == "F8_E4M3":
            found[name] = fp8_layer(files, prefix, block)
    return found


def _schemes(config: QuantConfig) -> list[Mapping[str, Any]]:
    """Return the setting `weights` of each group of layers, which describes how the group is quantised."""
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


def _compressed_integers(files: Files, prefix: str) -> Layer:
    stored = part(files, f"{prefix}.weight", "I8")
    check_shape(f"{prefix}.weight", stored.shape, (len(stored), *stored.shape[1:2]))

    def quants(first: int, last: int) -> NDArray[np.int16]:
        return stored[first:last].astype(np.int16)

    return _compressed_layer(files, prefix, "weight", 8, stored.shape, quants)


def _compressed_packed(files: Files, prefix: str, bits: int) -> Layer:
    stored = part(files, f"{prefix}.weight_packed", "I32")
    shape = tuple(int(n) for n in part(files, f"{prefix}.weight_shape", "I64", "I32").reshape(-1))
    if len(shape) != 2 or min(shape) < 0:
        raise _damaged(f"{prefix}.weight_shape", "two sizes", str(shape))
    n, k = shape
    check_shape(f"{prefix}.weight_packed", stored.shape, (n, -(-k * bits // 32)))
    middle = np.int16(1 << bits - 1)

    def quants(first: int, last: int) -> NDArray[np.int16]:
        return fields(stored[first:last], bits)[:, :k] - middle

    return _compressed_layer(files, prefix, "weight_packed", bits, (n, k), quants)


def _compressed_layer(files: Files, prefix: str, stored: str, bits: int, shape: tuple[int, ...], quants: Any) -> Layer:
    n, k = shape
    scale_shape = floats(files, f"{prefix}.weight_scale").shape
    rows, n_groups = scale_shape if len(scale_shape) == 2 else (1, 1)
    allowed = [(), (1,), (1, 1), (n, 1)] + ([(n, n_groups)] if n_groups and k % n_groups == 0 else [])
    check_shape(f"{prefix}.weight_scale", scale_shape, *allowed)
    others = [f"{prefix}.{end}" for end in _COMPRESSED_OPTIONAL if f"{prefix}.{end}" in files]
    shapes = [f"{prefix}.weight_shape"] if stored == "weight_packed" else []

    def read() -> Weight:
        scales = np.broadcast_to(floats(files, f"{prefix}.weight_scale").reshape(rows, n_groups), (n, n_groups))
        groups = equal_groups(k, k // n_groups)
        if f"{prefix}.weight_g_idx" in files:
            groups = part(files, f"{prefix}.weight_g_idx", "I32", "I64").astype(np.int64)
            check_shape(f"{prefix}.weight_g_idx", groups.shape, (k,))
        zeros = _compressed_zeros(files, f"{prefix}.weight_zero_point", bits, (n, n_groups))
        return Groups(f"{prefix}.weight", bits, scales, zeros, groups, quants, -(1 << bits - 1)).weight()

    return Layer((n, k), (f"{prefix}.{stored}", f"{prefix}.weight_scale", *shapes, *others), read)


def _compressed_zeros(files: Files, name: str, bits: int, shape: tuple[int, int]) -> NDArray[np.int16]:
    """Return the zero points (N, G), which are 0 if the files have no tensor `name`."""
    if name not in files:
        return np.zeros(shape, dtype=np.int16)
    stored = part(files, name, "I8", "I32")
    if stored.dtype == np.int8:
        check_shape(name, stored.shape, shape, (1,), (1, 1), ())
        return np.broadcast_to(stored.astype(np.int16).reshape(-1, *stored.shape[1:2]), shape)
    n, n_groups = shape
    check_shape(name, stored.shape, (-(-n * bits // 32), n_groups))
    return fields(stored.T, bits)[:, :n].T - np.int16(1 << bits - 1)


_READERS: dict[str, Callable[[QuantConfig, Files], Mapping[str, Layer]]] = {
    "gptq": gptq_layers,
    "awq": awq_layers,
    "fp8": fp8_layers,
    "compressed-tensors": compressed_layers,
    "mxfp4": mxfp4_layers,
}


def read_layers(where: str, values: Mapping[str, Any], files: Files) -> Mapping[str, Layer]:
    """Return a map from the name of each quantised weight to its layer. `values` is the `quantization_config`.

    Raises:
        UnsupportedConfigError: the method or one of its settings is not implemented.
        FormatError: the tensors of a layer do not fit each other.
    """
    config, method = QuantConfig(where, values), quant_method(values)
    if method not in _READERS:
        raise UnsupportedConfigError(
            where=where,
            key=f"{CONFIG}.quant_method",
            expected=" or ".join(map(repr, _READERS)),
            found=method,
            hint="download the original model, which is not quantised, and quantise it with --quant q8_0 or q4_0, or "
            "download a GGUF file of the model",
        )
    return _READERS[method](config, files)
