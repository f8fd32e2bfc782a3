"""How many cores there are to use: affinity, and the limits that control groups set, in folders made for the test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import mlx_engine
from mlx_engine.backends import create_backend
from mlx_engine.bench import sweep
from mlx_engine.bench.sweep import Plan
from mlx_engine.machine import memory as limits
from mlx_engine.machine.memory import usable_cores
from mlx_engine.observe import log
from tests.unit.test_command_generate import cli

MICRO = Path(__file__).parents[1] / "data" / "qwen3-micro" / "model-q8_0.gguf"


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    """A root folder with the groups of this process, and files in the tree of control groups."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_control_groups_affinity_counts(tmp_path: Path):
    assert usable_cores(tmp_path) == 8


def test_without_affinity_the_machines_cores_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores(tmp_path) == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores(tmp_path) == 1


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({}, 8),
        ({"pod/box/cpu.max": "max 100000\n"}, 8),
        ({"pod/box/cpu.max": "300000 100000\n"}, 3),
        ({"pod/box/cpu.max": "250000 100000\n"}, 2),
        ({"pod/box/cpu.max": "50000 100000\n"}, 1),
        ({"pod/box/cpu.max": "1600000 100000\n"}, 8),
        ({"pod/box/cpu.max": "max 100000\n", "pod/cpu.max": "400000 100000\n"}, 4),
        ({"pod/box/cpu.max": "500000 100000\n", "pod/cpu.max": "400000 100000\n", "cpu.max": "200000 100000\n"}, 2),
        ({"pod/box/cpu.max": "200000 100000\n", "cpu.max": "600000 100000\n"}, 2),
        ({"cpu.max": "300000 50000\n"}, 6),
        ({"elsewhere/cpu.max": "100000 100000\n"}, 8),
    ],
)
def test_version_2_every_group_up_to_the_root_may_set_a_limit(tmp_path: Path, files: dict[str, str], want: int):
    assert usable_cores(machine(tmp_path, "0::/pod/box\n", files)) == want


def test_version_2_in_the_root_group(tmp_path: Path):
    """Inside a container its own group is the root of what it sees."""
    assert usable_cores(machine(tmp_path, "0::/\n", {"cpu.max": "150000 100000\n"})) == 1


V1 = "12:memory:/box\n4:cpu,cpuacct:/box\n1:name=systemd:/box\n"


def quota(folder: str, quota_us: str, period_us: str = "100000\n") -> dict[str, str]:
    return {f"{folder}/cpu.cfs_quota_us": quota_us, f"{folder}/cpu.cfs_period_us": period_us}


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({}, 8),
        (quota("cpu/box", "-1\n"), 8),
        (quota("cpu/box", "300000\n"), 3),
        (quota("cpu", "200000\n"), 2),
        (quota("cpu/box", "500000\n") | quota("cpu", "200000\n"), 2),
        (quota("cpu/box", "20000\n", "50000\n"), 1),
        (quota("memory/box", "100000\n"), 8),
        ({"cpu/box/cpu.cfs_quota_us": "100000\n"}, 8),
    ],
)
def test_version_1_the_groups_of_the_processor_count(tmp_path: Path, files: dict[str, str], want: int):
    assert usable_cores(machine(tmp_path, V1, files)) == want


@pytest.mark.parametrize("text", ["", "\n", "200000\n", "many 100000\n", "200000 few\n", "200000 0\n", "\udcff\n"])
def test_a_limit_that_makes_no_sense_is_none(tmp_path: Path, text: str):
    root = machine(tmp_path, "0::/box\n", {"box/cpu.max": ""})
    (root / "sys/fs/cgroup/box/cpu.max").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert usable_cores(root) == 8


@pytest.mark.parametrize(("quota_us", "period_us"), [("", ""), ("many", "100000"), ("200000", "0"), ("0", "100000")])
def test_a_limit_of_version_1_that_makes_no_sense_is_none(tmp_path: Path, quota_us: str, period_us: str):
    assert usable_cores(machine(tmp_path, V1, quota("cpu/box", quota_us, period_us))) == 8


@pytest.mark.parametrize("groups", ["", "\n", "nonsense\n", "0:\n", "0::/box\n\nnonsense\n"])
def test_groups_that_make_no_sense_are_none(tmp_path: Path, groups: str):
    assert usable_cores(machine(tmp_path, groups, {"cpu.max": "max 100000\n"})) == 8


def test_a_group_that_is_a_file_sets_no_limit(tmp_path: Path):
    assert usable_cores(machine(tmp_path, "0::/pod/box\n", {"pod": "not a folder"})) == 8


def test_this_machine_has_a_core():
    assert 1 <= usable_cores() <= 8


# ---- what they are for ----


@pytest.mark.parametrize("jit", [True, False])
def test_a_parallel_backend_has_the_threads_it_is_told_or_all_cores(jit: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "usable_cores", lambda: 5)
    assert create_backend("parallel", threads=3, jit=jit).threads == 3
    assert create_backend("parallel", jit=jit).threads == 5


def test_more_threads_than_cores_are_not_made_and_the_user_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(limits, "usable_cores", lambda: 2)
    monkeypatch.setattr(log.LOGGER, "propagate", True)
    for _ in range(2):
        assert mlx_engine.load(MICRO, "parallel", threads=100_000).backend.threads == 2
    expected = "warning: threads: expected at most 2, the cores that this process may use, found 100000; using 2"
    assert caplog.messages == [expected]


@pytest.mark.parametrize("quiet", [[], ["-q"], ["--json"]], ids=str)
def test_a_command_warns_of_too_many_threads_in_one_line(quiet: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "usable_cores", lambda: 1)
    found = cli("generate", "-m", MICRO, "-b", "parallel", "-t", 1000, "-n", 1, "a", *quiet)
    assert (found.code, found.err.count("threads: expected at most 1, the core that")) == (0, 1)
    assert len(found.err.splitlines()) == 1 or not quiet


def test_a_sweep_makes_no_backend_of_too_many_threads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "usable_cores", lambda: 1)
    made = []
    monkeypatch.setattr(
        sweep, "create_backend", lambda name, **how: made.append(how["threads"]) or create_backend(name)
    )
    next(sweep.sweep(str(MICRO), Plan(threads=100_000, budget=1e-9), lambda *report: None))
    assert set(made) == {1}


def test_an_engine_hands_its_threads_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "usable_cores", lambda: 4)
    assert mlx_engine.load(MICRO, "parallel", threads=2).backend.threads == 2
    assert mlx_engine.load(MICRO, "parallel").backend.threads == 4
