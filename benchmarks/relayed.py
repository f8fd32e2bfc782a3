"""Start ranks on this machine as `mlx.launch` does, with simulated links between neighbours."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Other programs get a small share of the cores for the seconds of a measurement.
NICENESS = -10
Ranks = list["subprocess.Popen[str]"]


@contextmanager
def ranks(command: Sequence[str], n: int, link: tuple[float, float] | None = None) -> Iterator[Ranks]:
    """Run a Python command as each of n ranks, and end all of them when the context ends.

    The ring connects to the address of the next rank in its file of addresses. So each rank has a file of its own, in
    which the relay has this place.

    Args:
        command: the arguments of Python.
        n: number of ranks.
        link: bits per second and seconds of latency; None for plain loopback.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = free_ports(n)
        towards = list(ports)  # the port at which rank r is reached by its neighbour
        if link is not None:
            towards = [stack.enter_context(relay(port, *link)) for port in ports]
        started: Ranks = []
        for rank in range(n):
            files = [towards[i] if i == (rank + 1) % n else ports[i] for i in range(n)]
            hosts = folder / f"{rank}.json"
            hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in files]))
            environment = {**os.environ, "MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)}
            process = subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, env=environment, text=True, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
            stack.callback(ended, process)
            started.append(process)
        yield started


def ended(process: subprocess.Popen[str]) -> None:
    """End a process if it runs, and close its pipes."""
    if process.poll() is None:
        process.kill()
    process.communicate()


@contextmanager
def relay(target: int, rate: float, latency: float) -> Iterator[int]:
    """Run a relay to a port of this machine in a process of its own; yield the port that it listens on."""
    command = ["-m", "benchmarks.relay", "--rate", str(rate), "--latency", str(latency), f"0:{target}"]
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        yield int(process.stdout.readline() if process.stdout else 0)
    finally:
        ended(process)


def free_ports(n: int) -> list[int]:
    """Return n ports of this machine that are free now."""
    with ExitStack() as stack:
        made = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(n)]
        return [each.getsockname()[1] for each in made]


def urgent() -> None:
    """Run all threads of this process before those of other programs, where the system lets this user."""
    tasks = Path("/proc/self/task")
    for task in tasks.iterdir() if tasks.is_dir() else ():
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, int(task.name), NICENESS)
