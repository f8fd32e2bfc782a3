"""`chat` as a user meets it: scripts through a pipe, commands, and Ctrl-C in a terminal."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from tests.builtin import LONGEST
from tests.unit.test_command_generate import MODEL, ROOT, cli
from tests.unit.test_generate_options import plain  # noqa: F401 - a fixture

TURN = re.compile(r"\[(\d+) tokens in \d+\.\d\d s, \d+\.\d tokens/s\]")


def chat(script, *args, model="builtin"):
    return cli("chat", "--model", model, "--backend", "simd", *args, stdin=script)


def test_a_script_of_two_turns_is_answered():
    result = chat("What is the capital of France?\n\nWho are you?\n")
    assert result.code == 0, result.err
    first, second = result.out.splitlines()
    assert "Paris" in first
    assert "model" in second
    lines = result.err.splitlines()
    assert f"context {LONGEST:,} tokens; /help" in lines[0]
    assert lines[1].startswith("This is the small built-in model. It tells short stories")
    assert [bool(TURN.fullmatch(line)) for line in lines[-2:]] == [True, True]


def test_answers_alone_go_to_stdout_and_quiet_leaves_nothing_else():
    script = "Hello\n/stats\nquit\nnever\n"
    loud, quiet = chat(script), chat(script, "--quiet")
    assert loud.code == quiet.code == 0
    assert loud.out == quiet.out
    assert len(quiet.out.splitlines()) == 1
    assert quiet.err.splitlines()[0].startswith("context: ")
    for word in ("exit", "/quit", "  quit "):
        assert chat(f"{word}\nHello\n").out == ""


def test_the_second_turn_reads_the_first():
    script = "Tell me a story.\n/stats\nThank you!\n/stats\n"
    lines = [line for line in chat(script, "-n", 24).err.splitlines() if line.startswith(("context", "last", "turns"))]
    assert lines[0].startswith("context: ")
    n_prompt, n_generated = map(int, re.findall(r"(\d+) prompt .* (\d+) generated", lines[2])[0])
    assert f" {n_prompt + n_generated} of {LONGEST:,} tokens" in lines[0]
    assert f"({n_prompt + n_generated - 1} of them cached)" in lines[6]
    assert lines[5].startswith("turns: 2")


def test_options_of_generate_arrive():
    hot = ("--temp", 2, "--seed", 1, "-n", 12)
    assert chat("Hello\n", *hot).out == chat("Hello\n", *hot).out != chat("Hello\n", "-n", 12).out
    assert "ended after 3 tokens; --max-tokens" in chat("Tell me a story.\n", "-n", 3).err
    assert "--timeout" in chat("Tell me a story.\n", "--timeout", 1e-6).err
    assert chat("Hello\n", "--temp", -1).code == 2
    assert chat("Hello\n", model="nope.gguf").code == 1


def saved(tmp_path, script, *args):
    path = tmp_path / "saved.json"
    result = chat(f"{script}/save {path}\n", *args)
    assert result.code == 0
    return path, json.loads(path.read_text(encoding="utf-8"))


def test_commands_change_the_conversation(tmp_path):
    _, messages = saved(tmp_path, 'Hello\n/system Be\\\nbrief.\nBye!\n"""\nWho are\nyou?"""\n', "-n", 4)
    assert [message["role"] for message in messages] == ["system", *["user", "assistant"] * 3]
    assert messages[0]["content"] == "Be\nbrief."
    assert messages[5]["content"] == "Who are\nyou?"
    assert saved(tmp_path, "Hello\n/system x\n/clear\n")[1] == [{"role": "system", "content": "x"}]
    assert saved(tmp_path, "/system x\n/system\n/clear\n")[1] == []
    again = saved(tmp_path, "Hello\n/retry\n", "--system", "s")[1]
    assert [message["role"] for message in again] == ["system", "user", "assistant"]


def test_a_saved_conversation_is_loaded_again(tmp_path):
    path, messages = saved(tmp_path, "What is the capital of France?\n")
    result = chat("/retry\n", "--load", path)
    assert result.out == messages[-1]["content"] + "\n"
    assert chat(f"/load {path}\n/retry\n").out == result.out
    (tmp_path / "other.json").write_text('{"a": 1}')
    (tmp_path / "broken.json").write_text("[")
    wrong = [tmp_path / "none.json", tmp_path / "other.json", tmp_path / "broken.json", ""]
    result = chat("".join(f"/load {path}\n" for path in wrong) + f"/save {tmp_path}\n/save\nHello\n")
    assert [line.startswith("error: ") for line in result.err.splitlines()[-7:]] == [True] * 6 + [False]
    assert len(result.out.splitlines()) == 1
    assert chat("Hello\n", "--load", wrong[0]).code == 1


def test_what_is_no_command_is_an_error_or_a_message():
    result = chat("/nope\n/\n/help\n/etc/hosts is a file.\n/retry now\n", "-n", 3)
    errors = [line for line in result.err.splitlines() if line.startswith("error")]
    assert [line.split(":")[1] for line in errors] == [" /nope", " /"]
    assert len(result.out.splitlines()) == 2
    for word in (
        "/system [TEXT]",
        "/clear",
        "/save FILE",
        "/load FILE",
        "/retry",
        "/stats",
        "Ctrl-D",
        "Alt-Enter",
        '"""',
    ):
        assert word in result.err


def test_a_full_context_is_said_and_clear_begins_anew():
    script = "Tell me a story.\n" * 4 + "/clear\nHello\n"
    options = ("--context-len", 200, "-n", -1, "--ignore-eos")
    result = chat(script, *options)
    assert result.code == 0
    assert "context of 200 tokens is full; /clear" in result.err
    assert re.search("error: prompt and max_tokens: .* 200 tokens.*/clear begins a new conversation", result.err)
    assert result.out.endswith(chat("Hello\n", *options).out)


def test_a_model_without_a_template_says_so_and_goes_on_with_the_text(plain):  # noqa: F811
    result = chat("a\nb\n", "--system", "s", "-n", 3, "-q", "--ignore-eos", model=plain)
    assert re.fullmatch("warning: .*no chat template.*\n", result.err)
    text = cli("generate", "s\n\na", "-m", plain, "-b", "simd", "-n", 3, "--no-echo", "-q", "--ignore-eos").out
    assert result.out.startswith(text)
    follow = f"s\n\na{text[:-1]}\nb"
    more = cli("generate", follow, "-m", plain, "-b", "simd", "-n", 3, "--no-echo", "-q", "--ignore-eos").out
    assert result.out == text + more


def test_a_template_that_refuses_ends_the_turn_alone():
    result = chat('"""\nx\n"""\nHello\n', "-n", 2, model=MODEL)
    assert result.code == 0


# ---- a terminal ----

# The line editor asks the terminal to mark what is pasted, and begins to draw.
PROMPT = r"\x1b\[\?2004h.*>"


class Screen:
    """A process of `chat` on a terminal of its own."""

    def __init__(self, *args):
        import pty

        self.ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm"}
        command = [sys.executable, "cli.py", "chat", "-b", "simd", *map(str, args)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
        os.close(theirs)
        self.text = ""

    def wait_for(self, pattern, seconds=15):
        """Read until the pattern appears, and drop what was read up to there."""
        until = time.monotonic() + seconds
        while (match := re.search(pattern, self.text)) is None:
            is_ready = select.select([self.ours], [], [], max(0.0, until - time.monotonic()))[0]
            assert is_ready, (pattern, self.text)
            self.text += os.read(self.ours, 4096).decode(errors="replace")
            self.answer_cursor_request()
        before, self.text = self.text[: match.end()], self.text[match.end() :]
        return before

    def answer_cursor_request(self):
        if "\x1b[6n" in self.text:
            self.text = self.text.replace("\x1b[6n", "")
            self.type("\x1b[1;1R")

    def type(self, keys):
        os.write(self.ours, keys.encode())

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.ours)


@pytest.fixture
def screen():
    made = []

    def start(*args):
        made.append(Screen(*args))
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.mark.skipif(os.name != "posix", reason="terminals as POSIX has them")
def test_ctrl_c_stops_the_answer_and_not_the_program(screen):
    # Without a KV cache every token takes longer than the one before: nobody waits for the end of this answer.
    terminal = screen("-m", MODEL, "--ignore-eos", "-n", 4000, "--no-kv")
    terminal.wait_for(PROMPT)
    terminal.type("Once\r")
    terminal.wait_for("fox fox fox")
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for(r"\(stopped\)")
    n = int(TURN.search(terminal.wait_for(r"tokens/s\]"))[1])
    assert 0 < n < 4000
    terminal.wait_for(PROMPT)
    terminal.type("/stats\r")
    assert f"{n} generated tokens, ended by Ctrl-C" in terminal.wait_for("ended by Ctrl-C")
    terminal.wait_for(PROMPT)
    terminal.process.send_signal(signal.SIGINT)  # at the prompt: nothing to stop
    terminal.wait_for("Ctrl-D or quit")
    terminal.wait_for(PROMPT)
    terminal.type("\x04")
    assert terminal.process.wait(timeout=10) == 0
