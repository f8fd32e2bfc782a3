"""Other processes that use the cores during a benchmark: their share, and what is said about the figures."""

from __future__ import annotations

import json
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from typer.testing import CliRunner

from mlx_engine.bench import roofline
from mlx_engine.bench.origin import MOST, OtherProcesses, disturbed, fields, finding
from mlx_engine.commands import app, bench
from tests.busy import burners

MODEL = Path(__file__).parents[1] / "data" / "qwen3-micro" / "model-q8_0.gguf"

# Before the fixture of this folder replaces it.
share = OtherProcesses.share
Times = namedtuple("Times", "user nice system idle iowait irq softirq steal guest guest_nice")


@pytest.mark.slow
def test_a_busy_process_is_found():
    with burners(1):
        others = OtherProcesses()
        time.sleep(0.6)
        found = share(others)
    assert found is not None
    assert found > MOST


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("allowed", "own", "expected"),
    [
        ([0, 1], 0.0, (8 - 0.05) / 20), ([0, 1], 6.0, (2 - 0.05) / 20), ([1], 0.0, (1 - 0.05) / 10),
        ([0, 1], 8.0, 0.0), ([0, 7], 0.0, (8 - 0.05) / 20), (None, 0.0, (8 - 0.05) / 20),
    ],
)  # fmt: skip
def test_what_is_counted(monkeypatch: pytest.MonkeyPatch, allowed: list[int] | None, own: float, expected: float):
    """Core 0 is busy for 7 of 10 s, 1 s of them stolen by the host, and core 1 for 1 s; guests count in `user`."""
    now = [Times(*[100.0] * 10), Times(*[50.0] * 10)]
    later = [Times(103, 100, 102, 102, 101, 100, 101, 101, 102, 100), Times(51, 50, 50, 58, 51, *[50] * 5)]
    process = SimpleNamespace(cpu_times=lambda: (own if cores is later else 0.0, 0.0, 0.0, 0.0, 9.0))
    if allowed is not None:
        process.cpu_affinity = lambda: allowed
    monkeypatch.setattr(psutil, "Process", lambda: process)
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: cores)
    cores = now
    others = OtherProcesses()
    assert share(others) is None
    cores = later
    assert share(others) == pytest.approx(expected)


def test_a_finding_names_the_tests_and_the_largest_share():
    rows = [{"test": f"pp{i}", "backend": "simd", **fields(i / 100)} for i in (5, 6, 40)]
    assert [row["usable"] for row in rows] == [True, False, False]
    assert finding(rows[:1]) is finding([{"test": "pp1", **fields(None)}]) is disturbed([]) is None
    text = finding(rows)
    assert text is not None
    assert text.startswith("not usable: pp6 on simd, pp40 on simd: other processes used 40% of the cores")
    clients = [{"test": "pp8+tg2", "backend": "simd", "concurrency": i, **fields(0.5)} for i in range(1, 7)]
    assert "pp8+tg2, 4 clients on simd and 2 more: " in str(finding(clients))
    assert str(disturbed([fields(0.5)])).startswith("**Not usable: all figures: other")


CLIENTS = ("--concurrency", "1,2", "--requests", "1")


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("command", "stem", "others"),
    [
        (["bench"], "bench", 0.43), (["bench", "--sweep"], "sweep", 0.43), (["bench", *CLIENTS], "concurrency", 0.43),
        (["report"], "report", 0.43), (["bench"], "bench", 0.01), (["report"], "report", 0.01),
    ],
)  # fmt: skip
def test_figures_beside_other_processes_are_not_usable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: list[str], stem: str, others: float
):
    monkeypatch.setattr(roofline, "SECONDS", 1e-4)
    monkeypatch.setattr(bench, "draw", lambda found, folder: [])
    monkeypatch.setattr(OtherProcesses, "share", lambda self: others)
    what = ["-m", str(MODEL), "-b", "simd", "-p", "4", "-n", "2", "-r", "1", "--budget", "0.05", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*command, *what])
    assert result.exit_code == 0
    found = json.loads((tmp_path / f"{stem}.json").read_text())
    measured = [found] if stem == "report" else [row for row in found if not row["unavailable"]]
    assert {(row["usable"], row["others_share"]) for row in measured} == {(others < MOST, others)}
    page = (tmp_path / f"{stem}.md").read_text()
    assert ["not usable" in text.lower() for text in (result.stderr, page)] == [others > MOST] * 2
    advice = "used 43% of the cores meanwhile, expected at most 5%; end them and measure again"
    assert (advice in result.stderr) is (others > MOST)
