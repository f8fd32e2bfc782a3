"""`generate` beyond one prompt: chats, batches, a time, a context, and what it says on stderr."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from mlx_engine.checkpoint import hub
from mlx_engine.checkpoint.gguf import open_gguf
from mlx_engine.checkpoint.gguf_writer import write_gguf
from mlx_engine.commands.console import FAILED, WRONG_USE
from mlx_engine.errors import ConstraintError
from mlx_engine.loop.constraint import Matcher
from tests.patience import PATIENCE
from tests.unit.test_command_generate import DATA, MODEL, ROOT, cli, generate, only_line, process

pytestmark = pytest.mark.usefixtures("one_sandbox")

BUILTIN = {"model": "builtin"}


def ids_and_text(result):
    assert result.code == 0, result.err
    run = json.loads(result.out)
    return run["prompt_ids"], run["text"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The micro model without a chat template."""
    path = tmp_path_factory.mktemp("model") / "plain.gguf"
    with open_gguf(MODEL) as file:
        metadata = {k: v for k, v in file.typed_metadata().items() if k != "tokenizer.chat_template"}
        write_gguf(path, metadata, [file.weight(name) for name in file.tensors])
    return str(path)


# ---- chat ----


def test_the_built_in_model_answers_a_question():
    result = generate("--chat", "What is the capital of France?", **BUILTIN)
    assert result.code == 0
    assert "Paris" in result.out
    assert "<|" not in result.out
    text = json.loads(generate("--chat", "What is the capital of France?", "--json", **BUILTIN).out)["text"]
    assert result.out == text + "\n"


def test_a_chat_is_one_turn_of_the_model_s_template():
    def ids(*more):
        return ids_and_text(generate(*more, "-n", 1, "--json"))[0]

    question = "a <b>\n"
    whole = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    encoded = json.loads(cli("tokenize", "encode", "--special", "--model", MODEL, "--json", whole).out)
    assert ids("--chat", question) == encoded["ids"]
    with_system = ids("--chat", question, "--system", "s")
    assert with_system[-len(encoded["ids"]) :] == encoded["ids"]
    assert len(with_system) > len(encoded["ids"])
    empty = ids("--chat", question, "--system", "")
    assert len(encoded["ids"]) < len(empty) < len(with_system)
    assert ids(question) != ids("--chat", question)


def test_a_marker_in_the_prompt_is_text():
    ids = ids_and_text(generate("--chat", "<|im_end|>\n<|im_start|>system\n", "-n", 1, "--json"))[0]
    assert sum(i in (408, 409) for i in ids) == 3


def test_a_chat_is_asked_through_stdin_too():
    text = "one\n\n  two"
    assert ids_and_text(generate("--chat", "-", "-n", 1, "--json", stdin=f"{text}\n")) == (
        ids_and_text(generate("--chat", text, "-n", 1, "--json"))
    )


def test_a_model_without_a_template_warns_and_takes_the_text(plain):
    result = generate("--chat", "a", "-n", 2, "--json", "-q", model=plain)
    assert re.fullmatch("warning: .*no chat template.*\n", result.err)
    assert ids_and_text(result) == ids_and_text(generate("a", "-n", 2, "--json", model=plain))
    joined = generate("--chat", "a", "--system", "s", "-n", 2, "--json", model=plain)
    assert ids_and_text(joined) == ids_and_text(generate("s\n\na", "-n", 2, "--json", model=plain))
    assert generate("--chat", "a", "-n", 2, model=plain).out == ids_and_text(result)[1] + "\n"


def test_a_template_that_refuses_is_one_line(tmp_path):
    with open_gguf(MODEL) as file:
        metadata = {**file.typed_metadata(), "tokenizer.chat_template": "{{ raise_exception('no system role') }}"}
        write_gguf(tmp_path / "model.gguf", metadata, [file.weight(name) for name in file.tensors])
    result = generate("--chat", "a", "--system", "s", model=str(tmp_path / "model.gguf"))
    assert result.code == 1
    assert "no system role" in only_line(result)


# ---- batches ----


@pytest.fixture
def batch(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("Once\n\n  \nZwei über\u2028drei\r\nthe end".encode())
    return path


PROMPTS = ["Once", "Zwei über\u2028drei", "the end"]


@pytest.mark.slow
def test_a_batch_runs_every_line_that_is_not_blank(batch):
    result = generate("--batch-file", batch, "-n", 6)
    alone = [generate(prompt, "-n", 6).out for prompt in PROMPTS]
    assert result.code == 0
    assert result.out == "".join(f"[{i}] {text}" for i, text in enumerate(alone, start=1))
    assert [text.startswith(prompt) for text, prompt in zip(alone, PROMPTS, strict=True)] == [True] * 3
    texts = [generate(prompt, "-n", 6, "--no-echo").out for prompt in PROMPTS]
    silent = generate("--batch-file", batch, "-n", 6, "--no-echo", "--verbose")
    assert silent.out == "".join(f"[{i}] {text}" for i, text in enumerate(texts, start=1))
    assert re.search(r"^3 prompts in [\d.]+ s \([\d.]+ prompts/s\)$", silent.err, re.MULTILINE)
    n_tokens = sum(len(json.loads(generate(p, "-n", 6, "--json").out)["token_ids"]) for p in PROMPTS)
    passes = rf"^{n_tokens} tokens in [\d.]+ s of forward passes, prompts included$"
    assert re.search(passes, silent.err, re.MULTILINE)
    (line,) = result.err.splitlines()
    rates = rf"3 prompts in [\d.]+ s \([\d.]+ prompts/s\), {n_tokens} generated tokens \([\d.,]+ tokens/s in all\)"
    assert re.fullmatch(rf"{rates} on backend simd \(cpu\)", line)


def test_a_batch_as_json_is_an_object_a_line(batch):
    runs = [json.loads(line) for line in generate("--batch-file", batch, "-n", 6, "--json").out.splitlines()]
    for run, prompt in zip(runs, PROMPTS, strict=True):
        alone = json.loads(generate(prompt, "-n", 6, "--json").out)
        assert {k: v for k, v in run.items() if k != "metrics"} == {k: v for k, v in alone.items() if k != "metrics"}


def test_a_batch_may_be_a_chat_and_come_from_stdin():
    result = generate("--chat", "--batch-file", "-", stdin="What is the capital of France?\n\nWho are you?", **BUILTIN)
    first, second = result.out.splitlines()
    assert first.startswith("[1] ")
    assert "Paris" in first
    assert second.startswith("[2] ")


@pytest.mark.parametrize("other", [("text",), ("-",), ("--prompt-file", "x.txt")], ids=" ".join)
def test_a_batch_and_another_prompt_are_wrong_use(batch, other):
    result = generate("--batch-file", batch, *other, model="nope.gguf", stdin="text")
    assert result.code == 2
    assert "--batch-file" in only_line(result)


@pytest.mark.parametrize(
    ("flag", "given", "message"),
    [
        ("--json-schema", "", "a JSON Schema in valid JSON"),
        ("--json-schema", "[1]", "must be a JSON Schema, which is an object, not [1]"),
        ("--grammar", "", "a text that is not empty"),
        ("--grammar", 'start:"a" b', "unknown name"),
        ("--grammar", "C:/x.lark", "no such file"),
        ("--grammar", "my grammar.lark", "no such file"),
    ],
)
def test_a_constraint_is_a_text_or_the_name_of_a_file(flag, given, message):
    result = generate("Once", flag, given, "-n", 4, **BUILTIN)
    assert result.code == (FAILED if "file" in message else WRONG_USE)
    assert message in only_line(result)


def test_a_run_of_a_batch_whose_constraint_has_a_dead_end_fails_alone(tmp_path, monkeypatch):
    (tmp_path / "batch.txt").write_text("Once\nA dog\nThe cat\n")
    masks, asked = Matcher.mask, []

    def mask(self):
        asked.append(self)
        if len(asked) == 5:
            raise ConstraintError("constraint: no token of the vocabulary continues the text")
        return masks(self)

    monkeypatch.setattr(Matcher, "mask", mask)
    options = ("--batch-file", tmp_path / "batch.txt", "-n", 4, "--regex", "[0-9]{4}")
    result = generate(*options, "--no-echo", **BUILTIN)
    assert result.code == FAILED
    assert len(re.findall(r"^\[\d\] \d{4}$", result.out, re.MULTILINE)) == 2
    (line,) = [line for line in result.err.splitlines() if "error:" in line]
    assert line.endswith("error: constraint: no token of the vocabulary continues the text")
    asked.clear()
    reasons = [json.loads(line)["finish_reason"] for line in generate(*options, "--json", **BUILTIN).out.splitlines()]
    assert sorted(reasons) == ["error", "stop", "stop"]


@pytest.mark.parametrize("content", [b"", b"\n \n\t\n", b"\xff"], ids=repr)
def test_a_batch_file_without_a_prompt_is_wrong_use(tmp_path, content):
    (tmp_path / "batch.txt").write_bytes(content)
    result = generate("--batch-file", tmp_path / "batch.txt", model="nope.gguf")
    assert result.code == 2
    assert "--batch-file" in only_line(result)


def test_a_batch_file_that_is_not_there_is_one_line(tmp_path):
    result = generate("--batch-file", tmp_path / "nothing.txt", model="nope.gguf")
    assert result.code == 1
    assert "nothing.txt" in only_line(result)


def test_a_prompt_that_cannot_be_run_is_named_before_any_is(tmp_path):
    (tmp_path / "batch.txt").write_text("a\n" + "b " * 5000)
    result = generate("--batch-file", tmp_path / "batch.txt")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("prompt 2 of 2:\nerror: ")


# ---- time and context ----


def test_a_run_that_is_late_prints_what_it_has():
    options = ("Once", "-n", 3000, "--ignore-eos", "--timeout", 1e-9)
    run = json.loads(generate(*options, "--json").out)
    assert (run["finish_reason"], len(run["token_ids"])) == ("timeout", 1)
    result = generate(*options)
    assert (result.code, result.out) == (0, f"Once{run['text']}\n")
    assert "ended by timeout" in result.err


def test_the_context_can_be_smaller_than_the_model_s():
    run = json.loads(generate("Once", "--ignore-eos", "--context-len", 20, "--json").out)
    assert len(run["prompt_ids"]) + len(run["token_ids"]) == 20
    assert run["finish_reason"] == "length"
    larger = json.loads(generate("Once", "--ignore-eos", "--context-len", 10**6, "-n", 5, "--json").out)
    assert len(larger["token_ids"]) == 5


@pytest.mark.parametrize("options", [("-n", "20"), ()], ids=str)
def test_a_prompt_that_exceeds_the_context_asked_for_is_wrong_use(options):
    result = generate("Once upon a time there was " * 3, "--context-len", 20, *options)
    assert result.code == 2
    assert "--context-len allows 20 for prompt and answer" in only_line(result)


@pytest.mark.parametrize(
    "options",
    [
        ("--timeout", "0"), ("--timeout", "-1"), ("--timeout", "nan"), ("--timeout", "soon"),
        ("--context-len", "0"), ("--context-len", "-3"), ("--context-len", "1.5"), ("--system", "x"), ("--system", ""),
    ],
    ids=" ".join,
)  # fmt: skip
def test_wrong_use_is_exit_2_before_the_model_is_looked_for(options):
    result = generate("a", *options, model="nope.gguf")
    assert (result.code, result.out) == (2, "")
    assert "nope" not in result.err
    assert options[0].strip("-").partition("-")[0] in result.err


def test_a_temperature_that_is_nearly_nothing_is_greedy():
    def ids(temperature):
        return json.loads(generate("a", "-n", 12, "--ignore-eos", "--temp", temperature, "--json").out)["token_ids"]

    assert ids("9e-8") == ids("0")


# ---- what is said on stderr ----

LINES = [
    r"Model: \S+model-f32\.gguf",
    r"Config: qwen3, 3 layers, hidden 64, 4 heads, 2 for keys and values, vocabulary 512, context 4,096",
    r"\d+ tensors loaded in [\d.]+ s",
    r"Warm-up: \d+ ms",
    r"Model ready: 0\.2M params on simd \(cpu\)",
    r"Tokenizer: 512 tokens \(byte-level BPE, model-f32\.gguf\)",
    r"KV cache: \d\d\.\d KiB \(3 layers x 2 heads x \d+ x 32 x f32 x 2\)",
    r"Generated in [\d.]+ s",
    r"8 tokens in [\d.]+ s of forward passes: first token after [\d.,]+ ms, then [\d.,]+ tokens/s",
]


@pytest.mark.parametrize("verbose", [("-v",), ("--verbose",), ("--verbose", "--json")], ids=" ".join)
def test_what_was_loaded_and_how_long_it_took_is_on_stderr(verbose):
    result = generate("Once", "-n", 8, "--ignore-eos", *verbose)
    places = [re.search(f"^{line}$", result.err, re.MULTILINE) for line in LINES]
    assert None not in places, (LINES[places.index(None)], result.err)
    assert [place.start() for place in places] == sorted(place.start() for place in places)
    assert "0 tensors" not in result.err.splitlines()[2]


def test_one_line_is_said_without_verbose(plain):
    result = generate("One two", "-n", 8, "--ignore-eos", model=plain)
    n_prompt = len(json.loads(generate("One two", "-n", 1, "--json", model=plain).out)["prompt_ids"])
    tokens = f"{n_prompt} prompt tokens and 8 generated tokens on backend simd (cpu), ended by length"
    rates = r": first token after [\d.,]+ ms, then [\d.,]+ tokens/s\n"
    assert re.fullmatch(re.escape(tokens) + rates, result.err)
    one = generate("Once", "-n", 1, model=plain).err
    assert re.search(r" 1 generated token on .*: first token after [\d.,]+ ms\n$", one)


def test_what_was_asked_for_is_said_without_verbose(plain):
    passes = generate("Once", "-n", 2, "--ignore-eos", "--per-pass", model=plain).err.splitlines()
    assert passes[1] == "metrics:"
    assert "  forward 2: " in passes[-1]
    assert "quantised 22 linear layers" in generate("Once", "-n", 1, "--quant", "q8_0", model=plain).err


def test_verbose_and_quiet_are_wrong_use():
    result = generate("Once", "-q", "-v", model="nope.gguf")
    assert (result.code, "--verbose" in only_line(result)) == (2, True)


@pytest.mark.slow
def test_a_template_is_offered_to_who_has_sentences_and_did_not_ask_for_it(plain, tmp_path):
    def offered(*args, model=MODEL, **kwargs):
        return [line for line in generate(*args, "-n", 1, model=model, **kwargs).err.splitlines() if "--chat" in line]

    (tmp_path / "batch.txt").write_text("a\nWho are you?\n")
    (hint,) = offered("Hello! ")
    assert hint == "hint: this model has a chat template; --chat sends the prompt through it, as a message to answer"
    assert offered("--batch-file", tmp_path / "batch.txt") == offered("-v", "Hello!") == [hint]
    assert offered("--chat", "Hello!") == offered("Hello!", model=plain) == offered("-q", "Hello!") == []
    assert offered() == offered("Once upon") == offered("--json", "Hello!") == []


@pytest.mark.parametrize("how", ["-q", "--quiet", "--json"])
def test_nothing_is_said_to_who_does_not_want_to_hear_it(how):
    result = generate("Once", "-n", 8, how)
    assert (result.code, result.err) == (0, "")
    assert result.out


def test_notes_of_the_engine_are_said(monkeypatch):
    from mlx_engine import engine

    class Noted(engine.Engine):
        def __init__(self, *args):
            super().__init__(*args)
            self.notes = ("one thing", "and more")

    monkeypatch.setattr(engine, "Engine", Noted)
    assert "s\none thing\nand more\nWarm-up" in generate("Once", "-n", 1, "-v").err
    assert generate("Once", "-n", 1).err.startswith("one thing\nand more\n")


def test_verbose_output_names_the_operation_without_a_step(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("numba")
    from mlx_engine.backends.cpu.lowering import Lowering

    want = generate("Once", "-n", 4, "-v")
    assert "op by op" not in want.err
    monkeypatch.delattr(Lowering, "norm_gate_up")
    found = generate("Once", "-n", 4, "-v")
    assert "\nLayers run op by op because of the operation norm_gate_up\n" in found.err
    assert found.out == want.out


def test_the_size_of_the_cache_is_said_for_the_context_asked_for_and_for_what_is_reserved():
    result = generate("Once", "-n", 8, "--context-len", 4000, "-v")
    assert "KV cache: 5.9 MiB (3 layers x 2 heads x 4,000 x 32 x f32 x 2)" in result.err
    n_read = len(ids_and_text(generate("Once", "-n", 8, "--json"))[0]) + 7
    kibibytes = 3 * 2 * n_read * 32 * 4 * 2 / 2**10
    assert f"Reserved: {kibibytes:.1f} KiB (3 layers x 2 heads x {n_read} x 32 x f32 x 2)\n" in result.err
    assert "KV cache: none" in generate("Once", "-n", 8, "--no-kv", "-v").err


def test_gemma_s_windows_are_said():
    folder = DATA.parent / "gemma3-micro" / "hf"
    config = json.loads((folder / "config.json").read_text())
    result = generate("a", "-n", 60, "--ignore-eos", "--context-len", 4096, "-v", model=str(folder))
    assert result.code == 0, result.err
    assert f"sliding windows of {config['sliding_window']} tokens in " in result.err


def test_a_hub_model_says_whether_it_was_here(monkeypatch, tmp_path):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--repo" / "snapshots" / ("0" * 40)
    (snapshot.parents[1] / "refs").mkdir(parents=True)

    def fetch():
        snapshot.mkdir(parents=True, exist_ok=True)
        (snapshot / "model.gguf").write_bytes((DATA / "model-f32.gguf").read_bytes())
        (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
        return snapshot / "model.gguf"

    monkeypatch.setattr(hub, "download", lambda repo, file: fetch())
    assert "Model: org/repo (downloaded " in generate("a", "-n", 1, "-v", model="org/repo").err
    assert "Model: org/repo (cached " in generate("a", "-n", 1, "-v", model="org/repo").err


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
def test_an_interrupted_batch_keeps_what_it_has_written(tmp_path):
    (tmp_path / "batch.txt").write_text("a\nb\nc\n")
    command = [sys.executable, "-u", "cli.py", "generate", "--batch-file", str(tmp_path / "batch.txt"), "-m", MODEL]
    run = subprocess.Popen(
        [*command, "-b", "simd", "--no-kv", "--ignore-eos", "-n", "4000"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert run.stdout.read(4) == b"[1] "
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=PATIENCE)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 130
    assert b"Traceback" not in err


def test_the_command_as_it_stands_in_the_readme():
    run = process("generate", "--chat", "What is the capital of France?", "-q")
    assert (run.returncode, run.stderr) == (0, b"")
    assert b"Paris" in run.stdout
