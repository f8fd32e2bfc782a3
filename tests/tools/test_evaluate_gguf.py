"""The evaluation asks about what the training text never had as a subject, and counts whole words."""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch", reason="the training extra is not installed")
pytest.importorskip("gguf", reason="the gguf package is not installed")

from tools.corpus import subjects  # noqa: E402
from tools.evaluate_gguf import CONVERSATIONS, Case, cases  # noqa: E402


def test_all_requests_are_about_held_out_subjects() -> None:
    made = list(cases(100))
    assert made == list(cases(100))
    assert len({case.request for case in made}) == 100
    assert {case.noun for case in made} == set(subjects.HELD_OUT)
    for case in made:
        assert re.fullmatch(r"Tell me a story about an? .+\.", case.request)
        assert case.named_in(case.request)
        assert not case.name or subjects.is_held_out(case.name.lower())
    assert 20 < sum(bool(case.name) for case in made) < 30


def test_the_subject_counts_only_as_a_word_and_with_its_name() -> None:
    assert Case("", "cat", "").named_in("There was a cat.")
    assert not Case("", "cat", "").named_in("A cattle and a concat.")
    assert not Case("", "cat", "Momo").named_in("There was a cat.")


def test_there_are_twenty_conversations_of_three_turns() -> None:
    lines = CONVERSATIONS.strip("\n").splitlines()
    assert len(lines) == 20
    assert {line.count("|") for line in lines} == {3}
