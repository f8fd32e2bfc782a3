"""Malicious files: each raises one FormatError, and none allocates memory for sizes that it only claims.

The cases are those of llama.cpp's test, with the same results, plus nested arrays and files that exhaust memory.
Source: https://github.com/ggml-org/llama.cpp/blob/03f94f19a2c4c9d039fa1a84838fe3e2110cc28d/tests/test-gguf.cpp
"""

import struct
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest

from mlx_engine.checkpoint import open_gguf
from mlx_engine.errors import FormatError
from tests import gguf_bytes as g
from tests.gguf_bytes import File, array, pair, record, scalar, string, u32, u64

MAX = 2**64 - 1
GOOD_PAIR = pair("k", g.U8, b"\x01")
ALIGN_1 = pair("general.alignment", g.U32, u32(1))
TWO = [record("a", [3], g.GGML_F32, 0), record("b", [5], g.GGML_F32, 32)]
DATA = g.pad(bytes(range(12))) + g.pad(bytes(range(20)))
LONG = b"\0" * 64  # so that the error is about the field, not about the end of the file


def one_tensor(*args, data=bytes(64), **kwargs):
    return File([], [record(*args, **kwargs)], data).build()


REFUSED = {
    "bad magic": (File(magic=b"FUGG"), "magic"),
    "version 0": (File(version=0), "version"),
    "version 1": (File(version=1), "version"),
    "version of the future": (File(version=4), "version"),
    "big-endian version": (File(version=3 << 24), "big-endian"),
    "number of tensors": (File(n_tensors=MAX), "number of tensors"),
    "number of tensors beyond the file": (File(n_tensors=1000), "number of tensors"),
    "number of values": (File(n_pairs=MAX), "number of metadata"),
    "number of values beyond the file": (File([GOOD_PAIR], n_pairs=1000), "number of metadata"),
    "key size": (File([u64(MAX) + b"k" + u32(0) + LONG]), "key 0"),
    "key size beyond the format": (File([string("k" * 65_536) + u32(0) + b"\0"]), "key 0"),
    "empty key": (File([pair("", g.U8, b"\x01") + LONG]), "empty key"),
    "value type": (File([pair("k", 13, LONG)]), "'k', type"),
    "value type of an array": (File([pair("k", g.ARRAY, u32(13) + u64(1) + LONG)]), "element type"),
    "value size": (File([pair("k", g.STRING, u64(MAX) + LONG)]), "'k'"),
    "string of 1 TB": (File([pair("k", g.STRING, u64(2**40) + LONG)]), "'k'"),
    "array length": (File([pair("k", g.ARRAY, u32(g.F64) + u64(MAX) + LONG)]), "'k', length"),
    "array length that overflows": (File([pair("k", g.ARRAY, u32(g.F64) + u64(2**61) + LONG)]), "'k', length"),
    "array of bools beyond the file": (File([pair("k", g.ARRAY, u32(g.BOOL) + u64(100) + LONG)]), "'k', length"),
    "array of strings beyond the file": (File([pair("k", g.ARRAY, u32(g.STRING) + u64(2**40) + LONG)]), "'k', length"),
    "array of arrays beyond the file": (File([pair("k", g.ARRAY, u32(g.ARRAY) + u64(2**40) + LONG)]), "'k', length"),
    "string in an array": (
        File([pair("k", g.ARRAY, u32(g.STRING) + u64(2) + string("a") + u64(MAX) + LONG)]), r"'k'\[1\]",
    ),
    "arrays nested without end": (File([pair("k", g.ARRAY, (u32(g.ARRAY) + u64(1)) * 5_000)]), "nested arrays"),
    "long text that is not UTF-8": (File([pair("k", g.STRING, string(b"\xff" * 40_000))]), "UTF-8"),
    "duplicate key": (File([GOOD_PAIR, GOOD_PAIR]), "second value"),
    "alignment": (File([pair("general.alignment", g.U32, u32(13))]), "power of two"),
    "alignment of 0": (File([pair("general.alignment", g.U32, u32(0))]), "power of two"),
    "alignment of the wrong type": (File([pair("general.alignment", g.I32, u32(32))]), "UINT32"),
    "alignment that is text": (File([pair("general.alignment", g.STRING, string("32"))]), "UINT32"),
    "alignment with tensors": (File([pair("general.alignment", g.U32, u32(13))], TWO, DATA), "power of two"),
    "alignment beyond the file": (File([pair("general.alignment", g.U32, u32(2**31))], TWO[:1], DATA), "data of 1"),
    "tensor name size": (File([], [record("t" * 64, [1], 0, 0)], LONG), "name of tensor 0"),
    "number of dimensions": (File([], [record("t", [1] * 5, 0, 0)], LONG), "dimensions"),
    "many dimensions": (File([], [record("t", [1], 0, 0, n_dims=MAX)], LONG), "dimensions"),
    "negative shape": (File([], [record("t", [-1], 0, 0)], LONG), "dimensions"),
    "negative shape twice": (File([], [record("t", [-1, -1], 0, 0)], LONG), "dimensions"),
    "too many elements": (File([], [record("t", [4 * (2**31 - 1)] * 2, 0, 0)], LONG), "dimensions"),
    "too many bytes": (File([], [record("t", [1_533_910_000] * 2, g.GGML_I64, 0)], LONG), "dimensions|data of"),
    "empty shape that overflows": (File([], [record("t", [2**62, 2**62, 0], 0, 0)], LONG), "dimensions"),
    "tensor type": (File([], [record("t", [1], 42, 0)], LONG), "'t', type"),
    "tensor type that was removed": (File([], [record("t", [32], 4, 0)], LONG), "'t', type"),
    "negative tensor type": (File([], [record("t", [1], -1, 0)], LONG), "'t', type"),
    "rows that do not fill blocks": (File([], [record("t", [31, 32], g.GGML_Q8_0, 0)], LONG), "whole Q8_0 blocks"),
    "offset": (File([], [record("t", [1], 0, MAX)], LONG), "'t', offset"),
    "offset into the tensor before": (File([], [TWO[0], record("b", [5], 0, 0)], DATA), "'b', offset"),
    "offset that leaves a gap": (File([], [TWO[0], record("b", [5], 0, 64)], DATA + DATA), "'b', offset"),
    "duplicate tensor": (File([], [TWO[0], record("a", [5], 0, 32)], DATA), "unique name"),
    "offsets of another alignment": (File([], [TWO[0], record("b", [5], 0, 12)], DATA), "'b', offset"),
    "data of another alignment": (File([ALIGN_1], TWO, DATA, alignment=1), "'b', offset"),
    "data short by one byte": (File([], TWO, DATA[:-1]), "data of 2 tensors"),
    "no data": (File([], TWO, b""), "data of 2 tensors"),
    "sizes whose sum overflows": (
        File([], [record("a", [2**63 - 64], 24, 0), record("b", [2**63 - 64], 24, 2**63 - 64)], bytes(32)),
        "dimensions",
    ),
    "sizes beyond the file": (
        File([], [record("a", [2**59], 24, 0), record("b", [2**59], 24, 2**59)], bytes(32)), "data of 2 tensors",
    ),
}  # fmt: skip

ACCEPTED = {
    "nothing but a header": File(),
    "version 2": File(version=2),
    "values of every type": File(g.every_kind_of_pair()),
    "random bytes as values": File(
        [
            pair("text", g.STRING, string(bytes(range(128, 192)))),
            pair("texts", g.ARRAY, array(g.STRING, [b"\xff\xfe", b"\x80", b""])),
            pair("flags", g.ARRAY, array(g.BOOL, [0, 1, 77, 255])),
            pair("nan", g.F32, u32(0x7FA00001)),
        ]
    ),
    "tensors": File([], TWO, DATA),
    "tensors aligned to 1": File([ALIGN_1], [TWO[0], record("b", [5], 0, 12)], bytes(32), alignment=1),
    "an empty tensor": File([], [record("z", [32, 0], g.GGML_Q8_0, 0), record("a", [1], 0, 0)], bytes(32)),
    "bytes after the end": File([], TWO, DATA + b"more"),
    "a type that cannot be read": File([], [record("x", [32], 39, 0)], g.pad(bytes(17))),
}


def parametrize(cases):
    return pytest.mark.parametrize("case", cases.values(), ids=list(cases))


@pytest.fixture
def file_of(tmp_path):
    def write(data):
        path = tmp_path / "model.gguf"
        # A new file: to overwrite one takes some file systems milliseconds.
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        return path

    return write


@parametrize(REFUSED)
def test_a_hostile_file_is_refused_with_one_error_that_says_where(file_of, case):
    file, words = case
    path = file_of(file.build())
    with pytest.raises(FormatError, match=words) as caught:
        open_gguf(path)
    error = caught.value
    assert type(error) is FormatError
    assert error.where.startswith(str(path)) and " at byte " in error.where  # noqa: PT018
    assert error.expected and error.found and error.hint  # noqa: PT018
    assert len(str(error)) < 500 + len(str(path))


@parametrize(ACCEPTED)
def test_an_unusual_file_is_accepted(file_of, case):
    file = open_gguf(file_of(case.build()))
    assert (len(file.metadata), len(file.tensors)) == (len(case.pairs), len(case.records))


@pytest.mark.slow
def test_a_good_file_is_refused_when_cut_at_any_byte(file_of):
    good = g.small_file()
    open_gguf(file_of(good))
    for length in range(len(good)):
        path = file_of(good[:length])
        with pytest.raises(FormatError, match=" at byte "):
            open_gguf(path)


@pytest.mark.parametrize("alignment", [1, 64])
def test_a_file_is_refused_when_cut_at_any_byte_of_its_data(file_of, alignment):
    pairs = [pair("general.alignment", g.U32, u32(alignment))]
    good = File(pairs, [record("a", [3], 0, 0)], g.pad(struct.pack("<3f", 1, 2, 3), alignment), alignment=alignment)
    data = good.build()
    for cut in range(1, 13):
        with pytest.raises(FormatError):
            open_gguf(file_of(data[:-cut]))


def test_an_empty_tensor_too_wide_for_mlx_is_refused_when_it_is_loaded(file_of):
    file = open_gguf(file_of(File([], [record("z", [2**40, 0], 0, 0)], b"").build() + bytes(32)))
    with pytest.raises(FormatError, match="MLX"):
        file.load_tensor("z")


# ---- memory ----


def peak_of_opening(path):
    tracemalloc.start()
    try:
        with suppress(FormatError):
            open_gguf(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def arrays_of(inner, n):
    return File([pair("k", g.ARRAY, u32(g.ARRAY) + u64(n) + inner * n)])


def strings(n, texts):
    """Return an array of n strings, the same ones again and again."""
    once = b"".join(map(string, texts))
    assert n % len(texts) == 0
    return u32(g.STRING) + u64(n) + once * (n // len(texts))


def strings_of(n, texts):
    return File([pair("k", g.ARRAY, strings(n, texts))])


# Made when a test needs them: they are large.
GREEDY = {
    "a million bools": lambda: File([pair("k", g.ARRAY, u32(g.BOOL) + u64(1_000_000) + b"\1" * 1_000_000)]),
    "a million bytes": lambda: File([pair("k", g.ARRAY, u32(g.U8) + u64(1_000_000) + bytes(1_000_000))]),
    "halves of words": lambda: File([pair("k", g.ARRAY, array(g.U16, range(60_000)))]),
    "empty arrays": lambda: arrays_of(u32(g.U8) + u64(0), 60_000),
    "arrays of one byte": lambda: arrays_of(u32(g.U8) + u64(1) + b"\1", 60_000),
    "arrays of no strings": lambda: arrays_of(u32(g.STRING) + u64(0), 30_000),
    "arrays of no arrays": lambda: arrays_of(u32(g.ARRAY) + u64(0), 30_000),
    "arrays of an empty string": lambda: arrays_of(array(g.STRING, [""]), 20_000),
    "empty strings": lambda: strings_of(100_000, [""]),
    "strings of one byte": lambda: strings_of(100_000, ["a", "b"]),
    "strings of one bad byte": lambda: strings_of(100_000, [b"\xff"]),
    "strings of two bad bytes": lambda: strings_of(100_000, [b"\xff\xfe"]),
    "strings of one wide character": lambda: strings_of(100_000, ["Ā", "中"]),
    "strings of one emoji": lambda: strings_of(100_000, ["\U0001f600"]),
    "strings of bytes and emoji": lambda: strings_of(100_000, ["\U0001f600".encode() + b"abc\xff"]),
    "strings of zeros": lambda: strings_of(100_000, ["\0", "\0\0"]),
    "a long text": lambda: File([pair("k", g.STRING, string("a" * 2_000_000))]),
    "a long text with one emoji": lambda: File([pair("k", g.STRING, string("a" * 2_000_000 + "\U0001f600"))]),
    "a long text, wider and wider": lambda: File(
        [pair("k", g.STRING, string("a" * 1_000_000 + "é" + "a" * 1_000_000 + "中\U0001f600"))]
    ),
    "a long text that ends badly": lambda: File([pair("k", g.STRING, string(b"a" * 2_000_000 + b"\xff"))]),
    "many middling bad texts": lambda: strings_of(300, [b"\xff" * 30_000]),
    "tiny keys": lambda: File([pair(i.to_bytes(3, "big"), g.BOOL, b"\1") for i in range(30_000)]),
    "bad keys with numbers": lambda: File(
        [pair(b"\xff" + i.to_bytes(3, "big"), g.U16, b"\xff\xff") for i in range(30_000)]
    ),
    "empty tensors": lambda: File([], [record(f"{i:x}", [0], 0, 0) for i in range(15_000)], b""),
    "tensors without dimensions": lambda: File(
        [ALIGN_1], [record(f"{i:x}", [], 24, i) for i in range(15_000)], bytes(15_000), alignment=1,
    ),
    "an alignment of many strings": lambda: File(
        [pair("general.alignment", g.ARRAY, strings(100_000, [b"\xff\xff\xff"]))]
    ),
    "claims of memory": lambda: File([pair("k", g.ARRAY, u32(g.F64) + u64(2**27) + LONG)]),
}  # fmt: skip


# Whose memory takes seconds to measure.
TAKES_SECONDS = ("arrays of an empty string", "arrays of one byte", "empty arrays")


@pytest.mark.some(3)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=[pytest.mark.slow] * (name in TAKES_SECONDS)) for name, case in GREEDY.items()],
)
def test_no_file_takes_more_than_eight_times_its_size_and_a_megabyte(file_of, case):
    data = case().build()
    path = file_of(data)
    assert peak_of_opening(path) <= 8 * len(data) + (1 << 20)


@parametrize(REFUSED)
def test_a_refused_file_takes_little_memory(file_of, case):
    data = case[0].build()
    assert peak_of_opening(file_of(data)) <= 8 * len(data) + (1 << 20)


@pytest.mark.parametrize("case", ["a million bools", "halves of words", "strings of one byte", "a long text"])
def test_large_values_that_are_sound_are_read(file_of, case):
    (value,) = open_gguf(file_of(GREEDY[case]().build())).metadata.values()
    assert len(value) > 50_000


@pytest.mark.slow
def test_a_vocabulary_alone_stays_within_the_memory_it_may_take(file_of):
    rng = np.random.default_rng(0)
    tokens = ["Ġ" + "".join(map(chr, rng.integers(97, 123, n))) for n in rng.integers(1, 9, 20_000)]
    merges = [f"{token[:2]} {token[2:]}" for token in tokens]
    types = np.ones(len(tokens), np.int32)
    pairs = [pair(f"k{i}", g.ARRAY, array(g.STRING, texts)) for i, texts in enumerate((tokens, merges))]
    pairs += [
        pair("types", g.ARRAY, u32(g.I32) + u64(len(types)) + types.tobytes()),
        pair("n", g.F32, scalar(g.F32, 1.0)),
    ]
    path = file_of(File(pairs).build())
    assert open_gguf(path).metadata["k1"] == merges
    assert peak_of_opening(path) <= 8 * path.stat().st_size + (1 << 20)
