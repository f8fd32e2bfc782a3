"""`chat` as a user meets it: scripts through a pipe, commands, and Ctrl-C in a terminal."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from mlx_engine.checkpoint.gguf import open_gguf
from mlx_engine.checkpoint.gguf_writer import write_gguf
from tests.builtin import LONGEST
from tests.patience import PATIENCE
from tests.unit.test_command_generate import MODEL, ROOT, cli
from tests.unit.test_generate_options import plain  # noqa: F401 - a fixture

pytestmark = pytest.mark.usefixtures("one_sandbox")

RATES = r"first token after [\d,.]+ ms, then [\d,.]+ tokens/s"
TURN = re.compile(rf"\[(\d+) tokens: {RATES}\]")


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_saved_conversation_is_loaded_again(tmp_path):
    path, messages = saved(tmp_path, "What is the capital of France?\n")
    result = chat("/retry\n", "--load", path)
    assert result.out == messages[-1]["content"] + "\n"
    assert chat(f"/load {path}\n/retry\n").out == result.out
    (tmp_path / "other.json").write_text('{"a": 1}')
    (tmp_path / "broken.json").write_text("[" + "9" * 5000 + "]")  # an integer of more digits than Python reads
    wrong = [tmp_path / "none.json", tmp_path / "other.json", tmp_path / "broken.json", ""]
    result = chat("".join(f"/load {path}\n" for path in wrong) + f"/save {tmp_path}\n/save\nHello\n")
    assert [line.startswith("error: ") for line in result.err.splitlines()[-7:]] == [True] * 6 + [False]
    assert len(result.out.splitlines()) == 1
    assert chat("Hello\n", "--load", wrong[0]).code == 1


def test_words_with_a_slash_that_are_no_commands_are_not_sent_to_the_model():
    result = chat("/hlep\n/\n/help\n/etc/hosts is a file.\n/retry now\n", "-n", 3)
    errors = [line for line in result.err.splitlines() if line.startswith("error")]
    names = ["no command /hlep", "no command /", "no command /etc/hosts"]
    assert [line.partition(";")[0] for line in errors[:3]] == [f"error: {name}" for name in names]
    assert errors[3] == "error: there is no question to answer again"
    assert "; did you mean /help?; a space before the slash" in errors[0]
    assert result.out == ""
    usages = (
        "/system [TEXT]",
        "/set [NAME VALUE]",
        "/model NAME",
        "/clear",
        "/undo",
        "/save FILE",
        "/load FILE",
        "/retry",
    )
    for word in (*usages, "/stats", "/bye", "Ctrl-D", "Alt-Enter", "Tab", '"""'):
        assert word in result.err


@pytest.mark.parametrize("text", [" /etc/hosts\n", '"""/etc/hosts"""\n'])
def test_a_message_may_begin_with_a_slash(tmp_path, text):
    assert saved(tmp_path, text, "-n", 2)[1][0] == {"role": "user", "content": "/etc/hosts"}


def test_commands_of_other_programs_are_known():
    result = chat("/?\nbye\n/bye\nHello\n", "-q", "-n", 2)
    assert len(result.out.splitlines()) == 1  # the word alone is a message
    assert result.err.startswith("/help ")


def test_set_changes_an_option_as_the_command_line_does():
    script = "Hello\n/clear\n/set temp 2\n/set --seed=1\n/set max-tokens 12\nHello\n/set\n"
    result = chat(f"{script}/set temperature off\n/set seed off\n/set top_k 5\n/stats\n")
    greedy, sampled = result.out.splitlines()
    assert sampled == chat("Hello\n", "--temp", 2, "--seed", 1, "-n", 12).out.removesuffix("\n") != greedy
    lines = result.err.splitlines()
    for line in (
        "temperature 2",
        "seed 1",
        "max_tokens 12",
        "temperature         2",
        "top_k               off",
        "logit_bias          off",
        "timeout             off",
        "seed random",
    ):
        assert line in lines, line
    assert "warning: top_k has no effect at temperature 0; /set temperature T samples" in lines
    assert "sampling: greedy, top_k 5" in lines


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("temprature 1", r"/set has no option temprature; did you mean temperature\?"),
        ("temperature", r"/set temperature needs a value, or off for the default"),
        ("temperature hot", r"/set temperature needs a number, or off, not 'hot'"),
        ("temperature -1", r"temperature must be a number of at least 0, not -1.0"),
        ("top_k 1.5", r"/set top_k needs a whole number, or off, not '1.5'"),
        ("logit_bias 99999999=1", r"logit_bias must have token ids from 0 to"),
    ],
)
def test_a_setting_that_is_invalid_changes_nothing(setting, message):
    result = chat(f"/set {setting}\n/stats\n", "-q")
    assert re.search(f"^error: {message}", result.err, re.MULTILINE), result.err
    assert "sampling: greedy\n" in result.err


def test_undo_forgets_a_turn(tmp_path):
    path, messages = saved(tmp_path, "Hello\nWho are you?\n/undo\n")
    assert [message["role"] for message in messages] == ["user", "assistant"]
    result = chat(f"/load {path}\nWho are you?\n/undo\n/undo\n/undo\n/stats\n", "-q")
    assert "forgotten: 'Who are you?'\nforgotten: 'Hello'\nerror: there is no question to undo" in result.err
    assert result.err.endswith("sampling: greedy\n")


def test_another_model_continues_the_conversation(tmp_path):
    path, messages = saved(tmp_path, "/set max_tokens 3\nHello\n/model nope.gguf\nHello\n")
    assert len(messages) == 4
    result = chat(f"/load {path}\n/set max_tokens 3\n/model {MODEL}\n/retry\n/stats\n", "--ignore-eos")
    assert f"{MODEL} on simd" in result.err
    assert result.out == chat(f"/load {path}\n/retry\n", "-n", 3, "--ignore-eos", model=MODEL).out
    assert " of 4,096 tokens used" in result.err


@pytest.mark.slow
def test_a_model_that_cannot_be_used_leaves_the_other_one_running(tmp_path):
    script = "Hello\n/set logit_bias 1000=1\n/model {}\n/clear\nHello\n/model\n"
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    for model in (broken, tmp_path / "none", MODEL):  # the last one has fewer tokens than the bias
        result = chat(script.format(model), "-q")
        first, second = result.out.splitlines()
        assert first == second, result.err
        assert result.err.count("error: ") == 2


@pytest.mark.slow
def test_a_full_context_is_said_and_clear_begins_anew():
    script = "Tell me a story.\n" * 4 + "/clear\nHello\n"
    options = ("--context-len", 200, "-n", -1, "--ignore-eos")
    result = chat(script, *options)
    assert result.code == 0
    assert "context of 200 tokens is full; /clear" in result.err
    assert re.search(
        "error: the prompt has .* context_len allows 200 for .*/clear begins a new conversation", result.err
    )
    assert result.out.endswith(chat("Hello\n", *options).out)


def test_a_model_without_a_template_says_so_and_goes_on_with_the_text(plain):  # noqa: F811
    result = chat("a\nb\n", "--system", "s", "-n", 3, "-q", "--ignore-eos", model=plain)
    assert re.fullmatch("warning: .*no chat template.*\n", result.err)
    text = cli("generate", "s\n\na", "-m", plain, "-b", "simd", "-n", 3, "--no-echo", "-q", "--ignore-eos").out
    assert result.out.startswith(text)
    follow = f"s\n\na{text[:-1]}\nb"
    more = cli("generate", follow, "-m", plain, "-b", "simd", "-n", 3, "--no-echo", "-q", "--ignore-eos").out
    assert result.out == text + more


def test_a_system_message_alone_is_not_rendered_for_another_model(tmp_path):
    refuses = "{% if messages[-1].role != 'user' %}{{ raise_exception('no question') }}{% endif %}"
    path = tmp_path / "strict.gguf"
    with open_gguf(MODEL) as file:
        metadata = file.typed_metadata()
        template = f"{refuses}{{% for message in messages %}}{{{{ message.content }}}}{{% endfor %}}"
        metadata["tokenizer.chat_template"] = replace(metadata["tokenizer.chat_template"], value=template)
        write_gguf(path, metadata, [file.weight(name) for name in file.tensors])
    saved_to = tmp_path / "saved.json"
    script = f"/system a\n/model {path}\n/save {saved_to}\n/load {saved_to}\na\n"
    result = chat(script, "-q", "-n", 2, "--ignore-eos")
    assert "error" not in result.err
    assert "1 messages loaded" in result.err


def test_a_template_that_refuses_ends_the_turn_alone():
    result = chat('"""\nx\n"""\nHello\n', "-n", 2, model=MODEL)
    assert result.code == 0


# ---- a terminal ----

# The line editor asks the terminal to mark what is pasted, and begins to draw.
PROMPT = r"\x1b\[\?2004h.*>"


class Screen:
    """A process of `chat` on a terminal of its own."""

    def __init__(self, state, *args):
        import pty

        self.ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "XDG_STATE_HOME": str(state)}
        command = [sys.executable, "cli.py", "chat", "-b", "simd", *map(str, args)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
        os.close(theirs)
        self.text = ""

    def wait_for(self, pattern, seconds=PATIENCE):
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
def screen(tmp_path):
    made = []

    def start(*args):
        made.append(Screen(tmp_path, *args))
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.mark.slow
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
    assert terminal.process.wait(timeout=PATIENCE) == 0


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="terminals as POSIX has them")
def test_what_was_typed_is_kept_for_later_runs_unless_the_user_says_no(screen, tmp_path):
    for options, line in (((), "/stats"), (("--no-history",), "/set")):
        terminal = screen("-m", MODEL, *options)
        terminal.wait_for(PROMPT)
        terminal.type(f"{line}\r")
        terminal.wait_for("temperature" if line == "/set" else "sampling")
        terminal.wait_for(PROMPT)
        terminal.type("\x04")
        assert terminal.process.wait(timeout=PATIENCE) == 0
    file = tmp_path / "mlx_engine" / "chat_history"
    assert file.stat().st_mode & 0o777 == 0o600
    assert [line for line in file.read_text().splitlines() if line.startswith("+")] == ["+/stats"]
    terminal = screen("-m", MODEL)
    terminal.wait_for(PROMPT)
    terminal.type("\x1b[A\r")
    terminal.wait_for("sampling: greedy")


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="terminals as POSIX has them")
def test_what_is_typed_during_an_answer_is_for_the_next_message(screen):
    terminal = screen("-m", MODEL, "--ignore-eos", "-n", 4000, "--no-kv")
    terminal.wait_for(PROMPT)
    terminal.type("Once\r")
    terminal.wait_for("fox fox")
    terminal.type("/stats\r")
    terminal.wait_for("fox fox fox")
    terminal.process.send_signal(signal.SIGINT)
    assert "/stats" not in terminal.wait_for(r"\(stopped\)")
    terminal.wait_for("ended by Ctrl-C")
