"""Which rows of a benchmark are kept, and that a change of the measured code marks them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import log, measured_code, report, sweep
from benchmarks.log import FOLDER, Log
from benchmarks.measured_code import CHANGED, FOLDERS, OLDER, digest, mark, stamp
from benchmarks.summary import summary
from benchmarks.text import source

ROOT = Path(__file__).parents[2]
ORIGIN = {
    "time": "2026-01-02T03:04", "commit": "abc", "versions": {"numpy": "2"},
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


def test_a_row_records_the_commit_and_the_code_that_it_measures(results, monkeypatch, capsys):
    at_commit(monkeypatch, "abc")
    row = Log("rows", results / "rows.jsonl").append({"rate": 1.5})
    assert rows_of(results / "rows.jsonl") == [row]
    assert (row["commit"], row["rate"], row["code"]) == ("abc", 1.5, stamp("rows"))
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


def test_kept_rows_that_record_their_code_are_of_a_commit():
    for path in report.results():
        assert [row["commit"] for row in rows_of(path) if "code" in row and row["commit"].endswith("+")] == []


def test_benchmarks_write_their_results_with_the_log_alone():
    for path in (ROOT / "benchmarks").rglob("*.py"):
        assert ".open(" not in path.read_text() or path == Path(log.__file__), path


def test_a_sweep_is_kept_row_by_row(tmp_path, monkeypatch, capsys):
    at_commit(monkeypatch, "abc+")
    monkeypatch.setattr(sweep, "RESULTS", tmp_path / "sweep.jsonl")
    monkeypatch.setattr(sweep, "sweep", lambda model, plan: iter([{"rung": model}, {"rung": plan.budget}]))
    monkeypatch.setattr(sweep, "text", lambda rows: f"{len(rows)} rows")
    sweep.main("m")
    assert [row["rung"] for row in rows_of(tmp_path / "sweep.jsonl")] == ["m", sweep.BUDGET]
    assert capsys.readouterr().out == "2 rows\n"


# ---- marks ----


@pytest.fixture
def code(tmp_path, monkeypatch):
    """A checkout with one folder of measured code."""
    monkeypatch.setattr(measured_code, "ROOT", tmp_path)
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "gemv.py").write_text('"""Products."""\n\n\ndef dot(a, b=0):\n    return a * b\n')
    (tmp_path / "kernels" / "body.metal").write_text("one\n")
    return tmp_path / "kernels"


def measured() -> dict:
    return {**ORIGIN, "code": {"folders": ["kernels"], "sha256": digest(["kernels"])}}


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("gemv.py", '"""Products."""\n\n\ndef dot(a, b=0):\n    return b * a\n'),
        ("gemv.py", '"""Products."""\n\n\ndef dot(a, b=1):\n    return a * b\n'),
        ("body.metal", "two\n"),
        ("new.py", ""),
        ("cpu/new.h", "int x;\n"),
    ],
)
def test_a_planted_change_marks_the_section(code, file, text):
    row = measured()
    assert mark(row) is None
    assert source(row).endswith("commit abc, 2026-01-02.")
    (code / file).parent.mkdir(exist_ok=True)
    (code / file).write_text(text)
    assert mark(row) == CHANGED
    assert source(row).endswith("commit abc, 2026-01-02. **The measured code has changed since.**")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("gemv.py", '"""Other words."""\n\n\ndef dot(a, b=0):\n    """Return a product."""\n    return a * b  # why\n'),
        ("README.md", "words\n"),
        (".hidden", "an editor's\n"),
        ("__pycache__/gemv.pyc", "compiled\n"),
    ],
)
def test_words_and_files_that_are_no_code_do_not_mark(code, file, text):
    row = measured()
    (code / file).parent.mkdir(exist_ok=True)
    (code / file).write_text(text)
    assert mark(row) is None


def test_a_folder_that_is_gone_marks(code):
    row = measured()
    code.rename(code.with_name("elsewhere"))
    assert mark(row) == CHANGED


def test_a_row_without_a_hash_is_of_an_older_version():
    assert mark(ORIGIN) == OLDER
    assert source(ORIGIN).endswith(" **Measured by an older version.**")


def test_every_benchmark_names_folders_that_exist():
    assert set(report.SECTIONS) <= set(FOLDERS)
    assert {path.stem for path in FOLDER.glob("*.jsonl")} <= set(FOLDERS)
    for folders in FOLDERS.values():
        assert all((ROOT / folder).is_dir() for folder in folders)


# ---- the summary ----


def test_the_summary_has_a_figure_of_each_benchmark(code):
    medians = {"1": 50.0, "8": 200.0}
    found = [{"sha256": "a"}, {"sha256": "a"}]
    text = summary({
        "rows": [{**ORIGIN, "medians_ts": {**medians, "8": 1.0}}, {**measured(), "medians_ts": medians}],
        "batch": [{**ORIGIN, "depth": 128, "medians_ts": medians}],
        "bits": [{**ORIGIN, "backend": name, "found": found} for name in ("simd", "parallel")]
        + [{**ORIGIN, "backend": "mlx", "found": [{"sha256": "b"}]}],
    })  # fmt: skip
    assert "| 8 tokens of one sequence in one pass: tokens/s | 200 | 1 token: 50 | 4 | P, commit abc |" in text
    assert f"| 200 | 1 sequence: 50 | 4 | P, commit abc; **{OLDER}** |" in text
    assert "| different logits of one prompt | 1 | ways to read the prompt: 4 | - |" in text
    assert summary({}).count("\n") == 1


def test_the_summary_is_at_the_top_of_the_page():
    top = report.PAGE.read_text().split("\n## ")[0]
    lines = [line for line in top.splitlines() if line.startswith("| ")]
    assert 8 <= len(lines) <= 13
    for title in ("decode, 64 tokens", "prefill, 512 tokens", "in one pass", "8 sequences", "error", "logits of one"):
        assert title in top
