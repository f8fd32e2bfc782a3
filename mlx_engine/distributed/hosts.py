"""The machines and the links of a plan: what they offer, and how long work and messages take on them."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_engine.distributed.model_parts import Work

BITS = 8


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
    """

    memory: int
    bandwidth: float
    compute: float
    cores: int | None = None
    ranks: int = 1
    threads: int = 1

    @property
    def slowdown(self) -> float:
        """How much longer a rank's work takes because its threads share the cores with those of other ranks.

        A rank that waits for a message takes a core, too: the ring reads its sockets in a loop.
        """
        return 1.0 if self.cores is None else max(1.0, (self.threads + self.ranks - 1) / self.cores)

    @property
    def crowding(self) -> float:
        """The same while all ranks compute."""
        return 1.0 if self.cores is None else max(1.0, self.threads * self.ranks / self.cores)

    def seconds(self, work: Work) -> float:
        """Return the time of a rank's work while no other rank runs."""
        return max(work.nbytes / self.bandwidth, work.flops / self.compute)


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
