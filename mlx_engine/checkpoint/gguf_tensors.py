"""Parse a GGUF file's tensor records: name, shape, type and data offset."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlx_engine.checkpoint.gguf_values import Cursor, shown
from mlx_engine.quant.types import BY_ID, GGMLType

MAX_NAME_BYTES = 63  # GGML_MAX_NAME is 64, including the terminating zero byte
MAX_DIMS = 4  # GGML_MAX_DIMS
# ggml counts elements in a signed 64-bit integer. The limit is eight times smaller, because NumPy's size in bytes
# of the values as float64 must fit into 63 bits too.
MAX_ELEMENTS = 1 << 60

_DAMAGED = "the file is damaged, or made by a faulty converter; download or convert it again"
_RECORD_BYTES = 640  # a TensorInfo with its name and shape, and its dict entry: an upper bound


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's record.

    `shape` is row-major, the reverse of the order in the file; `offset` counts from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int
    nbytes: int


def read_tensor_infos(cursor: Cursor, n_tensors: int, alignment: int) -> tuple[int, dict[str, TensorInfo]]:
    """Return the byte at which tensor data begins, and the tensors by name. All tensors lie within the file.

    Raises:
        FormatError: a record is damaged, tensors leave gaps or overlap, or the file ends before their data
        does.
    """
    tensors: dict[str, TensorInfo] = {}
    starts: list[int] = []
    data_bytes = 0
    for i in range(n_tensors):
        info = _read_record(cursor, i, tensors, expected_offset=data_bytes)
        tensors[info.name] = info
        starts.append(data_bytes)
        data_bytes += padded(info.nbytes, alignment)
    if not n_tensors:
        return cursor.at, {}
    data_offset = padded(cursor.at, alignment)
    if data_offset + data_bytes > cursor.size:
        raise cursor.error(
            f"data of {n_tensors:,} tensors",
            at=data_offset,
            expected=f"{data_bytes:,} bytes",
            found=f"only {max(0, cursor.size - data_offset):,} bytes left of {cursor.size:,}",
            hint="the file is cut short or damaged; download or convert it again",
        )
    return data_offset, {name: _moved(info, data_offset) for name, info in tensors.items()}


def padded(n_bytes: int, alignment: int) -> int:
    """Round `n_bytes` up to a multiple of `alignment`."""
    return -(-n_bytes // alignment) * alignment


def _moved(info: TensorInfo, by: int) -> TensorInfo:
    return TensorInfo(info.name, info.shape, info.type, info.offset + by, info.nbytes)


def _read_record(cursor: Cursor, index: int, known: dict[str, TensorInfo], *, expected_offset: int) -> TensorInfo:
    at = cursor.at
    cursor.spend(_RECORD_BYTES, f"tensor {index}")
    name = cursor.string(f"name of tensor {index}", max_bytes=MAX_NAME_BYTES)
    field = f"tensor {shown(name)}"
    if name in known:
        raise cursor.error(field, at=at, expected="a unique name", found="a second tensor of this name", hint=_DAMAGED)
    shape = _read_shape(cursor, field)
    type_ = _read_type(cursor, field, shape)
    at = cursor.at
    offset = cursor.u64(f"{field}, offset,")
    if offset != expected_offset:
        expected = f"{expected_offset:,}, where the tensor before it ends"
        raise cursor.error(f"{field}, offset,", at=at, expected=expected, found=f"{offset:,}", hint=_DAMAGED)
    return TensorInfo(name, shape, type_, offset, type_.bytes_for(math.prod(shape)))


def _read_shape(cursor: Cursor, field: str) -> tuple[int, ...]:
    at = cursor.at
    n_dims = cursor.u32(f"{field}, number of dimensions,")
    if n_dims > MAX_DIMS:
        what = f"{field}, number of dimensions,"
        raise cursor.error(what, at=at, expected=f"at most {MAX_DIMS}", found=f"{n_dims:,}", hint=_DAMAGED)
    at = cursor.at
    dims = [cursor.u64(f"{field}, dimension {i},") for i in range(n_dims)]
    # Zero dimensions are left out of the product: an empty tensor is allowed, unless its other dimensions overflow.
    if math.prod(max(dim, 1) for dim in dims) >= MAX_ELEMENTS:
        expected = f"fewer than 2**{MAX_ELEMENTS.bit_length() - 1} elements"
        raise cursor.error(f"{field}, dimensions,", at=at, expected=expected, found=f"{dims}", hint=_DAMAGED)
    return tuple(reversed(dims))


def _read_type(cursor: Cursor, field: str, shape: tuple[int, ...]) -> GGMLType:
    at = cursor.at
    number = cursor.u32(f"{field}, type,")
    type_ = BY_ID.get(number)
    if type_ is None:
        hint = "the file is damaged, or the type is newer than this reader, or ggml has removed it"
        raise cursor.error(f"{field}, type,", at=at, expected="a ggml type number", found=f"{number:,}", hint=hint)
    row = shape[-1] if shape else 1
    if row % type_.block_size:
        expected = f"rows of whole {type_.name} blocks, {type_.block_size} weights each"
        raise cursor.error(f"{field}, type,", at=at, expected=expected, found=f"rows of {row:,}", hint=_DAMAGED)
    return type_
