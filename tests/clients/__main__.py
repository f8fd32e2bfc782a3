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

from tests.clients import environments
from tests.clients.documents import Document
from tests.clients.recorder import recording
from tests.clients.server import API_KEY, ROOT, running

HERE = Path(__file__).parent
PYTHON = {
    "openai": ["openai"],
    "openai_async": ["openai"],
    "langchain": ["langchain-openai"],
    "litellm": ["litellm"],
}
JS = ["openai_js", "ai_sdk"]


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
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join([*PYTHON, *JS])}; default: all")
    parser.add_argument(
        "--document",
        type=Path,
        default=os.environ.get("OPENAI_DOCUMENT") or ROOT.parent / "shared" / "schemas" / "openai-openapi.json",
        help="OpenAI's OpenAPI document as JSON; also in the environment as OPENAI_DOCUMENT",
    )
    parser.add_argument("--environments", type=Path, help="keep the installed clients in this folder")
    found = parser.parse_args()
    for name in found.clients:
        if name not in {*PYTHON, *JS}:
            parser.error(f"expected clients of {', '.join([*PYTHON, *JS])}, found {name}")
    return found


def main() -> int:
    """Run the clients; return 1 if something failed."""
    asked = options()
    document = Document(asked.document) if asked.document.exists() else None
    if document is None:
        print(f"no document at {asked.document}: replies are not validated; --document names another path")
    with (
        tempfile.TemporaryDirectory() as temporary,
        running() as plain,
        running("--slots", "4", "--queue", "0") as busy,
    ):
        urls, outcomes = {"BASE_URL": plain, "BUSY_URL": busy}, []
        for name in asked.clients or [*PYTHON, *JS]:
            outcomes.append(run_client(name, asked.environments or Path(temporary), urls, document))
            print(f"{name}: {outcomes[-1].n_checks} checks", flush=True)
    report(outcomes, is_validated=document is not None)
    return int(any(outcome.failures or outcome.wrong for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
