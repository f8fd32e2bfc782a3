"""`generate` and `backends` as a user meets them: what goes where, exit codes, and one line for every mistake."""

import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from mlx_engine.backends import auto, backend_names
from mlx_engine.commands import app
from mlx_engine.commands.generate import PromptOptions
from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "qwen3-micro"
MODEL = str(DATA / "model-f32.gguf")
NO_METAL = platform.system() != "Darwin" or platform.machine() != "arm64"


def cli(*args, stdin=None):
    """Exit code, stdout and stderr of a command, run in this process."""
    result = CliRunner().invoke(app, [str(a) for a in args], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return SimpleNamespace(code=result.exit_code, out=result.stdout, err=result.stderr)


def generate(*args, model=MODEL, backend="simd", stdin=None):
    return cli("generate", "--model", model, "--backend", backend, *args, stdin=stdin)


def process(*args, timeout=PATIENCE, **kwargs):
    command = [sys.executable, "cli.py", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, timeout=timeout, **kwargs)


def only_line(result):
    """The one line on stderr of a run that wrote nothing else."""
    assert result.out == ""
    assert "Traceback" not in result.err
    (line,) = result.err.splitlines()
    return line


# ---- what a run prints ----


def test_text_goes_to_stdout_and_everything_else_to_stderr():
    result = generate("Once upon a time", "-n", 8, "--verbose")
    as_json = json.loads(generate("Once upon a time", "-n", 8, "--json").out)
    assert result.code == 0
    assert result.out == "Once upon a time" + as_json["text"] + "\n"
    assert "backend simd" in result.err
    assert "tokens" in result.err
    assert "time_to_first_token_ms" in result.err
    assert "Once upon a time" not in result.err
    assert generate("Once upon a time", "-n", 8, "--quiet").out == result.out


def test_no_echo_prints_the_generated_text_alone():
    text = json.loads(generate("Once upon a time", "-n", 8, "--json").out)["text"]
    assert generate("Once upon a time", "-n", 8, "--no-echo").out == text + "\n"


def test_a_run_without_a_new_token_has_no_time_to_the_first_one():
    result = generate("Once", "-n", 0)
    assert result.out == "Once\n"
    assert result.err.splitlines()[-1].endswith("ended by length: no token")


def test_a_prompt_is_printed_as_it_was_read(tmp_path):
    prompt = "Über\n  zwei Zeilen "
    (tmp_path / "prompt.txt").write_bytes(f"{prompt}\n".encode())
    text = json.loads(generate(prompt, "-n", 4, "--json").out)["text"]
    for given in (("--prompt-file", tmp_path / "prompt.txt"), ("-",), ()):
        assert generate(*given, "-n", 4, stdin=f"{prompt}\n".encode()).out == prompt + text + "\n"


@pytest.mark.some(2)
@pytest.mark.skipif(os.name != "posix", reason="terminals as POSIX has them")
@pytest.mark.parametrize(
    ("options", "environment", "shown"),
    [
        ((), {}, "\x1b[2mOnce\x1b[0m"),
        ((), {"NO_COLOR": "1"}, "Once"),
        ((), {"TERM": "dumb"}, "Once"),
        (("--no-echo",), {}, ""),
    ],
    ids=["dimmed", "NO_COLOR", "dumb", "no echo"],
)
def test_a_terminal_shows_the_prompt_dimmed(options, environment, shown, monkeypatch):
    import pty

    text = json.loads(generate("Once", "-n", 4, "--json").out)["text"]
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"TERM": "xterm", **environment}.items():
        monkeypatch.setenv(name, value)
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb") as screen, os.fdopen(theirs, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        app(["generate", "Once", "-m", MODEL, "-b", "simd", "-n", "4", "-q", *options], standalone_mode=False)
        terminal.flush()
        printed = screen.readline().decode()
    assert printed.replace("\r\n", "\n") == f"{shown}{text}\n"


def test_json_is_one_object_with_the_keys_of_the_contract():
    result = generate("Once upon a time", "-n", 5, "--ignore-eos", "--json")
    assert result.code == 0
    assert len(result.out.splitlines()) == 1
    run = json.loads(result.out)
    assert run.keys() == {"prompt_ids", "token_ids", "text", "finish_reason", "backend", "metrics"}
    assert run["backend"].keys() == {"requested", "used", "device", "activations", "kv_type"}
    assert (run["backend"]["requested"], run["backend"]["used"]) == ("simd", "simd")
    assert len(run["token_ids"]) == 5
    assert all(isinstance(i, int) for i in run["prompt_ids"] + run["token_ids"])
    assert run["finish_reason"] == "length"
    assert run["metrics"]["time_to_first_token_ms"] > 0
    assert run["metrics"]["decode_tokens_per_second"] > 0
    assert len(run["metrics"]["per_pass_ms"]) == 5


def test_json_has_null_for_what_is_undefined():
    run = json.loads(generate("a", "-n", 1, "--json").out)
    assert run["metrics"]["decode_tokens_per_second"] is None


def test_the_cache_changes_no_token():
    with_cache, without = (
        json.loads(generate("Once", "-n", 12, "--ignore-eos", kv, "--json").out) for kv in ("--kv", "--no-kv")
    )
    assert with_cache["token_ids"] == without["token_ids"]


def test_the_same_seed_writes_the_same_and_options_arrive():
    def text(*more):
        return json.loads(generate("a", "-n", 30, "--ignore-eos", "--temp", 3, *more, "--json").out)["token_ids"]

    assert text("--seed", 1) == text("--seed", 1)
    assert text("--seed", 1) != text("--seed", 2)
    greedy = json.loads(generate("a", "-n", 30, "--ignore-eos", "--json").out)["token_ids"]
    assert text("--top-k", 1) == text("--top-p", 1e-9) == text("--top-p", 0) == text("--min-p", 1) == greedy


def test_stop_strings_end_the_text():
    options = ("a", "-n", 40, "--ignore-eos", "--temp", 2, "--seed", 1)
    whole = json.loads(generate(*options, "--json").out)["text"]
    stop = whole[5:7]
    run = json.loads(generate(*options, "--stop", "never there", "--stop", stop, "--json").out)
    assert (run["text"], run["finish_reason"], run["stop"]) == (whole.partition(stop)[0], "stop", stop)


def test_a_stop_token_ends_the_text():
    whole = json.loads(generate("Once", "-n", 9, "--ignore-eos", "--json").out)
    end = whole["token_ids"][4]
    run = json.loads(generate("Once", "-n", 9, "--stop-token-id", 1, "--stop-token-id", end, "--json").out)
    n = whole["token_ids"].index(end) + 1
    assert (run["token_ids"], run["finish_reason"], run["stop"]) == (whole["token_ids"][:n], "stop", end)
    assert whole["text"].startswith(run["text"])


# ---- backends ----


@pytest.mark.skipif(not NO_METAL, reason="this machine has Metal")
def test_a_backend_that_is_not_here_is_replaced_in_one_line_and_the_metrics_say_so():
    result = generate("a", "-n", 2, "--json", backend="metal")
    assert result.code == 0
    (line,) = result.err.splitlines()
    assert "metal" in line
    assert auto() in line
    assert json.loads(result.out)["backend"]["requested"] == "metal"
    assert json.loads(result.out)["backend"]["used"] == auto()
    assert f"backend {auto()}" in generate("a", "-n", 2, backend="metal").err


@pytest.mark.skipif(not NO_METAL, reason="this machine has Metal")
def test_strict_refuses_a_backend_that_is_not_here_before_the_model_is_looked_for():
    result = generate("a", "--strict", backend="metal", model="nope.gguf")
    assert result.code == 2
    line = only_line(result)
    assert "metal" in line
    assert "nope" not in line


@pytest.mark.parametrize("strict", [(), ("--strict",)], ids=["", "strict"])
def test_an_unknown_backend_is_wrong_use_and_the_known_ones_are_named(strict):
    result = generate("a", *strict, backend="gpu", model="nope.gguf")
    assert result.code == 2
    line = only_line(result)
    assert "gpu" in line
    assert all(name in line for name in backend_names())


def test_an_unknown_backend_is_refused_before_stdin_is_read(monkeypatch):
    monkeypatch.setattr(PromptOptions, "read", lambda *_, **__: pytest.fail("the prompt was read"))
    with pytest.raises(pytest.fail.Exception):
        generate("-")
    assert generate("-", backend="gpu").code == 2


# ---- wrong use ----


@pytest.mark.parametrize(
    "options",
    [
        ("--temp", "-1"), ("--temp", "nan"), ("--temp", "inf"), ("--temp", "warm"),
        ("--top-k", "0"), ("--top-k", "-3"), ("--top-k", "1.5"),
        ("--top-p", "-0.1"), ("--top-p", "1.5"), ("--top-p", "nan"),
        ("--min-p", "-0.1"), ("--min-p", "2"), ("--min-p", "nan"),
        ("--repetition-penalty", "0"), ("--repetition-penalty", "-1"), ("--repetition-penalty", "nan"),
        ("--seed", "-1"), ("--seed", "x"),
        ("--max-tokens", "-5"), ("--max-tokens", "ten"),
        ("--speculate", "draft"), ("--adapter", "a", "--adapter", "b"),
        ("--stop", ""), ("--quant", "q3"), ("--threads", "0"), ("--threads", "-2"),
        ("--quant-min-dim", "many"), ("--quant-min-dim", "-1"),
        ("--quant-layer", "attn_v"), ("--quant-layer", "attn_w=f32"),
        ("--no-such-option",),
    ],
    ids=" ".join,
)  # fmt: skip
def test_wrong_use_is_exit_2_before_the_model_is_looked_for(options):
    result = generate(*options, model="nope.gguf")
    assert result.code == 2
    assert result.out == ""
    assert "nope" not in result.err
    assert "Traceback" not in result.err
    assert options[0].strip("-").replace("-", "_").split("_")[0] in result.err.replace("-", "_")


def test_two_arguments_are_wrong_use():
    result = generate("one", "two", model="nope.gguf")
    assert result.code == 2
    assert "two" in result.err


def test_an_empty_prompt_is_wrong_use():
    assert generate("").code == 2


def test_a_prompt_longer_than_the_context_is_wrong_use():
    result = generate("a", "-n", 5000)
    assert result.code == 2
    assert "4,096" in only_line(result)


@pytest.mark.parametrize(
    "model", ["nope.gguf", "below/nope.gguf", str(DATA), str(DATA / "golden.npz"), str(ROOT / "cli.py")]
)
def test_a_model_that_cannot_be_loaded_is_exit_1_and_one_line(model):
    result = generate("a", model=model)
    assert result.code == 1
    line = only_line(result)
    assert line.startswith("error: ")
    assert model in line


# ---- where the prompt comes from ----


def ids_of(result):
    assert result.code == 0, result.err
    return json.loads(result.out)["prompt_ids"]


def test_the_prompt_comes_from_an_argument_stdin_or_a_file(tmp_path):
    text = "Über\n  zwei Zeilen"
    (tmp_path / "prompt.txt").write_text(text, encoding="utf-8")
    want = ids_of(generate(text, "-n", 1, "--json"))
    assert ids_of(generate("-", "-n", 1, "--json", stdin=text)) == want
    assert ids_of(generate("--prompt-file", tmp_path / "prompt.txt", "-n", 1, "--json")) == want
    assert ids_of(generate("-n", 1, "--json")) == ids_of(generate("Once upon a time", "-n", 1, "--json"))


def test_a_file_and_stdin_are_read_alike_to_the_byte(tmp_path):
    text = "one\r\ntwo\rthree"
    (tmp_path / "prompt.txt").write_bytes(text.encode())
    from_file = ids_of(generate("--prompt-file", tmp_path / "prompt.txt", "-n", 1, "--json"))
    assert from_file == ids_of(generate("-", "-n", 1, "--json", stdin=text.encode()))


@pytest.mark.parametrize("prompt", ["text", "-"])
def test_two_prompts_are_wrong_use(tmp_path, prompt):
    (tmp_path / "prompt.txt").write_text("text")
    result = generate(prompt, "--prompt-file", tmp_path / "prompt.txt", model="nope.gguf", stdin="text")
    assert result.code == 2
    assert "give the prompt either as an argument or as a file" in only_line(result)


def test_a_prompt_file_that_is_not_there_is_one_line(tmp_path):
    result = generate("--prompt-file", tmp_path / "nothing.txt", model="nope.gguf")
    assert result.code in (1, 2)
    assert "nothing.txt" in only_line(result)


def test_a_prompt_that_is_not_utf_8_is_wrong_use(tmp_path):
    (tmp_path / "prompt.txt").write_bytes(b"\xff\xfe")
    result = generate("--prompt-file", tmp_path / "prompt.txt", model="nope.gguf")
    assert result.code == 2
    assert "UTF-8" in only_line(result)
    assert generate("-", model="nope.gguf", stdin=b"\xff").code == 2


def test_an_argument_that_is_not_utf_8_is_one_line():
    result = generate("-n", 1, b"a\xff".decode(errors="surrogateescape"))
    assert result.code == 2
    assert "UTF-8" in only_line(result)


# ---- as a process ----


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
@pytest.mark.parametrize("more", [(), ("--json", "--log-level", "info")], ids=["text", "json"])
def test_an_interrupted_run_exits_130_without_a_traceback(more):
    command = [sys.executable, "-u", "cli.py", "generate", "a", "-m", MODEL, "-b", "simd", "--no-kv"]
    run = subprocess.Popen(
        [*command, "--ignore-eos", "-n", "4000", *more],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A process started in the background inherits an ignored SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        if more:
            assert any(line.startswith(b"token ") for line in run.stderr), "expected a line about a token"
        else:
            assert run.stdout.read(1), "expected a token"
        assert run.poll() is None, "it ended before it could be interrupted"
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=PATIENCE)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 130
    assert b"Traceback" not in err
    assert b"interrupted" in err


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="pipes as POSIX has them")
def test_a_reader_that_leaves_is_no_traceback():
    command = f"{sys.executable} cli.py generate a -m {MODEL} -b simd --ignore-eos -n 400 | head -c 1"
    run = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, timeout=PATIENCE)
    assert len(run.stdout) == 1
    assert b"Traceback" not in run.stderr
    assert b"Exception ignored" not in run.stderr


def test_text_that_the_terminal_cannot_show_is_no_traceback():
    options = ("-m", MODEL, "-b", "simd", "--ignore-eos", "-n", "60", "--temp", "3", "--seed", "1")
    result = CliRunner(charset="ascii").invoke(app, ["generate", "a", *options])
    assert result.exit_code == 0, result.exception
