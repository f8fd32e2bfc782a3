"""`bench` as a user meets it: what is measured, what is printed where, and one line for every mistake."""

import csv
import io
import json
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from mlx_engine import backends
from mlx_engine.backends import Entry, backend_names, create_backend, unavailable
from mlx_engine.bench import roofline
from mlx_engine.commands import app
from mlx_engine.commands.console import still_bar

MODEL = Path(__file__).parents[1] / "data" / "qwen3-micro" / "model-q8_0.gguf"


def bench(*args, model=MODEL, backend=("-b", "simd"), repetitions=1, jit=("--no-jit",)):
    """Without compiled kernels: a machine that has none says so on stderr."""
    command = ["bench", "-m", str(model), *backend, *jit, "-r", str(repetitions), *map(str, args)]
    result = CliRunner().invoke(app, command)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return SimpleNamespace(code=result.exit_code, out=result.stdout, err=result.stderr)


def names(*args, **options):
    result = bench("-o", "json", *args, **options)
    assert (result.code, result.err) == (0, "")
    return [row["test"] for row in json.loads(result.out)]


def mistake(result, code=2):
    """The one line on stderr of a run that wrote nothing else."""
    assert result.code == code
    assert result.out == ""
    (line,) = result.err.splitlines()
    return line.removeprefix("error: ")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The machine's own limits are not what is tested here."""
    monkeypatch.setattr(roofline, "SECONDS", 1e-4)


@pytest.fixture
def absent(monkeypatch):
    """A rung that no machine has."""
    monkeypatch.setitem(backends._ENTRIES, "absent", Entry("nowhere", pytest.fail, needs=lambda: "it needs the moon"))


# ---- lists ----


def test_the_options_make_the_same_combinations():
    assert names("-p", "2,3", "-n", "1", "-pg", "2,1", "-d", "0,4") == [
        *("pp2", "pp3", "tg1", "pp2+tg1"),
        *("pp2 @ d4", "pp3 @ d4", "tg1 @ d4", "pp2+tg1 @ d4"),
    ]


def test_the_pair_alone_is_measured_alone():
    assert names("-pg", "2,1") == ["pp2+tg1"]


def test_options_may_be_repeated():
    assert names("-p", 2, "-p", 3, "-n", 0, "-pg", "2,1", "-pg", "3,1") == ["pp2", "pp3", "pp2+tg1", "pp3+tg1"]


# ---- backends ----


def test_each_backend_asked_for_is_measured():
    rows = json.loads(bench("-p", 2, "-n", 0, "-o", "json", backend=("-b", "simd", "-b", "scalar")).out)
    assert [row["backend"] for row in rows] == ["simd", "scalar"]


@pytest.mark.usefixtures("absent")
def test_all_lists_every_backend_with_a_rate_or_a_reason():
    rows = json.loads(bench("-p", 2, "-n", 0, "-o", "json", backend=("-b", "all")).out)
    assert [row["backend"] for row in rows] == backend_names()
    assert [row["unavailable"] for row in rows] == [unavailable(name) for name in backend_names()]
    assert all(("avg_ts" in row) == (row["unavailable"] is None) for row in rows)


@pytest.mark.usefixtures("absent")
def test_an_absent_backend_is_told_in_the_table():
    result = bench("-p", 2, "-n", 0, backend=("-b", "absent", "-b", "simd"))
    assert result.code == 0
    _, _, absent, present = result.out.split("\n\n")[0].splitlines()
    assert "unavailable: it needs the moon" in absent
    assert "±" in present


# ---- what is printed ----


def test_a_table_and_the_build_are_printed():
    result = bench("-p", 2, "-n", 1)
    assert (result.code, result.err) == (0, "")
    table, build = result.out.split("\n\n")
    head, rule, *rows = table.splitlines()
    assert head.split()[1::2] == ["model", "size", "params", "backend", "jit", "test", "t/s"]
    assert set(rule) == set("|-: ")
    assert [row.split("|")[6].strip() for row in rows] == ["pp2", "tg1"]
    assert build.startswith("build: ")


def test_csv_is_all_of_stdout():
    rows = list(csv.DictReader(io.StringIO(bench("-p", 2, "-n", 1, "-o", "csv").out)))
    assert [row["test"] for row in rows] == ["pp2", "tg1"]
    assert all(float(row["avg_ts"]) > 0 for row in rows)


def test_json_is_all_of_stdout():
    rows = json.loads(bench("-p", 2, "-n", 3, "-o", "json", repetitions=2).out)
    assert [len(row["samples_ts"]) for row in rows] == [2, 2]
    assert [[len(passes) for passes in row["passes_s"]] for row in rows] == [[], [3, 3]]


def test_json_lines_are_all_of_stdout():
    lines = bench("-p", 2, "-n", 1, "-o", "jsonl").out.splitlines()
    assert [json.loads(line)["test"] for line in lines] == ["pp2", "tg1"]


def test_options_that_differ_are_told():
    (row,) = json.loads(bench("-p", 2, "-n", 0, "--no-kv", "--quant", "q4_0", "-o", "json").out)
    assert (row["kv"], row["quant"]) == (False, "q4_0")
    assert "| off | q4_0 |" in " ".join(bench("-p", 2, "-n", 0, "--no-kv", "--quant", "q4_0").out.split())


@pytest.mark.parametrize(("jit", "told"), [((), True), (("--no-jit",), False)])
def test_a_row_says_whether_kernels_may_be_compiled(jit, told):
    (row,) = json.loads(bench("-p", 2, "-n", 0, "-o", "json", jit=jit).out)
    assert row["jit"] is told


@pytest.mark.parametrize(("option", "told"), [((), True), (("--no-overlap",), False)])
def test_passes_may_be_kept_from_overlapping(option, told):
    result = bench("-p", 0, "-n", 3, "-o", "json", *option, backend=("-b", "mlx"))
    (row,) = json.loads(result.out)
    assert row["overlap"] is told
    assert (row["backend"], row["device"], row["weights"]) == ("mlx", create_backend("mlx").device, "Q8_0")
    assert ("overlap" in bench("-p", 0, "-n", 1, *option).out) != told


def test_the_budget_is_seconds():
    (row,) = json.loads(bench("-p", 0, "-n", 50, "--budget", 0, "-o", "json").out)
    assert row["estimated"] == "from 1 of 50 passes"
    assert "~" in bench("-p", 0, "-n", 50, "--budget", 0).out


def test_the_folder_gets_the_samples_and_the_table(tmp_path):
    out = tmp_path / "new" / "folder"
    result = bench("-p", 2, "-n", 1, "--out", out, "-o", "json")
    assert result.code == 0
    assert result.err == f"every sample is in {out / 'bench.json'}\n"
    assert {path.name for path in out.iterdir()} == {"bench.json", "bench.md"}
    assert json.loads((out / "bench.json").read_text()) == json.loads(result.out)
    table = (out / "bench.md").read_text()
    assert table.endswith("|\n")
    assert len(table.splitlines()) == 4


def test_the_folders_table_is_utf_8(tmp_path):
    bench("-p", 2, "-n", 0, "--out", tmp_path)
    assert " ± " in (tmp_path / "bench.md").read_bytes().decode("utf-8")


# ---- mistakes ----


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("-p", "many"), "-p: 'many' is no list of numbers"),
        (("-n", "1-"), "-n: '1-' is no list of numbers"),
        (("-d", "1-5*1"), "-d: 1-5*1 is no ascending range"),
        (("-pg", "512"), "-pg: '512' is no pair of prompt and generated tokens"),
        (("-p", 0, "-n", 0), "give at least one test"),
        (("-o", "sql"), "--output: unknown format 'sql'; choose md, csv, json or jsonl"),
        (("--quant", "q3"), "--quant: unknown type"),
        (("-t", 0), "--threads must be at least 1"),
        (("-b", "quick"), "backend 'quick' is not available: no backend has this name"),
        (("-p", 999_999_999), "pp999999999 needs 999,999,999 tokens"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(args, told):
    assert told in mistake(bench(*args))


@pytest.mark.parametrize("args", [("-r", 0), ("-r", "x"), ("--budget", "soon"), ("-t", "x"), ("--depth",)])
def test_what_the_parser_refuses_is_exit_code_2(args):
    result = bench(*args)
    assert (result.code, result.out) == (2, "")
    assert "Traceback" not in result.err


def test_a_model_that_does_not_exist_is_one_line_and_exit_code_1():
    assert "nowhere.gguf" in mistake(bench(model="nowhere.gguf"), code=1)


def test_a_file_that_is_no_model_is_one_line_and_exit_code_1(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"no model")
    assert "model.gguf" in mistake(bench(model=tmp_path / "model.gguf"), code=1)


def test_mistakes_are_found_before_the_model_is_opened(tmp_path):
    for args in (("-o", "sql"), ("-p", "many"), ("--quant", "q3"), ("-b", "quick")):
        assert "nowhere" not in mistake(bench(*args, model="nowhere.gguf"))


def test_a_folder_that_cannot_be_made_is_told_in_one_line(tmp_path):
    (tmp_path / "file").write_text("in the way")
    result = bench("-p", 2, "-n", 0, "--out", tmp_path / "file")
    assert result.code in (1, 2)
    (line,) = result.err.splitlines()
    assert str(tmp_path / "file") in line


# ---- while it is measured ----


def test_a_measurement_that_the_log_watches_says_so_once(monkeypatch):
    monkeypatch.setenv("MLX_ENGINE_LOG", "debug")
    result = bench("-p", 2, "-n", 1)
    assert result.code == 0
    assert [line for line in result.err.splitlines() if "lower" in line] == [
        "warning: MLX_ENGINE_LOG is set, so every operation is timed: rates are lower than without it"
    ]


def test_on_a_terminal_the_bar_moves_only_when_it_is_told(monkeypatch):
    """A thread of its own would take a core from what is measured."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    before = threading.active_count()
    with still_bar() as report:
        report(1, 3, "simd")
        assert threading.active_count() == before
        shown = terminal.getvalue()
        assert "simd" in shown
        assert "1/3" in shown
        report(2, 3, "parallel")
    assert "parallel" in terminal.getvalue()


def test_the_bar_knows_the_total_before_the_first_test_and_names_each(monkeypatch):
    told = []
    monkeypatch.setattr("mlx_engine.commands.bench.still_bar", lambda: nullcontext(lambda *seen: told.append(seen)))
    assert bench("-p", 4, "-n", 2).code == 0
    assert told[0] == (0, 4, "pp4 on simd")
    assert list(dict.fromkeys(told)) == [
        *((done, 4, "pp4 on simd") for done in range(3)), *((done, 4, "tg2 on simd") for done in range(2, 5)),
    ]  # fmt: skip


def test_an_interrupted_benchmark_keeps_the_cells_that_are_finished(tmp_path, monkeypatch):
    from mlx_engine.bench import run

    def interrupted(engine, test, **options):
        if test.n_gen:
            raise KeyboardInterrupt
        return measured(engine, test, **options)

    measured = run.measure
    monkeypatch.setattr(run, "measure", interrupted)
    result = bench("-p", 2, "-n", 1, "--out", tmp_path)
    assert result.code == 130
    assert " pp2 |" in result.out
    assert [row["n_prompt"] for row in json.loads((tmp_path / "bench.json").read_text())] == [2]


def test_an_interrupted_benchmark_is_exit_code_130(monkeypatch):
    from mlx_engine.bench import run

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "measure", interrupted)
    result = bench("-p", 2)
    assert (result.code, result.out) == (130, "")
