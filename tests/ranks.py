"""Ranks as processes on this machine, started as `mlx.launch` starts them."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE

ROOT = Path(__file__).parents[1]


def start(folder: Path, size: int, command: Sequence[str | Path]) -> list[subprocess.Popen[str]]:
    """Start a Python command as each rank of a run; `folder` holds the files of addresses."""
    ports = free_ports(size)
    return [start_rank(folder, rank, ports, command) for rank in range(size)]


def start_rank(folder: Path, rank: int, ports: Sequence[int], command: Sequence[str | Path]) -> subprocess.Popen[str]:
    """Start a Python command as one rank of a run, which reaches the ranks at these ports."""
    hostfile = folder / f"hosts{rank}.json"
    hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    environment = {**os.environ, "MLX_HOSTFILE": str(hostfile), "MLX_RANK": str(rank)}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *map(str, command)], cwd=ROOT, env=environment, text=True, **pipes)


def free_ports(n: int) -> list[int]:
    """Return ports that were free just now, and none of those that systems give to clients: ranks may start slowly."""
    found: list[int] = []
    for port in random.SystemRandom().sample(range(20_000, 32_000), 12_000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == n:
            break
    return found


def free_port() -> int:
    """Return a port that was free just now."""
    return free_ports(1)[0]


def finished(ranks: Sequence[subprocess.Popen[str]], timeout: float = PATIENCE) -> list[tuple[int, str, str]]:
    """Return exit code, stdout and stderr of each rank; kill those that do not end in time."""
    found = []
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=timeout)
            found.append((rank.returncode, out, err))
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.communicate()
    return found


def run(folder: Path, size: int, command: Sequence[str | Path]) -> list[tuple[int, str, str]]:
    """Run a Python command as each rank, and return exit code, stdout and stderr of each."""
    return finished(start(folder, size, command))


def last_json(out: str) -> dict[str, Any]:
    """Return the object in the last line of a rank's output."""
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found
