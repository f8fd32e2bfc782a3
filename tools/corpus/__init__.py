"""Generate the training text of the built-in model: stories, facts, conversations, and exercises in copying words."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tools.corpus import chat, facts, stories

END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, "<|im_start|>", "<|im_end|>")

# The kinds of documents, and the fraction of documents of each kind. In a "lesson", all answers only copy words from
# the question.
KINDS = ("story", "facts", "chat", "lesson")
WEIGHTS = (0.06, 0.10, 0.69, 0.15)


SHORT_SHARE = 0.8


def document(rng: random.Random, short_share: float = SHORT_SHARE) -> tuple[str, str]:
    """Generate one document; return its kind and text. `short_share`: the fraction of short stories in chats."""
    kind = rng.choices(KINDS, WEIGHTS)[0]
    if kind == "story":
        return kind, stories.tell(rng).text
    if kind == "chat":
        return kind, chat.document(rng, short_share)
    return kind, facts.document(rng) if kind == "facts" else chat.lesson(rng)


def documents(seed: int, count: int, short_share: float = SHORT_SHARE) -> Iterator[str]:
    """Yield documents, each with its end token; the same seed gives the same documents."""
    rng = random.Random(seed)
    for _ in range(count):
        yield document(rng, short_share)[1] + END_OF_TEXT
