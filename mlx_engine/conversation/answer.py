"""Read the text of an answer as events: reasoning, text, tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlx_engine.conversation.events import Event, ReasoningDelta, TextDelta
from mlx_engine.conversation.thinking import Piece, Reasoning

if TYPE_CHECKING:
    from mlx_engine.tokenizer.tokenizer import Tokenizer


class AnswerReader:
    """Turns the pieces of an answer's text into events. The events do not depend on how the text is cut."""

    def __init__(self, reasoning: Reasoning) -> None:
        self._reasoning = reasoning

    @classmethod
    def after(
        cls, tokenizer: Tokenizer, prompt_ids: Sequence[int], tools: Sequence[Mapping[str, Any]] = ()
    ) -> AnswerReader:
        """Return the reader of the answer to a prompt.

        Args:
            tokenizer: the model's tokenizer.
            prompt_ids: the prompt, at whose end the template may have opened the reasoning.
            tools: the tools that the answer may call, in the form of OpenAI's API; their schemas have the types of the
                arguments.
        """
        return cls(Reasoning.after(tokenizer, prompt_ids))

    def add(self, text: str) -> list[Event]:
        """Return the events that are certain after more text."""
        return _events(self._reasoning.add(text))

    def finish(self) -> list[Event]:
        """Return the events of the text that was held back."""
        return _events(self._reasoning.finish())


def _events(pieces: Iterable[Piece]) -> list[Event]:
    return [ReasoningDelta(text) if is_reasoning else TextDelta(text) for text, is_reasoning in pieces]
