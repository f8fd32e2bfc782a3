"""Other engines beside ours: the loop that times them, requests and replies, rounds, and the section of the page."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers import child, contests, folders
from benchmarks.peers.contests import (
    ENGINES,
    ERRORS,
    FORMATS,
    LLAMA,
    MLX_LM,
    OURS,
    PASSES,
    START,
    TRANSFORMERS,
    Contest,
    Contestant,
    Entry,
    continuing,
    interpreters,
    plan,
    play,
)
from benchmarks.peers.exact import CONTEXT, MODEL, exact_logits, relative
from benchmarks.peers.hugging_face import repacked
from benchmarks.peers.loop import Peer, fill, random_ids, run
from benchmarks.peers.process import PeerError, Process
from benchmarks.peers.start import N_TOKENS, prompt, starts
from benchmarks.sections import factor, later, latest, peers
from mlx_engine import load_tokenizer
from mlx_engine.bench.samples import Test as Cell
from mlx_engine.quant.types import F32, Q8_0
from mlx_engine.quant.weight import Weight


class Clockwork(Peer):
    """Reading takes a second per token, and three seconds for whatever is read alone."""

    n_vocab = 50

    def __init__(self) -> None:
        self.now, self.context, self.threads = 0.0, [], []

    def facts(self):
        return {"versions": {"clockwork": "1"}}

    def rewind(self, length):
        del self.context[length:]

    def read(self, ids):
        self.context += ids
        self.now += 3.0 if len(ids) == 1 else len(ids)
        return 7

    def logits(self, ids):
        return np.zeros((len(ids), self.n_vocab))

    def use_threads(self, n):
        self.threads.append(n)

    def clock(self):
        return self.now


def timed(peer: Clockwork, n_prompt=0, n_gen=0, depth=0, **more):
    return run(peer, {"n_prompt": n_prompt, "n_gen": n_gen, "n_depth": depth, **more}, peer.clock)


# ---- the loop ----


def test_a_run_times_reading_and_writing_behind_what_is_there():
    peer = Clockwork()
    fill(peer, 10)
    before = list(peer.context)
    assert timed(peer, 40, 3, 10, threads=2) == {"seconds": 49.0, "passes": [3.0] * 3, "estimated": None}
    assert peer.context == [*before, *random_ids(50, 40, seed=1), 7, 7, 7]
    assert peer.threads == [None, 2]
    timed(peer, n_gen=2, depth=10)
    assert len(peer.context) == 12


def test_writing_stops_when_the_budget_is_over_and_the_rest_is_extrapolated():
    assert timed(Clockwork(), n_gen=10, budget=7.0) == {
        "seconds": 30.0, "passes": [3.0] * 3, "estimated": "from 3 of 10 passes",
    }  # fmt: skip


def test_a_prompt_beyond_the_budget_is_read_in_part():
    found = timed(Clockwork(), n_prompt=160, budget=100.0)
    assert (found["seconds"], found["estimated"]) == (160.0, "from a pass of 16 tokens")
    assert timed(Clockwork(), n_prompt=160, budget=170.0)["estimated"] is None
    assert timed(Clockwork(), n_prompt=12, budget=0.0)["estimated"] is None


def test_every_engine_reads_the_same_tokens():
    assert random_ids(50, 30, seed=1) == random_ids(50, 30, seed=1) != random_ids(50, 30, seed=0)


# ---- the conversation ----


@pytest.mark.slow
def test_our_engine_answers_in_a_process_of_its_own(tmp_path: Path):
    prompts, exact = exact_logits()
    with Process("ours", sys.executable, model=str(MODEL), context=CONTEXT, backend="simd") as process:
        assert process.facts["backend"] == "simd"
        assert process.facts["sizes"]["cached"] == 3 * 2 * 2 * 32 * 4
        assert process.ask("fill", n=30) == {}
        found = process.ask("run", n_prompt=8, n_gen=3, n_depth=30)
        assert len(found["passes"]) == 3
        assert 0 < sum(found["passes"]) < found["seconds"]
        rates = process.ask("read_rates")
        assert set(rates) == {"in_order", "fastest"}
        assert all(rate > 1e6 for some in rates.values() for rate in some)  # bytes per second, on a busy machine
        process.ask("logits", prompts=prompts, out=str(tmp_path / "x.npz"))
    with np.load(tmp_path / "x.npz") as arrays:
        assert all(relative(have, want) < 1e-5 for have, want in zip(arrays.values(), exact, strict=True))


def test_what_is_not_installed_is_absent_and_no_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    out = io.StringIO()
    child.serve("llama", ['{"do": "open", "model": "m", "context": 8}', '{"do": "fill", "n": 1}'], out)
    answers = [json.loads(line) for line in out.getvalue().splitlines()]
    assert len(answers) == 1
    assert "llama_cpp" in answers[0]["absent"]


@pytest.mark.slow
def test_an_engine_that_fails_says_with_what(tmp_path: Path):
    with pytest.raises(PeerError, match=r"failed: .*SourceError"):
        Process("ours", sys.executable, model=str(tmp_path / "none.gguf"), context=8)
    with pytest.raises(PeerError, match="cannot be started"):
        Process("ours", str(tmp_path / "python"), model="m", context=8)


def test_an_unknown_request_is_refused():
    with pytest.raises(ValueError, match="found 'sing'"):
        child.answer(Clockwork(), {"do": "sing"})


def test_repacked_weights_are_the_same_numbers():
    weight = Weight.pack("w", np.random.default_rng(0).standard_normal((4, 64)), Q8_0)
    parts = repacked("a.weight", weight)
    codes = parts["a.weight"].view(np.uint8).reshape(4, 2, 32)
    assert parts["a.weight"].dtype == np.uint32
    values = codes * parts["a.scales"][..., None] + parts["a.biases"][..., None]
    np.testing.assert_array_equal(values.reshape(4, 64), weight.dequantize())
    plain = Weight.pack("n", [1.0, 2.0], F32)
    assert list(repacked("n.weight", plain)) == ["n.weight"]


# ---- who takes turns ----

FAST, SLOW = Contestant(LLAMA, threads=2), Contestant(LLAMA, threads=1)
ONCE, MINE = Contestant(MLX_LM, budget=1.0), Contestant(OURS)


class Turns:
    """Stands for the processes of a contest; remembers who ran."""

    def __init__(self, seconds):
        self.seconds, self.ran = seconds, []

    def __call__(self, contest, model, pythons):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def of(self, contestant):
        name = f"{contestant.engine} {contestant.setting}".strip()
        if name not in self.seconds:
            raise PeerError("not installed: no such module")
        self.ran.append(name)
        self.facts = {"versions": {"some": "1"}}
        return self

    def ask(self, do, **request):
        if do == "read_rates":
            return {"in_order": [1.0, 2.0], "fastest": [3.0]}
        return {"seconds": self.seconds[self.ran[-1]], "passes": [], "estimated": None}


def test_everyone_runs_once_a_round_until_a_setting_falls_behind(monkeypatch):
    mine, fast, slow, once = OURS, f"{LLAMA} 2 threads", f"{LLAMA} 1 thread", MLX_LM
    turns = Turns({mine: 3.0, fast: 1.0, slow: 1.1, once: 9.0})
    monkeypatch.setattr(contests, "Processes", turns)
    absent = Contestant(TRANSFORMERS)
    entries = play(Contest(Cell(n_gen=4), (MINE, FAST, SLOW, ONCE, absent), rounds=3, watches_memory=True), "m", {})
    assert turns.ran == [mine, fast, slow, once, slow, fast, mine, mine, fast]
    assert [len(entry.seconds) for entry in entries] == [3, 3, 2, 1, 0]
    assert (entries[0].read_rates, entries[0].fastest_read_rates) == ([1.0, 2.0] * 3, [3.0] * 3)
    assert entries[4].absent == "not installed: no such module"
    assert entries[0].absent is None


def test_a_setting_far_behind_drops_out_and_ours_never_do():
    entries = [Entry(FAST, [1.0]), Entry(SLOW, [1.3]), Entry(MINE, [1.0]), Entry(MINE, [5.0])]
    assert continuing(entries, 1.2) == [entries[0], *entries[2:]]
    default = Entry(Contestant(LLAMA, threads=2, stays=True), [9.0])
    assert continuing([*entries, default], 1.0) == [entries[0], *entries[2:], default]


@pytest.mark.parametrize("quick", [False, True])
def test_the_plan_names_engines_that_exist_and_files_each_contest_apart(quick: bool):
    for cores in (1, 2):
        contests = plan("auto", cores, quick=quick)
        assert len({contest.title for contest in contests}) == len(contests)
        for contest in contests:
            assert {contestant.engine for contestant in contest.contestants} <= set(ENGINES)
            told = [(contestant.engine, contestant.setting) for contestant in contest.contestants]
            assert len(set(told)) == len(told)
    assert interpreters({LLAMA: "/p"}) == {name: "/p" if name == LLAMA else sys.executable for name in ENGINES}


# ---- whole processes ----


def test_the_prompt_has_four_tokens_of_any_vocabulary():
    tokenizer = load_tokenizer("mlx_engine/assets/storyteller-q8_0.gguf")
    assert len(tokenizer.encode(prompt(tokenizer))) == N_TOKENS


@pytest.mark.slow
def test_a_process_is_timed_until_it_prints():
    late = "import time; x = bytearray(50_000_000); time.sleep(0.1); print('x', flush=True); time.sleep(0.2)"
    # The memory of the process that starts another does not count as the other's.
    ours = bytearray(300_000_000)
    began = time.perf_counter()
    (found,) = starts({"a": [sys.executable, "-c", late]}, 1)
    whole = time.perf_counter() - began
    # It ran twice, 0.3 s and more, of which one is not counted; of the other what it did after printing is not.
    assert len(found.seconds) == 1
    assert 0.1 < found.seconds[0] < whole - 0.5
    assert 50e6 < found.peak_bytes[0] < len(ours)


def test_a_process_that_fails_has_no_samples():
    (found,) = starts({"b": [sys.executable, "-c", "raise SystemExit('no')"]}, 1)
    assert (found.absent, found.seconds) == ("no", [])
    (found,) = starts({"c": [sys.executable, "-c", "pass"]}, 1)
    assert found.absent == "exit code 0, nothing printed"
    (found,) = starts({"d": ["/no/such/program"]}, 1)
    assert "No such file" in str(found.absent)


# ---- the page ----

COMMON = {
    "time": "2026-01-02", "commit": "abc", "versions": {"mlx-engine": "1"}, "model_name": "m", "model_size": 2e6,
    "model_n_params": 3e6,
    "machine": {"processor": "P", "cores": 2, "memory_bytes": 2**34, "system": "S"},
}  # fmt: skip


def measured(engine: str, seconds: list[float], **more):
    row = {
        **COMMON, "contest": "tg10", "test": "tg10", "n_prompt": 0, "n_gen": 10, "engine": engine, "setting": "",
        "default": True,
        "nbytes": 5e9, "seconds": seconds, "passes_s": [], "read_rates": [], "estimated": None, "absent": None,
        "facts": {"versions": {engine: "9"}},
    }  # fmt: skip
    return {**row, **more}


def test_the_page_compares_with_the_fastest_setting():
    rows = [
        measured(OURS, [1.0, 2.0, 1.25], read_rates=[8e9, 10e9, 9e9], fastest_read_rates=[10e9]),
        measured(LLAMA, [2.0, 2.0, 2.5], setting="2 threads, no flash attention", default=False),
        measured(LLAMA, [4.0, 4.0, 5.0], setting="2 threads"),
        measured(LLAMA, [0.5], setting="1 thread"),
        measured(MLX_LM, [50.0], estimated="from 2 of 10 passes"),
        measured(TRANSFORMERS, [], absent="not installed: torch", facts={}),
    ]
    text = peers(rows)
    # 8 and 5 tokens/s; the single rounds are 2, 1 and 2.
    fastest, default = "5 (4 to 5) | 1.6 (1 to 2)", "2.5 (2 to 2.5) | 3.2 (2 to 4)"
    assert f"| tg10 | 8 (5 to 10) | {fastest} | {default} | - | ~0.2 |" in text
    assert "- tg10, llama.cpp, 1 thread: 20 in 1 round" in text
    assert "- tg10, mlx-lm: from 2 of 10 passes" in text
    assert "| transformers | absent: not installed: torch |" in text
    # 500 MB per token, 4 of 9 and of 10 GB/s.
    assert "| tg10 | 500 | 4 (2.5 to 5) | 9 (8 to 10) | 44% | 10 | 40% |" in text
    assert "A whole process" not in text


def test_the_page_has_what_else_was_measured():
    passes = [1.0] * 30 + [1.5] * 226
    rows = [
        measured(OURS, [1.0], contest=FORMATS, test="tg10"),
        measured(OURS, [4.0], contest=FORMATS, test="tg10", setting="f32"),
        measured(OURS, [1.0], contest=PASSES, test="tg256", passes_s=[passes, [1.0] * 256]),
        {**COMMON, "contest": START, "engine": OURS, "prompt": "x", "n_tokens": 4, "seconds": [2.0, 1.0, 3.0],
         "peak_bytes": [9e8] * 3, "absent": None},
        {**COMMON, "contest": START, "engine": LLAMA, "prompt": "x", "n_tokens": 4, "seconds": [1.0],
         "peak_bytes": [6e8], "absent": None},
        {**COMMON, "contest": ERRORS, "engine": OURS, "together": 6.1e-7, "each": [6.1e-7], "absent": None},
    ]  # fmt: skip
    text = peers(rows)
    assert "factor 4 (4 to 4)" in text
    assert "Passes 241 to 256 of a text take 1.25 (1 to 1.5) times as long as passes 8 to 23" in text
    assert "| mlx_engine | 2 (1 to 3) | 900 (900 to 900) |" in text
    assert "| mlx_engine over llama.cpp | 2 | 1.5 |" in text
    assert "| mlx_engine | 6.1e-07 |" in text
    assert "Tokens per second" not in text


def test_only_what_took_turns_in_one_run_is_compared():
    old = measured(LLAMA, [1.0], time="2026-01-01")
    other = measured(LLAMA, [1.0], time="2026-01-01", contest="pp1", test="pp1")
    new = measured(OURS, [1.0])
    assert latest([old, other, new]) == [other, new]
    assert factor(new, None) == "-"


# ---- folders, beside transformers ----


def test_entries_of_several_sets_of_processes_become_one():
    first, second = Entry(MINE, [1.0], [[1.0]], facts={"a": 1}), Entry(MINE, [3.0], [[3.0]], absent="it died")
    whole = folders.joined([first, second])
    assert (whole.seconds, whole.passes, whole.facts, whole.absent) == ([1.0, 3.0], [[1.0], [3.0]], {"a": 1}, "it died")
    assert first.seconds == [1.0]


def test_folders_are_compared_with_transformers_and_with_our_own_float32():
    of = {"contest": "shape:a", "test": "tg10 @ d16"}
    rows = [
        measured(OURS, [1.0, 2.0, 1.25], setting="q8_0", **of),
        measured(OURS, [4.0, 4.0, 5.0], setting="f32", **of),
        measured(TRANSFORMERS, [10.0, 10.0, 10.0], **of),
        measured(OURS, [1.0], setting="q8_0", contest="shape:b", test="tg10 @ d16"),
        measured(TRANSFORMERS, [], absent="not installed: torch", contest="shape:b", test="tg10 @ d16"),
    ]
    text = folders.section(rows)
    assert "| 8 (5 to 10) | 2.5 (2 to 2.5) | 1 (1 to 1) | 8 (5 to 10) | 3.2 (2 to 4) |" in text
    assert "| 10 | - | - | - | - |" in text


def test_their_contest_has_every_one_in_every_round():
    of = folders.contest("auto", quick=False)
    assert of.test.name == "tg32 @ d16"
    assert [(c.engine, c.setting, c.budget) for c in of.contestants] == [
        (OURS, "q8_0", None), (OURS, "f32", None), (TRANSFORMERS, "", None),
    ]  # fmt: skip


def test_contests_of_another_commit_and_processor_are_named():
    made = (("a", "x", "one"), ("b", "y", "one"), ("b", "y", "one"), ("b", "z", "one"), ("c", "z", "two"))
    rows = [{"commit": commit, "contest": of, "machine": {"processor": on}} for commit, of, on in made]
    assert later(rows) == " Measured since, at commit b: y, z. Measured since, on two, at commit c: z."
    assert later(rows[:1]) == ""
