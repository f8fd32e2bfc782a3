"""Fetch the projects, run their kernels, plant bugs in them: `python -m tests.collection fetch|run|plant FOLDER`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.collection.outcome import Outcome, as_dictionary
from tests.collection.plant.table import plant_in
from tests.collection.repositories import HUB, REPOSITORIES, Repository, fetch
from tests.collection.run import run_cases


def main(arguments: list[str]) -> int:
    """Fetch, or run and print a line per case and a table; return 1 if a case ended otherwise than it should."""
    parser = argparse.ArgumentParser(prog="python -m tests.collection", description=__doc__)
    parser.add_argument("action", choices=["fetch", "run", "plant"])
    parser.add_argument("folder", type=Path, help="the folder of the checkouts")
    parser.add_argument("--from", dest="source", default=HUB, help="where to clone from (default: %(default)s)")
    parser.add_argument("--repository", action="append", default=[], metavar="PART", help="only those named like this")
    parser.add_argument("--case", action="append", default=[], metavar="PART", help="only cases named like this")
    parser.add_argument("--json", action="store_true", help="an outcome per line, as JSON")
    options = parser.parse_args(arguments)
    chosen = [r for r in REPOSITORIES if r.path in options.repository]
    if not chosen:
        chosen = [r for r in REPOSITORIES if not options.repository or any(p in r.path for p in options.repository)]
    if options.action == "fetch":
        for repository in chosen:
            print(fetch(repository, options.folder, options.source))
        return 0
    if options.action == "plant":
        return plant_in(options.repository, options.folder, options.case, json_lines=options.json)
    if options.json:
        for repository in chosen:
            for one in run_cases(repository, options.folder, options.case):
                print(json.dumps(as_dictionary(one)), flush=True)
        return 0
    outcomes = [one for repository in chosen for one in in_a_process(repository, options.folder, options.case)]
    print_table(outcomes)
    return 0 if all(one.good for one in outcomes) else 1


def in_a_process(repository: Repository, folder: Path, names: list[str]) -> list[Outcome]:
    """Run the cases of a repository in a process of their own: projects have modules with the same names."""
    command = [sys.executable, "-m", "tests.collection", "run", str(folder), "--json", "--repository", repository.path]
    command += [word for name in names for word in ("--case", name)]
    outcomes = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            if not line.startswith('{"repository"'):
                continue  # what a project prints
            one = Outcome(**json.loads(line))
            outcomes.append(one)
            sign = "ok  " if one.good else "FAIL"
            text = " ".join(one.text.split())[:600]
            print(f"{sign} {one.repository} {one.case}: {one.verdict} {text} {one.seconds} s", flush=True)
    if process.returncode:
        outcomes.append(Outcome(repository.path, "process", "error", text=f"ended with {process.returncode}"))
    return outcomes


def print_table(outcomes: list[Outcome]) -> None:
    """Print a row per repository: kernels that ran, and how the cases ended."""
    for repository in dict.fromkeys(one.repository for one in outcomes):
        its = [one for one in outcomes if one.repository == repository]
        kernels = {place for one in its for place in one.kernels}
        verdicts = ", ".join(f"{n} {verdict}" for verdict, n in Counter(one.verdict for one in its).most_common())
        print(f"{repository:<40}{len(kernels):>4} kernels{len(its):>5} cases: {verdicts}")
    sound, wrong = [one for one in outcomes if not one.bug], [one for one in outcomes if one.bug]
    every, right = places(outcomes), without_findings(outcomes)
    print(f"{len(every)} kernels of {len({place.split()[0] for place in every})} repositories;", end=" ")
    print(f"{len(right)} of them without a finding in sound cases, or in cases with a bug elsewhere")
    print(f"of {len(sound)} cases of sound kernels {sum(one.good for one in sound)} are right;", end=" ")
    print(f"of {len(wrong)} cases with a bug {sum(one.good for one in wrong)} were reported")


def places(outcomes: Iterable[Outcome]) -> set[str]:
    """Return where the kernels of these cases were made."""
    return {f"{one.repository} {place}" for one in outcomes for place in one.kernels}


def without_findings(outcomes: list[Outcome]) -> set[str]:
    """Return the places of kernels that ended as they should in a case, and in none otherwise but for its bug."""
    good = {f"{one.repository} {place}" for one in outcomes if one.good for place in {*one.kernels} - {*one.wrong}}
    bad = {f"{one.repository} {place}" for one in outcomes if not one.good for place in one.wrong}
    return good - bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
