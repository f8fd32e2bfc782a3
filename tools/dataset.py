"""Pack the documents of the training text into rows of token ids of one length, for `tools/train.py`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tools.corpus import END_OF_TEXT, SHORT_SHARE, documents

POOL = 256


def encoded(tokenizer: Tokenizer, seed: int, count: int, short_share: float) -> Iterator[list[int]]:
    """Yield each document's token ids, including its end token."""
    stream = documents(seed, count, short_share)
    while batch := list(islice(stream, 1000)):
        yield from (encoding.ids for encoding in tokenizer.encode_batch(batch, add_special_tokens=False))


def pack(stream: Iterator[list[int]], length: int, filler: int) -> Iterator[list[int]]:
    """Yield rows of `length` ids, filled with whole documents and then with `filler`.

    A row begins with the next document. Then the longest document that fits is added, from the next POOL documents,
    until none fits. A document is cut only if it is longer than a row.
    """
    pool = list(islice(stream, POOL))
    while pool:
        row = pool.pop(0)[:length]
        while fitting := [i for i, document in enumerate(pool) if len(document) <= length - len(row)]:
            row += pool.pop(max(fitting, key=lambda i: len(pool[i])))
        pool.extend(islice(stream, POOL - len(pool)))
        yield row + [filler] * (length - len(row))


def rows(
    tokenizer: Tokenizer, seed: int, count: int, length: int, short_share: float = SHORT_SHARE
) -> NDArray[np.uint16]:
    """Return `count` documents as rows (N, length + 1); the additional token is the target of the last position."""
    filler = tokenizer.get_vocab()[END_OF_TEXT]
    packed = pack(encoded(tokenizer, seed, count, short_share), length + 1, filler)
    return np.array(list(packed), dtype=np.uint16)
