"""Texts in which it is known who wrote a control token: the chat template, or a message.

In a *marked text* MARK stands before every control token (marker) that the template wrote. The same characters without
MARK came from a message, and are encoded as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from mlx_engine.tokenizer.messages import ROLES
from mlx_engine.tokenizer.tokenizer import Tokenizer

# A low surrogate: no text that UTF-8 can encode has one.
MARK = "\udc00"

# Called before each encoding with its text; it may raise, which ends the work.
Check: TypeAlias = Callable[[str], None]


def unchecked(text: str) -> None:
    """Let every text be encoded."""


@dataclass(frozen=True)
class Markers:
    """The markers of a tokenizer's chat template.

    Attributes:
        tokenizer: the tokenizer.
        ids: the id of each marker, by its text.
        always: the texts of user-defined tokens among them, which `encode` finds in any text.
    """

    tokenizer: Tokenizer
    ids: Mapping[str, int]
    always: tuple[str, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, roles: Iterable[str] = ()) -> Markers:
        """Return the control tokens, and the user-defined tokens that the template writes.

        A template may compose a token, as in `'<|' + role + '|>'`; `roles` are roles other than OpenAI's.
        """
        template, known = tokenizer.chat_template or "", {*ROLES, *roles}

        def is_written(text: str) -> bool:
            parts = (text.split(role) for role in known if role in text)
            return text in template or any(all(part in template for part in around) for around in parts)

        found = tokenizer.user_defined_tokens.items()
        always = {text: i for text, i in found if len(text.strip()) > 2 and is_written(text)}
        ids = {text: i for text, i in (tokenizer.special_tokens | always).items() if text}
        return cls(tokenizer, ids, tuple(always))

    @cached_property
    def values(self) -> frozenset[int]:
        """The ids of all markers."""
        return frozenset(self.ids.values())

    @cached_property
    def _spelled(self) -> re.Pattern[str]:
        longest_first = sorted(self.ids, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @cached_property
    def _written(self) -> re.Pattern[str]:
        return re.compile(f"{MARK}({self._spelled.pattern})")

    @cached_property
    def _cuts(self) -> re.Pattern[str]:
        """The places inside user-defined markers: text that is cut there holds none of them."""
        around = (f"(?<={re.escape(text[0])})(?={re.escape(text[1:])})" for text in self.always)
        return re.compile("|".join(around) or "(?!)")

    def mark(self, text: str) -> str:
        """Return the text with every marker that it spells marked."""
        return self._spelled.sub(lambda match: MARK + match[0], text)

    def written(self, marked: str) -> list[int]:
        """Return the ids of the markers in a marked text."""
        return [self.ids[match[1]] for match in self._written.finditer(marked)]

    def among(self, ids: Iterable[int]) -> list[int]:
        """Return the ids that are markers."""
        return [i for i in ids if i in self.values]

    def encode(self, marked: str, check: Check = unchecked) -> list[int]:
        """Return the ids of a marked text.

        If no message spells a marker, the whole text is encoded at once: the same ids as transformers gives. If one
        does, the parts between the template's own markers are encoded as plain text.

        Raises:
            TokenizerError: the vocabulary cannot encode the text.
            Exception: what `check` raises.
        """
        text = marked.replace(MARK, "")
        check(text)
        ids = self.tokenizer.encode(text, special=True)
        if self.among(ids) == self.written(marked):
            return ids
        ids, at = [], 0
        for match in self._written.finditer(marked):
            ids += [*self._plain(marked[at : match.start()], check), self.ids[match[1]]]
            at = match.end()
        return ids + self._plain(marked[at:], check)

    def _plain(self, text: str, check: Check) -> list[int]:
        check(text)
        forbidden = {self.ids[marker] for marker in self.always}
        return [i for piece in self._cuts.split(text) for i in _without(self.tokenizer, piece, forbidden)]


def _without(tokenizer: Tokenizer, text: str, forbidden: Collection[int]) -> list[int]:
    """Encode plain text without these ids. A normaliser may produce one; splitting the text there prevents it."""
    ids = tokenizer.encode(text)
    if len(text) < 2 or not any(i in forbidden for i in ids):
        return ids
    half = len(text) // 2
    return [*_without(tokenizer, text[:half], forbidden), *_without(tokenizer, text[half:], forbidden)]
