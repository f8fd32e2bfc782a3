"""Reasoning in an answer: the text between the think markers of a model, separated from the answer that follows."""

from __future__ import annotations

from typing import NamedTuple

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
