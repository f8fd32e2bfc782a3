"""`bench --concurrency` and `bench --url` as a user meets them."""

import csv
import io
import json
import sys

import pytest

from mlx_engine import bench as measuring
from mlx_engine.bench import concurrency, roofline
from mlx_engine.bench.clients import Load
from tests.unit.test_command_bench import bench, mistake
from tests.unit.test_concurrency_http import serving

WARM_UP = Load(n_prompt=2, n_gen=2, requests=1)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The machine's own limits are not what is tested here."""
    monkeypatch.setattr(roofline, "SECONDS", 1e-4)
    monkeypatch.setattr(concurrency, "WARM_UP", WARM_UP)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """One run with two numbers of clients: its folder, and what it printed."""
    folder = tmp_path_factory.mktemp("concurrency") / "new"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roofline, "SECONDS", 1e-4)
        patch.setattr(concurrency, "WARM_UP", WARM_UP)
        return folder, bench("--concurrency", "1,3", "-p", 4, "-n", 3, "--out", folder, repetitions=2)


@pytest.mark.slow
def test_a_table_and_its_notes_are_printed_and_saved_with_a_plot(measured):
    folder, result = measured
    assert (result.code, result.err) == (0, f"every sample is in {folder / 'concurrency.json'}\n")
    assert {path.name for path in folder.iterdir()} == {
        "concurrency.json", "concurrency.md", "concurrency.png", "concurrency.svg",
    }  # fmt: skip
    title, table, notes, shares = result.out.strip().split("\n\n")
    head, _, one, three = table.splitlines()
    assert [line.split("|")[3].strip() for line in (head, one, three)] == ["clients", "1", "3"]
    assert all(cell.strip() != "-" for line in (one, three) for cell in line.split("|")[4:])
    assert title.endswith("pp4+tg3")
    assert "2 requests" in notes
    assert "GFLOP/s" in shares
    page = (folder / "concurrency.md").read_text()
    assert result.out.strip() in page
    assert "![concurrency.png](concurrency.png)" in page


@pytest.mark.slow
def test_the_file_has_the_figures_of_every_round(measured):
    one, three = found = json.loads((measured[0] / "concurrency.json").read_text())
    assert [(row["concurrency"], row["rounds"], len(row["samples"])) for row in found] == [(1, 2, 2), (3, 2, 2)]
    assert (one["gain"], one["decode_rows_per_step"], one["weights"]) == (1.0, 1.0, "F32")
    assert 1 < three["decode_rows_per_step"] <= 3
    for row in found:
        for one in row["samples"]:
            assert one["total_ts"] / one["memory_limit_ts"] == pytest.approx(one["read_share"])
            assert one["total_ts"] / one["arithmetic_limit_ts"] == pytest.approx(one["peak_share"])
        assert row["seed"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["parallel", "mlx"])
def test_every_backend_runs(backend, tmp_path):
    result = bench("--concurrency", 2, "-p", 4, "-n", 3, "-o", "json", "--out", tmp_path, backend=("-b", backend))
    (row,) = json.loads(result.out)
    assert (row["backend"], row["gain"]) == (backend, None)
    assert row["total_ts"] > 0


@pytest.mark.slow
def test_csv_is_all_of_stdout_and_absent_backends_are_told(tmp_path, monkeypatch):
    from mlx_engine import backends
    from mlx_engine.backends import Entry

    absent = Entry("nowhere", pytest.fail, needs=lambda: "it needs the moon")
    monkeypatch.setitem(backends._ENTRIES, "absent", absent)
    options = ("--concurrency", 1, "-p", 4, "-n", 2, "--out", tmp_path)
    both = ("-b", "absent", "-b", "simd")
    rows = list(csv.DictReader(io.StringIO(bench(*options, "-o", "csv", backend=both).out)))
    assert [(row["backend"], bool(row.get("total_ts"))) for row in rows] == [("absent", False), ("simd", True)]
    assert "absent: not measured, it needs the moon." in bench(*options, backend=both).out


def test_a_shared_prefix_has_a_table_of_its_own(tmp_path):
    options = ("--concurrency", "1,2", "-p", 2, "-n", 2, "--shared-prefix", 8, "--out", tmp_path)
    result = bench(*options)
    assert result.code == 0
    title, table, note = result.out.strip().split("\n\n")
    assert title.endswith("pp2+tg2 @ shared 8")
    for column in ("cold ms", "warm ms", "control ms", "warm/cold"):
        assert column in table.splitlines()[0]
    assert "share nothing" in note
    rows = json.loads((tmp_path / "concurrency.json").read_text())
    assert [row["prefix_cache"] for row in rows] == [True, True]
    assert all(row["cold_ttft_ms"] > 0 and row["control_ttft_ms"] > 0 for row in rows)
    assert not (tmp_path / "concurrency.png").exists()


@pytest.mark.slow
def test_the_budget_marks_what_it_ended(tmp_path):
    result = bench("--concurrency", 1, "-p", 4, "-n", 100, "--budget", 0, "--out", tmp_path, repetitions=3)
    assert "~: the budget ended the run." in result.out
    (row,) = json.loads((tmp_path / "concurrency.json").read_text())
    assert row["rounds"] == 1
    assert row["rows_per_step"] == 4
    assert row["gap_ms"] is None


@pytest.mark.slow
def test_a_server_is_measured_over_http(tmp_path):
    with serving() as (server, url):
        command = ("--concurrency", "1,2", "--url", url, "-p", 2, "-n", 3, "--out", tmp_path)
        result = bench(*command, "-m", "mine", backend=(), jit=())
        assert {body["model"] for _, body, _ in server.seen} == {"mine"}
    assert result.code == 0
    assert [line.split("|")[1].strip() for line in result.out.splitlines()[4:6]] == ["HTTP", "HTTP"]
    assert "first token ms" in result.out
    assert "of read" not in result.out
    rows = json.loads((tmp_path / "concurrency.json").read_text())
    assert [(row["concurrency"], row["model_name"], row["url"]) for row in rows] == [
        (1, "mine", f"{url}/v1"), (2, "mine", f"{url}/v1"),
    ]  # fmt: skip
    assert (tmp_path / "concurrency.png").exists()


def test_a_plot_without_matplotlib_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlx_engine.bench.plots", None)
    monkeypatch.delattr(measuring, "plots", raising=False)
    result = bench("--concurrency", 1, "-p", 2, "-n", 2, "--out", tmp_path)
    assert result.code == 0
    assert "no plots" in result.err
    assert not (tmp_path / "concurrency.png").exists()


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--concurrency", "few"), "--concurrency: 'few' is no list of numbers, such as 1,2,4"),
        (("--concurrency", "0,1"), "--concurrency must be at least 1"),
        (("--concurrency", 2, "-p", "1,2"), "-p: --concurrency takes one number, at least 1, not 1,2"),
        (("--concurrency", 2, "-n", 0), "-n: --concurrency takes one number, at least 1, not 0"),
        (("--concurrency", 2, "-pg", "1,2"), "--concurrency cannot be combined with -pg"),
        (("--concurrency", 2, "--sweep"), "cannot be combined with --sweep"),
        (("--concurrency", 2, "--api-key", "x"), "cannot be combined with --api-key"),
        (("--url", "http://x", "--no-overlap"), "--url cannot be combined with -b, --no-jit, --no-overlap"),
        (("--shared-prefix", 9), "--shared-prefix needs --concurrency or --url"),
        (("--requests", 9), "--requests needs --concurrency or --url"),
        (("--concurrency", 2, "-p", 99_999), "pp99999+tg64 needs 100,063 tokens"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(args, told, tmp_path):
    assert told in mistake(bench(*args, "--out", tmp_path))


def test_a_folder_of_a_failed_run_does_not_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "nowhere" in mistake(bench("--concurrency", 2, model="nowhere.gguf"), code=1)
    assert not any((tmp_path / "bench-results").iterdir())
