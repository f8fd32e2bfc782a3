"""The machines and the links of a plan: what they offer, and how long work and messages take on them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlx_engine.distributed.model_parts import Work

BITS = 8
# Linux runs a thread that has waited for about this many seconds before others of the same core.
SLICE = 3e-3


@dataclass(frozen=True)
class Host:
    """A machine.

    Attributes:
        memory: bytes that the model may take.
        bandwidth: bytes per second that a rank reads while no other rank runs.
        compute: floating-point operations per second of a rank's products while no other rank runs.
        cores: cores of the machine; None if each rank has enough of them.
        ranks: ranks on this machine.
        threads: threads of each rank.
        together: how much longer a rank's work takes while other ranks on the machine work, because they share its
            memory bandwidth.
    """

    memory: int
    bandwidth: float
    compute: float
    cores: int | None = None
    ranks: int = 1
    threads: int = 1
    together: float = 1.0

    @property
    def crowding(self) -> float:
        """How much longer a rank's work takes while all ranks compute, because they share the memory and the cores."""
        together = self.together if self.ranks > 1 else 1.0
        return together * (1.0 if self.cores is None else max(1.0, self.threads * self.ranks / self.cores))

    @property
    def delay(self) -> float:
        """Seconds until a rank reads a message that has arrived, because another rank reads its sockets on its core."""
        return 0.0 if self.cores is None else SLICE / 2 * max(0.0, 1 - self.cores / self.ranks)

    def seconds(self, work: Work) -> float:
        """Return the time of a rank's work while no other rank runs.

        It is sqrt(r^2 + a^2), for r = bytes / bandwidth and a = operations / rate of arithmetic, because reading and
        arithmetic overlap in part. Passes of 1 to 8 requests on one core were within 7 % of it; the longer of r and a
        was up to a quarter too short.
        """
        return math.hypot(work.nbytes / self.bandwidth, work.flops / self.compute)

    def among_waiting(self, work: Work) -> float:
        """Return the time of a rank's work while the other ranks wait for messages.

        A rank that waits takes a core, too: the ring reads its sockets in a loop. The system first runs the rank whose
        message has arrived, and lets the others have their share of the cores after a slice of time.
        """
        seconds = self.seconds(work)
        share = 1.0 if self.cores is None else max(1.0, (self.threads + self.ranks - 1) / self.cores)
        return seconds + max(0.0, seconds - SLICE) * (share - 1)


@dataclass(frozen=True)
class Link:
    """A connection of two neighbours in the ring, the same in both directions.

    Attributes:
        rate: bits per second.
        latency: seconds from the first byte's departure to its arrival.
        overhead: seconds that the ring's software takes for a message.
    """

    rate: float
    latency: float
    overhead: float = 0.0

    def occupied(self, nbytes: float) -> float:
        """Return the seconds for which a message keeps the link busy."""
        return nbytes * BITS / self.rate

    def seconds(self, nbytes: float) -> float:
        """Return the time of a message from one rank's memory to the other's."""
        return self.latency + self.overhead + self.occupied(nbytes)
