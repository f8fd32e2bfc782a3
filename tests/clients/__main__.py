"""Run third-party clients against the server, validate what it replied, and fuzz its API.

`python -m tests.clients` needs a network for the packages of the clients, which it installs in a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.clients import environments, fuzz
from tests.clients.documents import VARIABLE, Document, default_path
from tests.clients.recorder import recording
from tests.clients.server import API_KEY, running

HERE = Path(__file__).parent
PYTHON = {
    "openai": ["openai"],
    "openai_async": ["openai"],
    "langchain": ["langchain-openai"],
    "litellm": ["litellm"],
    "anthropic": ["anthropic"],
}
JS = ["openai_js", "ai_sdk"]
FUZZ = "schemathesis"
NAMES = [*PYTHON, *JS, FUZZ]


@dataclass
class Outcome:
    """What a client found.

    Attributes:
        client: its name and version.
        failures: pairs of a check and its traceback.
        counts: the validated documents by their schema.
        wrong: what is wrong with them.
    """

    client: str
    n_checks: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def run_client(name: str, folder: Path, urls: Mapping[str, str], document: Document | None) -> Outcome:
    """Run the checks of a client, each server behind a recorder."""
    if name in PYTHON:
        program = environments.python(folder / PYTHON[name][0], PYTHON[name])
        command = [program, HERE / "python" / f"use_{name}.py"]
    else:
        program = environments.node(folder / "js")
        command = [program, folder / "js" / f"{name}.mjs"]
    outcome = Outcome(name)
    with recording(urls["BASE_URL"]) as plain, recording(urls["BUSY_URL"]) as busy:
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        env |= {"BASE_URL": plain.url, "BUSY_URL": busy.url, "API_KEY": API_KEY}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
        exchanges = [*plain.exchanges(), *busy.exchanges()]
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            found = json.loads(line)
            outcome.client, outcome.n_checks = found["client"], outcome.n_checks + 1
            if found["error"] is not None:
                outcome.failures.append((found["check"], found["error"]))
    if done.returncode != 0 or outcome.n_checks == 0:
        outcome.failures.append((f"status {done.returncode}", done.stdout[-2000:] + done.stderr[-4000:]))
    if document is not None:
        outcome.counts, outcome.wrong = document.check(exchanges)
    return outcome


def report(outcomes: list[Outcome], *, is_validated: bool) -> None:
    """Print what failed, and a table."""
    for outcome in outcomes:
        for name, text in outcome.failures:
            print(f"--- {outcome.client}: {name}\n{text}")
        for text in sorted(set(outcome.wrong)):
            print(f"--- {outcome.client}: {text}")
    print(f"{'client':34} {'checks':>6} {'failed':>6} {'documents':>9} {'invalid':>7}")
    for outcome in outcomes:
        documents = f"{outcome.counts.total():9} {len(outcome.wrong):7}" if is_validated else f"{'-':>9} {'-':>7}"
        print(f"{outcome.client:34} {outcome.n_checks:6} {len(outcome.failures):6} {documents}")
    for schema, n in sorted(sum((outcome.counts for outcome in outcomes), Counter[str]()).items()):
        print(f"{n:6} {schema}")


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument(
        "--document",
        type=Path,
        default=default_path(),
        help=f"OpenAI's OpenAPI document as JSON; also in the environment as {VARIABLE}",
    )
    parser.add_argument("--environments", type=Path, help="keep the installed clients in this folder")
    parser.add_argument("--examples", type=int, default=1000, help="examples per operation of schemathesis")
    parser.add_argument("--seed", type=int, help="seed of schemathesis")
    found = parser.parse_args()
    for name in found.clients:
        if name not in NAMES:
            parser.error(f"expected clients of {', '.join(NAMES)}, found {name}")
    return found


def run_clients(names: list[str], folder: Path, document: Document | None) -> bool:
    """Run clients against two servers, and print what they found; return whether nothing is wrong."""
    outcomes = []
    with running() as plain, running("--slots", "4", "--queue", "0") as busy:
        for name in names:
            outcomes.append(run_client(name, folder, {"BASE_URL": plain, "BUSY_URL": busy}, document))
            print(f"{name}: {outcomes[-1].n_checks} checks", flush=True)
    report(outcomes, is_validated=document is not None)
    return not any(outcome.failures or outcome.wrong for outcome in outcomes)


def run_fuzz(folder: Path, examples: int, seed: int | None) -> bool:
    """Run schemathesis, and print what it found; return whether that is nothing."""
    program = environments.python(folder / FUZZ, fuzz.PACKAGES)
    with tempfile.TemporaryDirectory() as files:
        found = fuzz.fuzz(program, Path(files), examples, seed)
    print(found.log if found.failed else f"{FUZZ}\n{found.summary}")
    return not found.failed


def main() -> int:
    """Run the clients; return 1 if something failed."""
    asked = options()
    document = Document(asked.document) if asked.document.exists() else None
    if document is None:
        print(f"no document at {asked.document}: replies are not validated; --document names another path")
    names = asked.clients or NAMES
    clients = [name for name in names if name != FUZZ]
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.environments or Path(temporary)
        is_fine = not clients or run_clients(clients, folder, document)
        if FUZZ in names:
            is_fine = run_fuzz(folder, asked.examples, asked.seed) and is_fine
    return int(not is_fine)


if __name__ == "__main__":
    sys.exit(main())
