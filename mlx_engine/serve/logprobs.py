"""Log-probabilities in the two shapes of OpenAI's API. JSON numbers have the exact float32 values."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_engine.loop.logprobs import TokenLogprobs
from mlx_engine.tokenizer import Tokenizer


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs]) -> dict[str, object]:
    """Return the value of `logprobs` of a choice of /v1/chat/completions."""
    content = [
        {
            **_described(tokenizer, token.token_id, token.logprob),
            "top_logprobs": [_described(tokenizer, token_id, logprob) for token_id, logprob in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs], offset: int) -> dict[str, object]:
    """Return the value of `logprobs` of a choice of /v1/completions.

    Args:
        tokenizer: the tokenizer of the ids.
        tokens: the tokens.
        offset: characters of the text before the first token.
    """
    texts, offsets = [_text(tokenizer, token.token_id) for token in tokens], []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [token.logprob for token in tokens],
        # Of tokens with the same text, which are parts of characters, the most likely is listed.
        "top_logprobs": [{_text(tokenizer, i): value for i, value in reversed(token.top)} for token in tokens],
        "text_offset": offsets,
    }


def _described(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, object]:
    data = tokenizer.token_bytes(token_id)
    return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")
