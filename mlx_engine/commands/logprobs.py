"""Log-probabilities of generated tokens as JSON and as a table, with the text of each token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_engine.loop.logprobs import TokenLogprobs
    from mlx_engine.tokenizer import Tokenizer


def logprob_row(token: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, object]:
    """Return a token as a JSON object: id, text, logprob, and the same of the most likely tokens under "top"."""
    return _entry(token.token_id, token.logprob, tokenizer) | {"top": [_entry(i, p, tokenizer) for i, p in token.top]}


def _entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, object]:
    return {"id": token_id, "text": _text(token_id, tokenizer), "logprob": logprob}


def table(tokens: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> str:
    """Return a table with a line per token: id, logprob, text, and the most likely tokens at its place."""
    lines = [f"{'id':>7}  {'logprob':>9}  token"]
    for token in tokens:
        shown = (f"{_quoted(i, tokenizer)} {p:.4f}" for i, p in token.top)
        alternatives = f"  ({', '.join(shown)})" if token.top else ""
        lines.append(f"{token.token_id:>7}  {token.logprob:>9.4f}  {_quoted(token.token_id, tokenizer)}{alternatives}")
    return "\n".join(lines)


def _text(token_id: int, tokenizer: Tokenizer) -> str:
    return tokenizer.decode([token_id], at_start=False)


def _quoted(token_id: int, tokenizer: Tokenizer) -> str:
    return json.dumps(_text(token_id, tokenizer), ensure_ascii=False)
