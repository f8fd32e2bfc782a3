"""The choice of a format by a chat template, the grammar of calls, and Python functions as tools."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from mlx_engine.constraint import Constraint
from mlx_engine.conversation.answer import AnswerReader
from mlx_engine.conversation.formats import TABLE, Format, answer_format, format_of, required_format
from mlx_engine.conversation.functions import call_function, function_tool, tools_of
from mlx_engine.conversation.tools import ToolChoice, grammar, with_choice
from mlx_engine.errors import OptionError
from mlx_engine.loop.constraint import Grammars
from mlx_engine.tokenizer.sandbox_process import SandboxProcess
from mlx_engine.tokenizer.vocabulary import TokenType
from tests.golden.test_chat_templates import GOLDEN
from tests.unit.test_tokenizer import MERGES, build, byte_level
from tests.unit.test_tool_calls import ID, call, calls_in, form_of, joined

# Chat templates, in our own words. CALL is the loop over the calls of a message.
TURNS = """
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}{{ '<|turn|>' + m.role + '\n' + (m.content or '') }}
{%- if m.tool_calls %}CALLS{% endif %}{{ '<|end_of|>\n' }}
{%- endfor %}{{ '<|turn|>assistant\n' }}"""
EACH = "{% for c in m.tool_calls %}{% set f = c.function %}CALL{% endfor %}"
ARGUMENTS = "{{ f.arguments | tojson }}"
VALUES = "{% for k, v in f.arguments.items() %}VALUE{% endfor %}"
OF_VALUE = "{{ v if v is string else v | tojson }}"
GEMMA = (
    '{% for k, v in f.arguments.items() %}{{ k }}:{% if v is string %}<|"|>{{ v }}<|"|>{% else %}{{ v | tojson }}'
    "{% endif %}{{ ',' if not loop.last }}{% endfor %}"
)
LIST = '{{ ", " if not loop.first }}{"name": {{ f.name | tojson }}, "arguments": ' + ARGUMENTS + "IDS}"


def listed(opening, closing="", ids=""):
    return f"{opening}[" + EACH.replace("CALL", LIST.replace("IDS", ids)) + f"]{closing}"


def tagged(call, value):
    return EACH.replace("CALL", call.replace("VALUES", VALUES.replace("VALUE", value.replace("V", OF_VALUE))))


ONE = "{% if m.tool_calls | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}"
NINE = "{% if c.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
TEMPLATES = {
    "hermes-json": EACH.replace(
        "CALL", '<tool_call>\n{"name": "{{ f.name }}", "arguments": ' + ARGUMENTS + "}\n</tool_call>"
    ),
    "qwen-xml": tagged(
        "<tool_call>\n<function={{ f.name }}>\nVALUES</function>\n</tool_call>\n",
        "<parameter={{ k }}>\nV\n</parameter>\n",
    ),
    "glm": tagged("<tool_call>{{ f.name }}VALUES</tool_call>", "<arg_key>{{ k }}</arg_key><arg_value>V</arg_value>"),
    "mistral-args": EACH.replace("CALL", NINE + "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]" + ARGUMENTS),
    "mistral-list": listed("[TOOL_CALLS]", ids=', "id": "{{ c.id }}"'),
    "gemma4": EACH.replace("CALL", "<|tool_call>call:{{ f.name }}{{ '{' }}" + GEMMA + "}<tool_call|>"),
    "harmony": ONE
    + EACH.replace("CALL", " to=functions.{{ f.name }}<|channel|>commentary json<|message|>" + ARGUMENTS + "<|call|>"),
    "llama-json": ONE + EACH.replace("CALL", '{"name": "{{ f.name }}", "parameters": ' + ARGUMENTS + "}"),
    "minimax": "<minimax:tool_call>\n"
    + tagged('<invoke name="{{ f.name }}">\nVALUES</invoke>\n', '<parameter name="{{ k }}">V</parameter>\n')
    + "</minimax:tool_call>",
    "seed-xml": tagged(
        "<seed:tool_call>\n<function={{ f.name }}>\nVALUES</function>\n</seed:tool_call>",
        "<parameter={{ k }}>V</parameter>\n",
    ),
    "granite-list": listed("<|tool_call|>"),
    "apriel-list": listed("<tool_calls>", "</tool_calls>"),
    "nemotron-list": listed("<TOOLCALL>", "</TOOLCALL>"),
    "command-list": "<|START_ACTION|>["
    + EACH.replace(
        "CALL", '{{ ", " if not loop.first }}{"tool_name": {{ f.name | tojson }}, "parameters": ' + ARGUMENTS + "}"
    )
    + "]<|END_ACTION|>",
    "kimi": "<|tool_calls_section_begin|>"
    + EACH.replace(
        "CALL",
        "<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
        + ARGUMENTS
        + "<|tool_call_end|>",
    )
    + "<|tool_calls_section_end|>",
}
SANDBOX = SandboxProcess()


class Reader(SimpleNamespace):
    """What the choice of a format reads of a tokenizer."""

    __hash__ = object.__hash__


def reader(template, *special, response_template=None):
    return Reader(
        chat_template=template,
        response_template=response_template,
        special_tokens={text: i for i, text in enumerate(special)},
        user_defined_tokens={},
        delimiter_ids=frozenset(range(len(special))),
        eog_ids=frozenset(),
        bos_id=None,
        eos_id=None,
        where="toy",
        sandbox=SANDBOX,
    )


@pytest.mark.some(2)
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_is_the_one_that_reads_what_the_template_writes(name):
    found = format_of(reader(TURNS.replace("CALLS", TEMPLATES[name])))
    assert found.name == name
    assert found.is_parallel == (ONE not in TEMPLATES[name])
    assert found.has_letter_ids == (NINE in TEMPLATES[name])
    assert found.is_rendered


def test_exactly_one_format_reads_each_template(monkeypatch):
    table = dict(TABLE)
    for name in TEMPLATES:
        rest = {other: entry for other, entry in table.items() if other != name}
        monkeypatch.setattr("mlx_engine.conversation.formats.TABLE", rest)
        found = format_of(reader(TURNS.replace("CALLS", TEMPLATES[name])))
        # Of Seed's calls, Qwen's form without the first tag reads the rest: the order of the table decides.
        assert (found and found.name) == ("qwen-xml" if name == "seed-xml" else None)


def test_the_templates_of_the_golden_texts():
    found = {name: format_of(reader(template)) for name, template in GOLDEN["templates"].items()}
    names = {name: form and form.name for name, form in found.items()}
    assert names == dict.fromkeys(names)  # none of them reads tools, or writes calls as a model does
    tools = "{{ tools }}"
    assert format_of(reader(tools + GOLDEN["templates"]["calls in tags"])).name == "hermes-json"
    assert format_of(reader(tools + GOLDEN["templates"]["headers"])).name == "llama-json"


def test_a_template_that_drops_calls_has_the_format_whose_opening_is_a_token():
    template = TURNS.replace("{%- if m.tool_calls %}CALLS{% endif %}", "")
    found = format_of(reader(template, "<|tool_call_start|>"))
    assert (found.name, found.is_rendered) == ("lfm2-python", False)
    assert found.write([call("f", {"s": "a", "n": [1]})]) == "<|tool_call_start|>[f(s='a', n=[1])]<|tool_call_end|>"
    assert format_of(reader(template, "<|tool_call|>")).name == "granite-list"
    assert format_of(reader(template)) is None
    unknown = TURNS.replace("CALLS", EACH.replace("CALL", "CALL {{ f.name }} " + ARGUMENTS))
    assert format_of(reader(unknown, "<|tool_call_start|>")) is None
    for chat_template, why in ((unknown, "writes calls in an unknown format"), ("{{ messages }}", "has no tools")):
        with pytest.raises(OptionError, match=f"tools: this model's chat template {why}; leave the tools out"):
            required_format(reader(chat_template))


OWN = {
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"<call\s+name=(?P<name>\w+)>",
            "close": "</call>",
            "repeats": True,
            "content": "kv-lines",
            "content_args": {"kv_sep": "=", "line_sep": ";"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"content": "text"},
    }
}


def test_the_folder_s_own_template_is_used():
    tokenizer = reader("{{ messages }}{{ tools }}", response_template=OWN)
    assert format_of(tokenizer).name == "response_template"
    form = answer_format(tokenizer, reads_calls=True)
    described = function_tool(typed)
    text = "<think>Hm.</think>Hi.\n<call name=typed>city=a b;days=3</call>"
    for at in range(len(text)):
        reading = AnswerReader(form, [described])
        events = [*reading.add(text[:at]), *reading.add(text[at:]), *reading.finish()]
        assert calls_in(events) == [("typed", {"city": "a b", "days": 3})]
        assert len(joined(events)) == 5
    with pytest.raises(OptionError, match="can be read, but not demanded"):
        with_choice(None, tokenizer, [described], ToolChoice(is_required=True))
    broken = {"fields": {"tool_calls": {**OWN["fields"]["tool_calls"], "open_pattern": "(?=x)"}}}
    assert format_of(reader("{{ messages }}{{ tools }}", response_template=broken)) is None


# The grammar

TOKENS = [
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|tool_call>", "<tool_call|>", '<|"|>', "<|start|>", "<|channel|>",
    "<|message|>", "<|end|>", "<|call|>", "<|constrain|>", "<|tool_call_start|>", "<|tool_call_end|>",
    "<|tool_call|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
]  # fmt: skip
TAGS = ["<tool_call>", "</tool_call>", "<arg_value>", "</arg_value>"]
SCHEMA = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "n": {"type": "integer"},
        "o": {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}},
        "e": {"enum": ["x", "y"]},
        "x": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["s", "n"],
}
F = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
G = {"type": "function", "function": {"name": "g_2", "parameters": {"type": "object", "properties": {}}}}
SHORT, LONG = {"s": "Ulm", "n": 3}, {"s": 'a "b" \\ \n<b>é', "n": -1, "o": {"a": [1, 2]}, "e": "x", "x": "nn"}
AUTO, ANY, ONE_F = ToolChoice(is_parallel=False), ToolChoice(is_required=True), ToolChoice(True, "f")


@cache
def vocabulary(*tags):
    special = {**dict.fromkeys(TOKENS, TokenType.CONTROL), **dict.fromkeys(tags, TokenType.USER_DEFINED)}
    special["<|im_end|>"] = TokenType.CONTROL
    end = len(byte_level(special=special)["tokenizer.ggml.tokens"]) - 1
    return build(byte_level(special=special, eos_token_id=end, chat_template=" ".join(tags)))


@cache
def compiler(*tags):
    return Grammars(vocabulary(*tags), vocabulary(*tags).vocab_size)


def accepts(tags, lark, text):
    """Return whether a grammar has a text, to its end."""
    tokenizer, matcher = vocabulary(*tags), compiler(*tags).matcher(Constraint.grammar(lark))
    for token in tokenizer.encode(text, special=True):
        if token in tokenizer.eog_ids:
            return bool(matcher.mask()[token])
        if matcher.is_complete or not matcher.mask()[token]:
            return False
        matcher.advance(token)
    return matcher.is_complete or bool(matcher.mask()[max(tokenizer.eog_ids)])


@pytest.mark.some(3)
@pytest.mark.parametrize("tags", [(), tuple(TAGS)], ids=["", "tags are tokens"])
@pytest.mark.parametrize("name", [name for name in TABLE if name not in ("apriel-list", "granite-list", "kimi")])
def test_the_grammar_has_the_calls_of_the_format_and_no_others(name, tags):
    if tags and "<tool_call>" not in TABLE[name]["written"][0].call:
        pytest.skip("the format has none of these tags")
    form = Format(name, TABLE[name], TABLE[name]["written"][0], is_parallel=name != "harmony")
    short, long, g, unknown, lacks, wrong = (
        form.write([call(*each)])
        for each in (("f", SHORT), ("f", LONG), ("g_2", {}), ("h", {}), ("f", {"s": "a"}), ("f", {"s": "a", "n": "x"}))
    )
    both, no_call = form.write([call("f", SHORT), call("g_2", {})]), "Hello, {world}"
    larks = [grammar(vocabulary(*tags), form, [F, G], choice) for choice in (ANY, ONE_F, AUTO)]
    if name == "harmony":
        no_call = f"<|channel|>final<|message|>{no_call}"
    wanted = {short: "yyy", long: "yyy", g: "yny", unknown: "nn", lacks: "nn", wrong: "nn", no_call: "nny"}
    wanted |= {both: "ynn"} if form.is_parallel else {}
    for text, answers in wanted.items():
        for lark, answer in zip(larks, answers, strict=False):
            assert accepts(tags, lark, text) == (answer == "y"), (text, lark)
    if name == "harmony":
        short = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" + short
        assert accepts(tags, larks[0], short)
    elif name != "llama-json":
        assert accepts(tags, larks[2], f"Let me see.\n{short}")
        assert not accepts(tags, larks[0], f"Let me see.\n{short}")


def test_an_answer_is_free_unless_a_call_is_demanded():
    tokenizer = reader(TURNS.replace("CALLS", TEMPLATES["hermes-json"]))
    assert with_choice(None, tokenizer, [F], ToolChoice()) is None
    assert with_choice(None, tokenizer, [], ToolChoice()) is None
    content = Constraint.json_object()
    assert with_choice(content, tokenizer, [], ToolChoice()) is content
    made = with_choice(content, tokenizer, [F], ToolChoice())
    assert made.follows_reasoning
    assert accepts((), made.text, '{"a": 1}')
    assert accepts((), made.text, form_of("hermes-json").write([call("f", SHORT)]))
    assert not accepts((), made.text, "text")
    strict = {"type": "function", "function": {**F["function"], "strict": True}}
    assert with_choice(None, tokenizer, [strict], ToolChoice()) is not None
    with pytest.raises(OptionError, match="must be a JSON Schema, not a regex"):
        with_choice(Constraint.regex("a"), tokenizer, [F], ToolChoice())
    with pytest.raises(OptionError, match="must name one of the tools, not 'h'"):
        with_choice(None, tokenizer, [F], ToolChoice(True, "h"))
    unsupported = {**SCHEMA, "uniqueItems": True}
    loose = {"type": "function", "function": {"name": "f", "parameters": unsupported}}
    assert '"type": "object"' in with_choice(None, tokenizer, [loose], ANY).text
    loose["function"]["strict"] = True
    with pytest.raises(OptionError, match=r"the schema of f, which is strict: .*uniqueItems"):
        with_choice(None, tokenizer, [loose], ANY)


# Python functions


@dataclass
class Point:
    x: int
    y: float = 0.0


def typed(city: str, days: int = 3, unit: Literal["C", "F"] = "C", points: list[Point] | None = None, *, more=None):
    """Return the weather.

    It is a long story.

    Args:
        city: The name of the city,
            on two lines.
        days: How many days.

    Returns:
        A text.
    """
    return {"city": city, "points": points, "more": more}


def test_a_function_is_described_by_its_signature_and_docstring():
    about = function_tool(typed)["function"]
    assert (about["name"], about["description"]) == ("typed", "Return the weather.\n\nIt is a long story.")
    schema = about["parameters"]
    assert schema["required"] == ["city"]
    assert schema["properties"]["city"] == {"type": "string", "description": "The name of the city, on two lines."}
    assert schema["properties"]["days"] == {"type": "integer", "description": "How many days."}
    assert schema["properties"]["unit"] == {"enum": ["C", "F"], "type": "string"}
    assert schema["properties"]["points"]["anyOf"][0]["items"] == {"$ref": "#/$defs/Point"}
    assert schema["$defs"]["Point"]["required"] == ["x"]


def test_a_function_is_called_with_checked_arguments():
    assert json.loads(call_function(typed, {"city": "Ulm", "points": [{"x": 1, "y": 2.5}]})) == {
        "city": "Ulm", "points": [{"x": 1, "y": 2.5}], "more": None,
    }  # fmt: skip
    assert call_function(typed, {"city": 3}).startswith("Error: ValidationError: Expected `str`, got `int`")
    assert "unknown field `town`" in call_function(typed, {"city": "a", "town": 1})
    assert "missing required field `city`" in call_function(typed, {})

    def fails(n: int) -> str:
        return "ä" if n else str(1 // n)

    assert call_function(fails, {"n": 1}) == "ä"
    assert call_function(fails, {"n": 0}) == "Error: ZeroDivisionError: integer division or modulo by zero"


def test_what_cannot_be_described_is_refused():
    def several(*names: str) -> None: ...

    def odd(what: type) -> None: ...

    for function, why in (
        (several, "cannot be given by name"),
        (odd, "of a type that JSON does not have"),
        (lambda: 1, "has no name"),
    ):
        with pytest.raises(OptionError, match=why):
            function_tool(function)
    bare: Mapping[str, Any] = {"name": "f"}
    empty = {"type": "object", "properties": {}}
    assert tools_of([bare]) == [{"type": "function", "function": {"name": "f", "description": "", "parameters": empty}}]
    with pytest.raises(OptionError, match=r"tools\[0\].function.parameters must be a JSON Schema"):
        tools_of([{"name": "f", "parameters": 3}])


def test_ids_are_unique():
    found = {answer_format(reader(None), reads_calls=False).new_id() for _ in range(1000)}
    assert len(found) == 1000
    assert ID not in found
    assert len(MERGES) > 0
