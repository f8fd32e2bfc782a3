"""The rank's side of its watching process (`watcher.py`), while MLX connects the ranks."""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from mlx_engine.distributed import watcher
from mlx_engine.distributed.liveness import COURTESY, FAILED, LIMIT, end_process
from mlx_engine.errors import DistributedError

# Seconds that the last rank waits before it connects, so that rank 0 listens already: after a refused connection MLX
# waits for 1 s.
HEAD_START = 0.1
# Seconds after which a rank that does not connect ends itself: the watchers have named a rank by then.
LONGEST = LIMIT + 1.0

R = TypeVar("R")


def connected(ring: Callable[[], R], rank: int, hosts: Sequence[str], peers: Mapping[int, socket.socket]) -> R:
    """Return the ring that connects this rank with its neighbours, once all ranks have connected.

    If a rank dies or stops meanwhile, a watching process prints one line that names it, and this process ends.

    Args:
        ring: connects this rank; it may keep the GIL, without end.
        rank: this rank.
        hosts: the host of each rank, for messages.
        peers: connections that nobody else reads: of rank 0 to all ranks, of the others to rank 0.
    """
    own, other = socket.socketpair()
    given = {"rank": rank, "hosts": hosts, "process": os.getpid(), "limit": LIMIT}
    try:
        with own:
            with other:
                watching = _watching(given, {rank: other, **peers})
            faulthandler.register(watcher.QUESTION, file=own.fileno(), all_threads=False)
            _end_later(own)
            _barrier(own, watcher.READY)
            _end_later(own)
            if rank == len(hosts) - 1:
                time.sleep(HEAD_START)
            made = _made(ring, own)
            _barrier(own, watcher.CONNECTED)
    finally:
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(watcher.QUESTION)
    watching.wait()
    return made


def _watching(given: dict[str, Any], links: Mapping[int, socket.socket]) -> subprocess.Popen[bytes]:
    """Start the watching process with the arguments of `Watcher`."""
    import fcntl  # imported here: Windows has none

    # A process that was started without stdin or stdout has sockets at their numbers, which the new one needs.
    numbers = {rank: fcntl.fcntl(link.fileno(), fcntl.F_DUPFD_CLOEXEC, 3) for rank, link in links.items()}
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", watcher.__file__, json.dumps({**given, "links": numbers})],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=list(numbers.values()),
            start_new_session=True,  # Ctrl-C is for the rank
        )
    finally:
        for number in numbers.values():
            os.close(number)


def _end_later(own: socket.socket) -> None:
    """End this process when the watchers have named a rank. A thread in C does this, without the GIL."""
    faulthandler.dump_traceback_later(LONGEST, exit=True, file=own.fileno())


def _made(ring: Callable[[], R], own: socket.socket) -> R:
    """Return the ring. Have rank 0 print the error if this fails, and end the process."""
    try:
        return ring()
    except DistributedError as error:
        time.sleep(COURTESY)  # if the ring failed because another rank has died, that rank is named first
        _barrier(own, f"{watcher.FAILED} {' '.join(str(error).split())}")
        raise


def _barrier(own: socket.socket, line: str) -> None:
    """Send a line to the watcher, and wait until all ranks have sent it. If the watcher has ended, end this process."""
    found = bytearray()
    try:
        own.sendall(f"{line}\n".encode())
        while not found.endswith(b"\n"):
            byte = own.recv(1)
            if not byte:
                break
            found += byte
    except OSError:
        found.clear()
    if found.decode().strip() != f"all {line}":
        end_process(FAILED, None)
