"""Start an engine's process (`child.py`), send requests to it, and read the replies."""

from __future__ import annotations

import json
import select
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.peers.loop import Answer

ROOT = Path(__file__).parents[2]

# Seconds to wait for a reply. In `benchmarks.peers`, the longest request is a context of 4,096 tokens on a slow
# machine.
PATIENCE = 300.0


class PeerError(Exception):
    """An engine is not installed, has exited, or does not reply."""


class Process:
    """An engine's process. `facts` is the reply to the request that opened it.

    Raises:
        PeerError: the engine's package is not installed, or the process failed.
    """

    def __init__(self, module: str, python: str, **request: Any) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed when the process is
        try:
            self._process = subprocess.Popen(
                [python, "-m", "benchmarks.peers.child", module],
                cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            )  # fmt: skip
        except OSError as error:
            self._errors.close()
            raise PeerError(f"{python} cannot be started: {error.strerror}") from error
        try:
            self.facts = self.ask("open", **request)
            if "absent" in self.facts:
                raise PeerError(f"not installed: {self.facts['absent']}")
        except BaseException:
            self.close()
            raise

    def ask(self, do: str, *, patience: float = PATIENCE, **request: Any) -> Answer:
        """Send a request and return the reply.

        Raises:
            PeerError: the process has exited, or does not reply within `patience` seconds.
        """
        if self._process.stdin is None or self._process.stdout is None:
            raise PeerError("the process was started without pipes")
        try:
            self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(self._error_line()) from None
        readable, _, _ = select.select([self._process.stdout], [], [], patience)
        if not readable:
            raise PeerError(f"no answer to {do!r} within {patience:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(self._error_line())
        reply: Answer = json.loads(line)
        return reply

    def close(self) -> None:
        """Close stdin, and kill the process if it does not exit."""
        try:
            self._process.communicate(timeout=10)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _error_line(self) -> str:
        """Return the error: the last line of the traceback on stderr."""
        self._process.wait(timeout=PATIENCE)
        self._errors.seek(0)
        said = self._errors.read().strip().splitlines()
        return f"failed: {said[-1] if said else f'exit code {self._process.returncode}'}"

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
