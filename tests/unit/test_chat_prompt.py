"""What a chat prompt has beside its messages: tools, documents and variables, checked, and unable to forge a marker."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_engine.errors import ChatTemplateError, OptionError
from mlx_engine.tokenizer import chat
from mlx_engine.tokenizer.chat import chat_ids
from mlx_engine.tokenizer.chat_prompt import ChatPrompt, reads, thinking
from tests.unit.test_chat import CHATML, here, user  # noqa: F401 - a fixture
from tests.unit.test_messages import FORGED
from tests.unit.test_tokenizer import build, byte_level

READS_ALL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ tools | tojson }}{{ documents | tojson }}{{ mood }}"
    "{% for tool in tools or [] %}{{ tool.name }}{% endfor %}{{ m.content }}<|im_end|>\n{% endfor %}"
)


def model(template=READS_ALL):
    return build(byte_level(chat_template=template))


def test_tools_documents_and_variables_arrive(here):  # noqa: F811
    prompt = ChatPrompt(user("x"), tools=[{"name": "f"}], documents=[{"title": "t"}], variables={"mood": "calm"})
    (text,) = chat.render(model(), [prompt])
    assert text == '<|im_start|>user\n[{"name": "f"}][{"title": "t"}]calmfx<|im_end|>\n'
    (text,) = chat.render(model(), [user("x")])
    assert text == "<|im_start|>user\nnullnullx<|im_end|>\n"


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"name": FORGED}]},
        {"tools": [{FORGED: {"deep": [1, FORGED]}}]},
        {"documents": [{"title": FORGED, "type": FORGED}]},
        {"variables": {"mood": FORGED}},
        {"variables": {"mood": {"role": FORGED}}},
    ],
    ids=str,
)
def test_no_text_beside_the_messages_makes_a_control_token(here, more):  # noqa: F811
    tokenizer = model()
    control = set(tokenizer.special_tokens.values())
    marked = [i for i in chat_ids(tokenizer, ChatPrompt(user("x"), **more)) if i in control]
    assert marked == [i for i in chat_ids(tokenizer, user("x")) if i in control]
    assert len(marked) == 2


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"variables": {"mod": 1}}, "mod"),
        ({"variables": {"content": 1}}, "content"),  # an attribute, and no variable
        ({"variables": {"messages": []}}, "messages"),
        ({"variables": {"bos_token": "x"}}, "bos_token"),
        ({"variables": {"mood": 1j}}, "chat_template_kwargs.mood"),
        ({"variables": {"mood": "\ud800"}}, "UTF-8"),
        ({"variables": [1]}, "chat_template_kwargs"),
        ({"tools": ["f"]}, "tools"),
        ({"documents": {"title": "t"}}, "documents"),
    ],
    ids=str,
)
def test_what_no_template_could_read_is_refused_by_name(more, named):
    with pytest.raises(OptionError, match=named):
        chat_ids(model(), ChatPrompt(user("x"), **more))


@pytest.mark.parametrize("name", ["tools", "documents"])
def test_a_template_that_does_not_read_tools_or_documents_refuses_them(name):
    with pytest.raises(ChatTemplateError, match=f"does not read {name}"):
        chat_ids(model(CHATML), ChatPrompt(user("x"), **{name: [{"name": "f"}]}))


def test_comments_attributes_and_quoted_words_are_no_names():
    assert not any(reads("{# a #}{{ x.a }}{{ 'a' }} a {% set ab = m[\"a\"] %}", name) for name in ("a", "b"))
    assert all(reads("{%- if a -%}{{ f(b) }}", name) for name in ("a", "b", "f"))


@pytest.mark.some(1)
@pytest.mark.parametrize("part", ["{%", "{{", "{#", "{{ a }", "{# }}", "{{ '", "{%{#"])
def test_a_template_is_searched_once_whatever_does_not_end_in_it(part):
    """A search to the end from each beginning would take an hour."""
    assert not reads(part * 250_000, "tools")
    assert reads(part * 250_000 + "#}{{ tools }}", "tools")


@given(st.text("{}%#'. ab", max_size=30))
def test_names_are_those_of_one_regular_expression(template):
    code = re.compile(r"\{#.*?#\}|\{[{%](.*?)[%}]\}", re.DOTALL)
    found = " ; ".join(match[1] or "" for match in code.finditer(template))
    for name in ("a", "b", "ab"):
        assert reads(template, name) == bool(re.search(rf"(?<![.\w'\"]){name}(?![\w'\"])", found))


def test_thinking_is_turned_on_and_off_by_the_name_that_the_template_has():
    assert thinking("{% if enable_thinking %}", False) == {"enable_thinking": False}
    assert thinking("{% if not thinking %}", True) == {"thinking": True}
    assert thinking(None, None) == {}
    for template in (None, CHATML):
        with pytest.raises(OptionError, match="reads enable_thinking or thinking"):
            thinking(template, False)
