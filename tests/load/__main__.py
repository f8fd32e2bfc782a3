"""Run load or faults against a server in a process of its own; end with status 1 if anything is not as it must be."""

from __future__ import annotations

import argparse
import sys

from tests.load.faults import faults
from tests.load.left import left
from tests.load.load import load


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.load", description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="how many requests")
    parser.add_argument("--clients", type=int, default=64, help="how many clients ask one after the other")
    parser.add_argument("--rate", type=float, help="requests per second at random moments, however many are open")
    parser.add_argument("--seed", type=int, default=1, help="seed of all random choices")
    parser.add_argument("--faults", action="store_true", help="run faults in place of load")
    parser.add_argument("--left", type=int, metavar="N", help="run N clients that ask for much and leave")
    parser.add_argument("--seconds", type=float, default=60.0, help="with --left: for how long")
    parser.add_argument("--no-length-check", action="store_true", help="with --left: encode what cannot fit, too")
    parser.add_argument("--model", default="builtin", help="with --left: the model")
    given = parser.parse_args()
    if given.left is not None:
        return report(left(given.left, given.seconds, ["-m", given.model], checks_length=not given.no_length_check))
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
