"""Load and unload two models many times in one server, and print the resident memory.

    python -m tests.load.loads --loads 200

Two models of different architecture share the memory of one, so each request for the other one is a load. The script
fails if the memory grows by more than `--most` MiB after a warm-up of a fifth of the loads, or if an answer changes.
"""

from __future__ import annotations

import argparse
import statistics
import time

import psutil

from tests.serve.several import FILES, need, several


def main() -> None:
    """Run the loads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=int, default=200)
    parser.add_argument("--most", type=float, default=4.0, help="MiB of growth after the warm-up")
    given = parser.parse_args()
    grown, n_threads = run(given.loads)
    print(f"grown by {grown:.2f} MiB after the warm-up; threads at most {n_threads}")
    if grown > given.most:
        raise SystemExit(f"the resident memory has grown by {grown:.2f} MiB, more than {given.most:g}")


def run(n_loads: int) -> tuple[float, int]:
    """Alternate between two models; return the growth of the resident memory in MiB, and the most threads."""
    memory = max(need(path) for path in FILES.values()) + 1000
    process, resident, threads = psutil.Process(), list[float](), 0
    answers: dict[str, set[str]] = {name: set() for name in FILES}
    start = time.perf_counter()
    with several(memory=memory) as server:
        for i in range(n_loads):
            name = list(FILES)[(i + 1) % 2]
            reply = server.complete(name, logprobs=1)
            answers[name].add(reply.json()["mlx_engine"]["digest"])
            for loads in server.loads.values():
                loads.engines.clear()
                loads.schedulers.clear()
            resident.append(process.memory_info().rss / 2**20)
            threads = max(threads, process.num_threads())
            if i % 20 == 19:
                print(f"{i + 1} loads: {resident[-1]:.1f} MiB, {process.num_threads()} threads", flush=True)
        n = sum(loads.n for loads in server.loads.values())
    assert n == n_loads + 1, f"expected {n_loads + 1} loads, found {n}"
    assert all(len(digests) == 1 for digests in answers.values()), answers
    print(f"{(time.perf_counter() - start) / n_loads * 1000:.0f} ms per load and answer")
    fifth = max(1, n_loads // 5)
    return statistics.median(resident[-fifth:]) - statistics.median(resident[fifth : 2 * fifth]), threads


if __name__ == "__main__":
    main()
