"""`chat --tools`: functions of a Python file, called when the user agrees."""

import json
import sys
from collections.abc import Callable

import pytest

from mlx_engine import engine as engines
from mlx_engine.engine import CheckedCheckpoint
from tests.scripted import Rendered, ScriptedEngine, scripted, write_model
from tests.unit.test_command_generate import cli

TOOLS = '''
"""Tools."""
from __future__ import annotations
from math import sqrt

def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    Args:
        a: The first.
    """
    return a + b

def fail(why: str) -> str:
    """Fail."""
    raise ValueError(why)

def _hidden() -> None: ...
'''
CALLS = {
    "Add.": '<tool_call>\n{"name": "add", "arguments": {"a": 40}}\n</tool_call>',
    "Fail.": 'Well.\n<tool_call>\n{"name": "fail", "arguments": {"why": "rain"}}\n</tool_call>',
    "Dance.": '<tool_call>\n{"name": "dance", "arguments": {}}\n</tool_call>',
}


def script(prompt: Rendered) -> str:
    return f"It says {prompt.results[-1]}." if prompt.results else CALLS.get(prompt.asked.strip(), "Hello.")


@pytest.fixture
def chat(tmp_path, monkeypatch) -> Callable[..., object]:
    path, file = tmp_path / "model.gguf", tmp_path / "mine.py"
    write_model(path, context=2048)
    file.write_text(TOOLS)
    made = scripted(script)

    def begin(opened: CheckedCheckpoint, progress=None) -> ScriptedEngine:
        return made(opened, progress)

    monkeypatch.setattr(engines, "Engine", begin)

    def run(*lines: str, tools=file):
        return cli("chat", "-m", path, "-b", "parallel", "--tools", tools, "-n", 100, stdin="\n".join(lines) + "\n")

    return run


def test_a_tool_is_called_when_the_user_agrees(chat):
    run = chat("/tools", "Add.", "y", "Hi.", "Add.", "n", "Add.", "always", "Add.", "/tools", "Fail.", "yes")
    assert run.code == 0
    assert "add(a, b)  Add two numbers." in run.err
    assert run.err.count("call add(a=40)? y: yes, n: no, always: this tool from now on") == 3
    assert "add(a=40) = 42" in run.err
    assert "add(a, b)  Add two numbers., called without a question" in run.err
    assert "call fail(why='rain')?" in run.err
    said = [line for line in run.out.splitlines() if line]
    declined = "It says The user does not want this call to be made.."
    assert said == [
        "It says 42.",
        "Hello.",
        declined,
        "It says 42.",
        "It says 42.",
        "Well.",
        "It says Error: ValueError: rain.",
    ]
    assert "_hidden" not in run.err
    assert "sqrt" not in run.err


def test_a_tool_that_is_not_there_is_an_error_for_the_model(chat):
    run = chat("Dance.")
    assert "call dance(): there is no such tool" in run.err
    assert run.out.strip() == "It says Error: there is no such tool."


def test_a_file_that_has_no_tools_is_refused(chat, tmp_path):
    reasons = {
        "1 / 0": "the file fails with ZeroDivisionError",
        "import sys; sys.exit(3)": "the file fails with SystemExit: 3",
        "x = 1": "expected a function",
    }
    for text, why in reasons.items():
        (tmp_path / "bad.py").write_text(text)
        run = chat("Hi.", tools=tmp_path / "bad.py")
        assert run.code != 0
        assert why in run.err.replace("\n", " ")


def test_a_file_of_tools_does_not_replace_a_module(chat, tmp_path):
    (tmp_path / "json.py").write_text(TOOLS)
    assert "It says 42" in chat("Add.", "y", tools=tmp_path / "json.py").out
    assert sys.modules["json"] is json


def test_a_model_without_tools_refuses_them(tmp_path):
    (tmp_path / "mine.py").write_text(TOOLS)
    run = cli("chat", "-b", "simd", "--tools", tmp_path / "mine.py", stdin="Hi.\n")
    assert run.code != 0
    assert "this model's chat template has no tools" in run.err.replace("\n", " ")
    plain = cli("chat", "-b", "simd", stdin="/tools\n")
    assert "there are no tools; --tools FILE.py lets the model call the functions of a file" in plain.err
