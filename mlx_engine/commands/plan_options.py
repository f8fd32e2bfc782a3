"""The options of `plan` about machines and the links between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_engine.commands.quantities import (
    bandwidth_of,
    bits_of,
    compute_of,
    each_host,
    memories_of,
    seconds_of,
)
from mlx_engine.errors import OptionError, Words

if TYPE_CHECKING:
    from mlx_engine.backends.base import Backend
    from mlx_engine.distributed.hosts import Host, Link
    from mlx_engine.weights.outline import Outlined


@dataclass(frozen=True)
class HostOptions:
    """The machines."""

    hosts: Annotated[
        str, typer.Option("--hosts", metavar="HOSTS", help="The machines and their memory: 4x16GB, or 16GB,64GB.")
    ] = "2x16GB"
    usable: Annotated[
        float,
        typer.Option(
            "--usable", min=1, max=100, metavar="PERCENT", help="How much of a machine's memory the model may take."
        ),
    ] = 75.0
    bandwidth: Annotated[
        str | None,
        typer.Option(
            "--bandwidth",
            metavar="RATE",
            help="Memory bandwidth, such as 120GB/s; one, or one per machine.",
            show_default="measured here",
        ),
    ] = None
    compute: Annotated[
        str | None,
        typer.Option(
            "--compute",
            metavar="RATE",
            help="Arithmetic of products, such as 3TFLOP/s; one, or one per machine.",
            show_default="measured here",
        ),
    ] = None
    ranks_per_host: Annotated[
        int, typer.Option("--ranks-per-host", min=1, help="Processes on each machine; they share its memory.")
    ] = 1
    cores: Annotated[
        int | None,
        typer.Option(
            "--cores", min=1, help="Cores of each machine, if its ranks have to share them.", show_default="enough"
        ),
    ] = None

    @property
    def measured(self) -> tuple[str, ...]:
        """What is measured on this machine, because no option gives it."""
        given = {"bandwidth": self.bandwidth, "compute": self.compute}
        return tuple(name for name, value in given.items() if value is None)

    def check(self) -> None:
        """Check all values before a model is opened; raise OptionError."""
        n = len(memories_of("--hosts", self.hosts))
        if self.bandwidth is not None:
            each_host("--bandwidth", self.bandwidth, n, bandwidth_of)
        if self.compute is not None:
            each_host("--compute", self.compute, n, compute_of)

    def ranks(self, backend: Backend, outline: Outlined) -> list[Host]:
        """Return the host of each rank; what no option gives is measured on this machine.

        Raises:
            OptionError: a value is invalid, or cannot be measured here.
        """
        from mlx_engine.distributed.hosts import Host

        memories = memories_of("--hosts", self.hosts)
        n, threads = len(memories), int(getattr(backend, "threads", 1) or 1)
        reads = (
            [measured_bandwidth(backend, threads)] * n
            if self.bandwidth is None
            else each_host("--bandwidth", self.bandwidth, n, bandwidth_of)
        )
        computes = (
            [measured_compute(backend, outline)] * n
            if self.compute is None
            else each_host("--compute", self.compute, n, compute_of)
        )
        usable = [int(memory * self.usable / 100) // self.ranks_per_host for memory in memories]
        return [
            Host(memory, read, compute, self.cores, self.ranks_per_host, threads)
            for memory, read, compute in zip(usable, reads, computes, strict=True)
            for _ in range(self.ranks_per_host)
        ]


@dataclass(frozen=True)
class LinkOptions:
    """The links between neighbours."""

    link: Annotated[
        str, typer.Option("--link", metavar="RATE", help="Rate of the links between neighbours, such as 10Gbit/s.")
    ] = "1Gbit/s"
    latency: Annotated[
        str,
        typer.Option("--latency", metavar="TIME", help="Time from one machine to the next, half of what ping prints."),
    ] = "0.2ms"
    overhead: Annotated[
        str, typer.Option("--overhead", metavar="TIME", help="Time that the ring's software takes for a message.")
    ] = "0.1ms"

    def link_of(self) -> Link:
        """Return the link; raise OptionError if a value is invalid."""
        from mlx_engine.distributed.hosts import Link

        return Link(
            bits_of("--link", self.link),
            seconds_of("--latency", self.latency),
            seconds_of("--overhead", self.overhead),
        )


def measured_bandwidth(backend: Backend, threads: int) -> float:
    """Return the bytes per second at which this machine reads memory; raise OptionError if that is unknown."""
    from mlx_engine.bench.outlook import machine_bandwidth

    found = machine_bandwidth(1 if backend.name in ("scalar", "simd") else threads)
    if found is None:
        expected = "a rate such as 120GB/s, because this machine's cannot be measured"
        raise OptionError(option="--bandwidth", expected=expected, found=Words("none"))
    return found


def measured_compute(backend: Backend, outline: Outlined) -> float:
    """Return the floating-point operations per second of this backend's products with the model's largest type."""
    from mlx_engine.bench.roofline import product_rate

    if backend.name == "scalar":
        expected = "a rate such as 300GFLOP/s, for the backend scalar"
        raise OptionError(option="--compute", expected=expected, found=Words("none"))
    types: Any = outline.sizes.types
    return product_rate(backend, max(types, key=lambda type_: types[type_]))
