"""Of several processes that need the same kernels at once, one compiles."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("numba")

from kernels.cpu.build import library, machine_code
from kernels.cpu.build.machine_code import COMPILING, locked
from tests.patience import PATIENCE
from tests.unit.test_cpu_library import python

# Both processes find no code before either compiles. The code of a format is compiled already: no test waits for that.
ONE_OF_TWO = """
import os, sys, time
from pathlib import Path
from kernels.cpu.build import library, machine_code
code, meet = Path(sys.argv[1]), Path(sys.argv[2])
def build(parts, keep):
    time.sleep(0.3)
    print(*parts)
    for part in parts:
        keep(part, code.read_bytes()[32:])
machine_code.build = build
(meet / str(os.getpid())).touch()
while len(list(meet.iterdir())) < 2:
    time.sleep(0.01)
print("found", len(library.codes(["q8_0"])["q8_0"]) == code.stat().st_size - 32)
"""


@pytest.mark.slow
def test_one_of_two_processes_compiles_and_both_have_the_code(tmp_path: Path):
    library.load().format("q8_0")
    meet, cache = tmp_path / "meet", tmp_path / "cache"
    meet.mkdir()
    arguments = ONE_OF_TWO, library.code_file("q8_0"), meet
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(python, *arguments, NUMBA_CACHE_DIR=str(cache)) for _ in range(2)]
    said = sorted(run.result().stdout.split() for run in runs)
    assert said == [["found", "True"], ["q8_0", "found", "True"]], [run.result().stderr for run in runs]


def test_a_compiling_process_does_not_wait_for_the_one_that_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def lock() -> None:
        with locked([tmp_path / "part.code"]):
            pass

    with locked([tmp_path / "part.code"]):
        monkeypatch.setenv(COMPILING, "1")
        waiting = threading.Thread(target=lock, daemon=True)
        waiting.start()
        waiting.join(PATIENCE)
        assert not waiting.is_alive()


def test_a_process_that_was_suspended_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine_code, "PATIENCE", 0.1)
    with locked([tmp_path / "part.code"]), locked([tmp_path / "part.code"]):
        assert (tmp_path / "part.lock").exists()


def test_without_a_folder_for_locks_nothing_waits():
    with locked([Path("/proc/nowhere/part.code")]):
        assert not Path("/proc/nowhere").exists()
