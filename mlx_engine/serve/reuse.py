"""The explanation of a request's cached tokens: how many there are, and why there are not more."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_engine.cache.prefix import SHOWN
from mlx_engine.loop.request import Request
from mlx_engine.tokenizer import Tokenizer


def explained(request: Request, tokenizer: Tokenizer) -> dict[str, object]:
    """Return what the prefix cache had of a prompt. It tells about the prompts of others.

    Keys:
        cached_tokens: tokens of the prompt that were not computed again.
        agreeing_tokens: tokens that the prompt has in common with an earlier prompt and answer.
        cause: why not more of them are cached; null if the cache had no more to give.
            "disabled": the server has no prefix cache.
            "first_use": no earlier request began with the same token.
            "differs": the cache continues with another token: the history was edited, or the template differs.
            "retokenized": the cache continues with the same text in other tokens.
            "evicted": the next token was cached, and had to leave.
            "window": the keys and values that sliding-window layers need were evicted.
            "state": the model has a state, which is held at the end of a shorter prefix alone.
            "memory": no page was free for the last cached tokens.
        position: where the tokens differ, if they do.
        found, expected: there, the prompt's and the cache's token id, and the text of at most 8 tokens.

    Args:
        request: a request that has been admitted.
        tokenizer: the tokenizer of its ids.
    """
    match = request.match
    known: dict[str, object] = {"cached_tokens": request.n_cached, "agreeing_tokens": match.agreeing if match else 0}
    nothing: dict[str, object] = {"position": None, "found": None, "expected": None}
    if match is None:
        return {**known, "cause": "disabled", **nothing}
    if match.agreeing == 0 and match.end in ("new", "differs"):
        return {**known, "cause": "first_use", **nothing}
    if match.end != "differs":
        return {**known, "cause": None if match.end in ("whole", "new") else match.end, **nothing}
    found = request.prompt_ids[match.agreeing : match.agreeing + SHOWN]
    is_same = _is_same_text(_bytes(tokenizer, found), _bytes(tokenizer, match.expected))
    return {
        **known,
        "cause": "retokenized" if is_same else "differs",
        "position": match.agreeing,
        "found": _shown(tokenizer, found),
        "expected": _shown(tokenizer, match.expected),
    }


def _is_same_text(a: bytes, b: bytes) -> bool:
    """Return whether one text begins with the other: both are cut off somewhere."""
    return a.startswith(b) or b.startswith(a)


def _shown(tokenizer: Tokenizer, ids: Sequence[int]) -> dict[str, object]:
    return {"token_id": ids[0], "text": _bytes(tokenizer, ids).decode("utf-8", "replace")}


def _bytes(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    return b"".join(map(tokenizer.token_bytes, ids))
