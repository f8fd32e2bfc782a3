"""`bench --sweep` and `bench --compare` as a user meets them."""

import json
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from mlx_engine import bench as measuring
from mlx_engine.backends import unavailable
from mlx_engine.bench import roofline, sweep
from mlx_engine.bench.ladder import RUNGS
from mlx_engine.commands import app
from tests.unit.test_command_bench import bench, mistake


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The machine's own limits are not what is tested here."""
    monkeypatch.setattr(roofline, "SECONDS", 1e-4)


# ---- the whole ladder ----


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """One real sweep of all rungs, in little time: its folder, and what it printed."""
    folder = tmp_path_factory.mktemp("sweep") / "new"
    options = ("--sweep", "-p", "4,8", "-n", 4, "--budget", 0.03, "--out", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roofline, "SECONDS", 1e-4)
        # On a busy machine a token of the slowest rung may take longer than the small budget allows.
        patch.setattr(sweep, "seconds_per_weight", lambda backend: 0.0)
        return folder, bench(*options, backend=(), jit=())


@pytest.mark.slow
def test_a_sweep_prints_its_table_and_writes_its_files(swept):
    folder, result = swept
    assert result.code == 0
    assert {path.name for path in folder.iterdir()} == {
        "sweep.json", "sweep.md", "passes.png", "ladder.png", "roofline.png", "passes.svg", "ladder.svg",
        "roofline.svg",
    }  # fmt: skip
    assert "plots" not in result.err
    assert f"every sample is in {folder / 'sweep.json'}" in result.err
    assert result.out.strip() in (folder / "sweep.md").read_text()
    for part in (
        "| scalar, no cache |",
        "prefill (pp8): the largest speedup is",
        "decode (tg4): the largest speedup is",
        "of read",
    ):
        assert part in result.out


@pytest.mark.slow
def test_a_sweep_has_every_rung_with_a_rate_or_a_reason(swept):
    rows = json.loads((swept[0] / "sweep.json").read_text())
    titles = list(dict.fromkeys(row["rung"] for row in rows))
    assert titles[: len(RUNGS)] == [rung.title for rung in RUNGS]
    for row in rows:
        assert ("median_ts" in row) == (row["unavailable"] is None)
        assert row["unavailable"] == unavailable(row["backend"])


@pytest.mark.slow
def test_a_sweep_can_be_compared_with_itself(swept):
    file = swept[0] / "sweep.json"
    result = compare(file, file)
    assert (result.code, result.err) == (0, "")
    assert "Only in" not in result.out
    assert "one pass, profiled" in result.out


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
        (("-d", 4), "--sweep cannot be combined with -d"),
        (("-pg", "4,4", "--no-jit"), "--sweep cannot be combined with -pg, --no-jit"),
        (("--kv",), "cannot be combined with --kv or --no-kv"),
        (("-n", "4,8"), "-n: --sweep takes one number, not 4,8"),
        (("-b", "quick"), "no backend has this name"),
        (("-p", 999_999), "pp999999 needs 999,999 tokens; the model's context has"),
        (("-p", 0, "-n", 0, "-b", "simd"), "give at least one test"),
    ],
)
def test_wrong_use_of_a_sweep_is_one_line(args, told, tmp_path):
    assert told in mistake(bench("--sweep", *args, "--out", tmp_path, backend=(), jit=()))


# ---- before and after ----


def compare(*paths, args=()):
    result = CliRunner().invoke(app, ["bench", "--compare", *map(str, paths), *map(str, args)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return SimpleNamespace(code=result.exit_code, out=result.stdout, err=result.stderr)


@pytest.mark.slow
def test_two_benchmarks_are_compared(tmp_path):
    for name in ("old", "new"):
        assert bench("-p", 2, "-n", 1, "--out", tmp_path / name).code == 0
    result = compare(tmp_path / "old" / "bench.json", tmp_path / "new" / "bench.json", args=("--out", tmp_path))
    assert (result.code, result.err) == (0, "")
    for part in ("| prefill, pp2 |", "| per token, tg1 |", "prefill, pp2: one pass, profiled", "| linear |"):
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
    assert told == f"--compare cannot be combined with {found}"


def test_a_type_of_activations_that_no_rung_has_is_refused_in_one_sentence():
    result = bench("--sweep", "--activations", "f16", backend=("-b", "simd"), jit=())
    line = "no chosen rung of the sweep has activations f16; choose --backend mlx, metal or cuda"
    assert mistake(result) == line
