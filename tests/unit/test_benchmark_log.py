"""Which rows of a benchmark are kept, and with which stamp of a version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import log, report, sweep
from benchmarks.log import Log
from benchmarks.report import summary
from benchmarks.sections import source

ROOT = Path(__file__).parents[2]
ORIGIN = {
    "time": "2026-01-02T03:04", "commit": "abc", "versions": {"mlx-engine": "9.1", "numpy": "2"},
    "machine": {"processor": "P", "cores": 2, "memory_bytes": 2**30, "system": "S"},
}  # fmt: skip


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder that stands for the project's results."""
    monkeypatch.setattr(log, "FOLDER", tmp_path)
    return tmp_path


def at_commit(monkeypatch: pytest.MonkeyPatch, commit: str | None) -> None:
    monkeypatch.setattr(log, "origin", lambda: {**ORIGIN, "commit": commit})


# ---- which rows are kept ----


def test_a_row_records_the_version_and_the_commit_that_it_measures(results, monkeypatch, capsys):
    at_commit(monkeypatch, "abc")
    row = Log("rows", results / "rows.jsonl").append({"rate": 1.5})
    assert rows_of(results / "rows.jsonl") == [row]
    assert (row["commit"], row["rate"], row["versions"]["mlx-engine"]) == ("abc", 1.5, "9.1")
    assert "mlx-engine 9.1, numpy 2; commit abc, 2026-01-02." in source(row)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("commit", "reason"), [("abc+", "files have changed"), (None, "no git checkout")])
def test_a_row_from_a_tree_with_changes_is_not_kept(results, monkeypatch, capsys, commit, reason):
    at_commit(monkeypatch, commit)
    kept = Log("rows", results / "rows.jsonl")
    # Said before anything is measured.
    assert reason in capsys.readouterr().err
    assert kept.append({"rate": 1.5})["rate"] == 1.5
    assert rows_of(results / "rows.jsonl") == []


def test_a_file_of_the_users_takes_every_row(tmp_path, monkeypatch, capsys):
    at_commit(monkeypatch, "abc+")
    Log("rows", tmp_path / "mine.jsonl").append({"rate": 1.5})
    assert [row["commit"] for row in rows_of(tmp_path / "mine.jsonl")] == ["abc+"]
    assert capsys.readouterr().err == ""


def test_what_a_row_says_itself_counts(tmp_path, monkeypatch):
    at_commit(monkeypatch, "abc")
    assert Log("rows", None).append({"time": "2027"})["time"] == "2027"


def test_rows_that_are_kept_have_a_version_and_since_0_2_a_commit():
    for path in report.results():
        rows = rows_of(path)
        assert all(row["versions"]["mlx-engine"] for row in rows)
        assert [row["commit"] for row in rows if row["versions"]["mlx-engine"] >= "0.2" and "+" in row["commit"]] == []


def test_benchmarks_write_their_results_with_the_log_alone():
    for path in (ROOT / "benchmarks").rglob("*.py"):
        assert ".open(" not in path.read_text().replace("os.open(", "") or path == Path(log.__file__), path


def test_a_sweep_is_kept_row_by_row(tmp_path, monkeypatch, capsys):
    at_commit(monkeypatch, "abc+")
    monkeypatch.setattr(sweep, "RESULTS", tmp_path / "sweep.jsonl")
    monkeypatch.setattr(sweep, "sweep", lambda model, plan: iter([{"rung": model}, {"rung": plan.budget}]))
    monkeypatch.setattr(sweep, "text", lambda rows: f"{len(rows)} rows")
    sweep.main("m")
    assert [row["rung"] for row in rows_of(tmp_path / "sweep.jsonl")] == ["m", sweep.BUDGET]
    assert capsys.readouterr().out == "2 rows\n"


# ---- the summary ----


def test_the_summary_has_a_figure_of_each_benchmark():
    medians = {"1": 50.0, "8": 200.0}
    found = [{"sha256": "a"}, {"sha256": "a"}]
    text = summary({
        "rows": [{**ORIGIN, "medians_ts": {**medians, "8": 1.0}}, {**ORIGIN, "medians_ts": medians}],
        "batch": [{**ORIGIN, "depth": 128, "medians_ts": medians}],
        "bits": [{**ORIGIN, "backend": name, "found": found} for name in ("simd", "parallel")]
        + [{**ORIGIN, "backend": "mlx", "found": [{"sha256": "b"}]}],
    })  # fmt: skip
    assert "| 8 tokens of one sequence in one pass: tokens/s | 200 | 1 token: 50 | 4 | 9.1, P |" in text
    assert "| 200 | 1 sequence: 50 | 4 | 9.1, P |" in text
    assert "| different logits of one prompt | 1 | ways to read the prompt: 4 | - |" in text
    assert summary({}).count("\n") == 1


def test_the_summary_is_at_the_top_of_the_page():
    top = report.PAGE.read_text().split("\n## ")[0]
    lines = [line for line in top.splitlines() if line.startswith("| ")]
    assert 8 <= len(lines) <= 13
    for title in ("decode, 64 tokens", "prefill, 512 tokens", "in one pass", "8 sequences", "error", "logits of one"):
        assert title in top
