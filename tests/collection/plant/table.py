"""Plant all bugs, each project's in a process of its own, and print how they were reported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.collection.plant.bugs import BUGS
from tests.collection.plant.run import Planted, plant
from tests.collection.plant.subjects import OURS
from tests.collection.repositories import REPOSITORIES


def plant_in(parts: Sequence[str], folder: Path, names: list[str], *, json_lines: bool) -> int:
    """Plant the bugs whose names contain one of `names`, or all, in the projects whose paths contain one of `parts`.

    Returns:
        0 if every sound kernel came out without a finding and every bug with line, thread and advice.
    """
    paths = [r.path for r in REPOSITORIES] + [OURS]
    used = {bug.kernel.split()[0] for bug in BUGS}
    chosen = [path for path in paths if path in used and (not parts or path in parts)]
    chosen = chosen or [path for path in paths if path in used and any(part in path for part in parts)]
    if json_lines:
        for path in chosen:
            repository = next((r for r in REPOSITORIES if r.path == path), None)
            for one in plant(repository, folder, names):
                print(json.dumps(asdict(one)), flush=True)
        return 0
    found = [one for path in chosen for one in _in_a_process(path, folder, names)]
    _print_summary(found)
    return 0 if all(one.is_complete if one.kind else not one.caught for one in found) else 1


def _in_a_process(path: str, folder: Path, names: list[str]) -> list[Planted]:
    command = [sys.executable, "-m", "tests.collection", "plant", str(folder), "--json", "--repository", path]
    command += [word for name in names for word in ("--case", name)]
    found = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            if not line.startswith('{"kernel"'):
                continue  # what a project prints
            one = Planted(**json.loads(line))
            found.append(one)
            _print(one)
    if process.returncode:
        found.append(Planted(path, "process", "", False, text=f"ended with {process.returncode}"))
    return found


def _print(one: Planted) -> None:
    if not one.kind:
        print(f"{'FAIL' if one.caught else 'ok  '} sound: {one.kernel} {one.seconds} s", flush=True)
    else:
        lacks = [what for what in ("line", "threads", "advice") if not getattr(one, what)]
        says = "MISSED" if not one.caught else f"without {', '.join(lacks)}" if lacks else "line, threads, advice"
        sign = "ok  " if one.is_complete else "FAIL"
        print(f"{sign} {one.kind}: {one.name} | {one.kernel} | {says} {one.seconds} s", flush=True)
    if one.text and not (one.kind and one.is_complete):
        print("     " + "\n     ".join(one.text.splitlines()[:12]), flush=True)


def _print_summary(found: Sequence[Planted]) -> None:
    bugs, sound = [one for one in found if one.kind], [one for one in found if not one.kind]
    caught, every = Counter(one.kind for one in bugs if one.caught), Counter(one.kind for one in bugs)
    complete = Counter(one.kind for one in bugs if one.is_complete)
    print(f"\n{'kind':<40}{'bugs':>5}{'caught':>8}{'line, threads, advice':>24}")
    for kind, n in sorted(every.items()):
        print(f"{kind:<40}{n:>5}{caught[kind]:>8}{complete[kind]:>24}")
    theirs = sum(not one.kernel.startswith(OURS) for one in bugs)
    print(f"{len(bugs)} bugs of {len(every)} kinds, {theirs} of them in third-party kernels:", end=" ")
    print(f"{caught.total()} caught, {complete.total()} with line, threads and advice")
    quiet = sum(not one.caught for one in sound)
    third = sum(not one.kernel.startswith(OURS) for one in sound)
    print(f"{len(sound)} sound kernels, {third} of them third-party: {quiet} without a finding")
