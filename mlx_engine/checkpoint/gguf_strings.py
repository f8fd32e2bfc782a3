"""Strings one after the other, as GGUF stores them: a length in 8 bytes, then as many bytes of text."""

from __future__ import annotations

import struct

import numpy as np

_U64 = struct.Struct("<Q")


def short_strings(piece: bytes, n: int) -> tuple[list[str], int] | None:
    """Up to `n` strings from the start of `piece`, and their bytes; None where this quick way does not apply.

    A vocabulary has hundreds of thousands of strings, so no Python may run for each. A length below 256 is
    a byte and seven zeros, which short texts do not contain: wherever 8 bytes make such a number, a string
    should begin. That each then ends where the next begins proves that they do. With the lengths zeroed,
    one `split` makes the strings.
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
    if np.count_nonzero(flat) != n_bytes - 8 * starts.size:  # a zero within a text would be split at
        return None
    return flat.tobytes().decode("utf-8", "surrogateescape").split("\0" * 8)[1:], n_bytes


def any_strings(piece: bytes, n: int) -> tuple[list[str], int]:
    """Up to `n` strings from the start of `piece`, and their bytes; none if the first is not whole."""
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
