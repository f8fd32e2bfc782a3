"""Find delimiters in a stream of text, and the text at its end that may become a delimiter when more text follows.

A delimiter is a literal or a regular expression. Python's `re` has no partial matching. So `partial_of` makes a
partial expression, which matches the end of a text if this end can be completed to a match of the delimiter. For the
delimiter `</think>`, the partial expression matches the end of "so far </th".
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from mlx_engine.kernels.cached import cached_property

# How many of a prompt's last tokens are decoded to find out whether the prompt ends with an opening marker.
TAIL = 16


class ThinkMarkers(NamedTuple):
    """The texts before and after an answer's reasoning. A chat template that contains `sign` uses these markers."""

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
    """Return the markers of a chat template; None if it contains no known markers."""
    return next((markers for markers in MARKERS if markers.sign in (template or "")), None)


MARK = "\udc00"
"""Marked text has MARK before each control token that the model generated, because ordinary text may have the same
spelling. MARK is a lone surrogate, so it is never part of valid text."""

# Matches a symbol of a regular expression: a character or class, the beginning or end of a group, "|", or a quantifier.
PART = re.compile(
    r"(?P<atom>\\(?:u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)|\[\^?\]?(?:\\.|[^\]\\])*\])"
    r"|(?P<open>\((?:\?P<\w+>|\?:|(?!\?)))|(?P<close>\))|(?P<bar>\|)"
    r"|(?P<quantifier>(?:[*+?]|\{\d+(?:,\d*)?\})\??)|(?P<character>.)",
    re.DOTALL,
)
ANCHORS = ("\\A", "\\Z", "\\b", "\\B", "^", "$")


class UnsupportedPatternError(ValueError):
    """A regular expression has a construct that `partial_of` does not support, such as a look-around."""


class _Item(NamedTuple):
    """A character, class or group: its source, partial expression (None unless it is a group), and quantifier."""

    source: str
    partial: str | None
    quantifier: str


def partial_of(pattern: str) -> str:
    """Return the partial expression of `pattern`.

    It matches the end of a text if more text could complete this end to a match of `pattern`. Raise
    UnsupportedPatternError if the pattern has a look-around, a back-reference or an anchor.
    """
    parts, at = [], 0
    while at < len(pattern):
        match = PART.match(pattern, at)
        if match is None or (pattern.startswith("(?", at) and match.lastgroup != "open"):
            raise UnsupportedPatternError(f"{pattern!r} has {pattern[at : at + 4]!r}")
        if match[0] in ANCHORS or re.fullmatch(r"\\[1-9]", match[0]):
            raise UnsupportedPatternError(f"{pattern!r} has {match[0]!r}")
        parts.append((str(match.lastgroup), match[0]))
        at = match.end()
    partial, n = _branches(parts, 0)
    if n < len(parts):
        raise UnsupportedPatternError(f"{pattern!r} closes a group that it does not open")
    return partial


def _branches(parts: list[tuple[str, str]], at: int) -> tuple[str, int]:
    """Return the partial expression of the alternatives from parts[at] on, and the index in `parts` after them."""
    sequences: list[list[_Item]] = [[]]
    while at < len(parts) and parts[at][0] != "close":
        kind, source = parts[at]
        at += 1
        if kind == "bar":
            sequences.append([])
        elif kind == "quantifier":
            last = sequences[-1].pop()
            sequences[-1].append(last._replace(quantifier=source))
        elif kind == "open":
            begin = at
            inner, at = _branches(parts, at)
            whole = "(?:" + "".join("(?:" if k == "open" else s for k, s in parts[begin:at]) + ")"
            at += 1
            sequences[-1].append(_Item(whole, inner, ""))
        else:
            sequences[-1].append(_Item(source, None, ""))
    return "|".join(_sequence(items) for items in sequences if items) or "(?!)", at


def _sequence(items: Iterable[_Item]) -> str:
    """Return the partial expression of a sequence of elements."""
    rest: str | None = None
    for source, partial, quantifier in reversed(list(items)):
        most = quantifier.rstrip("?}").split(",")[-1].lstrip("{")  # the maximum: "2" of {2}, "" of {2,}, "5" of {2,5}
        again = source + ("{0," + most + "}" if "{" in quantifier else "*")
        if quantifier in ("", "?", "??"):
            ways = [partial or r"\Z"]
        else:
            ways = [f"{again}(?:{partial})" if partial else rf"{again}\Z"]
        if rest is not None:
            ways.append(f"{source}{quantifier}(?:{rest})")
        rest = "|".join(ways)
    return f"(?:{rest})"


class _More:
    """The type of MORE, which `Delimiter.match` returns if later text decides whether there is a match."""


MORE = _More()


@dataclass(frozen=True)
class Delimiter:
    """An expression that opens or closes a part of an answer."""

    pattern: str

    @cached_property
    def full(self) -> re.Pattern[str]:
        """The compiled expression."""
        return re.compile(self.pattern, re.DOTALL)

    @cached_property
    def _partial(self) -> re.Pattern[str]:
        return re.compile(rf"(?!\Z)(?:{partial_of(self.pattern)})", re.DOTALL)

    def find(self, text: str, at: int, *, is_end: bool) -> tuple[re.Match[str] | None, int]:
        """Return the first match at or after an index, and an index before which no match can begin.

        Unless `is_end`, more text may follow, so None is returned in place of a match that more text could change.
        """
        found = self.full.search(text, at)
        maybe = None if is_end else self._partial.search(text, at)
        if maybe is not None and (found is None or maybe.start() <= found.start()):
            return None, maybe.start()
        return found, len(text) if found is None else found.start()

    def match(self, text: str, at: int, *, is_end: bool) -> re.Match[str] | _More | None:
        """Return the match that begins at an index; None if no match begins there; MORE if later text decides this."""
        if not is_end and (at == len(text) or self._partial.match(text, at)):
            return MORE
        return self.full.match(text, at)


def literal(*texts: str) -> str:
    """Return the expression that matches one of several texts."""
    return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))


def marked(pattern: str, special: Collection[str]) -> str:
    """Return the expression for marked text: a control token in `special` matches only after MARK."""
    written = [text for text in special if text and re.escape(text) in pattern]
    if not written:
        return pattern
    longest_first = sorted(map(re.escape, written), key=len, reverse=True)
    return re.sub("|".join(map(re.escape, longest_first)), lambda match: f"(?:{MARK}{match[0]})", pattern)
