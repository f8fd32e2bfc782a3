"""Reasoning in an answer: the text between the think markers of a model, separated from the answer that follows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mlx_engine.tokenizer.tokenizer import Tokenizer

# How many tokens at the end of a prompt are searched for an opening marker, which may be followed by white space.
TAIL = 16


class ThinkMarkers(NamedTuple):
    """The texts before and after the reasoning of an answer, and a text in the chat template that shows their use."""

    opening: str
    closing: str
    sign: str


MARKERS = (
    ThinkMarkers("<seed:think>", "</seed:think>", "<seed:think>"),
    ThinkMarkers("[THINK]", "[/THINK]", "[/THINK]"),
    ThinkMarkers("<|START_THINKING|>", "<|END_THINKING|>", "<|END_THINKING|>"),
    ThinkMarkers("<|channel>thought\n", "<channel|>", "<|channel>thought"),
    ThinkMarkers(
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        "<|channel|>analysis<|message|>",
    ),
    ThinkMarkers("<think>", "</think>", "</think>"),
)
"""The markers of known models: Seed-OSS, Magistral and Ministral, Command, Gemma 4, gpt-oss, and most others."""


def think_markers(template: str | None) -> ThinkMarkers | None:
    """Return the markers of a chat template; None if it has none that are known."""
    return next((markers for markers in MARKERS if markers.sign in (template or "")), None)


class Piece(NamedTuple):
    """A piece of an answer."""

    text: str
    is_reasoning: bool


class Reasoning:
    """Tells the reasoning in a stream of text from the answer, without the markers and the white space around them.

    The reasoning begins with the opening marker at the start of the text, or the prompt has the marker at its end. The
    pieces do not depend on how the text is cut: a text that may become a marker is held back.
    """

    def __init__(self, markers: ThinkMarkers | None, *, is_open: bool = False) -> None:
        self._markers, self._held = markers, ""
        # States follow each other: before the opening marker, in the reasoning, before the answer, in the answer.
        self._state = "answer" if markers is None else "thinking" if is_open else "start"
        self._is_at_start = True  # of the reasoning or the answer: white space is dropped

    @classmethod
    def after(cls, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> Reasoning:
        """Return the reader of the answer to a prompt, whose template may have opened the reasoning."""
        markers = think_markers(tokenizer.chat_template)
        if markers is None:
            return cls(None)
        tail = tokenizer.decode(prompt_ids[-TAIL:]).rstrip()
        return cls(markers, is_open=tail.endswith(markers.opening.rstrip()))

    def add(self, text: str) -> list[Piece]:
        """Return the pieces that are certain now."""
        if self._markers is None:
            return [Piece(text, False)] if text else []
        self._held += text
        if self._state == "start":
            self._begin(is_end=False)
        found = []
        if self._state == "thinking":
            found += self._think(is_end=False)
        if self._state == "answer":
            found += self._answer()
        return found

    def finish(self) -> list[Piece]:
        """Return the text that was held back."""
        if self._state == "start":
            self._begin(is_end=True)
        return self._think(is_end=True) if self._state == "thinking" else self._answer()

    def _begin(self, *, is_end: bool) -> None:
        assert self._markers is not None  # noqa: S101 - for mypy
        text, opening = self._held.lstrip(), self._markers.opening
        if text.startswith(opening):
            self._state, self._held = "thinking", text[len(opening) :]
        elif is_end or not opening.startswith(text):
            self._state, self._is_at_start = "answer", False  # an answer without reasoning keeps its white space

    def _think(self, *, is_end: bool) -> list[Piece]:
        assert self._markers is not None  # noqa: S101 - for mypy
        closing = self._markers.closing
        text = self._held.lstrip() if self._is_at_start else self._held
        before, marker, rest = text.partition(closing)
        if marker:
            self._state, self._held = "answer", rest
            found = _pieces(before.rstrip(), is_reasoning=True)
            self._is_at_start = True
            return found
        n = len(text) if is_end else len(text) - _overlap(text, closing)
        said = text[:n].rstrip()  # white space before a closing marker is dropped
        self._held = "" if is_end else text[len(said) :]
        self._is_at_start = self._is_at_start and not said
        return _pieces(said, is_reasoning=True)

    def _answer(self) -> list[Piece]:
        text = self._held.lstrip() if self._is_at_start else self._held
        self._held, self._is_at_start = "", self._is_at_start and not text
        return _pieces(text, is_reasoning=False)


def split(pieces: Iterable[str], reasoning: Reasoning) -> tuple[str, str]:
    """Return the reasoning and the answer of a whole text."""
    found = [piece for text in pieces for piece in reasoning.add(text)] + reasoning.finish()
    thought, said = ("".join(text for text, is_reasoning in found if is_reasoning is kind) for kind in (True, False))
    return thought, said


def _pieces(text: str, *, is_reasoning: bool) -> list[Piece]:
    return [Piece(text, is_reasoning)] if text else []


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest proper prefix of `marker` that ends `text`."""
    return next(n for n in range(min(len(text), len(marker) - 1), -1, -1) if text.endswith(marker[:n]))
