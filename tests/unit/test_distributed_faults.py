"""Ranks that die or hang: every other rank ends within 10 s, and one line names the rank. Slow: real processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests import ranks

pytestmark = pytest.mark.slow

SIZE = 3
# Seconds in which all must have ended; the machine may be busy with other tests.
LIMIT, SLACK = 10.0, 3.0
PROMPT = "once upon a time there was " * 30
GENERATE = ["cli.py", "generate", "-p", PROMPT, "-b", "scalar", "-n", "300", "--shard", "pipeline", "-v"]
MOMENTS = ("load", "prefill", "decode", "serve")


class Watched:
    """Ranks whose output is collected while they run."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        self.processes = ranks.start(folder, SIZE, command)
        self.client: subprocess.Popen[bytes] | None = None
        self.out: list[list[str]] = [[] for _ in self.processes]
        self.err: list[list[str]] = [[] for _ in self.processes]
        for rank, process in enumerate(self.processes):
            for stream, into in ((process.stdout, self.out[rank]), (process.stderr, self.err[rank])):
                threading.Thread(target=self._read, args=(stream, into), daemon=True).start()

    @staticmethod
    def _read(stream, into: list[str]) -> None:
        with contextlib.suppress(ValueError):
            while piece := os.read(stream.fileno(), 4096):
                into.append(piece.decode(errors="replace"))

    def wait_for(self, holds, seconds: float = 60.0) -> None:
        """Wait until a condition holds."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, self.err
            assert all(process.poll() is None for process in self.processes), self.err
            time.sleep(0.005)

    def maps_model(self, rank: int) -> bool:
        """Return whether a rank has opened the model's file."""
        return "storyteller" in Path(f"/proc/{self.processes[rank].pid}/maps").read_text()

    def close(self) -> None:
        """Kill what still runs."""
        for process in (*self.processes, *([self.client] if self.client else [])):
            if process.poll() is None:
                process.kill()
            process.wait()
        for process in self.processes:
            for stream in (process.stdout, process.stderr):
                stream.close()


def running_at(moment: str, folder: Path, victim: int) -> Watched:
    """Return ranks that have reached a moment of their run."""
    if moment == "serve":
        port = ranks.free_port()
        options = ["-b", "simd", "--port", str(port), "--shard", "pipeline", "--split", "2,2,2"]
        watched = Watched(folder, ["cli.py", "serve", *options])
        watched.wait_for(lambda: "Listening" in "".join(watched.err[0]))
        command = ["curl", "-s", "-m", "60", f"http://127.0.0.1:{port}/v1/completions", "-d"]
        body = '{"prompt": "Once", "max_tokens": 400, "ignore_eos": true}'
        watched.client = subprocess.Popen(
            [*command, body, "-H", "Content-Type: application/json"], stdout=subprocess.DEVNULL
        )
        time.sleep(0.3)
        return watched
    prompt = PROMPT if moment != "decode" else "Once upon"
    command = [prompt if word == PROMPT else word for word in GENERATE]
    watched = Watched(folder, [*command, "--split", "2,2,2"])
    if moment == "load":
        watched.wait_for(lambda: watched.maps_model(victim))
        return watched
    watched.wait_for(lambda: "KV cache" in "".join(watched.err[0]))
    if moment == "decode":
        watched.wait_for(lambda: len("".join(watched.out[0])) > len(prompt) + 4)
    else:
        time.sleep(0.3)
        assert not watched.out[0]
    return watched


@pytest.mark.parametrize("victim", range(SIZE))
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_all_ranks_end_and_one_line_names_the_rank(tmp_path, moment: str, number: signal.Signals, victim: int):
    watched = running_at(moment, tmp_path, victim)
    try:
        others = [process for rank, process in enumerate(watched.processes) if rank != victim]
        os.kill(watched.processes[victim].pid, number)
        began = time.monotonic()
        for process in others:
            process.wait(max(0.1, began + LIMIT + SLACK - time.monotonic()))
        time.sleep(0.1)  # for the threads that read
        assert [process.returncode for process in others] == [1, 1]
        errors = "".join(piece for rank, pieces in enumerate(watched.err) if rank != victim for piece in pieces)
        lines = re.findall(r"^error: .*$", errors, flags=re.MULTILINE)
        assert len(lines) == 1, errors
        assert lines[0].startswith(
            f"error: rank {victim} (127.0.0.1): expected to run until the end, found that it has"
        )
        assert "Traceback" not in errors
    finally:
        watched.close()


def test_ctrl_c_ends_all_ranks(tmp_path):
    watched = running_at("decode", tmp_path, 0)
    try:
        for process in watched.processes:
            process.send_signal(signal.SIGINT)
        began = time.monotonic()
        for process in watched.processes:
            process.wait(max(0.1, began + LIMIT + SLACK - time.monotonic()))
        time.sleep(0.1)
        assert [process.returncode for process in watched.processes] == [130] * SIZE
        assert ["interrupted" in "".join(pieces) for pieces in watched.err] == [True, False, False]
        assert "error" not in "".join(piece for pieces in watched.err for piece in pieces)
    finally:
        watched.close()
