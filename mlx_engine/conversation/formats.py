"""How models write tool calls: a table of response templates, and the choice of the one that fits a model.

A response template has the form of `response_template` in Hugging Face's tokenizer_config.json. It lists the regions of
an answer (reasoning, text, calls): the texts or patterns that open and close each region, and the kind of its content.
If a model's folder has a response template whose calls can be parsed, this template is used. If not, an entry of the
table is chosen by a test: the model's chat template renders a conversation with calls, and the first entry that parses
these calls correctly is used. If the chat template takes tools but renders no calls, the first entry whose opening
delimiter is a control token of the model is used.

The table extends Hugging Face's form:
- `transform` makes a call from the parsed content. It may name keys of a JSON object, such as "{parameters}", whether
  the content is one object or a list of objects (`transform_each`);
- a pattern with a group `known` matches only if the text of this group is the name of a tool;
- `content` "python-calls" is a list of calls in Python's syntax;
- "" in `open` means that a call may have no opening delimiter; such a call is parsed only at the beginning of an
  answer, or directly after reasoning or another call;
- `written` is a list of `Written`: the forms in which models generate the text of calls.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from mlx_engine.conversation.delimiters import (
    Delimiter,
    ThinkMarkers,
    UnsupportedPatternError,
    literal,
    marked,
    partial_of,
    think_markers,
)
from mlx_engine.conversation.schemas import arguments_of
from mlx_engine.errors import OptionError, shown
from mlx_engine.tokenizer.chat_prompt import reads
from mlx_engine.tokenizer.vocabulary import is_marked

if TYPE_CHECKING:
    from mlx_engine.tokenizer.tokenizer import Tokenizer

Template = Mapping[str, Any]
Json = dict[str, Any]


@dataclass(frozen=True)
class Written:
    """The text of calls as the model generates them, for `Format.write` and for the grammar of constrained calls.

    Attributes:
        call: the format string of a call, with {name}, {quoted} (the name as JSON), {arguments} (JSON), {values} (all
            arguments, each formatted by `value`), {id} and {index} (the number of calls before it).
        value: the format string of an argument, with {key} and {value}.
        before, between, after: the texts before the first call, between two calls, and after the last call.
    """

    call: str
    value: str = ""
    before: str = ""
    between: str = "\n"
    after: str = ""


def _function(name: str, arguments: str | Json) -> Json:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


NAMED = _function("{name}", "{content}")
WHOLE: Json = {"type": "function", "function": "{content}"}
OBJECT = '{{"name": {quoted}, "arguments": {arguments}}}'


def _calls(written: Sequence[Written], **fields: Any) -> Template:
    return {"fields": {"tool_calls": {"repeats": True, **fields}}, "written": tuple(written)}


def _json_list(opening: str, closing: str, item: str = OBJECT, **fields: Any) -> Template:
    """Return the template of calls as a JSON list between two texts."""
    ends = {"close": closing} if closing else {}
    return _calls(
        [Written(item, before=f"{opening}[", between=", ", after=f"]{closing}")],
        **{"open": opening, "content": "json", "transform_each": True, "transform": WHOLE, **ends, **fields},
    )


# Matches the name of a tool in a header of gpt-oss, before or after the name of the channel. {0} is replaced by the
# name of the pattern's group.
HARMONY_TO = r" to=(?:functions\.)?(?P<{0}>[\w.-]+?)"
HARMONY_START = r"(?:<\|start\|>assistant)?"
HARMONY_KIND = r"(?: ?(?:<\|constrain\|>)?(?:json|code))?"

TABLE: Mapping[str, Template] = {
    # Qwen 2.5 and 3, Granite 4, Hermes, and most others
    "hermes-json": _calls(
        [Written("<tool_call>\n" + OBJECT + "\n</tool_call>")],
        open="<tool_call>",
        close="</tool_call>",
        content="json",
        transform=WHOLE,
    ),
    # Seed-OSS
    "seed-xml": _calls(
        [
            Written(
                "<seed:tool_call>\n<function={name}>\n{values}</function>\n</seed:tool_call>",
                "<parameter={key}>{value}</parameter>\n",
            )
        ],
        open_pattern=r"<seed:tool_call>\s*<function=(?P<name>[^<>\s]+)>",
        close_pattern=r"</function>(?:\s*</seed:tool_call>)?|</seed:tool_call>",
        content="xml-inline",
        content_args={"tag_pattern": r"<parameter=(?P<key>[^<>]+)>(?P<value>.*?)</parameter>"},
        transform=NAMED,
    ),
    # Qwen3-Coder, Qwen 3.5: strings have no quotes; the tag <tool_call> is sometimes missing
    "qwen-xml": _calls(
        [
            Written(
                "<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>",
                "<parameter={key}>\n{value}\n</parameter>\n",
            )
        ],
        open_pattern=r"<tool_call>\s*<function=(?P<name>[^<>\s]+)>|<function=(?P<known>[^<>\s]+)>",
        close_pattern=r"</function>(?:\s*</tool_call>)?|</tool_call>",
        content="xml-inline",
        content_args={"tag_pattern": r"<parameter=(?P<key>[^<>]+)>\n?(?P<value>.*?)\n?</parameter>"},
        transform=NAMED,
    ),
    # GLM 4.5 to 4.7
    "glm": _calls(
        [
            Written(
                "<tool_call>{name}\n{values}</tool_call>",
                "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
            ),
            Written(
                "<tool_call>{name}{values}</tool_call>",
                "<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
                between="",
            ),
        ],
        open_pattern=r"<tool_call>\s*(?P<name>[\w.:/-]+)",
        close="</tool_call>",
        content="xml-inline",
        content_args={
            "tag_pattern": r"<arg_key>\s*(?P<key>[^<>]+?)\s*</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
        },
        transform=NAMED,
    ),
    # Mistral Small 3.2, Ministral 3, Devstral
    "mistral-args": _calls(
        [
            Written("[TOOL_CALLS]{name}[ARGS]{arguments}", between=""),
            Written("[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]{arguments}", between=""),
        ],
        open_pattern=r"\[TOOL_CALLS\]\s*(?P<name>[^\s\[\]{]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?",
        content="json",
        transform=NAMED,
    ),
    # Mistral 7B v0.3, Nemo
    "mistral-list": _json_list("[TOOL_CALLS]", "", '{{"name": {quoted}, "arguments": {arguments}, "id": "{id}"}}'),
    # Gemma 4: keys without quotes, strings between two control tokens <|"|>
    "gemma4": _calls(
        [Written("<|tool_call>call:{name}{arguments}<tool_call|>", between="")],
        open_pattern=r"<\|tool_call>call:(?P<name>[^\s{}<]+)",
        close="<tool_call|>",
        content="json",
        content_args={"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        transform=NAMED,
    ),
    # gpt-oss: every part of an answer is in a channel
    "harmony": {
        "fields": {
            "thinking": {
                "open_pattern": HARMONY_START + r"<\|channel\|>analysis<\|message\|>",
                "close": "<|end|>",
            },
            "content": {
                "open_pattern": HARMONY_START + rf"<\|channel\|>(?:final|commentary){HARMONY_KIND}<\|message\|>",
                "close": ["<|end|>", "<|return|>"],
            },
            "tool_calls": {
                "open_pattern": f"{HARMONY_START}(?:"
                + HARMONY_TO.format("name")
                + rf"<\|channel\|>(?:commentary|analysis){HARMONY_KIND}"
                + r"|<\|channel\|>(?:commentary|analysis)"
                + HARMONY_TO.format("name_after")
                + rf"{HARMONY_KIND})<\|message\|>",
                "close": ["<|call|>", "<|end|>"],
                "repeats": True,
                "content": "json",
                "transform": NAMED,
            },
        },
        "written": (
            Written(
                "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>",
                between="<|start|>assistant",
            ),
        ),
    },
    # Llama 3.1 to 3.3: the opening delimiter is optional; several calls are separated by semicolons
    "llama-json": _calls(
        [Written('{{"name": {quoted}, "parameters": {arguments}}}', between="; ")],
        open=["", "<|python_tag|>"],
        content="json",
        transform=_function("{name}", "{parameters}"),
    ),
    # MiniMax M2
    "minimax": _calls(
        [
            Written(
                '<invoke name="{name}">\n{values}</invoke>',
                '<parameter name="{key}">{value}</parameter>\n',
                before="<minimax:tool_call>\n",
                after="\n</minimax:tool_call>",
            )
        ],
        open_pattern=r'(?:<minimax:tool_call>\s*)?<invoke name="(?P<name>[^"<>]+)">',
        close_pattern=r"</invoke>(?:\s*</minimax:tool_call>)?",
        content="xml-inline",
        content_args={"tag_pattern": r'<parameter name="(?P<key>[^"<>]+)">(?P<value>.*?)</parameter>'},
        transform=NAMED,
    ),
    # LFM 2 and 2.5: calls in Python's syntax
    "lfm2-python": _calls(
        [Written("{name}({values})", "{key}={value}", "<|tool_call_start|>[", ", ", "]<|tool_call_end|>")],
        open="<|tool_call_start|>",
        close="<|tool_call_end|>",
        content="python-calls",
    ),
    # Granite 3.3
    "granite-list": _json_list("<|tool_call|>", ""),
    # Command R7B and Command A
    "command-list": _json_list(
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        '{{"tool_call_id": "{id}", "tool_name": {quoted}, "parameters": {arguments}}}',
        transform=_function("{tool_name}", "{parameters}"),
    ),
    # Apriel; Nemotron Nano 2
    "apriel-list": _json_list("<tool_calls>", "</tool_calls>"),
    "nemotron-list": _json_list("<TOOLCALL>", "</TOOLCALL>"),
    # Kimi K2
    "kimi": _calls(
        [
            Written(
                "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
                before="<|tool_calls_section_begin|>",
                between="",
                after="<|tool_calls_section_end|>",
            )
        ],
        open_pattern=r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*(?:functions\.)?"
        r"(?P<name>[^\s<:]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>",
        close_pattern=r"<\|tool_call_end\|>(?:\s*<\|tool_calls_section_end\|>)?",
        content="json",
        transform=NAMED,
    ),
}


class CallForm(NamedTuple):
    """The syntax of tool calls in one response template.

    Attributes:
        open, close: the delimiters of calls; `close` is None if the content shows its own end.
        is_bare: whether the opening delimiter may be missing ("" in `open`).
        content: the kind of the content, one of `CONTENTS`.
        settings: the response template's settings for this kind of content (`content_args`).
        name_key, arguments_key: the keys of the name and of the arguments in a JSON object; None if the opening
            delimiter has the name, so that the content is only the arguments.
        is_list: whether the content is a list of calls.
        tag: the opening and closing tag of a value, for "xml-inline".
        quotes: the delimiters of a string, in addition to JSON's quotes.
    """

    open: Delimiter | None
    close: Delimiter | None
    is_bare: bool
    content: str
    settings: Template
    name_key: str | None
    arguments_key: str | None
    is_list: bool
    tag: tuple[Delimiter, Delimiter] | None
    quotes: tuple[tuple[Delimiter, Delimiter], ...]


class Region(NamedTuple):
    """A part of an answer between two delimiters: reasoning, or text."""

    is_reasoning: bool
    open: Delimiter
    close: Delimiter | None


class Form(NamedTuple):
    """A response template whose patterns are compiled.

    Attributes:
        first: reasoning that can only be at the beginning of an answer.
        regions: reasoning and texts that can be anywhere.
        calls: the syntax of calls; None if calls are not parsed.
    """

    first: tuple[Region, ...] = ()
    regions: tuple[Region, ...] = ()
    calls: CallForm | None = None


CONTENTS = ("json", "xml-inline", "kv-lines", "python-calls")


def compiled(template: Template, special: Sequence[str] = ()) -> Form:
    """Compile a response template.

    Args:
        template: a response template.
        special: the model's control tokens, for text with `delimiters.MARK` before each generated control token; empty
            for plain text.

    Raises:
        UnsupportedPatternError: a pattern has a construct that is not supported.
        KeyError, TypeError, ValueError, AttributeError, re.error: `template` is not a response template.
    """
    fields, regions = template["fields"], []
    for name in ("thinking", "reasoning_content", "reasoning", "content"):
        opening = _delimiter(fields.get(name, {}), "open", special)
        if opening is not None:
            regions.append(Region(name != "content", opening, _delimiter(fields[name], "close", special)))
    return Form((), tuple(regions), _call_form(fields["tool_calls"], special) if "tool_calls" in fields else None)


def _call_form(about: Template, special: Sequence[str]) -> CallForm:
    content, settings = about.get("content", "text"), about.get("content_args", {})
    if content not in CONTENTS:
        raise UnsupportedPatternError(f"content {content!r}")
    opening = _delimiter(about, "open", special)
    transform = about.get("transform", WHOLE)
    function = transform.get("function", transform)
    keys: list[str | None] = ["name", "arguments"]
    if isinstance(function, Mapping):
        keys = [str(function[key])[1:-1] for key in keys if key]
        groups: Mapping[str, int] = {} if opening is None else opening.full.groupindex
        keys = [None if key == "content" or key in groups else key for key in keys]
    tag = None
    if content == "xml-inline":
        begin, end = re.split(r"\(\?P<value>\.\*\??\)", settings["tag_pattern"])
        tag = Delimiter(marked(begin, special)), Delimiter(marked(end, special))
        partial_of(tag[0].pattern)
    quotes = settings.get("string_delims") or ()
    return CallForm(
        open=opening,
        close=_delimiter(about, "close", special),
        is_bare="" in ([about.get("open")] if isinstance(about.get("open"), str) else about.get("open") or ()),
        content=content,
        settings=settings,
        name_key=keys[0],
        arguments_key=keys[1],
        is_list=bool(about.get("transform_each")),
        tag=tag,
        quotes=tuple(
            (Delimiter(marked(literal(a), special)), Delimiter(marked(literal(b), special))) for a, b in quotes
        ),
    )


def _delimiter(about: Template, side: str, special: Sequence[str]) -> Delimiter | None:
    """Return the delimiter that opens or closes a region; None if there is none."""
    given = about.get(side) or ()
    texts = [text for text in ([given] if isinstance(given, str) else given) if text]
    pattern = about.get(f"{side}_pattern") or (literal(*texts) if texts else None)
    if pattern is None:
        return None
    partial_of(pattern)
    return Delimiter(marked(pattern, special))


@dataclass(frozen=True)
class AnswerFormat:
    """How the answers of a model are parsed.

    Attributes:
        plain, marked: the form for plain text, and for text with `delimiters.MARK` before each generated control token.
        opening: the opening marker of the reasoning, with which a prompt may end; "" if the model has none.
        has_letter_ids: whether the ids of calls are nine letters and digits, as Mistral's templates demand.
    """

    plain: Form
    marked: Form
    opening: str = ""
    has_letter_ids: bool = False

    def new_id(self) -> str:
        """Return a new id of a call."""
        if self.has_letter_ids:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True)
class Format:
    """How a model writes tool calls.

    Attributes:
        name: the name of the entry in `TABLE`; "response_template" for the response template of the model's folder.
        template: the response template.
        written: the text of calls as the model generates them; None if it is not known.
        is_parallel: whether the chat template takes several calls in one message.
        has_letter_ids: whether the chat template demands ids of nine letters and digits.
        is_rendered: whether the chat template renders calls. If not, the text of `write` is put into the content of
            the message.
    """

    name: str
    template: Template
    written: Written | None
    is_parallel: bool = True
    has_letter_ids: bool = False
    is_rendered: bool = True

    def write(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of calls as the model generates them.

        A call has OpenAI's form (`{"id": ..., "function": {"name": ..., "arguments": ...}}`), or is only the value of
        "function". The arguments are an object or its JSON text. Raise OptionError for other arguments, or if `written`
        is None.
        """
        if self.written is None:
            raise OptionError(f"tools: calls cannot be written in the format {self.name}", option="tools")
        form, texts = self.written, []
        for i, call in enumerate(calls):
            function = call.get("function", call)
            name, arguments = function["name"], _object_of(function["arguments"])
            values = [form.value.format(key=key, value=self._value(value)) for key, value in arguments.items()]
            separator = ", " if self.calls["content"] == "python-calls" else ""
            texts.append(
                form.call.format(
                    name=name,
                    quoted=json.dumps(name, ensure_ascii=False),
                    arguments=self.shown(arguments),
                    values=separator.join(values),
                    id=call.get("id", ""),
                    index=i,
                )
            )
        return form.before + form.between.join(texts) + form.after if texts else ""

    @property
    def calls(self) -> Template:
        """The description of calls in the response template."""
        found: Template = self.template["fields"]["tool_calls"]
        return found

    def _value(self, value: Any) -> str:
        """Return an argument as text: a string unchanged, any other value as JSON.

        In "python-calls", lists and objects are JSON, and all other values are Python literals.
        """
        if self.calls["content"] == "python-calls" and not isinstance(value, list | tuple | Mapping):
            return repr(value)
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    def shown(self, value: Any) -> str:
        """Return a value as JSON, or in the format's variant of JSON."""
        quotes = (self.calls.get("content_args", {}).get("string_delims") or [None])[0]
        if quotes is None:
            return json.dumps(value, ensure_ascii=False)
        if isinstance(value, str):
            return f"{quotes[0]}{value}{quotes[1]}"
        if isinstance(value, Mapping):
            return "{" + ",".join(f"{key}:{self.shown(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list | tuple):
            return "[" + ",".join(map(self.shown, value)) + "]"
        return json.dumps(value)


def _object_of(arguments: Any) -> Mapping[str, Any]:
    value = arguments_of("{}" if arguments == "" else arguments)
    if value is None:
        message = f"the arguments of a call must be a JSON object, not {shown(arguments)}"
        raise OptionError(message, option="messages", expected="a JSON object", found=arguments)
    return value


# The texts of the test conversation. No chat template contains them.
QUESTION = "What is the weather in Ulm and in Ghent?"
CITIES = (("Ulm \u00fc", 3), ("Ghent", 14))
PROBE: Json = {
    "type": "function",
    "function": {
        "name": "probe_weather",
        "description": "Return the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "The city."},
                "days": {"type": "integer", "description": "The number of days."},
            },
            "required": ["city", "days"],
        },
    },
}

# Caches of `format_of` and `answer_format`, for each tokenizer and chat template.
_FORMATS: WeakKeyDictionary[Tokenizer, dict[str | None, Format | None]] = WeakKeyDictionary()
_ANSWERS: WeakKeyDictionary[Tokenizer, dict[Hashable, AnswerFormat]] = WeakKeyDictionary()


def format_of(tokenizer: Tokenizer) -> Format | None:
    """Return how the model writes tool calls; None if this is unknown. The first use renders a test conversation."""
    known = _FORMATS.setdefault(tokenizer, {})
    if tokenizer.chat_template not in known:
        known[tokenizer.chat_template] = _chosen(tokenizer)
    return known[tokenizer.chat_template]


def required_format(tokenizer: Tokenizer) -> Format:
    """Return the result of `format_of`; raise OptionError if it is None."""
    found, template = format_of(tokenizer), tokenizer.chat_template
    if found is None:
        has_tools = template is not None and reads(template, "tools")
        why = "writes calls in an unknown format" if has_tools else "has no tools"
        message = f"tools: this model's chat template {why}; leave the tools out, or use a model that is made for them"
        raise OptionError(message, option="tools", expected="a model whose calls can be read", found=tokenizer.where)
    return found


def _chosen(tokenizer: Tokenizer) -> Format | None:
    """Return the format of the folder's response template, or else of the entry of `TABLE` that fits, or else None."""
    own, template = _own(tokenizer), tokenizer.chat_template
    if template is None or not reads(template, "tools"):
        return own
    from mlx_engine.conversation.dialect import rewritten
    from mlx_engine.conversation.template import dialect_of

    dialect = dialect_of(tokenizer)
    if not dialect.calls:
        return own or _spelled(tokenizer)
    is_parallel = dialect.several == "one message"
    for has_results in (False, True):  # some templates drop a call without a result
        messages = rewritten(_probe(2 if is_parallel else 1, has_results=has_results), dialect, _as_nothing)
        text = _rendered(tokenizer, messages)
        calls = messages[1]["tool_calls"]
        name = None if text is None else _reading(text, calls)
        if name is not None and text is not None:
            written = _as_written(name, calls, text)
            found = own or Format(name, TABLE[name], written)
            return replace(found, written=written, is_parallel=is_parallel, has_letter_ids=dialect.nine)
    return own


def _probe(n: int, *, has_results: bool) -> list[Json]:
    name = PROBE["function"]["name"]
    calls = [
        {"id": f"probe_call_{i}", **_function(name, {"city": city, "days": days})}
        for i, (city, days) in enumerate(CITIES[:n])
    ]
    results = [{"role": "tool", "content": "warm", "tool_call_id": call["id"]} for call in calls if has_results]
    question = {"role": "user", "content": QUESTION}
    return [question, {"role": "assistant", "content": "", "tool_calls": calls}, *results]


def _as_nothing(calls: Sequence[Mapping[str, Any]]) -> str:
    """Raise AssertionError: calls cannot be written as text while the format is being determined."""
    raise AssertionError(f"expected a dialect with calls, found {len(calls)} calls to be written as text")


def _own(tokenizer: Tokenizer) -> Format | None:
    """Return the format of the folder's response template; None if there is none, or it is not supported."""
    template = tokenizer.response_template
    try:
        return Format("response_template", template, None) if template and compiled(template).calls else None
    except (UnsupportedPatternError, KeyError, TypeError, ValueError, AttributeError, re.error):
        return None


def _rendered(tokenizer: Tokenizer, messages: Sequence[Json]) -> str | None:
    """Return the text that the chat template writes after the question; None if it fails or omits the question."""
    from mlx_engine.tokenizer.chat import render_each
    from mlx_engine.tokenizer.chat_prompt import ChatPrompt

    (text,) = render_each(tokenizer, [ChatPrompt(messages, [PROBE])])
    return None if text is None or QUESTION not in text else text[text.rindex(QUESTION) + len(QUESTION) :]


def _reading(text: str, calls: Sequence[Json]) -> str | None:
    """Return the name of the first entry of `TABLE` that parses these calls in a rendered text; None if none does."""
    first = PROBE["function"]["name"]
    starts = [0, *(match.start() for match in re.finditer(r"\{", text[: text.find(first)]))]
    wanted = _named(calls)
    for name, template in TABLE.items():
        form = compiled(template)
        # A call without an opening delimiter is parsed only at the beginning of a text, so parse the text from each
        # brace before the tool's name. The parser accepts several keys for arguments, so check that the text has
        # this format's key.
        is_bare = form.calls is not None and form.calls.is_bare
        if is_bare and form.calls is not None and f'"{form.calls.arguments_key}"' not in text:
            continue
        for start in starts if is_bare else (0,):
            if _calls_in(text[start:], form) == wanted:
                return name
    return None


def _calls_in(text: str, form: Form) -> list[tuple[str, Json | None]]:
    from mlx_engine.conversation.answer import AnswerReader, message_of

    reader = AnswerReader(AnswerFormat(form, form), [PROBE])
    return _named(message_of([*reader.add(text), *reader.finish()]).get("tool_calls", ()))


def _named(calls: Sequence[Json]) -> list[tuple[str, Json | None]]:
    return [(call["function"]["name"], arguments_of(call["function"]["arguments"])) for call in calls]


def _as_written(name: str, calls: Sequence[Json], text: str) -> Written:
    """Return the entry's first `Written` that formats the first call as in `text`, or else its first `Written`."""
    variants: Sequence[Written] = TABLE[name]["written"]
    found = (form for form in variants if Format(name, TABLE[name], form).write(calls[:1]).strip() in text)
    return next(found, variants[0])


def _spelled(tokenizer: Tokenizer) -> Format | None:
    """Return the format of the first entry of `TABLE` whose opening delimiter is a control token, or None."""
    for name, template in TABLE.items():
        opening = template["fields"]["tool_calls"].get("open")
        if isinstance(opening, str) and opening in tokenizer.special_tokens:
            return Format(name, template, template["written"][0], is_rendered=False)
    return None


def answer_format(tokenizer: Tokenizer, *, reads_calls: bool) -> AnswerFormat:
    """Return how a model's answers are parsed. If `reads_calls` is false, calls remain in the text."""
    markers = think_markers(tokenizer.chat_template)
    known, key = _ANSWERS.setdefault(tokenizer, {}), (tokenizer.chat_template, markers, reads_calls)
    if key not in known:
        known[key] = _answer_format(tokenizer, markers, format_of(tokenizer) if reads_calls else None)
    return known[key]


def _answer_format(tokenizer: Tokenizer, markers: ThinkMarkers | None, calls: Format | None) -> AnswerFormat:
    forms, literals = [], tokenizer.special_tokens | tokenizer.user_defined_tokens
    delimiters = [text for text, i in literals.items() if i in tokenizer.delimiter_ids and is_marked(text)]
    for special in ((), delimiters):
        form = compiled(calls.template, special) if calls else Form()
        if not any(each.is_reasoning for each in form.regions) and markers is not None:
            if markers.opening.startswith("<|channel|>"):
                form = form._replace(regions=compiled(TABLE["harmony"], special).regions)
            else:
                ends = (Delimiter(marked(literal(text), special)) for text in markers[:2])
                form = form._replace(first=(Region(True, *ends),))
        forms.append(form)
    opening = "" if markers is None else markers.opening
    return AnswerFormat(forms[0], forms[1], opening, calls is not None and calls.has_letter_ids)
