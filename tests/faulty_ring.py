"""A rank that is killed or stopped, or whose ring fails, while MLX connects the ranks. Tests start it as ranks.

    python -m tests.faulty_ring MOMENT SIGNAL VICTIM ARGUMENTS...

runs `cli.py` with the arguments. The rank VICTIM sends itself the signal at the moment.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from mlx_engine.commands import main
from mlx_engine.distributed import shard
from mlx_engine.distributed.group import RANK, Ring
from mlx_engine.errors import DistributedError

# Before MLX connects it; when MLX has connected it; when it has said so, and the other ranks have not.
MOMENTS = "before", "after", "connected"
# The ring of the victim fails, without a signal; or the victim gets the signal, and the rings of the others fail.
FAILS, BREAKS = "fails", "breaks"


def strike(at: str) -> None:
    """Send this process the signal if this is its moment."""
    if (moment, victim) == (at, int(os.environ[RANK])):
        os.kill(os.getpid(), number)


class FaultyRing(Ring):
    """A ring of which one rank stops or dies."""

    def __init__(self) -> None:
        strike("before")
        strike(BREAKS)
        if moment == BREAKS or (moment == FAILS and int(os.environ[RANK]) == victim):
            raise DistributedError("no neighbour answers", where="ring", hint="start all ranks with mlx.launch")
        super().__init__()
        strike("after")
        if moment == "connected" and self.rank == victim:
            threading.Timer(0.3, strike, ("connected",)).start()
        elif moment == "connected":
            time.sleep(1.0)


if __name__ == "__main__":
    moment, number, victim = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    sys.argv = ["cli.py", *sys.argv[4:]]
    shard.Ring = FaultyRing
    main()
