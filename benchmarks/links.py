"""Measure messages of MLX's ring between two ranks, over loopback and over simulated links (`benchmarks.relay`).

    python -m benchmarks.links [--sizes 4096,1048576] [--links 1e9:0.0001,1e10:0.001]

A message goes from rank 0 to rank 1, which answers with 4 bytes. For each size the table has the time of the message
with its answer over loopback and over each link, and the ratio to the expected time of the link: the time over
loopback, plus two times the latency, plus the bytes divided by the rate. Times are the shortest of several, because
other programs share the cores. The sizes are those of decode (4 to 64 KB) and of prefill (1 to 16 MB).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.relay import ranks, urgent
from mlx_engine.distributed.group import Group, Ring

SIZES = (4 << 10, 16 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20)
LINKS = tuple((rate, latency) for rate in (1e9, 1e10) for latency in (1e-4, 1e-3, 5e-3))
FLOAT_BYTES, BITS = 4, 8
# The smallest number of messages of a size, and the least number of seconds for which they are sent.
LEAST, SECONDS = 5, 1.0


class Trip(NamedTuple):
    """The bytes of a message, and the shortest time of the message with its answer."""

    nbytes: int
    seconds: float


def promised(loopback: Trip, rate: float, latency: float) -> float:
    """Return the expected seconds of a message with its answer over a link, given the seconds over loopback."""
    return loopback.seconds + 2 * latency + (loopback.nbytes + FLOAT_BYTES) * BITS / rate


def worker(sizes: Sequence[int], group: Group) -> list[Trip]:
    """Exchange messages between ranks 0 and 1; return the trips on rank 0, and nothing on rank 1."""
    found = []
    for nbytes in sizes:
        message, answer = np.zeros(nbytes // FLOAT_BYTES, np.float32), np.zeros(1, np.float32)
        seconds: list[float] = []
        while True:
            # Rank 0 tells rank 1 whether another message follows, so that both ranks end together.
            goes_on = len(seconds) <= LEAST or sum(seconds) < SECONDS
            if group.rank == 0:
                group.send(np.array([goes_on], np.float32), 1)
            elif not group.receive((1,), np.float32, 0)[0]:
                break
            if group.rank == 0 and not goes_on:
                break
            start = time.perf_counter()
            if group.rank == 0:
                group.send(message, 1)
                group.receive(answer.shape, np.float32, 1)
            else:
                group.receive(message.shape, np.float32, 0)
                group.send(answer, 0)
            seconds.append(time.perf_counter() - start)
        found.append(Trip(nbytes, min(seconds[1:], default=0.0)))
    group.close()
    return found if group.rank == 0 else []


def measure(sizes: Sequence[int], link: tuple[float, float] | None = None) -> list[Trip]:
    """Return the trips over a link (bits per second, seconds of latency), or over loopback."""
    command = ["-m", "benchmarks.links", "--worker", "--sizes", ",".join(map(str, sizes))]
    with ranks(command, 2, link) as started:
        out, errors = started[0].communicate(timeout=300)
    if started[0].returncode:
        raise RuntimeError(errors)
    return [Trip(*row) for row in json.loads(out)]


def table(plain: Sequence[Trip], links: Sequence[tuple[float, float]], found: Sequence[Sequence[Trip]]) -> list[str]:
    """Return the lines of the table: a row per size; for each link the measured ms and the ratio to the expected."""
    heads = [f"{rate / 1e9:g} Gbit/s, {latency * 1e3:g} ms" for rate, latency in links]
    lines = ["| Bytes | loopback | " + " | ".join(heads) + " |", "|---:|" + "---:|" * (1 + len(links))]
    for i, trip in enumerate(plain):
        cells = [f"{trip.nbytes:,}", f"{trip.seconds * 1e3:.2f} ms"]
        for link, trips in zip(links, found, strict=True):
            cells.append(f"{trips[i].seconds * 1e3:.2f} ms ({trips[i].seconds / promised(trip, *link):.2f})")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def links_of(text: str) -> list[tuple[float, float]]:
    """Parse a list of RATE:LATENCY, in bits per second and seconds."""
    return [(float(rate), float(latency)) for rate, latency in (item.split(":") for item in text.split(","))]


def main() -> None:
    """Print the table; with --worker be a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes of a message")
    parser.add_argument("--links", type=links_of, default=list(LINKS), help="RATE:LATENCY, bits per second and seconds")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    sizes = [int(size) for size in given.sizes.split(",")]
    if given.worker:
        ring = Ring()
        urgent()
        print(json.dumps(worker(sizes, ring)))
        return
    plain = measure(sizes)
    print("\n".join(table(plain, given.links, [measure(sizes, link) for link in given.links])))


if __name__ == "__main__":
    main()
