"""Measure one process's time and peak memory: `python -m benchmarks.peers.stopwatch COMMAND...` prints JSON.

This is a separate program because it must be small: between fork and exec a new process has the memory of its parent,
and the system counts that memory in the peak of the new process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence

# The unit of peak memory in bytes: Linux reports KiB, macOS bytes.
UNIT = 1 if sys.platform == "darwin" else 1024


def watch(command: Sequence[str]) -> dict[str, object]:
    """Return seconds to the first printed byte, peak resident memory, exit code and the last line of stderr."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if process.stdout is None or process.stderr is None:
        raise RuntimeError("the process was started without pipes")
    with process.stdout, process.stderr:
        has_printed = bool(process.stdout.read(1))
        seconds = time.perf_counter() - began
        process.stdout.read()
        said = process.stderr.read().decode(errors="replace").strip().splitlines()
        # Not process.wait(): wait4 also returns the resources that the process has used.
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
