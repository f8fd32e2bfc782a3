"""Read GGUF files, also split ones. A file is memory-mapped: opening it parses the header and reads no tensor data.

Layout: magic, version, counts; the metadata as typed key-value pairs; one record per tensor (name, dimensions, type,
offset); padding to `general.alignment`; the tensors, each padded likewise. Versions 2 and 3, little-endian.

Where the specification is ambiguous, this reader follows llama.cpp: the alignment is a uint32 and a power of two
(default 32); tensors are stored without gaps, in the order of their records, and the padding after the last tensor is
part of the file; tensor names are shorter than 64 bytes; a dimension may be 0. Unlike llama.cpp, this reader accepts
arrays of arrays, which the specification allows.

If another process truncates the file while it is mapped, reading the lost part ends this process (SIGBUS).

Source: `gguf_init_from_reader`,
https://github.com/ggml-org/llama.cpp/blob/067d44f6c48459f7a82dbafc6fbd0bae97755a4e/ggml/src/gguf.cpp
"""

from __future__ import annotations

import contextlib
import difflib
import math
import mmap
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from mlx_engine.checkpoint.gguf_values import (
    CUT_SHORT,
    FAULTY,
    MAX_KEY_BYTES,
    Cursor,
    Value,
    ValueType,
    read_value,
    read_value_type,
)
from mlx_engine.checkpoint.paths import POINTER_BYTES, other_kind, refuse_other_paths, refuse_pointer
from mlx_engine.errors import FormatError, SourceError, first, shown
from mlx_engine.quant.types import BY_ID, GGMLType
from mlx_engine.quant.weight import Weight

if TYPE_CHECKING:
    import mlx.core as mx

MAX_NAME_BYTES = 63  # GGML_MAX_NAME is 64, including the terminating zero byte
MAX_DIMS = 4  # GGML_MAX_DIMS
# NumPy limits an array to fewer than 2**63 bytes, so a float64 array has fewer than 2**60 elements. (ggml's limit of
# 2**63 elements is larger.)
MAX_ELEMENTS = 1 << 60

_RECORD_BYTES = 640  # upper bound on the memory of a TensorInfo with name, shape and dict entry


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's record. `shape` is row-major, reversed from the file; `offset` counts from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int
    nbytes: int


def read_tensor_infos(cursor: Cursor, n_tensors: int, alignment: int) -> tuple[int, dict[str, TensorInfo]]:
    """Return the byte at which tensor data begins, and a map from each tensor's name to its record.

    Raises:
        FormatError: a record is damaged, there are gaps between tensors, tensors overlap, or the file ends before the
            end of the last tensor.
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
            hint=CUT_SHORT,
        )
    return data_offset, {name: replace(info, offset=info.offset + data_offset) for name, info in tensors.items()}


def padded(n_bytes: int, alignment: int) -> int:
    """Round `n_bytes` up to a multiple of `alignment`."""
    return -(-n_bytes // alignment) * alignment


def _read_record(cursor: Cursor, index: int, known: dict[str, TensorInfo], *, expected_offset: int) -> TensorInfo:
    at = cursor.at
    cursor.spend(_RECORD_BYTES, f"tensor {index}")
    name = cursor.string(f"name of tensor {index}", max_bytes=MAX_NAME_BYTES)
    field = f"tensor {shown(name)}"
    if name in known:
        raise cursor.error(field, at=at, expected="a unique name", found="a second tensor of this name", hint=FAULTY)
    shape = _read_shape(cursor, field)
    type_ = _read_type(cursor, field, shape)
    at = cursor.at
    offset = cursor.u64(f"{field}, offset,")
    if offset != expected_offset:
        expected = f"{expected_offset:,}, where the tensor before it ends"
        raise cursor.error(f"{field}, offset,", at=at, expected=expected, found=f"{offset:,}", hint=FAULTY)
    return TensorInfo(name, shape, type_, offset, type_.bytes_for(math.prod(shape)))


def _read_shape(cursor: Cursor, field: str) -> tuple[int, ...]:
    at = cursor.at
    n_dims = cursor.u32(f"{field}, number of dimensions,")
    if n_dims > MAX_DIMS:
        what = f"{field}, number of dimensions,"
        raise cursor.error(what, at=at, expected=f"at most {MAX_DIMS}", found=f"{n_dims:,}", hint=FAULTY)
    at = cursor.at
    dims = [cursor.u64(f"{field}, dimension {i},") for i in range(n_dims)]
    # Dimensions of 0 count as 1 here, so that the other dimensions of an empty tensor are checked, too.
    if math.prod(max(dim, 1) for dim in dims) >= MAX_ELEMENTS:
        expected = f"fewer than 2**{MAX_ELEMENTS.bit_length() - 1} elements"
        raise cursor.error(f"{field}, dimensions,", at=at, expected=expected, found=f"{dims}", hint=FAULTY)
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
        raise cursor.error(f"{field}, type,", at=at, expected=expected, found=f"rows of {row:,}", hint=FAULTY)
    return type_


MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"

# Bytes of the smallest key-value pair: key length (8), key (1), value type (4), value (1). Bytes of the smallest tensor
# record: name length (8), name (0), number of dimensions (4), dimensions (0), type (4), offset (8).
_MIN_PAIR_BYTES, _MIN_RECORD_BYTES = 14, 24
_MAX_MLX_DIM = (1 << 31) - 1


class MappedFile(mmap.mmap):
    """A memory-mapped file, with its path, and the `os.stat` result from the time of the mapping."""

    path: Path
    stat: os.stat_result


class GGUFFile:
    """An open GGUF file: metadata, and name, shape and type of every tensor. Create it with `open_gguf`.

    `kinds` maps each metadata key to the stored type of its value, so that `write_gguf` can write the same bytes.
    `data_offset` is the byte at which tensor data begins.
    """

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self.path = path
        self._map = mapped
        cursor = Cursor(mapped, str(path))
        self.version = _read_version(cursor)
        n_tensors = cursor.count("number of tensors", bytes_each=_MIN_RECORD_BYTES)
        n_pairs = cursor.count("number of metadata values", bytes_each=_MIN_PAIR_BYTES)
        self.metadata: dict[str, object] = {}
        self.kinds: dict[str, ValueType] = {}
        for i in range(n_pairs):
            self._read_pair(cursor, i)
        self.alignment = _alignment(cursor, self.metadata, self.kinds)
        self.data_offset, self.tensors = read_tensor_infos(cursor, n_tensors, self.alignment)

    def _read_pair(self, cursor: Cursor, index: int) -> None:
        at = cursor.at
        key = cursor.string(f"key {index} of the metadata", max_bytes=MAX_KEY_BYTES)
        field = f"metadata {shown(key)}"
        if not key or key in self.metadata:
            raise cursor.error(
                field,
                at=at,
                expected="a unique, non-empty key",
                found="a second value for this key" if key else "an empty key",
                hint=FAULTY,
            )
        cursor.spend(512, field)  # upper bound on the bytes of the entries in both dicts together
        self.kinds[key] = kind = read_value_type(cursor, f"{field}, type,")
        self.metadata[key] = read_value(cursor, kind, field)

    @property
    def files(self) -> list[Path]:
        """The file, or all parts of a split file, in order."""
        return [self.path]

    def typed_metadata(self) -> dict[str, Value]:
        """Return the metadata with its stored types. `write_gguf` then writes the same bytes."""
        return {key: Value(self.kinds[key], value) for key, value in self.metadata.items()}

    def weight(self, name: str) -> Weight:
        """Return a tensor in its stored type, as a view of the mapped file, even if the type cannot be dequantised.

        Raises:
            FormatError: the file has no tensor of this name.
            SourceError: the file was closed.
        """
        info = self._info(name)
        if self._map.closed:
            raise SourceError(f"{self.path}: the file was closed; open it again with open_gguf")
        data = np.frombuffer(self._map, np.uint8, info.nbytes, info.offset)
        return Weight(info.name, info.shape, info.type, data)

    def load_tensor(self, name: str) -> mx.array:
        """Return a tensor dequantised to float32.

        Raises:
            FormatError: the file has no tensor of this name, or a dimension is too large for MLX.
            UnsupportedTypeError: the type is known, but dequantising it is not implemented.
            SourceError: the file was closed.
        """
        weight = self.weight(name)
        if any(dim > _MAX_MLX_DIM for dim in weight.shape):
            raise FormatError(
                where=f"{self.path}: tensor {shown(name)}",
                expected=f"dimensions of at most {_MAX_MLX_DIM:,}, the limit of MLX",
                found=f"shape {weight.shape}",
                hint="the file is damaged; download or convert it again",
            )
        import mlx.core as mx  # imported here, so that opening and listing files does not load MLX

        return mx.array(weight.dequantize())

    def _info(self, name: str) -> TensorInfo:
        if name in self.tensors:
            return self.tensors[name]
        close = difflib.get_close_matches(name, self.tensors, n=3) or list(self.tensors)[:3]
        others = f"{len(self.tensors):,} others, such as {', '.join(map(shown, close))}"
        raise FormatError(
            where=str(self.path),
            expected=f"a tensor named {shown(name)}",
            found=others if close else "no tensors at all",
            hint="list them with `inspect`, or choose the file of another model",
        )

    def close(self) -> None:
        """Close the file. Returned weights stay valid: the mapping exists as long as a weight refers to it."""
        with contextlib.suppress(BufferError):
            self._map.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"GGUFFile({str(self.path)!r}, {len(self.tensors)} tensors, {len(self.metadata)} metadata values)"


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Open a GGUF file; given any part of a split file, open all parts as one.

    Raises:
        SourceError: there is no such file, it cannot be opened, or a part of a split file is missing or renamed.
        FormatError: the file is not valid GGUF, or the parts of a split file do not fit together.
    """
    opened = _open_part(Path(path))
    try:
        return _open_split(opened) if COUNT_KEY in opened.metadata else opened
    except BaseException:
        opened.close()
        raise


def _open_part(file: Path) -> GGUFFile:
    try:
        refuse_other_paths(file, "a GGUF file")
        with file.open("rb") as stream:
            if os.fstat(stream.fileno()).st_size == 0:
                where, hint = f"{file}: magic at byte 0", "download or convert it again"
                raise FormatError(where=where, expected="'GGUF'", found="an empty file", hint=hint)
            mapped = MappedFile(stream.fileno(), 0, access=mmap.ACCESS_READ)
            mapped.path, mapped.stat = file, os.fstat(stream.fileno())
    except (SourceError, FormatError):
        raise
    except OSError as error:
        raise SourceError(f"{file}: cannot be opened ({error.strerror}); check the permissions of the file") from error
    except ValueError as error:
        raise SourceError(f"{shown(str(file))}: not a valid path ({error}); check the path") from error
    try:
        return GGUFFile(file, mapped)
    except BaseException:
        mapped.close()
        raise


def _read_version(cursor: Cursor) -> int:
    cursor.need(len(MAGIC), "magic")
    magic = cursor.buffer[: len(MAGIC)]
    if magic != MAGIC:
        path, head = Path(cursor.path), cursor.buffer[:POINTER_BYTES]
        refuse_pointer(path, head, "a GGUF file")
        unknown = repr(magic), "this is not a GGUF file; convert the model to GGUF, or check what was downloaded"
        found, hint = other_kind(path, head) or unknown
        raise cursor.error("magic", expected=repr(MAGIC), found=found, hint=hint)
    cursor.at = len(MAGIC)
    version = cursor.u32("version")
    if version in VERSIONS:
        return version
    if version & 0xFFFF == 0 and version:
        found, hint = f"{version:#010x}, a big-endian version number", "get the little-endian file of this model"
    elif version < min(VERSIONS):
        found, hint = str(version), "convert the model again; no current program writes this version"
    else:
        found, hint = str(version), "the file is damaged, or its version is newer than this reader supports"
    raise cursor.error("version", at=len(MAGIC), expected="2 or 3", found=found, hint=hint)


def _alignment(cursor: Cursor, metadata: dict[str, object], kinds: dict[str, ValueType]) -> int:
    value = metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
    kind = kinds.get(ALIGNMENT_KEY, ValueType.UINT32)
    if kind == ValueType.UINT32 and isinstance(value, int) and value.bit_count() == 1:
        return value
    raise cursor.error(
        f"metadata {ALIGNMENT_KEY!r}, before the tensor records",
        expected="a UINT32 that is a power of two",
        found=f"{kind.name} {value}" if isinstance(value, int | float) else kind.name,
        hint=FAULTY,
    )


COUNT_KEY, NUMBER_KEY, TENSORS_KEY = "split.count", "split.no", "split.tensors.count"
_SPLIT_KEYS = (NUMBER_KEY, COUNT_KEY, TENSORS_KEY)
_PART_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_DAMAGED_PARTS = "the parts are of different models or damaged; download all of them again"


def part_names(name: str) -> list[str]:
    """Return the names of all parts of a split file from the name of any part. For other names, return [name]."""
    match = _PART_NAME.fullmatch(name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return [name]
    return [f"{match['stem']}-{i:05}-of-{match['count']}.gguf" for i in range(1, int(match["count"]) + 1)]


def part_files(path: Path) -> list[Path]:
    """Return all parts of a split file, given any part. If a part is missing or `path` is no part, return [path]."""
    files = [path.with_name(name) for name in part_names(path.name)]
    return files if all(file.is_file() for file in files) else [path]


class SplitGGUFFile(GGUFFile):
    """All parts of a split GGUF file as one file: the metadata of the first part, and the tensors of all parts.

    The parts are named NAME-00001-of-00005.gguf and so on. The metadata of a part has the index of the part (from 0)
    and the number of parts; the metadata of the first part has the number of tensors in all parts. `data_offset` is the
    sum of the parts' data offsets. `TensorInfo.offset` counts from the start of the part that has the tensor.

    Source: llama.cpp, tools/gguf-split, and `llama_split_path` in src/llama.cpp.
    """

    def __init__(self, parts: Sequence[GGUFFile]) -> None:
        head = parts[0]
        self.path, self.version, self.alignment = head.path, head.version, head.alignment
        self.metadata = {key: value for key, value in head.metadata.items() if key not in _SPLIT_KEYS}
        self.kinds = {key: kind for key, kind in head.kinds.items() if key not in _SPLIT_KEYS}
        self.data_offset = sum(part.data_offset for part in parts)
        self.tensors = {name: info for part in parts for name, info in part.tensors.items()}
        self._parts = parts
        self._part_of = {name: part for part in parts for name in part.tensors}

    @property
    def files(self) -> list[Path]:
        """The files of all parts."""
        return [part.path for part in self._parts]

    def weight(self, name: str) -> Weight:
        """Return a tensor, as a view of the mapped part that has it."""
        return self._part_of[self._info(name).name].weight(name)

    def close(self) -> None:
        """Close all parts."""
        for part in self._parts:
            part.close()


def _open_split(named: GGUFFile) -> GGUFFile:
    """Open all parts of a split file as one file. `named` is any part; return it if it is the only part."""
    count = _whole_number(named, COUNT_KEY)
    if count == 1:
        return named
    names = part_names(named.path.name)
    if len(names) != count:
        raise SourceError(
            f"{named.path}: this is one of {count:,} parts, but its name does not end in -00001-of-{count:05}.gguf; "
            "give all parts the names that they were published with"
        )
    paths = [named.path.with_name(name) for name in names]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise SourceError(
            f"{named.path}: of the {count:,} parts of this split file, {first(missing, 5)} are missing; "
            "download them to the same folder"
        )
    parts: list[GGUFFile] = []
    try:
        for path in paths:
            parts.append(named if path == named.path else _open_part(path))
        _check_parts(parts, count)
    except BaseException:
        for part in parts:
            part.close()
        raise
    return SplitGGUFFile(parts)


def _check_parts(parts: Sequence[GGUFFile], count: int) -> None:
    """Check that the parts are in order, that no tensor is in two parts, and that no tensor is missing."""
    names = set[str]()
    for number, part in enumerate(parts):
        for key, expected in ((COUNT_KEY, count), (NUMBER_KEY, number)):
            found = _whole_number(part, key)
            if found != expected:
                raise _part_error(part, f"{key} to be {expected:,}", f"{found:,}")
        twice = sorted(names & set(part.tensors))
        if twice:
            raise _part_error(part, "each tensor in one part only", f"{twice[0]!r} in two")
        names |= set(part.tensors)
    total = _whole_number(parts[0], TENSORS_KEY)
    if len(names) != total:
        raise _part_error(
            parts[0], f"{total:,} tensors in all parts together, as {TENSORS_KEY} says", f"{len(names):,}"
        )


def _whole_number(part: GGUFFile, key: str) -> int:
    value = part.metadata.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < (key == COUNT_KEY):
        raise _part_error(part, f"a whole number as {key}", repr(value)[:80])
    return value


def _part_error(part: GGUFFile, expected: str, found: str) -> FormatError:
    return FormatError(where=str(part.path), expected=expected, found=found, hint=_DAMAGED_PARTS)
