"""Chat templates that are broken or mean harm: one error each, in a bounded time."""

import re
import sys

import pytest

from mlx_engine.errors import ChatTemplateError
from mlx_engine.tokenizer import sandbox, sandbox_process
from mlx_engine.tokenizer.chat import Limits, chat_ids
from tests.unit.test_chat import chatml, user
from tests.unit.test_tokenizer import build, byte_level

# ---- templates that mean harm, or are broken ----

BROKEN = {
    "refusal": "{{ raise_exception('System role not supported') }}",
    "words for the terminal": "{{ raise_exception('one\\n\\x1b[2Jtwo') }}",
    "syntax": "{% for m in messages %}",
    "no such attribute": "{{ messages[0].a.b }}",
    "python's own": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "python's own in a namespace": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "changed messages": "{{ messages.append(1) }}",
    "a file": "{% include '/etc/passwd' %}",
    "a long range": "{% for i in range(10**9) %}x{% endfor %}",
    "endless recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "much text": "{% for i in range(2000) %}" + "x" * 1000 + "{% endfor %}",
    "deep": "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "not utf-8": "a\udcffb",
}
SLOW = {
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a large power": "{{ 10 ** (10 ** 10) }}",
}
LARGE = {
    "repetition": "{{ 'x' * 10 ** 11 }}",
    "doubling": "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "padding": "{{ 'x' | center(10 ** 11) }}",
}


def refused(template):
    tokenizer = build(byte_level(chat_template=template))
    with pytest.raises(ChatTemplateError) as caught:
        chat_ids(tokenizer, user("x"), limits=Limits(seconds=1, characters=1_000_000))
    message = str(caught.value)
    assert message.startswith("toy: expected a chat template")
    assert len(message.splitlines()) == 1
    assert len(message) < 800
    assert message.isprintable()
    return message


@pytest.mark.parametrize("name", BROKEN)
def test_a_template_that_fails_is_one_error(name):
    message = refused(BROKEN[name])
    if name == "refusal":
        assert "System role not supported" in message
    if name == "much text":
        assert "1,000,000 characters" in message


@pytest.mark.skipif(sys.platform == "win32", reason="no bounds on processor time")
@pytest.mark.parametrize("name", SLOW)
def test_a_template_that_takes_too_long_is_ended(name):
    assert "over 1 seconds" in refused(SLOW[name])


@pytest.mark.skipif(sys.platform != "linux", reason="no bounds on memory")
@pytest.mark.parametrize("name", LARGE)
def test_a_template_that_takes_too_much_memory_is_ended(name):
    assert re.search("Memory|over 1 seconds", refused(LARGE[name]))


def test_a_sandbox_that_cannot_be_started_is_one_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert "/no/such/python" in refused("x")


def test_a_sandbox_that_does_not_come_back_is_ended(monkeypatch, tmp_path):
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(sandbox, "__file__", str(tmp_path / "sleeps.py"))
    monkeypatch.setattr(sandbox_process, "START_SECONDS", 0)
    tokenizer = chatml()
    with pytest.raises(ChatTemplateError, match="over 0"):
        chat_ids(tokenizer, user("x"), limits=Limits(seconds=0.1))


def test_a_sandbox_that_crashes_says_its_last_word(monkeypatch, tmp_path):
    (tmp_path / "fails.py").write_text("raise SystemExit('no room\\n')")
    monkeypatch.setattr(sandbox, "__file__", str(tmp_path / "fails.py"))
    assert "no room" in refused("x")
