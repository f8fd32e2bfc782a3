"""A scripted model: a real engine on a tiny random model with a long context, whose answers a script chooses.

Agents send 1,500 to 19,000 tokens before the first word, and expect tool calls that no small model can write. Here the
forward passes, pages, prefix cache, log-probabilities and streams are those of every model; only the id of each chosen
token is replaced by the next id of the script's answer. A script is a function of the rendered prompt.

`python -m tests.scripted --port 8901` serves a scripted model with the command `serve`; other options are `serve`'s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import mlx_engine.engine
from mlx_engine import open_gguf
from mlx_engine.backends.parameters import Array, Token
from mlx_engine.backends.sampling import Draw
from mlx_engine.checkpoint.gguf_writer import write_gguf
from mlx_engine.checkpoint.shapes import Qwen3Shape
from mlx_engine.checkpoint.sources import BUILTIN
from mlx_engine.engine import CheckedCheckpoint, Engine, open_source
from mlx_engine.loop.request import Request
from mlx_engine.loop.scheduler import Scheduler, StepOutput
from mlx_engine.loop.stream import Progress

CONTEXT = 40_960
ROOT = Path(__file__).parents[1]
# Tokens that models with tools have and the vocabularies may lack, with their types in GGUF.
CONTROL, USER_DEFINED = 3, 4
ADDED = {
    "<|im_start|>": CONTROL, "<|im_end|>": CONTROL, "<think>": USER_DEFINED, "</think>": USER_DEFINED,
    "<tool_call>": USER_DEFINED, "</tool_call>": USER_DEFINED,
    "<tool_response>": USER_DEFINED, "</tool_response>": USER_DEFINED,
}  # fmt: skip

# ---- chat templates: the forms of Qwen3 and of Qwen3-Coder, in our own words ----

_TURNS = """
{%- set found = namespace(last_query=0) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set found.last_query = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{%- if not loop.first %}
{%- if STRICT %}{{ raise_exception('a system message must be the first') }}{% endif %}
{{- '<|im_start|>system\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- elif message.role == 'user' %}
{{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > found.last_query and message.reasoning_content %}
{{- '<think>\n' + message.reasoning_content.strip('\n') + '\n</think>\n\n' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{ '\n' }}{% endif %}
CALL
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.previtem is undefined or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
"""
_HEAD = """
{%- set first = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}
{{- '<|im_start|>system\n' }}{% if first %}{{ first + '\n\n' }}{% endif %}
{{- '# Tools\n\nThese are the signatures of the functions that you may call:\n<tools>' }}
{%- for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}
{{- '\n</tools>\n\nWrite a call as <tool_call> HOW </tool_call>.<|im_end|>\n' }}
{%- elif first %}
{{- '<|im_start|>system\n' + first + '<|im_end|>\n' }}
{%- endif %}
"""
_JSON_CALL = """
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\n</tool_call>' }}
"""
_XML_CALL = """
{{- '<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for name, value in call.function.arguments.items() %}
{{- '<parameter=' + name + '>\n' }}
{{- value if value is string else value | tojson }}{{ '\n</parameter>\n' }}
{%- endfor %}
{{- '</function>\n</tool_call>' }}
"""


def _template(head: str, call: str, *, strict: str) -> str:
    turns = _TURNS.replace("STRICT", strict).replace("CALL", call.strip())
    return (_HEAD.replace("HOW", head) + turns).strip()


TEMPLATES = {
    "json": _template('{"name": NAME, "arguments": OBJECT}', _JSON_CALL, strict="false"),
    "xml": _template("<function=NAME> <parameter=NAME>", _XML_CALL, strict="true"),
}
"""By name: "json" has calls as Qwen3's, "xml" as Qwen3-Coder's and refuses system messages after the first."""

# ---- what a script reads and writes ----


class Turn(NamedTuple):
    """A turn of a rendered conversation, without its markers."""

    role: str
    text: str


@dataclass(frozen=True)
class Rendered:
    """A rendered prompt, taken apart.

    Attributes:
        text: all of it.
        turns: the turns before the answer.
        tools: the functions that the template has listed, by name.
        form: the name of the template.
    """

    text: str
    turns: tuple[Turn, ...]
    tools: Mapping[str, Any]
    form: str

    @classmethod
    def of(cls, text: str, form: str) -> Rendered:
        """Parse a prompt."""
        *turns, _ = re.split(r"<\|im_end\|>\n", text)
        parts = [turn.removeprefix("<|im_start|>").partition("\n") for turn in turns]
        listed = re.search(r"^<tools>\n(.*?)\n</tools>$", text, re.DOTALL | re.MULTILINE)
        tools = [json.loads(line)["function"] for line in listed[1].split("\n")] if listed else []
        found = tuple(Turn(role, said) for role, _, said in parts)
        return cls(text, found, {tool["name"]: tool for tool in tools}, form)

    @property
    def thinks(self) -> bool:
        """Whether the answer may begin with reasoning."""
        return not self.text.endswith("</think>\n\n")

    @property
    def asked(self) -> str:
        """The last turn of the user that is no tool's result."""
        turns = (turn.text for turn in reversed(self.turns) if turn.role == "user")
        return next((text for text in turns if "<tool_response>" not in text), "")

    @property
    def results(self) -> list[str]:
        """The tools' results since the user's last words."""
        found: list[str] = []
        for turn in self.turns:
            if turn.role != "user":
                continue
            results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", turn.text, re.DOTALL)
            is_reminder = turn.text.lstrip().startswith("<system-reminder>")
            found = [*found, *results] if results or is_reminder else []
        return found

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return a call in the template's form."""
        if self.form == "json":
            return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
        values = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in arguments.items())
        parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values)
        return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


Script = Callable[[Rendered], str]

COMMAND, SAID, FINAL = "echo hello-from-tool", "hello-from-tool", "The tool said hello-from-tool, as it should."
# The shell tools of the agents, and those by which they end.
SHELLS = (
    "bash", "shell", "shell_command", "exec_command", "run_shell_command", "execute_command", "run_commands",
    "run_terminal_command", "echo",
)  # fmt: skip
ENDINGS = ("submit_and_exit", "attempt_completion", "complete", "final_answer", "final_result")
# Parameters of a call by what their names mean.
COMMANDS, TEXTS = ("command", "cmd", "commands", "code", "script", "text"), ("result", "answer", "response", "summary")


def agent(prompt: Rendered) -> str:
    """Do what the user says with lines "Call NAME JSON" and "Say TEXT", else call the shell tool with `echo`.

    After a result, call the tool with which some agents end, and give the final text.
    """
    thought = "<think>\nThe user wants me to go on.\n</think>\n\n" if prompt.thinks and prompt.tools else ""
    by_name = {name.lower(): name for name in prompt.tools}
    ending = next((by_name[name] for name in ENDINGS if name in by_name), None)
    if prompt.results or prompt.asked.startswith("Observation:"):  # smolagents gives results as the user's text
        is_over = any("<tool_call>" in turn.text and ending and ending in turn.text for turn in prompt.turns[1:])
        if ending is None or is_over:
            return thought + FINAL
        return thought + prompt.call(ending, arguments(prompt.tools[ending], FINAL))
    calls = re.findall(r"^Call (\w+) (\{.*\})$", prompt.asked, re.MULTILINE)
    if calls and prompt.tools:
        return thought + "\n".join(prompt.call(name, json.loads(given)) for name, given in calls)
    if said := re.search(r"^Say (.*)$", prompt.asked, re.MULTILINE):
        return thought + said[1]
    shell = next((by_name[name] for name in SHELLS if name in by_name), None)
    if shell is None:
        return thought + FINAL
    return f"{thought}Let me run it.\n{prompt.call(shell, arguments(prompt.tools[shell], COMMAND))}"


def arguments(tool: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return arguments that a tool's schema requires: `text` for its command or result, examples for all others."""
    schema: Mapping[str, Any] = tool.get("parameters") or {}
    properties: Mapping[str, Any] = schema.get("properties", {})
    main = next((name for name in (*COMMANDS, *TEXTS) if name in properties), next(iter(properties), None))
    names = [name for name in properties if name == main or name in schema.get("required", ())]
    return {name: example(properties[name], text if name == main else "to say hello") for name in names}


def example(schema: Mapping[str, Any], text: str) -> Any:
    """Return a value of a simple schema, with `text` for its first string."""
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return example(schema["anyOf"][0], text)
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "array":
        return [example(schema.get("items", {}), text)]
    if kind == "object":
        return arguments({"parameters": schema}, text)
    return {"integer": 1, "number": 1, "boolean": False}.get(kind, text)


# ---- the model ----


def write_model(
    path: Path, vocabulary: str | Path = BUILTIN, *, template: str = "json", context: int = CONTEXT
) -> None:
    """Write a model with random weights: the vocabulary of a GGUF file, and a template of `TEMPLATES`."""
    with open_gguf(vocabulary) as file:
        kept = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.ggml.")}
    tokens, types = list(kept["tokenizer.ggml.tokens"]), list(kept["tokenizer.ggml.token_type"])
    for token, kind in ADDED.items():
        if token in tokens:
            types[tokens.index(token)] = kind
        else:
            tokens.append(token)
            types.append(kind)
    changed = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATES[template],
    }
    shape = Qwen3Shape(1, 32, 64, 1, 1, 32, len(tokens), context, 1e6)
    settings = {f"qwen3.{key}": value for key, value in shape.settings().items()}
    about = {"general.architecture": "qwen3", "general.name": "scripted model, random weights", "general.file_type": 7}
    write_gguf(path, {**about, **settings, **kept, **changed}, shape.drawn())


class ScriptedEngine(Engine):
    """An engine whose chosen tokens are those of a script.

    Attributes:
        script: returns the text of the answer to a prompt.
        pause: seconds that a step with tokens of a prompt takes more.
        record: a file that gets a line of JSON per request that has ended; None for none.
        requests: all requests that its schedulers got, in order.
        form: the name of the chat template.
    """

    script: Script
    pause: float = 0.0
    record: Path | None = None

    def __init__(self, opened: CheckedCheckpoint, progress: Progress | None = None) -> None:
        super().__init__(opened, progress)
        self.requests: list[Request] = []
        template = self.tokenizer.chat_template or ""
        self.form = next(name for name, text in TEMPLATES.items() if text == template)
        self._answer = lru_cache(maxsize=64)(self._answer_to)
        choose = self.backend.choose

        def forced(logits: Array, draws: Sequence[Draw], *others: Any, **named: Any) -> list[Token]:
            choose(logits, draws, *others, **named)
            return [self._forced(draw) for draw in draws]

        self.backend.choose = forced  # type: ignore[method-assign]

    @classmethod
    def load(cls, path: Path, script: Script = agent, *, pause: float = 0.0, threads: int | None = 1) -> ScriptedEngine:
        """Load a file of `write_model`."""
        return scripted(script, pause=pause)(open_source(path, "parallel", threads=threads))

    def scheduler(self, **options: Any) -> Scheduler:
        """Return a scheduler that records requests, and pauses while it reads prompts."""
        made = super().scheduler(**options)
        submit, step = made.submit, made.step

        def recorded(request: Request, *others: Any, **named: Any) -> Any:
            self.requests.append(request)
            return submit(request, *others, **named)

        def paused() -> StepOutput:
            output = step()
            if output.n_prefill:
                time.sleep(self.pause)
            for request in output.ended:
                self._write(request)
            return output

        made.submit, made.step = recorded, paused  # type: ignore[method-assign]
        return made

    def _write(self, request: Request) -> None:
        if self.record is None:
            return
        prompt = Rendered.of(self.text_of(request.prompt_ids), self.form)
        line = {
            "prompt": len(request.prompt_ids),
            "cached": request.n_cached,
            "tools": len(prompt.tools),
            "results": prompt.results,
            "answer": self.text_of(request.output.token_ids),
        }
        with self.record.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of a prompt with its markers."""
        return self.tokenizer.decode(ids)

    def _forced(self, draw: Draw) -> int:
        answer = self._answer(tuple(draw.recent[: draw.n_prompt]))
        return answer[min(len(draw.recent) - draw.n_prompt, len(answer) - 1)]

    def _answer_to(self, prompt: tuple[int, ...]) -> list[int]:
        """Return the ids of the script's answer, which ends with the end of the turn."""
        text = self.script(Rendered.of(self.text_of(prompt), self.form))
        return self.tokenizer.encode(f"{text}<|im_end|>", special=True)


def scripted(script: Script, **attributes: Any) -> type[ScriptedEngine]:
    """Return the class of engines with a script."""
    return type("ScriptedEngine", (ScriptedEngine,), {"script": staticmethod(script), **attributes})


@contextlib.contextmanager
def serving(record: Path, *options: str) -> Iterator[str]:
    """Run `serve` with a scripted model as a process; yield its address."""
    command = [sys.executable, "-m", "tests.scripted", "--port", "0", "--record", str(record)]
    process = subprocess.Popen([*command, *options], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines: list[str] = []
    try:
        for line in process.stderr:
            lines.append(line)
            if found := re.match(r"Listening on (\S+)", line):
                yield found[1]
                break
        else:
            raise RuntimeError(f"the server: expected an address, found this log:\n{''.join(lines)}")
    finally:
        process.terminate()
        _, rest = process.communicate(timeout=60)
        if "Traceback" in rest:
            print(f"the log of the server:\n{rest}")


def main(given: Sequence[str]) -> None:
    """Serve a scripted model with the command `serve`."""
    parser = argparse.ArgumentParser(prog="python -m tests.scripted", description=__doc__)
    parser.add_argument("--vocab", type=Path, default=BUILTIN, help="GGUF file that has the vocabulary")
    parser.add_argument("--template", choices=list(TEMPLATES), default="json")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds per step that reads a prompt")
    parser.add_argument("--record", type=Path, help="file that gets a line of JSON per request")
    options, others = parser.parse_known_args(given)
    from mlx_engine.commands import main as command_line

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scripted.gguf"
        write_model(path, options.vocab, template=options.template)
        mlx_engine.engine.Engine = scripted(agent, pause=options.pause, record=options.record)  # type: ignore[misc]
        sys.argv = ["cli.py", "serve", "-m", str(path), "-b", "parallel", *others]
        command_line()


if __name__ == "__main__":
    main(sys.argv[1:])
