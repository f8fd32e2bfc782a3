"""`bench` as a user meets it: what is measured, what is printed where, and one line for every mistake."""

import csv
import io
import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from mlx_engine import backends
from mlx_engine import bench as measuring
from mlx_engine.backends import Entry, backend_names, create_backend, unavailable
from mlx_engine.bench import roofline
from mlx_engine.bench.ladder import RUNGS
from mlx_engine.bench.lists import numbers, pair
from mlx_engine.bench.lists import tests_of as combined
from mlx_engine.commands.app import app
from mlx_engine.commands.console import still_bar
from mlx_engine.errors import OptionError

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


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("512", [512]),
        ("0", [0]),
        ("128,512", [128, 512]),
        ("512,128,512", [512, 128, 512]),
        (" 128, 512 ", [128, 512]),
        ("3-6", [3, 4, 5, 6]),
        ("7-7", [7]),
        ("64-256+64", [64, 128, 192, 256]),
        ("64-255+64", [64, 128, 192]),
        ("0-4+2", [0, 2, 4]),
        ("64-512*2", [64, 128, 256, 512]),
        ("64-511*2", [64, 128, 256]),
        ("1-100*10", [1, 10, 100]),
        ("8,64-256*2,3-4", [8, 64, 128, 256, 3, 4]),
    ],
)
def test_a_list_of_numbers(text, meant):
    assert numbers("-p", [text], [1]) == meant


def test_an_option_that_is_given_again_goes_on_with_the_list():
    assert numbers("-p", ["1,2", "5-6"], [9]) == [1, 2, 5, 6]


@pytest.mark.parametrize("texts", [None, []])
def test_without_a_list_the_default_holds(texts):
    assert numbers("-p", texts, [512]) == [512]


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "5,", "-5", "5-", "1.5", "1e3", "five", "1 2", "0x10", "+5", "1234567890", "1_000", "\n"),
        *("1-5+", "1-5*", "1-5+0", "1-5*0", "1-5*1", "0-5*2", "1-5/2", "1--5", "1-5+-1", "1-2-3", "5*2", "5+2"),
        *("1-5+2*2", "4,1-5+0"),
    ],
)
def test_a_list_that_cannot_be_understood_is_refused(text):
    with pytest.raises(OptionError) as caught:
        numbers("-p", [text], [1])
    assert caught.value.option == "-p"
    assert text.endswith(caught.value.found)


@pytest.mark.parametrize("text", ["512-64", "8,5-4", "512-64*2"])
def test_a_range_that_runs_backwards_is_refused(text):
    with pytest.raises(OptionError):
        numbers("-p", [text], [1])


@pytest.mark.parametrize(("text", "meant"), [("512,64", (512, 64)), (" 16,4 ", (16, 4))])
def test_a_pair(text, meant):
    assert pair(text) == meant


@pytest.mark.parametrize(
    "text", ["", "512", "512,", ",64", "512,64,1", "512, 64", "0,64", "512,0", "a,b", "1-2,3", "-1,5"]
)
def test_a_pair_that_cannot_be_understood_is_refused(text):
    with pytest.raises(OptionError, match="tokens to read and to write") as caught:
        pair(text)
    assert caught.value.option == "-pg"


# ---- combinations ----


@pytest.mark.parametrize(
    ("p", "n", "pg", "d", "meant"),
    [
        (None, None, None, None, ["pp512", "tg64"]),
        (["16"], None, None, None, ["pp16", "tg64"]),
        (None, ["4"], None, None, ["pp512", "tg4"]),
        (["16"], ["0"], None, None, ["pp16"]),
        (["0"], ["4"], None, None, ["tg4"]),
        (["16,32"], ["4,8"], None, None, ["pp16", "pp32", "tg4", "tg8"]),
        (None, None, ["16,4"], None, ["pp16+tg4"]),
        (None, None, ["16,4", "8,2"], None, ["pp16+tg4", "pp8+tg2"]),
        (["32"], None, ["16,4"], None, ["pp32", "tg64", "pp16+tg4"]),
        (["32"], ["0"], ["16,4"], None, ["pp32", "pp16+tg4"]),
        (["16"], ["4"], None, ["0,8"], ["pp16", "tg4", "pp16 @ d8", "tg4 @ d8"]),
        (["16"], ["4"], ["2,1"], ["8"], ["pp16 @ d8", "tg4 @ d8", "pp2+tg1 @ d8"]),
    ],
)
def test_every_combination_at_every_depth(p, n, pg, d, meant):
    assert [test.name for test in combined(p, n, pg, d)] == meant


def test_nothing_to_measure_is_refused():
    with pytest.raises(OptionError, match="expected something to measure"):
        combined(["0"], ["0"], None, None)


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
        (("-p", "many"), "-p: expected numbers as 512"),
        (("-n", "1-"), "-n: expected numbers as 512"),
        (("-d", "1-5*1"), "-d: expected a range that leads upwards"),
        (("-pg", "512"), "-pg: expected tokens to read and to write"),
        (("-p", 0, "-n", 0), "expected something to measure"),
        (("-o", "sql"), "output: expected md or csv or json or jsonl, found 'sql'"),
        (("--quant", "q3"), "quant: expected keep or f32"),
        (("-t", 0), "threads: expected a whole number >= 1"),
        (("-b", "quick"), "backend 'quick' is not available: no backend has this name"),
        (("-p", 999_999_999), "pp999999999: expected at most"),
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


# ---- the whole ladder ----


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """One real sweep of all rungs, in little time: its folder, and what it printed."""
    folder = tmp_path_factory.mktemp("sweep") / "new"
    options = ("--sweep", "-p", "4,8", "-n", 4, "--budget", 0.03, "--out", folder)
    return folder, bench(*options, backend=(), jit=())


def test_a_sweep_prints_its_table_and_writes_its_files(swept):
    folder, result = swept
    assert result.code == 0
    assert {path.name for path in folder.iterdir()} == {
        "sweep.json", "sweep.md", "passes.png", "ladder.png", "roofline.png",
    }  # fmt: skip
    assert "plots" not in result.err
    assert f"every sample is in {folder / 'sweep.json'}" in result.err
    assert result.out.strip() in (folder / "sweep.md").read_text()
    for part in (
        "| scalar, no cache |",
        "prefill (pp8) was moved most by",
        "decode (tg4) was moved most by",
        "of read",
    ):
        assert part in result.out


def test_a_sweep_has_every_rung_with_a_rate_or_a_reason(swept):
    rows = json.loads((swept[0] / "sweep.json").read_text())
    titles = list(dict.fromkeys(row["rung"] for row in rows))
    assert titles[: len(RUNGS)] == [rung.title for rung in RUNGS]
    for row in rows:
        assert ("median_ts" in row) == (row["unavailable"] is None)
        assert row["unavailable"] is None or unavailable(row["backend"]) == row["unavailable"]


def test_a_sweep_can_be_compared_with_itself(swept):
    file = swept[0] / "sweep.json"
    result = compare(file, file)
    assert (result.code, result.err) == (0, "")
    assert "Only in" not in result.out
    assert "one pass taken apart" in result.out


def test_where_matplotlib_is_broken_there_are_no_plots_and_a_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "mlx_engine.bench.plots", raising=False)
    monkeypatch.delattr(measuring, "plots", raising=False)
    options = ("--sweep", "-p", 2, "-n", 1, "--budget", 0, "--out", tmp_path)
    result = bench(*options, backend=("-b", "metal"), jit=())
    assert result.code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"sweep.json", "sweep.md"}
    (line,) = [line for line in result.err.splitlines() if "plots" in line]
    assert "matplotlib.figure" in line
    assert "pip install --force-reinstall matplotlib" in line


def test_a_sweep_for_programs_is_json_and_nothing_else(tmp_path):
    options = ("--sweep", "-p", 2, "-n", 0, "-o", "json", "--out", tmp_path)
    rows = json.loads(bench(*options, backend=("-b", "metal", "-b", "cuda"), jit=()).out)
    assert [row["rung"] for row in rows] == ["metal", "cuda"]


def test_without_a_folder_a_sweep_makes_one_named_after_the_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert bench("--sweep", "-p", 2, "-n", 0, backend=("-b", "metal"), jit=()).code == 0
    (folder,) = (tmp_path / "bench-results").iterdir()
    assert folder.name.startswith("model-q8_0-2")
    assert (folder / "sweep.json").exists()


def test_a_sweep_that_measured_nothing_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "nowhere.gguf" in mistake(bench("--sweep", backend=(), jit=(), model="nowhere.gguf"), code=1)
    assert list((tmp_path / "bench-results").iterdir()) == []


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("-d", 4), "--sweep: expected no option that it would ignore, found '-d'"),
        (("-pg", "4,4", "--no-jit"), "found '-pg, --no-jit'"),
        (("--kv",), "found '--kv or --no-kv'"),
        (("-n", "4,8"), "-n: expected one number with --sweep, found '4,8'"),
        (("-b", "quick"), "no backend has this name"),
        (("-p", 999_999), "pp999999: expected at most"),
        (("-p", 0, "-n", 0, "-b", "simd"), "at least"),
    ],
)
def test_wrong_use_of_a_sweep_is_one_line(args, told, tmp_path):
    if told == "at least":
        told = "expected something to measure"
    assert told in mistake(bench("--sweep", *args, "--out", tmp_path, backend=(), jit=()))


# ---- before and after ----


def compare(*paths, args=()):
    result = CliRunner().invoke(app, ["bench", "--compare", *map(str, paths), *map(str, args)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return SimpleNamespace(code=result.exit_code, out=result.stdout, err=result.stderr)


def test_two_benchmarks_are_compared(tmp_path):
    for name in ("old", "new"):
        assert bench("-p", 2, "-n", 1, "--out", tmp_path / name).code == 0
    result = compare(tmp_path / "old" / "bench.json", tmp_path / "new" / "bench.json", args=("--out", tmp_path))
    assert (result.code, result.err) == (0, "")
    for part in ("| prefill, pp2 |", "| per token, tg1 |", "prefill, pp2: one pass taken apart", "| linear |"):
        assert part in " ".join(result.out.split())
    assert (tmp_path / "compare.md").read_text() == result.out


@pytest.mark.parametrize("content", ["", "{", "[{}]"])
def test_a_damaged_file_is_one_line(tmp_path, content):
    (tmp_path / "rows.json").write_text(content)
    told = mistake(compare(tmp_path / "rows.json", tmp_path / "rows.json"), code=1)
    assert "rows.json: expected a list of measurements" in told


def test_a_missing_file_is_one_line(tmp_path):
    assert "nowhere.json" in mistake(compare(tmp_path / "nowhere.json", tmp_path / "x.json"), code=1)


@pytest.mark.parametrize(
    ("args", "found"),
    [(("--sweep",), "--sweep"), (("-m", "m", "-p", 4), "-m, -p"), (("-o", "json"), "-o"), (("-t", 2), "-t")],
)
def test_a_comparison_measures_nothing(tmp_path, args, found):
    told = mistake(compare("a", "b", args=args))
    assert told == f"--compare: expected no option that it would ignore, found '{found}'"


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


def test_an_interrupted_benchmark_is_exit_code_130(monkeypatch):
    from mlx_engine.bench import run

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "measure", interrupted)
    result = bench("-p", 2)
    assert (result.code, result.out) == (130, "")
