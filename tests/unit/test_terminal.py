"""What a command prints on a terminal: no control characters of a file, no bars with --quiet, whole lines."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import struct
import sys
from pathlib import Path

import pytest
import typer

from mlx_engine.bench import roofline
from mlx_engine.bench.origin import OtherProcesses
from mlx_engine.checkpoint.gguf import open_gguf
from mlx_engine.checkpoint.gguf_values import Value, ValueType
from mlx_engine.checkpoint.gguf_writer import write_gguf
from mlx_engine.commands import app, console
from mlx_engine.observe import log

DATA = Path(__file__).parents[1] / "data" / "qwen3-micro"
MODEL = DATA / "model-q8_0.gguf"
# Sets the title of a terminal's window, and clears the screen.
COMMANDS = "\x1b]0;owned\x07\x1b[2J\x9b2J"
# What commands themselves print: the colours of typer, and the dimmed prompt.
COLOR = re.compile(r"\x1b\[\d*m")


class Terminal(io.TextIOWrapper):
    """A stream that is a terminal, and keeps what is written."""

    def __init__(self, typed: bytes = b"") -> None:
        super().__init__(io.BytesIO(typed), encoding="utf-8", newline="")

    def isatty(self) -> bool:
        return True

    def shown(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode()


@pytest.fixture
def terminal(monkeypatch):
    """Run a command on a terminal, on which stdin may be typed; return what stdout and stderr show, in their order."""

    def run(*args, typed: bytes = b"", plain: bool = True) -> str:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("NO_COLOR", "1" if plain else "")
        screen = Terminal()
        monkeypatch.setattr(sys, "stdin", Terminal(typed))
        monkeypatch.setattr(sys, "stdout", screen)
        monkeypatch.setattr(sys, "stderr", screen)
        with contextlib.suppress(typer.Exit):
            app([str(arg) for arg in args], standalone_mode=False)
        return screen.shown()

    return run


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A GGUF file, and a folder, whose strings have commands for terminals wherever a reader accepts them."""
    folder = tmp_path_factory.mktemp("hostile")
    with open_gguf(MODEL) as file:
        text = Value(ValueType.STRING, COMMANDS)
        template = Value(ValueType.STRING, f"{{{{ raise_exception({COMMANDS!r}) }}}}{COMMANDS}")
        # Without merges, text is encoded byte by byte, and the other tokens may have any text.
        tokens = [f"{token}{COMMANDS}" if len(token) > 1 else token for token in file.metadata["tokenizer.ggml.tokens"]]
        metadata = {**file.typed_metadata(), "general.name": text, f"key{COMMANDS}": text,
                    "tokenizer.chat_template": template, "tokenizer.ggml.tokens": tokens,
                    "tokenizer.ggml.merges": []}  # fmt: skip
        write_gguf(folder / "model.gguf", metadata, [file.weight(name) for name in file.tensors])
        metadata |= {"general.architecture": text}
        write_gguf(folder / "architecture.gguf", metadata, [file.weight(name) for name in file.tensors])
    hf = shutil.copytree(DATA / "hf", folder / "hf")
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps({**config, f"key{COMMANDS}": COMMANDS, "hidden_act": COMMANDS}))
    header = json.dumps({f"t{COMMANDS}": {"dtype": COMMANDS, "shape": [4], "data_offsets": [0, 4]}}).encode()
    (folder / "one.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    names = shutil.copytree(DATA / "hf", folder / "names")
    shutil.copy(folder / "one.safetensors", names / "model.safetensors")
    return folder


@pytest.mark.some(3)
@pytest.mark.parametrize(
    "args",
    [
        ("inspect", "model.gguf"),
        ("inspect", "model.gguf", "--meta", "general.name"),
        ("inspect", "model.gguf", "--meta", "tokenizer.chat_template"),
        ("inspect", "model.gguf", "--meta", "tokenizer.ggml.tokens"),
        ("inspect", "model.gguf", "--meta", "nothing"),
        ("inspect", "model.gguf", "--verify"),
        ("inspect", "architecture.gguf"),
        ("inspect", "architecture.gguf", "--verify"),
        ("inspect", "hf"),
        ("inspect", "hf", "--verify"),
        ("inspect", "one.safetensors"),
        ("inspect", "one.safetensors", "--stats", "--head", 1),
        ("inspect", "names", "--verify"),
        ("generate", "-m", "model.gguf", "-n", 20, "--ignore-eos", "--temp", 2, "--seed", 1),
        ("generate", "-m", "model.gguf", "-n", 1, "--logprobs", 2),
        ("generate", "-m", "model.gguf", "-n", 1, "--chat"),
        ("generate", "-m", "architecture.gguf"),
        ("generate", "-m", "hf"),
        ("generate", "-m", "names"),
        ("generate", COMMANDS, "-m", MODEL, "-n", 1),
        ("generate", "-m", COMMANDS),
        ("tokenize", "info", "-m", "model.gguf"),
        ("tokenize", "info", "-m", "model.gguf", "--lookup", 300),
        ("tokenize", "decode", "300", "-m", "model.gguf"),
        ("tokenize", "encode", "once upon a time", "--pieces", "-m", "model.gguf"),
        ("quantize", "architecture.gguf", "out.gguf"),
        ("bench", "-m", "hf"),
        ("bench", "-m", "model.gguf", "-p", 1, "-n", 1, "-r", 1),
    ],
    ids=lambda args: " ".join(map(ascii, args)),
)
def test_commands_in_a_file_never_reach_a_terminal(hostile, terminal, monkeypatch, args):
    monkeypatch.chdir(hostile)
    monkeypatch.setattr(roofline, "SECONDS", 1e-4)
    shown = terminal(*args)
    assert shown
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", COLOR.sub("", shown)), ascii(shown)


# ---- bars and lines ----


@pytest.mark.parametrize("how", ["--quiet", "--json"])
def test_a_quiet_run_draws_no_bars(terminal, how):
    options = ("-m", MODEL, "-b", "simd", "-n", 2)
    assert "\x1b[?25l" in terminal("generate", "Once", *options, plain=False)
    shown = terminal("generate", "Once", *options, how, plain=False)
    assert "\x1b" not in shown.replace("\x1b[2mOnce\x1b[0m", "")
    assert len(shown.splitlines()) == 1


def test_a_quiet_chat_draws_no_bars(terminal, monkeypatch):
    monkeypatch.setattr("mlx_engine.commands.chat.typed_messages", lambda *_, **__: iter(["Once"]))
    options = ("-m", MODEL, "-b", "simd", "-n", 2)
    assert "\x1b[?25l" in terminal("chat", *options, plain=False)
    assert "\x1b" not in terminal("chat", *options, "--quiet", plain=False)


@pytest.mark.some(2)
@pytest.mark.parametrize("ending", [b"", b"\n"])
@pytest.mark.parametrize("plain", [True, False])
def test_each_answer_of_a_batch_is_a_line_of_its_own(terminal, ending, plain):
    typed = b"Once upon a time\nthe end" + ending
    shown = terminal("generate", "--batch-file", "-", "-m", MODEL, "-n", 3, "--quiet", typed=typed, plain=plain)
    echo = [] if ending else [""]  # ends the line that was typed
    begins = [COLOR.sub("", line)[:11] for line in shown.splitlines()]
    assert begins == [*echo, "[1] Once up", "[2] the end"]


def test_the_rate_of_a_run_is_that_of_decode(terminal):
    shown = terminal("generate", "Once upon a time", "-m", MODEL, "-b", "simd", "-n", 5, "--ignore-eos", "-v")
    rate = re.search(
        r"^5 tokens in \S+ s of forward passes: first token after (\S+) ms, then (\S+) tokens/s$", shown, re.M
    )
    metrics = [re.search(f"{name}: (\\S+)$", shown, re.M)[1] for name in ("first_token_ms", "decode_tokens_per_second")]
    assert [float(number.replace(",", "")) for number in rate.groups()] == pytest.approx(
        [*map(float, metrics)], abs=0.06
    )
    assert shown.count("tokens/s") == 1


# ---- what is no text ----


def test_what_was_found_is_quoted_only_if_it_is_a_value(terminal):
    assert terminal("generate", "", "-m", MODEL).endswith("error: the prompt is empty\n")
    assert terminal("bench", "-m", MODEL, "-o", "nothing").endswith(
        "unknown format 'nothing'; choose md, csv, json or jsonl\n"
    )


@pytest.mark.parametrize(
    ("args", "option"),
    [
        (("generate", "a\udcff"), "prompt"),
        (("generate", "a", "--chat", "--system", "\udcff"), "--system"),
        (("generate", "a", "--stop", "\udcff"), "--stop"),
        (("tokenize", "encode", "\udcff"), "text"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_bytes_that_are_no_text_are_named_with_their_option(terminal, args, option):
    shown = terminal(*args, "-m", MODEL)
    assert shown.startswith(f"error: {option} ")
    assert "UTF-8" in shown or "Unicode" in shown
    assert str(MODEL) not in shown
    assert len(shown.splitlines()) == 1


@pytest.mark.slow
def test_a_sweep_draws_its_bars_on_a_terminal(terminal, tmp_path, monkeypatch):
    monkeypatch.setattr(roofline, "SECONDS", 1e-4)
    shown = terminal(
        "bench", "-m", MODEL, "--sweep", "-b", "simd", "-p", 2, "-n", 1, "--budget", 0.01, "--out", tmp_path
    )
    assert "prefill, pp2: tokens per second (log scale)" in shown
    assert "decode, tg1: tokens per second (log scale)" in shown
    assert "█" in shown
    assert "█" not in (tmp_path / "sweep.md").read_text()


@pytest.mark.slow
def test_figures_that_are_not_usable_are_red(terminal, monkeypatch, tmp_path):
    monkeypatch.setattr(roofline, "SECONDS", 1e-4)
    monkeypatch.setattr(OtherProcesses, "share", lambda self: 0.43)
    command = ["report", "-m", MODEL, "-b", "simd", "-p", 2, "-n", 1, "-r", 1, "--out", tmp_path, "--json"]
    assert terminal(*command, plain=False).endswith("end them and measure again\x1b[0m\n")
    assert "\n\x1b[31mnot usable: " in terminal(*command, plain=False)
    assert "\x1b[31m" not in terminal(*command)


def test_a_bar_that_begins_while_another_is_shown_is_a_line_of_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(console, "is_plain", lambda stream: False)
    with console.progress_bar("loading") as loading:
        loading(3, 35)
        with console.bar_of_parts("compiling kernels") as compiling:
            assert compiling is not None
            compiling(1, 2, "q8_0")
            shown = console._shown
            assert shown is not None
            assert [(task.description, task.completed, task.total) for task in shown.tasks] == [
                ("loading", 3, 35),
                ("compiling kernels: q8_0", 1, 2),
            ]
        assert [task.description for task in shown.tasks] == ["loading"]
    assert console._shown is None


def test_without_a_terminal_there_is_no_bar_of_parts():
    with console.bar_of_parts("compiling kernels") as bar:
        assert bar is None


def test_a_quiet_run_has_no_bar_of_parts_either(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(log, "show_bar", console.bar_of_parts)
    with console.progress_bar("loading", quiet=True), log.progress_bar("compiling kernels") as bar:
        assert bar is None
    assert log.show_bar is console.bar_of_parts
