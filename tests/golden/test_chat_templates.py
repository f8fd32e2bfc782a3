"""Chat templates against the texts that transformers renders: see `make_chat_goldens.py`."""

import json
from pathlib import Path

import pytest

from mlx_engine.tokenizer import sandbox
from mlx_engine.tokenizer.chat_prompt import ChatPrompt
from tests.golden.compare_chat_templates import given

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "chat-templates.json").read_text(encoding="utf-8"))
CASES = [(name, title) for name, texts in GOLDEN["texts"].items() for title in texts]


@pytest.mark.parametrize(("name", "title"), CASES, ids=[f"{name}: {title}" for name, title in CASES])
def test_a_conversation_is_rendered_as_transformers_does(name, title):
    template = GOLDEN["templates"][name]
    prepared = ChatPrompt(**given(template, GOLDEN["conversations"][title])).for_template(template, "golden")
    (text,) = sandbox.render(template, [prepared.names()], GOLDEN["names"], 1 << 16)
    assert text == GOLDEN["texts"][name][title]


def test_every_template_has_at_least_five_conversations():
    assert {name: len(texts) >= 5 for name, texts in GOLDEN["texts"].items()} == dict.fromkeys(
        GOLDEN["templates"], True
    )
