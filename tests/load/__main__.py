"""Run load or faults against a server in a process of its own; end with status 1 if anything is not as it must be."""

from __future__ import annotations

import argparse
import sys

from tests.load.faults import faults
from tests.load.load import load


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.load", description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="how many requests")
    parser.add_argument("--clients", type=int, default=64, help="how many clients ask one after the other")
    parser.add_argument("--rate", type=float, help="requests per second at random moments, however many are open")
    parser.add_argument("--seed", type=int, default=1, help="seed of all random choices")
    parser.add_argument("--faults", action="store_true", help="run faults in place of load")
    given = parser.parse_args()
    if given.faults:
        return report(faults())
    return report(load(given.requests, given.clients, given.rate, given.seed))


def report(violations: list[str]) -> int:
    for violation in violations:
        print("VIOLATION:", violation)
    print(f"{len(violations)} violations")
    return int(bool(violations))


if __name__ == "__main__":
    sys.exit(main())
