"""Decode consecutive GGUF strings: an 8-byte length, then the bytes of the text."""

from __future__ import annotations

import struct

import numpy as np

_U64 = struct.Struct("<Q")


def short_strings(piece: bytes, n: int) -> tuple[list[str], int] | None:
    """Decode up to `n` strings from the start of `piece`; return them and the bytes read, or None if not applicable.

    A vocabulary has hundreds of thousands of strings, so a Python loop over them is too slow. A length below 256
    is stored as one byte and seven zeros, a sequence that short texts do not contain, so every such sequence is
    taken for the start of a string. The guess is verified: each string must end where the next one starts. With
    the length bytes zeroed, one `split` returns all strings.
    """
    if len(piece) < 8:
        return None
    numbers = np.ndarray((len(piece) - 7,), "<u8", piece, strides=(1,))
    starts = np.flatnonzero(numbers < 256)[:n]
    ends = starts + 8 + numbers[starts].astype(np.int64)
    if starts.size == 0 or starts[0] != 0 or np.any(ends[:-1] != starts[1:]):
        return None
    if ends[-1] > len(piece):
        starts, ends = starts[:-1], ends[:-1]
    if starts.size == 0:
        return None
    n_bytes = int(ends[-1])
    flat = np.frombuffer(piece, np.uint8, n_bytes).copy()
    flat[starts] = 0
    if np.count_nonzero(flat) != n_bytes - 8 * starts.size:  # `split` would cut a text at a zero byte of its own
        return None
    return flat.tobytes().decode("utf-8", "surrogateescape").split("\0" * 8)[1:], n_bytes


def any_strings(piece: bytes, n: int) -> tuple[list[str], int]:
    """Decode up to `n` strings one by one; return them and the bytes read, no strings if the first is incomplete."""
    out: list[str] = []
    at, last = 0, len(piece) - 8
    for _ in range(n):
        if at > last:
            break
        end = at + 8 + _U64.unpack_from(piece, at)[0]
        if end > len(piece):
            break
        out.append(piece[at + 8 : end].decode("utf-8", "surrogateescape"))
        at = end
    return out, at
