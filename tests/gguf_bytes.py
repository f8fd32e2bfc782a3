"""GGUF files put together by hand, byte by byte, so that every field can be wrong. Knows nothing of the package."""

import struct
from dataclasses import dataclass, field

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
LAYOUT = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}

GGML_F32, GGML_Q8_0, GGML_I8, GGML_I64 = 0, 8, 24, 27


def u32(n):
    return struct.pack("<I", n & 0xFFFFFFFF)


def u64(n):
    return struct.pack("<Q", n & 0xFFFFFFFFFFFFFFFF)


def string(text):
    data = text if isinstance(text, bytes) else text.encode()
    return u64(len(data)) + data


def scalar(kind, value):
    return string(value) if kind == STRING else struct.pack("<" + LAYOUT[kind], value)


def array(kind, values):
    """`values` are numbers or texts; for an array of arrays, already bytes."""
    items = values if kind == ARRAY else [scalar(kind, value) for value in values]
    return u32(kind) + u64(len(values)) + b"".join(items)


def pair(key, kind, payload):
    return string(key) + u32(kind) + payload


def record(name, dims, ggml_type, offset, *, n_dims=None):
    """`dims` in the order of the file, the fastest first."""
    count = len(dims) if n_dims is None else n_dims
    return string(name) + u32(count) + b"".join(map(u64, dims)) + u32(ggml_type) + u64(offset)


def pad(data, alignment=32):
    return data + bytes(-len(data) % alignment)


@dataclass
class File:
    """A file in parts; `build` joins them. Counts are right unless they are given."""

    pairs: list = field(default_factory=list)
    records: list = field(default_factory=list)
    data: bytes = b""
    magic: bytes = b"GGUF"
    version: int = 3
    n_tensors: int | None = None
    n_pairs: int | None = None
    alignment: int = 32

    def build(self):
        n_tensors = len(self.records) if self.n_tensors is None else self.n_tensors
        n_pairs = len(self.pairs) if self.n_pairs is None else self.n_pairs
        header = self.magic + u32(self.version) + u64(n_tensors) + u64(n_pairs)
        header += b"".join(self.pairs) + b"".join(self.records)
        return (pad(header, self.alignment) if self.records else header) + self.data


def every_kind_of_pair():
    """One value of each type, arrays of each, and arrays of arrays."""
    pairs = [pair(f"s.{kind}", kind, scalar(kind, "text" if kind == STRING else 1)) for kind in (*LAYOUT, STRING)]
    pairs += [pair(f"a.{kind}", ARRAY, array(kind, [1, 0, 1])) for kind in LAYOUT]
    pairs += [pair("a.text", ARRAY, array(STRING, ["", "a", "Ġthe", "中文", "x" * 300, "a\0b", "\0", "end"]))]
    nested = [array(U8, [1, 2]), array(STRING, ["p", "q"]), array(ARRAY, [array(F64, [0.5])]), array(ARRAY, [])]
    pairs += [pair("a.nested", ARRAY, array(ARRAY, nested)), pair("a.empty", ARRAY, array(STRING, []))]
    return pairs


def small_file():
    """A good file with metadata of every type and three tensors, two of which end off the alignment."""
    values = struct.pack("<6f", *range(6))
    block = struct.pack("<e32b", 0.5, *range(-16, 16))
    records = [
        record("a", [3, 2], GGML_F32, 0),
        record("b", [32, 2], GGML_Q8_0, 32),
        record("c", [1], GGML_I8, 128),
    ]
    return File(every_kind_of_pair(), records, pad(values) + pad(block * 2) + pad(b"\x05")).build()
