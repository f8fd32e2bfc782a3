"""Tool calls in answers: every format, every cut, arbitrary text, and the choice of a format by its chat template."""

import itertools
import json
import random
import re
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_engine.conversation.answer import AnswerReader, message_of
from mlx_engine.conversation.delimiters import Delimiter, UnsupportedPatternError, partial_of
from mlx_engine.conversation.events import ArgumentsDelta, CallBegin, CallEnd, ReasoningDelta, TextDelta
from mlx_engine.conversation.formats import (
    TABLE,
    AnswerFormat,
    Format,
    Region,
    compiled,
)
from mlx_engine.tokenizer.vocabulary import TokenType
from tests.unit.test_tokenizer import build, byte_level


def tool(name, **properties):
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}


STRING, INTEGER = {"type": "string"}, {"type": "integer"}
OPTIONAL = {"anyOf": [STRING, {"type": "null"}]}
TOOLS = [
    tool("f", s=STRING, n=INTEGER, o={"type": "object"}, l={"type": "array"}, b={"type": "boolean"}, x=OPTIONAL),
    tool("g_2"),
]
HARD = 'a "quote" \\ \n<b>é😀</b> </tool_call> </parameter> {x}\n'
ARGUMENTS = (
    {},
    {"s": "Ulm", "n": 3},
    {"s": HARD, "n": -1, "o": {"a": [1, {"b": None}], "c": "d e"}, "l": [1.5, "x"], "b": True, "x": None},
    {"s": "", "x": "nul", "l": []},
)
ID = "abcdefghi"
FORMS = [(name, i) for name, template in TABLE.items() for i in range(len(template["written"]))]


def form_of(name, i=0):
    return Format(name, TABLE[name], TABLE[name]["written"][i])


def call(name, arguments):
    return {"id": ID, "function": {"name": name, "arguments": arguments}}


@cache
def reading(name, think=False, special=()):
    forms = []
    for tokens in ((), special):
        form = compiled(TABLE[name], tokens)
        if think:
            form = form._replace(first=(Region(True, Delimiter("<think>"), Delimiter("</think>")),))
        forms.append(form)
    return AnswerFormat(*forms, opening="<think>" if think else "")


def read(name, *pieces, think=False, is_thinking=False, tools=TOOLS, marks=None, special=(), cut=False):
    reader = AnswerReader(reading(name, think, special), tools, is_thinking=is_thinking)
    return [event for piece in pieces for event in reader.add(piece, marks)] + reader.finish(is_cut=cut)


def joined(events):
    """Return the events without ids, and with deltas joined that follow each other."""
    found = []
    for event in events:
        same = found and type(found[-1]) is type(event)
        if same and isinstance(event, ArgumentsDelta):
            found[-1] = event._replace(text=found[-1].text + event.text)
        elif same and isinstance(event, TextDelta | ReasoningDelta):
            found[-1] = type(event)(found[-1].text + event.text)
        else:
            found.append(event._replace(id="") if isinstance(event, CallBegin) else event)
    return found


def calls_in(events):
    message = message_of(events)
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", ())]


def examples(name, i):
    """Yield texts of a format, each with its calls."""
    form = form_of(name, i)
    for arguments in ARGUMENTS:
        calls = [call("f", arguments), call("g_2", {})]
        yield form.write(calls[:1]), calls[:1]
    yield form.write(calls), calls
    if name != "llama-json":  # which has no opening, so that nothing may be before a call
        yield f"Before é.\n\n{form.write(calls[:1])}\nAfter. ", calls[:1]


@pytest.mark.some(4)
@pytest.mark.parametrize(("name", "i"), FORMS)
def test_a_format_reads_what_it_writes(name, i):
    for text, calls in examples(name, i):
        events = read(name, text)
        assert calls_in(events) == [(c["function"]["name"], c["function"]["arguments"]) for c in calls]
        assert [event.call for event in events if isinstance(event, CallEnd)] == list(range(len(calls)))
        said = message_of(events)["content"]
        assert said == ("Before é.After. " if "Before" in text else None)


@pytest.mark.some(2)
@pytest.mark.parametrize(("name", "i"), FORMS)
def test_the_events_do_not_depend_on_how_the_text_is_cut(name, i):
    draw = random.Random(1)
    for text, _ in examples(name, i):
        whole = joined(read(name, text))
        for at in range(0, len(text), 1 if len(text) < 120 else 3):
            assert joined(read(name, text[:at], text[at:])) == whole
        for _ in range(12):
            a, b = sorted(draw.choices(range(len(text) + 1), k=2))
            assert joined(read(name, text[:a], text[a:b], text[b:])) == whole
        assert joined(read(name, *text)) == whole


@pytest.mark.slow
@pytest.mark.parametrize(("name", "i"), FORMS)
def test_every_cut_into_three_pieces(name, i):
    for text, _ in examples(name, i):
        whole = joined(read(name, text))
        for a, b in itertools.combinations_with_replacement(range(len(text) + 1), 2):
            assert joined(read(name, text[:a], text[a:b], text[b:])) == whole


def test_arguments_stream_as_they_come():
    reader = AnswerReader(reading("hermes-json"), TOOLS)
    assert reader.add('Hi. <tool_call>\n{"name": "f", "argu') == [TextDelta("Hi.")]
    begin, arguments = reader.add('ments": {"s": "on')
    assert (begin.call, begin.name, arguments.text) == (0, "f", '{"s": "on')
    assert reader.add("e two") == [ArgumentsDelta(0, "e two")]
    assert reader.add('"}') == [ArgumentsDelta(0, '"}'), CallEnd(0)]
    assert reader.add("}\n</tool_call>") == reader.finish() == []
    reader = AnswerReader(reading("qwen-xml"), TOOLS)
    reader.add("<tool_call>\n<function=f>\n<parameter=s>\nline 1\n")
    assert reader.add('li"e 2\nmore') == [ArgumentsDelta(0, '\\nli\\"e 2\\nmore')]


def test_text_is_held_back_only_while_it_may_be_a_delimiter():
    reader = AnswerReader(reading("hermes-json"), TOOLS)
    assert reader.add("a <tool") == [TextDelta("a")]
    assert reader.add("box> b") == [TextDelta(" <toolbox> b")]
    assert reader.add(" <tool_call>x") == [TextDelta(" <tool_call>x")]
    assert reader.add("y ") == [TextDelta("y")]
    assert reader.finish() == [TextDelta(" ")]


MALFORMED = [
    ("hermes-json", "<tool_call>\nno JSON\n</tool_call>"),
    ("hermes-json", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
    ("hermes-json", '<tool_call>{"name": "f", "arguments": [1]}</tool_call> more'),
    ("hermes-json", '<tool_call>{"name": "f", "argum'),
    ("hermes-json", "</tool_call> <tool_call"),
    ("qwen-xml", "<tool_call>\n<function=f>no value"),
    ("qwen-xml", "<function=unknown>\n<parameter=a>\n1\n</parameter>\n</function>"),
    ("glm", '<tool_call>{"name": "f"}</tool_call>'),
    ("mistral-args", "[TOOL_CALLS]f[ARGS]text"),
    ("mistral-list", "[TOOL_CALLS][1]"),
    ("gemma4", "<|tool_call>call:f(1)<tool_call|>"),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>text<|call|>"),
    ("harmony", "<|channel|>nonsense w1<|message|>x"),
    ("llama-json", '{"name": "Ada", "age": 3}'),
    ("llama-json", '{"name": "Ada"} and more'),
    ("llama-json", "{"),
    ("minimax", "<minimax:tool_call>text</minimax:tool_call>"),
    ("lfm2-python", "<|tool_call_start|>[f(1, 2, 3, 4, 5, 6, 7)]<|tool_call_end|>"),
    ("lfm2-python", "<|tool_call_start|>[f(s=os.name)]<|tool_call_end|>"),
    ("lfm2-python", "<|tool_call_start|>[f(s=1j), f() # w1\n]<|tool_call_end|>"),
]


@pytest.mark.parametrize(("name", "text"), MALFORMED)
def test_what_does_not_parse_is_given_out_as_it_is(name, text):
    for pieces in ([text], list(text)):
        assert joined(read(name, *pieces)) == [TextDelta(text)]


def test_arguments_that_are_no_json_are_given_out_as_they_are():
    text = '<tool_call>{"name": "f", "arguments": {"s": Ulm}}</tool_call> After.'
    assert joined(read("hermes-json", text))[1:] == [
        ArgumentsDelta(0, '{"s": Ulm}}'), CallEnd(0), TextDelta("After."),
    ]  # fmt: skip
    cut = joined(read("hermes-json", '<tool_call>{"name": "f", "arguments": {"s": "Ul', cut=True))
    assert cut[1:] == [ArgumentsDelta(0, '{"s": "Ul')]
    assert joined(read("qwen-xml", "<function=f>\n<parameter=s>\nUl", cut=True))[1:] == [ArgumentsDelta(0, '{"s": "Ul')]
    complete = "<function=f>\n<parameter=n>\n3\n</parameter>\n"
    assert joined(read("qwen-xml", complete))[1:] == [ArgumentsDelta(0, '{"n": 3}'), CallEnd(0)]
    assert joined(read("qwen-xml", complete, cut=True))[1:] == [ArgumentsDelta(0, '{"n": 3')]


def test_json_that_models_write_becomes_json():
    for written, meant in (
        (r'{"s": "a\'b \d"}', {"s": "a'b \\d"}),
        ('{"s": "a\nb\tc"}', {"s": "a\nb\tc"}),
        (r'"{\"s\": \"a\"}"', {"s": "a"}),
        ("null", {}),
    ):
        text = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
        assert calls_in(read("hermes-json", text)) == [("f", meant)]
    for text in ('{"arguments": {"s": "a"}, "name": "f"}', '{"id": "x", "name": "f", "parameters": {"s": "a"}}'):
        assert calls_in(read("hermes-json", f"<tool_call>{text}</tool_call>")) == [("f", {"s": "a"})]
    unknown = read("hermes-json", '<tool_call>{"name": "f", "arguments": {}, "why": "w1"}</tool_call>')
    assert joined(unknown)[1:] == [ArgumentsDelta(0, "{}"), CallEnd(0), TextDelta('"why": "w1"')]


TYPED = [
    (STRING, "007", "007"),
    (INTEGER, " 007 ", 7),
    (INTEGER, "3.0", 3.0),
    (INTEGER, "three", "three"),
    ({"type": "number"}, ".5", 0.5),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "yes", "yes"),
    ({"type": "object"}, '{"a": 1}', {"a": 1}),
    ({"type": "array"}, "[1, 2", "[1, 2"),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "null"]}, "nullable", "nullable"),
    ({"type": ["string", "integer"]}, "5", 5),
    ({"enum": ["5", "x"]}, "5", "5"),
    ({"const": 5}, "5", 5),
    ({"$ref": "#/$defs/d"}, "5", "5"),
    ({"$ref": "#/$defs/a%20number"}, "5", 5),
    ({"$ref": "#/$defs/either/anyOf/1"}, "5", 5),
    ({"type": "integer", "nullable": True}, "null", None),
    ({"anyOf": [{"type": "array"}, {"type": "null"}]}, "None", None),
    ({}, "5", 5),
    ({}, "five", "five"),
    ({}, '"five"', '"five"'),
]


@pytest.mark.parametrize(("schema", "text", "value"), TYPED)
def test_values_without_quotes_have_the_types_of_the_schema(schema, text, value):
    described = tool("f", a=schema)
    number = {"type": "integer"}
    described["function"]["parameters"]["$defs"] = {
        "d": STRING, "a number": number, "either": {"anyOf": [STRING, number]},
    }  # fmt: skip
    written = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    for pieces in ([written], list(written)):
        ((_, arguments),) = calls_in(read("qwen-xml", *pieces, tools=[described]))
        assert arguments == {"a": value}
        assert type(arguments["a"]) is type(value)


def test_a_call_ends_the_reasoning():
    written = form_of("hermes-json").write([call("f", {})])
    expected = [ReasoningDelta("I must."), CallBegin(0, "", "f"), ArgumentsDelta(0, "{}"), CallEnd(0)]
    assert joined(read("hermes-json", f"I must.\n{written}", think=True, is_thinking=True)) == expected
    assert joined(read("hermes-json", f"<think>\nI must.\n{written} Done.", think=True))[-1] == TextDelta("Done.")
    thought = "a <tool_call> b"
    assert joined(read("hermes-json", f"<think>{thought}</think>c", think=True)) == [
        ReasoningDelta(thought), TextDelta("c"),
    ]  # fmt: skip


def test_the_channels_of_gpt_oss():
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 3}<|call|>'
    )
    expected = [
        ReasoningDelta("Hm."), TextDelta("I look."), CallBegin(0, "", "f"), ArgumentsDelta(0, '{"n": 3}'), CallEnd(0),
    ]  # fmt: skip
    for at in range(len(text)):
        assert joined(read("harmony", text[:at], text[at:])) == expected
    for head in (" to=functions.f<|channel|>commentary json", "<|channel|>analysis to=f code"):
        assert calls_in(read("harmony", head + "<|message|>{}")) == [("f", {})]
    final = "<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>final<|message|>Yes. "
    assert joined(read("harmony", final)) == [ReasoningDelta("Hm."), TextDelta("Yes. ")]


def test_delimiters_that_are_tokens_count_as_tokens_alone():
    special = ("<|tool_call>", "<tool_call|>", '<|"|>')
    text = form_of("gemma4").write([call("f", {"s": "Ulm"})])
    marks = sorted(at for token in special for at in range(len(text)) if text.startswith(token, at))
    assert calls_in(read("gemma4", *text, marks=marks, special=special)) == [("f", {"s": "Ulm"})]
    assert joined(read("gemma4", *text, marks=[], special=special)) == [TextDelta(text)]
    spelled = form_of("gemma4").write([call("f", {"s": 'a<|"|>,n:7}<tool_call|>b'})])
    inner = [at for at in marks if at < spelled.index("a<")] + [spelled.rindex('<|"|>'), spelled.rindex("<tool_call|>")]
    assert calls_in(read("gemma4", *spelled, marks=inner, special=special)) == [
        ("f", {"s": 'a<|"|>,n:7}<tool_call|>b'})
    ]
    unclosed = '<tool_call>{"name": "f", "arguments": {"s": "a</tool_call>'
    found = joined(read("hermes-json", unclosed, marks=[0, 46], special=("<tool_call>", "</tool_call>")))
    assert found[1:] == [ArgumentsDelta(0, '{"s": "a'), CallEnd(0)]


def test_a_decoder_marks_the_tokens():
    tokenizer = build(byte_level(special={"<|a|>": TokenType.CONTROL, "<b>": TokenType.USER_DEFINED, "\n\n": 4}))
    stream = tokenizer.stream(at_start=False)
    ids = [
        *tokenizer.encode("x<|a|>é"),
        *(tokenizer.encode(t, special=True)[0] for t in ("<|a|>", "<b>", "\n\n", "<|a|>")),
    ]
    text = "".join(map(stream.add, ids))
    assert text == "x<|a|>é<|a|><b>\n\n<|a|>"
    assert list(stream.marks) == [7, 12, 17]


@pytest.mark.parametrize("name", sorted(TABLE))
def test_every_beginning_of_a_delimiter_may_become_one(name):
    form = compiled(TABLE[name])
    text = form_of(name).write([call("f", {"s": "a"}), call("g_2", {})])
    for delimiter in (form.calls.open, form.calls.close):
        if delimiter is None:
            continue
        found, _ = delimiter.find(text, 0, is_end=True)
        if found is None:  # an end token, which no text has
            continue
        for end in range(1, len(found[0])):
            assert delimiter.find(found[0][:end], 0, is_end=False) == (None, 0), found[0][:end]
        assert delimiter.find("&", 0, is_end=False) == (None, 1)


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("a[bc]+d{2,3}(?:x|yz)*e", ["abcbddyze", "acddde"]),
        (r"<(?P<n>\w+)\s*/?>", ["<ab  />", "<a>"]),
        ("(?:ab)+|c?d", ["ababab", "cd"]),
    ],
)
def test_partial_matches_are_the_beginnings_of_matches(pattern, texts):
    for text in texts:
        assert re.fullmatch(pattern, text)
        for end in range(len(text)):
            assert re.fullmatch(partial_of(pattern), text[:end]), text[:end]
        assert not re.fullmatch(partial_of(pattern), "#")


@pytest.mark.parametrize("pattern", ["(?=a)", "a(?!b)", r"(a)\1", "^a", r"a\b", "a)"])
def test_a_pattern_that_cannot_be_matched_in_part_is_refused(pattern):
    with pytest.raises(UnsupportedPatternError):
        partial_of(pattern)


# Arbitrary text


CUTS = re.compile(r"(?<=[>\]}\"'=\n])|(?=[<\[{\"'=:\n])")


@cache
def parts_of(name):
    """Return the parts of a format's texts: delimiters, brackets, and a word that stands for anything else."""
    written = form_of(name).write([call("f", {"s": "a", "n": 3}), call("g_2", {})])
    parts = {part for text in (written, "<think>", "</think>") for part in [text, *CUTS.split(text)]}
    # What a key named id has is dropped, and so is a number after the name in Kimi's form.
    sound = {part for part in parts if part and "id" not in part and ID not in part}
    return sorted(sound | {*'{}[]",:\\<> \n', "</", "é", "word"})


@st.composite
def texts(draw, names):
    name = draw(st.sampled_from(names))
    parts = draw(st.lists(st.sampled_from(parts_of(name)), max_size=24))
    numbered = [f"w{i}w" if part == "word" else part for i, part in enumerate(parts)]
    cuts = draw(st.lists(st.integers(0, 200), max_size=3))
    return name, "".join(numbered), cuts, draw(st.booleans()), draw(st.booleans())


def check_nothing_is_lost(case):
    name, text, cuts, think, is_thinking = case
    about = {"think": think, "is_thinking": think and is_thinking}
    events = read(name, text, **about)
    ends = sorted({min(cut, len(text)) for cut in cuts})
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *ends, len(text)])]
    assert joined(read(name, *pieces, **about)) == joined(events)
    message = message_of(events)
    functions = [c["function"] for c in message.get("tool_calls", ())]
    told = "".join(
        [
            message["content"] or "",
            message.get("reasoning_content", ""),
            *(f["name"] + f["arguments"] for f in functions),
        ]
    )
    assert all(word in told for word in (f"w{i}w" for i in range(24)) if word in text)
    if not functions and not think and name != "harmony":
        assert message["content"] == text


@settings(max_examples=300, deadline=None)
@given(texts(sorted(TABLE)))
def test_arbitrary_text_loses_nothing(case):
    check_nothing_is_lost(case)


@pytest.mark.slow
@settings(max_examples=100_000, deadline=None)
@given(texts(sorted(TABLE)))
def test_much_arbitrary_text_loses_nothing(case):
    check_nothing_is_lost(case)
