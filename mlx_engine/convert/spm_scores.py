"""Convert a BPE merge list to SPM scores, if equivalent scores exist. The equivalence is checked for every token.

BPE merges the adjacent pair of lowest rank. SPM has no merge list: any adjacent pair that forms a token may merge, the
highest score first. Both are equivalent if BPE merges the text of every token into that one token. In that case, two
adjacent tokens that form a token T are always the pair of the last merge when BPE encodes T alone: no merge has crossed
the ends of the pair, so the merges inside are those of T alone. SPM therefore chooses among the same pairs as BPE, and
scores by the rank of that last merge give the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from mlx_engine.errors import TokenizerError


def scores(where: str, tokens: Sequence[str], normal: Iterable[int], merges: Sequence[tuple[str, str]]) -> list[float]:
    """Return a score for each token; `normal` are the ids that merges may produce.

    Raises:
        TokenizerError: SPM would produce a token that these merges do not.
    """
    ids = {tokens[i]: i for i in normal}
    # Tokens of other types are matched before merging, or never produced from plain text.
    ranks = {pair: rank for rank, pair in enumerate(merges) if all(text in ids for text in (*pair, "".join(pair)))}
    last = {i: last_step(token, ranks) for token, i in ids.items() if len(token) > 1}
    for i, rank in last.items():
        if rank is None and any(tokens[i][:cut] in ids and tokens[i][cut:] in ids for cut in range(1, len(tokens[i]))):
            raise TokenizerError(
                f"{where}: expected merges that make {tokens[i]!r:.40} (id {i:,}) of its own text, found none; in GGUF "
                "scores decide, by which two tokens would: quantise the folder on load instead, with --quant"
            )
    # float32 is exact up to 2^24: ranks of merges may exceed that, numbers of tokens do not.
    made = sorted((rank, i) for i, rank in last.items() if rank is not None)
    places = {i: place for place, (_, i) in enumerate(made)}
    return [-float(places.get(i, len(made))) for i in range(len(tokens))]


def last_step(text: str, ranks: Mapping[tuple[str, str], int]) -> int | None:
    """Return the rank of the merge that makes `text` one token; None if merging ends with several tokens."""
    parts, rank = list(text), None
    while len(parts) > 1:
        steps = [(ranks[pair], i) for i, pair in enumerate(pairwise(parts)) if pair in ranks]
        if not steps:
            return None
        rank, i = min(steps)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return rank
