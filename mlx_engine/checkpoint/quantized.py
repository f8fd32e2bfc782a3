"""Folders whose linear layers are quantised: `quantization_config` in config.json, with a `quant_method`.

A quantised layer is several tensors: quants, scales, zero points. A reader of a method finds the layers of a folder,
and returns each as one weight whose values are those of the method's own arithmetic, without another quantisation.
Activations stay float32, also where the config asks to quantise them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlx_engine.checkpoint.safetensors import SafetensorsFile
from mlx_engine.errors import FormatError, UnsupportedConfigError
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
            UnsupportedConfigError: names the first other setting.
        """
        for key, value in self.values.items():
            if key not in known and value not in (None, False, {}, []):
                raise self.error(key, "absent", value)

    def error(self, key: str, expected: str, found: object) -> UnsupportedConfigError:
        """Return the error about one setting, for the caller to raise."""
        return UnsupportedConfigError(where=self.where, key=f"{CONFIG}.{key}", expected=expected, found=found)


def quant_method(values: Mapping[str, object]) -> str | None:
    """Return the method of a `quantization_config`; None if it names none, as in folders that MLX has quantised."""
    # Folders of bitsandbytes from before transformers 4.34 do not name it.
    is_old = any(key.startswith(("load_in_", "bnb_")) for key in values)
    method = values.get("quant_method", "bitsandbytes" if is_old else None)
    return method if method is None else str(method)


def named(files: Files, ending: str) -> list[str]:
    """Return what precedes `ending` in the names of tensors that end so."""
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
