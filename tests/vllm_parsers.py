"""Run vLLM's own tests of tool parsers on the formats that are read here: `python -m tests.vllm_parsers FOLDER`.

FOLDER is a checkout of vLLM, of which nothing is committed here. Its parsers are replaced by `Parser`, which has their
interface and reads with `AnswerReader`; the rest of vLLM, and the tokenizers of its tests, by stand-ins.

Tests that fail here and are no differences of formats: those of vLLM's own functions (`_parse_gemma4_args`, regular
expressions with a timeout, structural tags, `adjust_request`). The differences:
- white space before a call is dropped, and text after a call is kept;
- a call that nothing marks is read at the beginning of an answer alone, and Gemma's only with its token;
- a call whose JSON is malformed is text, or, once it has begun, has the arguments as they are: none is left out;
- without a schema, a value between tags that is JSON counts as such;
- Python's sets and other values that JSON lacks make a call text;
- a value ends at its closing tag alone;
- ids are new ones, also for Kimi K2.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import json
import re
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

import tests
from mlx_engine.conversation.answer import AnswerReader, message_of
from mlx_engine.conversation.events import ArgumentsDelta, CallBegin, TextDelta
from mlx_engine.conversation.formats import TABLE, AnswerFormat, compiled

# Formats by the names that vLLM's tests use, of modules or of parsers.
FORMATS = {
    "hermes": "hermes-json", "granite4": "hermes-json", "qwen3": "qwen-xml", "qwen3_coder": "qwen-xml", "glm4": "glm",
    "glm47": "glm", "glm45": "glm", "gemma4": "gemma4", "minimax_m2": "minimax", "lfm2": "lfm2-python",
    "llama": "llama-json", "llama3_json": "llama-json", "kimi_k2": "kimi", "mistral": "mistral-args",
}  # fmt: skip
FILES = (
    "hermes",
    "granite4",
    "qwen3coder",
    "glm4_moe",
    "glm47_moe",
    "gemma4",
    "minimax_m2",
    "lfm2",
    "llama3_json",
    "kimi_k2",
)


# Constants that tests of Gemma 4 import.
GEMMA = {"TOOL_CALL_START": "<|tool_call>", "TOOL_CALL_END": "<tool_call|>", "STRING_DELIM": '<|"|>'}


class Record:
    """An object of vLLM's protocol: what it was made with, and None for what it was not made with."""

    def __init__(self, *args: Any, **values: Any) -> None:
        self.__dict__.update({name: _record(value) for name, value in values.items()})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return {"tool_calls": [], "type": "function"}.get(name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and str(self) == str(other)

    def __str__(self) -> str:
        """Return the values, with the JSON text of arguments in one form."""
        values = {**vars(self)}
        if isinstance(values.get("arguments"), str):
            with contextlib.suppress(ValueError):
                values["arguments"] = json.loads(values["arguments"])
        return repr(sorted((name, str(value)) for name, value in values.items() if value is not None))

    __hash__ = None  # type: ignore[assignment]

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return {name: value.model_dump() if isinstance(value, Record) else value for name, value in vars(self).items()}


def _record(value: Any) -> Any:
    is_function = isinstance(value, dict) and "name" in value
    return Record(**value) if is_function else value


class Tokenizer:
    """A tokenizer of words and characters."""

    def __init__(self, *_: Any, **more: Any) -> None:
        self._words: dict[str, int] = dict(more.get("vocab") or {})

    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> Tokenizer:
        return cls()

    def tokenize(self, text: str) -> list[str]:
        return re.findall(r"<[|/]?\w+[|]?>|\w{1,4}|\s+|.", text, re.DOTALL)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [self._words.setdefault(word, len(self._words)) for word in self.tokenize(text)]

    def decode(self, ids: Any, **_: Any) -> str:
        words = {i: word for word, i in self._words.items()}
        return "".join(words[i] for i in ([ids] if isinstance(ids, int) else ids))

    def get_vocab(self) -> dict[str, int]:
        return self._words


class Parser:
    """vLLM's interface of a tool parser."""

    name = ""

    def __init__(self, tokenizer: Any = None, tools: Any = None, **_: Any) -> None:
        self.model_tokenizer, self._tools, self.vocab = tokenizer, tools, {}
        self._reader: AnswerReader | None = None
        self._text = ""

    def _new(self, request: Any) -> AnswerReader:
        given = self._tools or getattr(request, "tools", None) or ()
        tools = [each for tool in (given if isinstance(given, list | tuple) else ()) if (each := _tool(tool))]
        form = compiled(TABLE[self.name])
        return AnswerReader(AnswerFormat(form, form), tools)

    def extract_tool_calls(self, model_output: str, request: Any = None) -> Record:
        reader = self._new(request)
        found = message_of([*reader.add(model_output), *reader.finish()])
        calls = [
            Record(id=call["id"], type="function", function=call["function"]) for call in found.get("tool_calls", ())
        ]
        return Record(tools_called=bool(calls), tool_calls=calls, content=found["content"])

    def extract_tool_calls_streaming(
        self, previous_text: str = "", current_text: str = "", delta_text: str = "", *others: Any, **named: Any
    ) -> Record | None:
        if self._reader is None or (not previous_text and current_text == delta_text and len(self._text) > 0):
            self._reader, self._text = self._new(others[-1] if others else named.get("request")), ""
        self._text += delta_text
        content, calls = "", dict[int, Record]()
        for event in self._reader.add(delta_text):
            if isinstance(event, TextDelta):
                content += event.text
            elif isinstance(event, CallBegin):
                function = {"name": event.name, "arguments": ""}
                calls[event.call] = Record(index=event.call, id=event.id, type="function", function=function)
            elif isinstance(event, ArgumentsDelta):
                empty = Record(index=event.call, type="function", function=Record(name=None, arguments=""))
                calls.setdefault(event.call, empty).function.arguments += event.text
        if not content and not calls:
            return None
        return Record(content=content or None, tool_calls=list(calls.values()))

    def adjust_request(self, request: Any) -> Any:
        return request


def _tool(tool: Any) -> dict[str, Any] | None:
    function = getattr(tool, "function", None)
    name = getattr(function, "name", None)
    if not isinstance(name, str):
        return None
    parameters = getattr(function, "parameters", None)
    return {
        "type": "function",
        "function": {"name": name, "parameters": parameters if isinstance(parameters, dict) else {}},
    }


def parser_of(name: str) -> type[Parser]:
    """Return the parser of vLLM's name of a module, a class or a parser."""
    found = max((known for known in FORMATS if known in name.lower()), key=len, default="")
    return type(name, (Parser,), {"name": FORMATS.get(found, "")})


def incremental(tokenizer: Tokenizer, all_input_ids: list[int], **_: Any) -> tuple[list[str], str, int, int]:
    """Return the text of the last token, as vLLM's function of this name does."""
    text = tokenizer.decode(all_input_ids[-1])
    return [text], text, 0, 0


class Module(types.ModuleType):
    """A module that has every name: parsers, tokenizers, records, and mocks for the rest."""

    __path__ = ()  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith("ToolParser") or name.endswith("Parser"):
            made: Any = parser_of(self.__name__.rpartition(".")[2]) if name != "ToolParser" else Parser
        elif name in ("get_tokenizer", "AutoTokenizer", "MockTokenizer"):
            made = Tokenizer
        elif name in GEMMA:
            made = GEMMA[name]
        elif name == "detokenize_incrementally":
            made = incremental
        elif name == "ToolParserManager":
            made = types.SimpleNamespace(get_tool_parser=parser_of)
        else:
            made = type(name, (Record,), {}) if name[0].isupper() and not name.isupper() else MagicMock(name=name)
        setattr(self, name, made)
        return made


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for vLLM and what its tests import."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        known = ("vllm", "transformers", "xgrammar", "tests.parser", "mistral_common", "partial_json_parser", "torch")
        if not any(name == each or name.startswith(f"{each}.") for each in known):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Module:
        return Module(spec.name)

    def exec_module(self, module: Any) -> None:
        """Do nothing: a module makes its names when they are asked for."""


def main(folder: Path) -> int:
    """Run the tests, and print how many hold and which do not."""
    sys.meta_path.insert(0, Finder())
    tests.__path__.append(str(folder / "tests"))
    paths = (folder / "tests" / "tool_parsers" / f"test_{name}_tool_parser.py" for name in FILES)
    files = [str(path) for path in paths if path.exists()]
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=line",
        "-W",
        "ignore",
        "--rootdir",
        str(folder),
        "-c",
        "/dev/null",
        "-n",
        "0",
    ]
    return int(pytest.main([*options, *files]))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
