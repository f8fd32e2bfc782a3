"""Run agent programs and SDKs against `serve` with a scripted model, each through its loop.

The loop is a prompt, a call of the agent's shell tool, its result, and a final text. A program passes if it has printed
the final text, and if its tool's output has reached the model. `python -m tests.agents FOLDER` needs a network for the
packages, which it installs in the folder: 1.5 GB for the usual programs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.agents.programs import MODEL, PROGRAMS, SDKS, USUAL, Program, environment, install
from tests.clients.documents import VARIABLE, Document, default_path
from tests.clients.recorder import Exchange, recording
from tests.scripted import FINAL, SAID, serving

ROOT = Path(__file__).parents[2]
# Seconds for one program; most take 5 to 20.
LIMIT = 240
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
HERE = Path(__file__).parent


@dataclass
class Outcome:
    """What a program did.

    Attributes:
        failures: what is wrong; empty if its loop has ended well.
        served: what the model was asked, one entry per request, see `tests.scripted`.
        exchanges: what was sent and answered.
        seconds: how long it ran.
    """

    name: str
    version: str
    api: str
    failures: list[str]
    served: list[dict[str, Any]]
    exchanges: list[Exchange]
    seconds: float

    @property
    def cells(self) -> list[str]:
        """The cells of its row of the table."""
        posts = [exchange for exchange in self.exchanges if exchange.path in PATHS.get(self.api, PATHS.values())]
        main = [one for one in self.served if one["tools"]] or self.served
        first, second = (main[i] if len(main) > i else {} for i in range(2))
        longest = max((len(exchange.request) for exchange in posts[:2]), default=0)
        new = f"{second['prompt'] - second['cached']:,}" if second else "-"
        numbers = [f"{len(posts)}", f"{longest:,}", f"{first.get('prompt', 0):,}", f"{second.get('cached', 0):,}", new]
        result = "ok" if not self.failures else "FAILED"
        return [self.name, self.version, self.api, *numbers, f"{self.seconds:.0f}", result]

    @property
    def values(self) -> Iterator[str]:
        """The documents of /v1/messages and its route for counts, one per line."""
        for exchange in self.exchanges:
            if exchange.path.startswith(PATHS["messages"]) and exchange.is_whole and exchange.status == 200:
                yield from (
                    exchange.events if exchange.media_type == "text/event-stream" else [json.dumps(exchange.value)]
                )


HEAD = ["program", "version", "API", "requests", "bytes", "tokens", "cached 2nd", "new 2nd", "s", "result"]


def run_program(name: str, folder: Path, url: str, record: Path) -> Outcome:
    """Run a program through its loop."""
    program = PROGRAMS[name]
    packages = install(name, folder)
    start, before = time.monotonic(), len(_served(record))
    with tempfile.TemporaryDirectory() as temporary, recording(url) as recorder:
        home = Path(temporary)
        for path, text in program.files(recorder.url).items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(text)
        (home / "hello.txt").write_text("hello\n")
        git = ["git", "-c", "user.name=test", "-c", "user.email=test@localhost"]
        subprocess.run(["git", "init", "-q"], cwd=home, check=True)
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "test"], cwd=home, check=True)
        env = environ(home, packages, program.env(recorder.url))
        failures: list[str] = []
        if program.before is not None:
            output, status = run(packages, program, program.before(recorder.url), home, env)
            failures += [] if status == 0 else [f"the first run: status {status}\n{output}"]
        output, status = run(packages, program, program.arguments(recorder.url), home, env)
        version, _ = run(packages, program, program.version, home, env)
        exchanges = recorder.exchanges()
    served = _served(record)[before:]
    failures += verdict(program, output, status, served, exchanges)
    number = re.search(r"\d+\.\d+(\.\d+)?", version)
    seconds = time.monotonic() - start
    return Outcome(name, number[0] if number else "?", program.api, failures, served, exchanges, seconds)


def run_sdk(name: str, folder: Path, url: str, record: Path) -> Outcome:
    """Run the functions of an SDK."""
    program = environment(folder / name, SDKS[name].split())
    start, before = time.monotonic(), len(_served(record))
    with recording(url) as recorder:
        env = environ(folder / name, folder / name, {"BASE_URL": recorder.url, "BUSY_URL": url, "API_KEY": "none"})
        env |= {"MODEL": MODEL, "PYTHONPATH": str(ROOT / "tests" / "clients" / "python")}
        command = [program.absolute(), HERE / "sdks" / f"use_{name}.py"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT, check=False)
        exchanges = recorder.exchanges()
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    failures = [f"{one['check']}\n{one['error']}" for one in found if one["error"] is not None]
    if done.returncode != 0 or not found:
        failures.append(f"status {done.returncode}\n{done.stderr[-4000:]}")
    version = found[0]["client"].split()[1] if found else "?"
    served = _served(record)[before:]
    return Outcome(name, version, f"{len(found)} checks", failures, served, exchanges, time.monotonic() - start)


def invalid(outcome: Outcome, document: Document | None, folder: Path) -> list[str]:
    """Return how replies and events differ from OpenAI's document, and from the types of the package anthropic."""
    others = [one for one in outcome.exchanges if not one.path.startswith(PATHS["messages"]) and one.method == "POST"]
    found = [] if document is None else document.check(others)[1]
    lines = "\n".join(outcome.values)
    if lines:
        command = [environment(folder / "anthropic", SDKS["anthropic"].split()), HERE / "sdks" / "check_messages.py"]
        done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
        found += [json.loads(line) for line in done.stdout.splitlines()]
        found += [done.stderr] if done.returncode != 0 else []
    return sorted(set(found))


def environ(home: Path, packages: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """Return the whole environment of a program: a home of its own, and no key of the user's."""
    path = os.pathsep.join([str(packages / "bin"), os.environ["PATH"]])
    return {"HOME": str(home), "PATH": path, "TERM": "dumb", "LANG": "C.UTF-8", "NO_COLOR": "1", **extra}


def run(
    packages: Path, program: Program, arguments: Sequence[str], home: Path, env: Mapping[str, str]
) -> tuple[str, int]:
    """Run a program in its home; return its output and status. After `LIMIT` it is ended with all its children."""
    command = [str(packages.resolve() / program.command), *arguments]
    how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, cwd=home, env=env, text=True, errors="replace", start_new_session=True, **how)
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        output += f"\n[ended after {LIMIT} s]"
    return output, process.returncode


def verdict(
    program: Program, output: str, status: int, served: Sequence[Mapping[str, Any]], exchanges: Sequence[Exchange]
) -> list[str]:
    """Return what is wrong with a run."""
    found = []
    if status != 0:
        found.append(f"status {status}")
    if FINAL not in " ".join(output.split()):
        found.append(f"the final text was not printed; the output ends with:\n{output[-2000:]}")
    if program.uses_tools and not any(SAID in result for one in served for result in one["results"]):
        found.append("the tool's output has not reached the model")
    for exchange in exchanges:
        if exchange.status >= 400 and exchange.method == "POST":
            found.append(f"{exchange.path}: {exchange.status} {exchange.body[:500].decode(errors='replace')}")
    return found


def _served(record: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def report(outcomes: Sequence[Outcome]) -> None:
    """Print what failed, and a table."""
    for outcome in outcomes:
        for failure in outcome.failures:
            print(f"--- {outcome.name}: {failure}")
    rows = [HEAD, *(outcome.cells for outcome in outcomes)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.agents", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the installed programs")
    names = {**PROGRAMS, **SDKS}
    kinds = f"of the programs {', '.join(PROGRAMS)} and the SDKs {', '.join(SDKS)}"
    usual = f"{', '.join(USUAL)} and all SDKs"
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{kinds}; default: {usual}")
    parser.add_argument("--vocab", type=Path, help="GGUF file whose vocabulary the model gets; default: the built-in")
    parser.add_argument("--template", default="json", help="chat template of the model, see tests/scripted.py")
    parser.add_argument("--pause", default="0", help="seconds that each step of a prompt takes more")
    parser.add_argument("--url", help="a server that runs already, in place of a scripted one")
    parser.add_argument("--bodies", type=Path, help="write what was sent and answered to this folder, for a look")
    found = parser.parse_args()
    for name in found.names:
        if name not in names:
            parser.error(f"expected names of {', '.join(names)}, found {name}")
    return found


def write_bodies(folder: Path, outcome: Outcome) -> None:
    """Write each request and its response to files of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, exchange in enumerate(outcome.exchanges):
        name = f"{outcome.name}-{i:02}{exchange.path.replace('/', '-')}"
        (folder / f"{name}.request.json").write_bytes(exchange.request)
        (folder / f"{name}.{exchange.status}.txt").write_bytes(exchange.body)


def main() -> int:
    """Run the programs; return 1 if something failed."""
    asked = options()
    outcomes = []
    document = Document(default_path()) if default_path().exists() else None
    if document is None:
        print(f"no document of OpenAI at {default_path()}: chats and responses are not validated; set {VARIABLE}")
    with tempfile.TemporaryDirectory() as temporary:
        record = Path(temporary) / "record.jsonl"
        vocabulary = ["--vocab", str(asked.vocab.resolve())] if asked.vocab else []
        how = [*vocabulary, "--template", asked.template, "--pause", asked.pause, "--explain-cache"]
        with contextlib.nullcontext(asked.url) if asked.url else serving(record, *how, "--name", MODEL) as url:
            for name in asked.names or (*USUAL, *SDKS):
                run_one = run_program if name in PROGRAMS else run_sdk
                outcomes.append(run_one(name, asked.folder, url, record))
                outcomes[-1].failures += invalid(outcomes[-1], document, asked.folder)
                print(f"{name}: {'failed' if outcomes[-1].failures else 'ok'}", flush=True)
                if asked.bodies:
                    write_bodies(asked.bodies, outcomes[-1])
    report(outcomes)
    return int(any(outcome.failures for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
