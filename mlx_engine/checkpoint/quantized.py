"""Folders whose linear layers are quantised: `quantization_config` in config.json, with a `quant_method`.

A quantised layer consists of several tensors: quants, scales, zero points. Each method has a reader. The reader finds
the layers of a folder, and returns each layer as one weight with exactly the values that the method defines.
Activations stay float32, even if the config asks to quantise them.
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
from mlx_engine.quant.packing import pack_halves
from mlx_engine.quant.types import F32, Q4_0, Q8_0, GGMLType
from mlx_engine.quant.weight import Weight

Files: TypeAlias = Mapping[str, SafetensorsFile]
CONFIG = "quantization_config"
# Types of scales: floats, or powers of two.
SCALES = ("F32", "F16", "BF16", "F8_E8M0")


@dataclass(frozen=True)
class Layer:
    """A quantised weight: its row-major shape, (N, K) or (X, N, K), its tensors' names, a function that reads it."""

    shape: tuple[int, ...]
    parts: tuple[str, ...]
    read: Callable[[], Weight]


class QuantConfig:
    """The `quantization_config` of a folder. A setting that changes values and is not implemented is an error."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where, self.values = where, values

    def expect(self, key: str, *allowed: object) -> Any:
        """Return a setting whose value must be among `allowed`; an absent setting is the first of them.

        Raises:
            UnsupportedConfigError: it has another value.
        """
        value = self.values.get(key, allowed[0])
        if not isinstance(value, str | int | float | None) or value not in allowed:
            raise self.error(key, " or ".join(map(repr, allowed)), value)
        return value

    def refuse_others(self, known: tuple[str, ...]) -> None:
        """Check that every setting is among `known`, or is null, false or empty.

        Raises:
            UnsupportedConfigError: there is another setting; the error names the first one.
        """
        for key, value in self.values.items():
            if key not in known and value not in (None, False, {}, []):
                raise self.error(key, "absent", value)

    def error(self, key: str, expected: str, found: object) -> UnsupportedConfigError:
        """Return the error about one setting, for the caller to raise."""
        return UnsupportedConfigError(where=self.where, key=f"{CONFIG}.{key}", expected=expected, found=found)


def quant_method(values: Mapping[str, object]) -> str | None:
    """Return the method of a `quantization_config`; None without a method, as in folders that MLX has quantised."""
    # Folders of bitsandbytes from before transformers 4.34 do not name it.
    is_old = any(key.startswith(("load_in_", "bnb_")) for key in values)
    method = values.get("quant_method", "bitsandbytes" if is_old else None)
    return method if method is None else str(method)


def named(files: Files, ending: str) -> list[str]:
    """Return the names of tensors that end with `ending`, without this ending."""
    return [name.removesuffix(ending) for name in files if name.endswith(ending)]


def part(files: Files, name: str, *dtypes: str) -> NDArray[Any]:
    """Return a tensor of a quantised weight.

    Raises:
        FormatError: there is none, or its type is none of `dtypes`.
    """
    if name not in files:
        layer = name.rpartition(".")[0]
        raise FormatError(
            where=layer, expected=f"a tensor {name!r}", found="none", hint="download or convert the folder again"
        )
    return files[name].array(name, *dtypes)


def floats(files: Files, name: str) -> NDArray[np.float32]:
    """Return scales widened to float32, which is exact.

    Raises:
        FormatError: there is no such tensor, or it is not of a type in `SCALES`.
    """
    stored = part(files, name, *SCALES)
    dtype = files[name].tensors[name].dtype
    if dtype == "BF16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "F8_E8M0":
        return np.where(stored == 255, np.float32(np.nan), np.ldexp(np.float32(1), stored.astype(np.int32) - 127))
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return stored.astype(np.float32)


def check_shape(name: str, found: tuple[int, ...], *allowed: tuple[int, ...]) -> None:
    """Raise FormatError if the shape of a tensor is not among `allowed`."""
    if found not in allowed:
        expected = f"the shape {' or '.join(map(str, allowed))}"
        raise FormatError(where=name, expected=expected, found=str(found), hint="download or convert the folder again")


BLOCK = 32
# Weights per piece: temporaries take a few megabytes.
_PIECE = 1 << 20


@dataclass(frozen=True)
class Groups:
    """A matrix (N, K) of `bits`-bit integers in G groups of columns.

    Attributes:
        name: the weight's name.
        scales: float32 (N, G).
        zeros: int16 (N, G).
        groups: (K,) the group of each column.
        quants: function that returns rows `first` to `last - 1` of the integers, (last - first, K) of type int16.
        lowest: the lowest value of an integer; the highest is `lowest + 2**bits - 1`.

    Weights of integers with a scale and a zero point per group of columns: `scale * (q - zero)`.

    The value is one product of float32: scales are widened, and `q - zero` is a small integer. If each 32 columns of a
    row share a scale that is a float16, the weight is a Q4_0 or Q8_0 weight of the same values, which backends multiply
    as stored. Otherwise it is expanded to float32.
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
            raise FormatError(
                where=self.name,
                expected=f"columns in groups 0 to {n_groups - 1}",
                found=f"groups {self.groups.min()} to {self.groups.max()}",
                hint="download or convert the folder again",
            )

    def weight(self) -> Weight:
        """Return the matrix as Q4_0 or Q8_0 if their values are exactly those of the integers, else as float32."""
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
            with np.errstate(invalid="ignore", over="ignore"):  # any bytes are weights
                values = self.scales[first:last, self.groups] * differences.astype(np.float32)
            return np.ascontiguousarray(values).view(np.uint8)
        made = np.empty(differences.size // BLOCK, layout.Q4_0 if type_ == Q4_0 else layout.Q8_0)
        with np.errstate(invalid="ignore"):  # a signalling NaN
            made["d"] = self.scales[first:last, self.groups[::BLOCK]].astype(np.float16).reshape(-1)
        blocks = differences.reshape(-1, BLOCK)
        made["qs"] = pack_halves((blocks + 8).astype(np.uint8)) if type_ == Q4_0 else blocks.astype(np.int8)
        return made.view(np.uint8).reshape(last - first, -1)


def fields(words: NDArray[np.int32], bits: int, order: tuple[int, ...] | None = None) -> NDArray[np.int16]:
    """Split words (n, k) into unsigned fields of `bits` bits, lowest first: (n, k * 32 / bits).

    With an `order`, value i of a word is its field `order[i]`.
    """
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    if order is not None:
        shifts = shifts[list(order)]
    unsigned = np.ascontiguousarray(words).view(np.uint32)
    found = unsigned[..., None] >> shifts & np.uint32((1 << bits) - 1)
    return found.astype(np.int16).reshape(len(words), -1)


def equal_groups(k: int, size: int) -> NDArray[np.int64]:
    """Return the group of each of k columns if groups have `size` columns, -1 for one group of all."""
    return np.arange(k) // (k if size == -1 else size) if k else np.zeros(0, np.int64)
