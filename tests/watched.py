"""Ranks as processes whose output is read while they run, and the moments of a run at which tests disturb them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests import ranks
from tests.builtin import N_LAYERS
from tests.patience import PATIENCE, wait_for

SIZE = 3
# Seconds in which all must have ended; the machine may be busy with other tests.
LIMIT, SLACK = 10.0, 3.0
MOMENTS = ("load", "prefill", "decode", "serve")
PROMPTS = {"prefill": "once upon a time there was " * 6, "decode": "Once upon"}
SHARED = ["--shard", "pipeline", "--split", f"2,{N_LAYERS - 3},1"]


class Watched:
    """Ranks whose output is collected while they run."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        self.processes = processes
        self.client: subprocess.Popen[str] | None = None
        self.out: list[list[str]] = [[] for _ in self.processes]
        self.err: list[list[str]] = [[] for _ in self.processes]
        self._readers: list[list[threading.Thread]] = [[] for _ in self.processes]
        for rank, process in enumerate(self.processes):
            for stream, into in ((process.stdout, self.out[rank]), (process.stderr, self.err[rank])):
                reader = threading.Thread(target=self._read, args=(stream, into), daemon=True)
                self._readers[rank].append(reader)
                reader.start()

    @staticmethod
    def _read(stream, into: list[str]) -> None:
        with contextlib.suppress(ValueError):
            while piece := os.read(stream.fileno(), 4096):
                into.append(piece.decode(errors="replace"))

    def wait_for(self, holds: Callable[[], bool], seconds: float = PATIENCE, *, but: int | None = None) -> None:
        """Wait until a condition holds, while all ranks run, or all but one."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, self.err
            ended = [rank for rank, process in enumerate(self.processes) if process.poll() is not None]
            assert set(ended) <= {but}, self.err
            time.sleep(0.005)

    def wait_until_struck(self, rank: int) -> None:
        """Wait until a rank has ended or is stopped. A busy machine takes long until it comes so far."""
        process = self.processes[rank]

        def is_struck() -> bool:
            if process.poll() is not None:
                return True
            return Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][0] in "TZ"

        wait_for(is_struck)

    def maps_model(self, rank: int) -> bool:
        """Return whether a rank has opened the model's file."""
        return "storyteller" in Path(f"/proc/{self.processes[rank].pid}/maps").read_text()

    def wait(self, seconds: float, *, but: int | None = None) -> list[int | None]:
        """Wait until all ranks, or all but one, have ended and nobody has their pipes; return their exit codes."""
        waiting = [rank for rank in range(len(self.processes)) if rank != but]
        deadline = time.monotonic() + seconds
        for rank in waiting:
            self.processes[rank].wait(max(0.1, deadline - time.monotonic()))
            for reader in self._readers[rank]:
                reader.join(max(0.1, deadline - time.monotonic()))
                assert not reader.is_alive(), f"another process has the pipes of rank {rank}"
        return [self.processes[rank].returncode for rank in waiting]

    def errors(self, *, but: int | None = None) -> str:
        """Return what all ranks, or all but one, have written to stderr."""
        return "".join(piece for rank, pieces in enumerate(self.err) if rank != but for piece in pieces)

    def error_lines(self, *, but: int | None = None) -> list[str]:
        """Return the lines of errors among them. A thread of MLX may have begun the same line with one of its own."""
        return re.findall(r"^(?:\[ring\].*?)?(error: .*)$", self.errors(but=but), flags=re.MULTILINE)

    def answer(self, seconds: float) -> str:
        """Wait for the server's answer, and return its text."""
        assert self.client is not None
        return str(json.loads(self.client.communicate(timeout=seconds)[0])["choices"][0]["text"])

    def close(self) -> None:
        """Kill what still runs."""
        for process in (*self.processes, *([self.client] if self.client else [])):
            if process.poll() is None:
                process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


def generate(prompt: str, n: int) -> list[str]:
    """Return the command of a run on the slowest backend, without how it is shared."""
    return ["cli.py", "generate", "-p", prompt, "-b", "scalar", "-n", str(n), "--ignore-eos", "-v"]


def serving(folder: Path) -> tuple[Watched, int]:
    """Return ranks that serve, and the port."""
    port = ranks.free_port()
    watched = Watched(ranks.start(folder, SIZE, ["cli.py", "serve", "-b", "simd", "--port", str(port), *SHARED]))
    watched.wait_for(lambda: "Listening" in "".join(watched.err[0]))
    return watched, port


def ask(watched: Watched, port: int, prompt: str = "Once", n: int = 400) -> None:
    """Send a request to ranks that serve."""
    body = json.dumps({"prompt": prompt, "max_tokens": n, "ignore_eos": True, "temperature": 0})
    command = ["curl", "-s", "-m", "60", f"http://127.0.0.1:{port}/v1/completions", "-d", body]
    watched.client = subprocess.Popen(
        [*command, "-H", "Content-Type: application/json"], stdout=subprocess.PIPE, text=True
    )


def running_at(moment: str, folder: Path, victim: int, n: int = 300) -> Watched:
    """Return ranks that have reached a moment of their run, in which they generate `n` tokens."""
    if moment == "serve":
        watched, port = serving(folder)
        ask(watched, port)
        time.sleep(0.3)
        return watched
    prompt = PROMPTS.get(moment, PROMPTS["prefill"])
    watched = Watched(ranks.start(folder, SIZE, [*generate(prompt, n), *SHARED]))
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
