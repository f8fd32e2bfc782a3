"""The types of GGUF metadata values, and how each is stored."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np


class ValueType(IntEnum):
    """The types of metadata values, by their number in the file."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


@dataclass(frozen=True)
class Value:
    """A metadata value with an explicit stored type, for values whose default type is not the wanted one."""

    kind: ValueType
    value: object


# The `struct` code of each number type. NumPy's codes differ (its "l" has 8 bytes on Linux and 4 on Windows).
CODES = {
    ValueType.UINT8: "<B",
    ValueType.INT8: "<b",
    ValueType.UINT16: "<H",
    ValueType.INT16: "<h",
    ValueType.UINT32: "<I",
    ValueType.INT32: "<i",
    ValueType.FLOAT32: "<f",
    ValueType.BOOL: "<?",
    ValueType.UINT64: "<Q",
    ValueType.INT64: "<q",
    ValueType.FLOAT64: "<d",
}
DTYPES: dict[ValueType, np.dtype[Any]] = {kind: np.dtype(code) for kind, code in CODES.items()}
