"""Scores that say the same as a list of merges, where there are such: a BPE as SPM, proved token by token.

BPE merges the neighbours that come first in its list. SPM has no list: any two neighbours that make a token may merge,
the token with the highest score first. Both are the same if BPE makes every token's text into that one token. For
then, while a text is merged, two neighbours that make a token T are always the same two, those of the last step in
which BPE makes T alone: no merge has crossed the ends of the two, so what happened between them is what happens in T
alone. SPM thus has no other pair to choose than BPE, and scores by the place of that step give the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from mlx_engine.errors import TokenizerError


def scores(where: str, tokens: Sequence[str], normal: Iterable[int], merges: Sequence[tuple[str, str]]) -> list[float]:
    """A score for each token; `normal` are the ids that merging may make.

    Raises:
        TokenizerError: there is a token that SPM would make and these merges do not.
    """
    ids = {tokens[i]: i for i in normal}
    # What has another type is found before anything is merged, or is not to come out of plain text at all.
    ranks = {pair: rank for rank, pair in enumerate(merges) if all(text in ids for text in (*pair, "".join(pair)))}
    last = {i: last_step(token, ranks) for token, i in ids.items() if len(token) > 1}
    for i, rank in last.items():
        if rank is None and any(tokens[i][:cut] in ids and tokens[i][cut:] in ids for cut in range(1, len(tokens[i]))):
            raise TokenizerError(
                f"{where}: expected merges that make {tokens[i]!r:.40} (id {i:,}) of its own text, found none; in GGUF "
                "scores decide, by which two tokens would: quantise the folder on load instead, with --quant"
            )
    # A float32 counts to 2^24, which merges may exceed and tokens do not.
    made = sorted((rank, i) for i, rank in last.items() if rank is not None)
    places = {i: place for place, (_, i) in enumerate(made)}
    return [-float(places.get(i, len(made))) for i in range(len(tokens))]


def last_step(text: str, ranks: Mapping[tuple[str, str], int]) -> int | None:
    """The rank of the merge that makes `text` one token; None where merging ends before."""
    parts, rank = list(text), None
    while len(parts) > 1:
        steps = [(ranks[pair], i) for i, pair in enumerate(pairwise(parts)) if pair in ranks]
        if not steps:
            return None
        rank, i = min(steps)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return rank
