"""Quantised folders made from random integers: the packers of the formats, word by word from their definitions.

A packer returns the tensors of a layer as (dtype, shape, bytes), and the float32 weights that they stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

Tensors: TypeAlias = dict[str, tuple[str, tuple[int, ...], bytes]]
Packed: TypeAlias = tuple[Tensors, np.ndarray]
DTYPES = {"f4": "F32", "f2": "F16", "i1": "I8", "i4": "I32", "i8": "I64"}


def tensor(array: np.ndarray, dtype: str | None = None) -> tuple[str, tuple[int, ...], bytes]:
    return dtype or DTYPES[array.dtype.str[1:]], array.shape, np.ascontiguousarray(array).tobytes()


def bf16(array: np.ndarray) -> np.ndarray:
    """Cut floats to BF16."""
    return (array.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def as_bf16(array: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    return tensor((array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16), "BF16")


def words(values: np.ndarray, bits: int, places: list[int] | None = None) -> np.ndarray:
    """Pack rows of integers into int32 words: value i of a word at field `places[i]`, by default i."""
    per_word = 32 // bits
    places = places or list(range(per_word))
    made = np.zeros((len(values), -(-values.shape[1] // per_word)), dtype=np.uint64)
    for column in range(values.shape[1]):
        at = np.uint64(bits * places[column % per_word])
        made[:, column // per_word] |= (values[:, column].astype(np.uint64) & np.uint64((1 << bits) - 1)) << at
    return made.astype(np.uint32).view(np.int32)


def scales_of(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return (0.01 * rng.standard_normal(shape)).astype(np.float16).astype(np.float32)


def gptq(
    rng: np.random.Generator, prefix: str, n: int, k: int, *, size: int = 32, bits: int = 4, v2: bool = False,
    zero: int | None = None, shuffled: bool = False, scale_type: Any = np.float16,
) -> Packed:  # fmt: skip
    n_groups = -(-k // size)
    q, zeros = rng.integers(0, 1 << bits, (n, k)), rng.integers(0, 1 << bits, (n, n_groups))
    if zero is not None:
        zeros[:] = zero
    scales = scales_of(rng, (n, n_groups)) * (np.float32(1) if scale_type == np.float16 else np.float32(1.1))
    groups = np.arange(k, dtype=np.int32) // size
    if shuffled:
        groups = rng.permutation(groups)
    stored = words(zeros.T, bits)
    if not v2:
        stored = (stored.view(np.uint32) - np.uint32(0x11111111 if bits == 4 else 0x01010101)).view(np.int32)
    tensors = {
        f"{prefix}.qweight": tensor(words(q, bits).T), f"{prefix}.qzeros": tensor(stored),
        f"{prefix}.scales": tensor(scales.T.astype(scale_type)), f"{prefix}.g_idx": tensor(groups),
    }  # fmt: skip
    return tensors, scales[:, groups] * (q - zeros[:, groups]).astype(np.float32)


def awq(rng: np.random.Generator, prefix: str, n: int, k: int, *, size: int = 32) -> Packed:
    n_groups = -(-k // size)
    q, zeros = rng.integers(0, 16, (k, n)), rng.integers(0, 16, (n_groups, n))
    scales, places = scales_of(rng, (n_groups, n)), [0, 4, 1, 5, 2, 6, 3, 7]
    tensors = {
        f"{prefix}.qweight": tensor(words(q, 4, places)), f"{prefix}.qzeros": tensor(words(zeros, 4, places)),
        f"{prefix}.scales": tensor(scales.astype(np.float16)),
    }  # fmt: skip
    groups = np.arange(k) // size
    return tensors, (scales[groups] * (q - zeros[groups]).astype(np.float32)).T


def int8(
    rng: np.random.Generator, prefix: str, n: int, k: int, *, exact: bool = True, zeros: bool = False
) -> Packed:  # fmt: skip
    q = rng.integers(-128, 128, (n, k)).astype(np.int8)
    scales = bf16(0.01 * rng.random((n, 1)) + 1e-3) if exact else (0.01 * rng.random((n, 1))).astype(np.float32)
    points = rng.integers(-100, 100, (n, 1)).astype(np.int8) if zeros else np.zeros((n, 1), np.int8)
    tensors = {f"{prefix}.weight": tensor(q), f"{prefix}.weight_scale": as_bf16(scales) if exact else tensor(scales)}
    if zeros:
        tensors[f"{prefix}.weight_zero_point"] = tensor(points)
    return tensors, scales * (q.astype(np.int16) - points).astype(np.float32)


def pack(
    rng: np.random.Generator, prefix: str, n: int, k: int, *, size: int = 32, zeros: bool = False
) -> Packed:  # fmt: skip
    n_groups = k // size
    q, scales = rng.integers(-8, 8, (n, k)), bf16(0.01 * rng.random((n, n_groups)) + 1e-3)
    points = rng.integers(-8, 8, (n, n_groups)) if zeros else np.zeros((n, n_groups), np.int64)
    tensors = {
        f"{prefix}.weight_packed": tensor(words(q + 8, 4)), f"{prefix}.weight_scale": as_bf16(scales),
        f"{prefix}.weight_shape": tensor(np.array([n, k])),
    }  # fmt: skip
    if zeros:
        tensors[f"{prefix}.weight_zero_point"] = tensor(words((points + 8).T, 4).T)
    groups = np.arange(k) // size
    return tensors, scales[:, groups] * (q - points[:, groups]).astype(np.float32)


def e4m3(code: int) -> float:
    """Return the value of one byte, by the definition."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    size = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
    return float("nan") if code & 127 == 127 else -size if sign else size


def fp8(
    rng: np.random.Generator, prefix: str, n: int, k: int, *, block: tuple[int, int] = (128, 128), scale: str = "F32"
) -> Packed:
    codes = rng.integers(0, 256, (n, k)).astype(np.uint8)
    codes[codes & 127 == 127] = 3  # NaN
    # Values of up to 448, brought to those of weights.
    scales = (1e-4 * (1 + rng.random((-(-n // block[0]), -(-k // block[1]))))).astype(np.float32)
    stored = tensor(scales)
    if scale == "BF16":
        scales, stored = bf16(scales), as_bf16(scales)
    if scale == "F8_E8M0":
        exponents = rng.integers(110, 116, scales.shape)
        scales, stored = np.exp2(exponents - 127.0).astype(np.float32), tensor(exponents.astype(np.uint8), "F8_E8M0")
    values = np.array([e4m3(code) for code in range(256)], dtype=np.float32)[codes]
    tensors = {f"{prefix}.weight": tensor(codes, "F8_E4M3"), f"{prefix}.weight_scale_inv": stored}
    return tensors, values * np.kron(scales, np.ones(block, np.float32))[:n, :k]


Packer: TypeAlias = Callable[..., Packed]


def write_folder(folder: Path, base: Path, tensors: Tensors, config: dict[str, Any] | None) -> Path:
    """Write a folder with the settings and the tokenizer of `base`."""
    folder.mkdir()
    settings = json.loads((base / "config.json").read_text()) | ({"quantization_config": config} if config else {})
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_bytes((base / "tokenizer.json").read_bytes())
    header, data = {}, b""
    for name, (dtype, shape, values) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder
