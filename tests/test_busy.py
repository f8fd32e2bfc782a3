"""`python -m tests.busy`: its processes end with it, and a failed test is reported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.busy import ROOT, burners, run
from tests.patience import wait_for


def test_burners_run_in_the_context_alone():
    with burners(2) as started:
        wait_for(lambda: all(psutil.Process(each.pid).cpu_times().user > 0.05 for each in started))
        assert [each.poll() for each in started] == [None, None]
    assert [each.returncode for each in started] == [-9, -9]


@pytest.mark.slow
def test_burners_end_when_their_parent_is_killed():
    code = (
        "import os\nfrom tests.busy import burners\nwith burners(1) as started:\n    print(started[0].pid, flush=True)"
    )
    command = [sys.executable, "-c", f"{code}\n    os.kill(os.getpid(), 9)"]
    pid = int(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False).stdout)
    wait_for(lambda: not psutil.pid_exists(pid))


@pytest.mark.slow
def test_a_test_that_fails_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "test_two.py").write_text("def test_right(): pass\ndef test_wrong(): assert 0\n")
    code, line = run(["-n", "0", "-p", "no:cacheprovider", str(tmp_path)])
    assert (code, "test_two.py::test_wrong" in line, "1 failed, 1 passed" in line) == (1, True, True), line
    assert "assert 0" in capsys.readouterr().out
    (tmp_path / "test_two.py").write_text("def test_right(): pass\n")
    code, line = run(["-n", "0", "-p", "no:cacheprovider", str(tmp_path)])
    assert (code, line.endswith("; no failure")) == (0, True), line
