"""Generate the training text of the built-in model: stories, facts and conversations."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tools.corpus import chat, facts, stories

END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, "<|im_start|>", "<|im_end|>")

# Shares of documents; a story is about six times as long as a list of facts, so that by tokens
# some 70 % are stories, 10 % facts and 20 % conversations.
KINDS = ("story", "facts", "chat")
WEIGHTS = (0.10, 0.20, 0.70)


def document(rng: random.Random) -> tuple[str, str]:
    """Generate one document; return its kind and text."""
    kind = rng.choices(KINDS, WEIGHTS)[0]
    if kind == "story":
        return kind, stories.tell(rng).text
    return kind, facts.document(rng) if kind == "facts" else chat.document(rng)


def documents(seed: int, count: int) -> Iterator[str]:
    """Yield documents, each with its end token; the same seed gives the same documents."""
    rng = random.Random(seed)
    for _ in range(count):
        yield document(rng)[1] + END_OF_TEXT
