"""Read GGUF files. A file is memory-mapped: opening it parses the header and reads no tensor data.

Layout: magic, version, counts; the metadata as typed key-value pairs; one record per tensor (name,
dimensions, type, offset); padding to `general.alignment`; the tensors, each padded likewise. Versions 2 and
3, little-endian.

Where the specification is ambiguous, this reader follows llama.cpp, because most GGUF files are written for it:
the alignment is a uint32 and a power of two (default 32); tensors are stored without gaps, in the order of their
records, and the padding after the last tensor is part of the file; tensor names are shorter than 64 bytes; a
dimension may be 0. Unlike llama.cpp, this reader accepts arrays of arrays, which the specification allows.

If another process truncates a mapped file, access to the lost part ends this process (SIGBUS; see mapping.py).

Source: `gguf_init_from_reader`,
https://github.com/ggml-org/llama.cpp/blob/067d44f6c48459f7a82dbafc6fbd0bae97755a4e/ggml/src/gguf.cpp
"""

from __future__ import annotations

import contextlib
import difflib
import mmap
import os
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from mlx_engine.checkpoint.gguf_tensors import TensorInfo, read_tensor_infos
from mlx_engine.checkpoint.gguf_types import Value, ValueType
from mlx_engine.checkpoint.gguf_values import MAX_KEY_BYTES, Cursor, read_value, read_value_type, shown
from mlx_engine.checkpoint.lfs import POINTER_BYTES, refuse_pointer
from mlx_engine.checkpoint.mapping import view
from mlx_engine.checkpoint.paths import other_kind, refuse_other_paths
from mlx_engine.errors import FormatError, SourceError
from mlx_engine.quant.weight import Weight

if TYPE_CHECKING:
    import mlx.core as mx

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"
# The number of parts of a split file, see gguf_split.py.
COUNT_KEY = "split.count"

# Smallest key-value pair: key length (8), one byte of key, value type (4), one byte of value. Smallest tensor
# record: name length (8), no name, number of dimensions (4), no dimensions, type (4), offset (8).
_MIN_PAIR_BYTES, _MIN_RECORD_BYTES = 14, 24
_MAX_MLX_DIM = (1 << 31) - 1


class GGUFFile:
    """An open GGUF file: metadata, and name, shape and type of every tensor. Create it with `open_gguf`.

    `kinds` maps each metadata key to its stored type, so that `write_gguf` can write the value back unchanged.
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
                hint="the file is damaged, or made by a faulty converter; download or convert it again",
            )
        cursor.spend(512, field)  # each of two dicts gets a new entry
        self.kinds[key] = kind = read_value_type(cursor, f"{field}, type,")
        self.metadata[key] = read_value(cursor, kind, field)

    @property
    def files(self) -> list[Path]:
        """The files that the tensors are read from: one, or all parts of a split file."""
        return [self.path]

    def typed_metadata(self) -> dict[str, Value]:
        """Return the metadata with its stored types; `write_gguf` writes it back byte for byte."""
        return {key: Value(self.kinds[key], value) for key, value in self.metadata.items()}

    def weight(self, name: str) -> Weight:
        """Return a tensor in its stored type, as a view of the mapped file. The type need not be readable.

        Raises:
            FormatError: the file has no tensor of this name.
            SourceError: the file was closed.
        """
        info = self._info(name)
        if self._map.closed:
            raise SourceError(f"{self.path}: the file was closed; open it again with open_gguf")
        data = view(self.path, self._map, np.uint8, info.nbytes, info.offset)
        return Weight(info.name, info.shape, info.type, data)

    def load_tensor(self, name: str) -> mx.array:
        """Return a tensor dequantised to float32.

        Raises:
            FormatError: the file has no tensor of this name, or a dimension is too large for MLX.
            UnsupportedTypeError: the tensor's type is known but cannot be read.
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
        raise FormatError(
            where=str(self.path),
            expected=f"a tensor named {shown(name)}",
            found=f"{len(self.tensors):,} others, such as {', '.join(map(shown, close))}"
            if close
            else "no tensors at all",
            hint="list them with `inspect`, or choose the file of another model",
        )

    def close(self) -> None:
        """Close the file. Weights already returned stay valid: the mapping lives as long as a view of it."""
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
    """Map a GGUF file and parse its header; no tensor data is read. Of a split file, all parts are opened as one.

    Raises:
        SourceError: there is no such file, it cannot be opened, or a part of a split file is missing.
        FormatError: the file is not valid GGUF; the message says where, what was expected and what was found.
    """
    opened = _open_part(Path(path))
    if COUNT_KEY not in opened.metadata:
        return opened
    from mlx_engine.checkpoint.gguf_split import open_split

    try:
        return open_split(opened, _open_part)
    except BaseException:
        opened.close()
        raise


def _open_part(file: Path) -> GGUFFile:
    try:
        refuse_other_paths(file, "a GGUF file")
        with file.open("rb") as stream:
            if os.fstat(stream.fileno()).st_size == 0:
                raise FormatError(
                    where=f"{file}: magic at byte 0",
                    expected="'GGUF'",
                    found="an empty file",
                    hint="download or convert it again",
                )
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except SourceError:
        raise
    except OSError as error:
        raise SourceError(f"{file}: cannot be opened ({error.strerror}); check the permissions of the file") from error
    except ValueError as error:
        if isinstance(error, FormatError):
            raise
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
        f"metadata {ALIGNMENT_KEY!r}, before the tensors",
        expected="a UINT32 that is a power of two",
        found=f"{kind.name} {value}" if isinstance(value, int | float) else kind.name,
        hint="the file is damaged, or made by a faulty converter; download or convert it again",
    )
