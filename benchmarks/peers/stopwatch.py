"""One process from its start to its end: `python -m benchmarks.peers.stopwatch COMMAND...` prints JSON.

This is a program of its own because it must be small: until a new process runs its own program, the system counts the
memory of the one that starts it as its own, and never forgets that peak.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence

# The system tells the peak in KiB, but for macOS.
UNIT = 1 if sys.platform == "darwin" else 1024


def watch(command: Sequence[str]) -> dict[str, object]:
    """Seconds to the first byte that it prints, the most memory that was resident, its exit code and its last words."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if process.stdout is None or process.stderr is None:
        raise RuntimeError("the process was started without pipes")
    with process.stdout, process.stderr:
        has_printed = bool(process.stdout.read(1))
        seconds = time.perf_counter() - began
        process.stdout.read()
        said = process.stderr.read().decode(errors="replace").strip().splitlines()
        # Not process.wait(): this also tells what the process has used.
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return {
        "seconds": seconds if has_printed else None,
        "peak_bytes": usage.ru_maxrss * UNIT,
        "exit_code": process.returncode,
        "said": said[-1] if said else "",
    }


if __name__ == "__main__":
    print(json.dumps(watch(sys.argv[1:])))
