"""`cli.py serve` as a process: its address, what it writes, and what it takes from the machine."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import psutil

from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]
SERVE = (sys.executable, str(ROOT / "cli.py"), "serve")
START_SECONDS = PATIENCE


class Vitals(NamedTuple):
    """What a process holds at a moment.

    Attributes:
        rss: resident memory in bytes.
        threads: number of threads.
        fds: number of open file descriptors.
        pages: pages of keys and values that answers hold.
        running: answers with a slot.
        waiting: answers in the queue.
    """

    rss: int
    threads: int
    fds: int
    pages: int
    running: int
    waiting: int

    @property
    def is_idle(self) -> bool:
        return not (self.pages or self.running or self.waiting)


class ServerProcess:
    """A server in a process of its own; a context manager that ends it.

    Attributes:
        address: host and port.
        lines: what it has written to stderr after it listened.
    """

    def __init__(self, *arguments: str, command: Sequence[str] = SERVE, **options: Any) -> None:
        command = [*command, "--port", "0", *arguments]
        self.popen = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, errors="replace", **options)
        self.lines: list[str] = []
        self._listens = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._listens.wait(START_SECONDS) or not hasattr(self, "address"):
            self.popen.kill()
            raise RuntimeError(f"the server did not listen: {self.lines}")

    def _read(self) -> None:
        """Read stderr, so that the process can always write."""
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            if self._listens.is_set():
                self.lines.append(line.rstrip("\n"))
            elif match := re.match(r"Listening on http://(.+):(\d+)", line):
                self.address = match[1], int(match[2])
            elif line.startswith("Try: "):
                self._listens.set()
        self._listens.set()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.popen.kill()
        self.popen.wait()
        self._reader.join(PATIENCE)
        if self.popen.stderr is not None:
            self.popen.stderr.close()

    def end(self, *signals: signal.Signals, seconds: float = PATIENCE) -> int:
        """Send signals, and return the exit code; a killed process has a negative one."""
        for number in signals or (signal.SIGTERM,):
            self.popen.send_signal(number)
            time.sleep(0.05)
        try:
            code = self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            code = self.popen.wait()
        self._reader.join(PATIENCE)
        return code

    def get(self, path: str) -> str:
        host, port = self.address
        with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=PATIENCE) as reply:
            text: str = reply.read().decode()
        return text

    def metrics(self) -> dict[str, float]:
        """Return the metrics by name and label, without their prefix."""
        lines = [line.rsplit(" ", 1) for line in self.get("/metrics").splitlines() if not line.startswith("#")]
        return {name.removeprefix("mlx_engine:"): float(value) for name, value in lines}

    def vitals(self) -> Vitals:
        process, metrics = psutil.Process(self.popen.pid), self.metrics()
        return Vitals(
            process.memory_info().rss,
            process.num_threads(),
            process.num_fds(),
            int(metrics["kv_cache_pages_in_use"]),
            int(metrics["num_requests_running"]),
            int(metrics["num_requests_waiting"]),
        )

    def settled(self, seconds: float = PATIENCE) -> Vitals:
        """Return the vitals when no request runs, or after so many seconds."""
        end = time.monotonic() + seconds
        while not (found := self.vitals()).is_idle and time.monotonic() < end:
            time.sleep(0.1)
        return found
