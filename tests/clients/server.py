"""The server as a process of its own, with the built-in model, on a free port."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
API_KEY = "key-of-the-tests"


@contextmanager
def running(*options: str) -> Iterator[str]:
    """Run `cli.py serve` with further options; yield its address, and stop it in the end.

    Raises:
        RuntimeError: the server did not start, or did not end with status 0; the message has its output.
    """
    command = [sys.executable, "cli.py", "serve", "--port", "0", "--api-key", API_KEY, "--grace", "5", *options]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines: list[str] = []
    try:
        for line in process.stderr:
            lines.append(line)
            if found := re.match(r"Listening on (\S+)", line):
                yield found[1]
                break
    finally:
        process.terminate()
        _, rest = process.communicate(timeout=30)
    if process.returncode != 0 or "Traceback" in rest:
        log = "".join(lines) + rest
        raise RuntimeError(f"the server: expected to end well, found status {process.returncode} and this log:\n{log}")
