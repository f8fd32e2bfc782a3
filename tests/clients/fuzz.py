"""schemathesis on the server's own OpenAPI document: all checks, valid and invalid requests."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from tests.clients.server import API_KEY, running

PACKAGES = ["schemathesis"]
HOOKS = Path(__file__).with_name("fuzz_hooks.py")


class Fuzzed(NamedTuple):
    """What schemathesis found.

    Attributes:
        summary: its last lines.
        failed: whether it found a failure, or did not run.
        log: all that it printed, and what the server did.
    """

    summary: str
    failed: bool
    log: str


def fuzz(program: Path, folder: Path, examples: int, seed: int | None = None) -> Fuzzed:
    """Run schemathesis in a folder, where it leaves its files, against a server of its own."""
    with running() as url:
        command = [program.with_name("st"), "run", f"{url}/openapi.json", "-H", f"Authorization: Bearer {API_KEY}"]
        command += ["--checks", "all", "--max-examples", str(examples), "--continue-on-failure", "--no-color"]
        command += [] if seed is None else ["--seed", str(seed)]
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        env["SCHEMATHESIS_HOOKS"] = str(HOOKS)
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    found = re.search(r"=+ SUMMARY =+\n(.*)", done.stdout, flags=re.DOTALL)
    return Fuzzed(found[1].strip() if found else "", done.returncode != 0 or found is None, done.stdout + done.stderr)
