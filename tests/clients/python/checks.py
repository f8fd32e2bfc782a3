"""Checks of a client library. The environment has the servers; each check prints a line of JSON with its outcome."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import traceback
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

BASE_URL = os.environ["BASE_URL"] + "/v1"
# A server of four slots and no queue.
BUSY_URL = os.environ["BUSY_URL"] + "/v1"
API_KEY = os.environ["API_KEY"]
MODEL = "builtin"
ASK = [{"role": "user", "content": "Tell me a story."}]

_checks: list[Callable[[], Any]] = []


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    """Add a function, plain or asynchronous, to the checks."""
    _checks.append(function)
    return function


def run(package: str, kind: str = "") -> None:
    """Run all checks of a package; `kind` says which part of it."""
    client = f"{package} {version(package)} {kind}".rstrip()
    for function in _checks:
        error = None
        try:
            result = function()
            if inspect.isawaitable(result):
                asyncio.run(_awaited(result))
        except Exception:
            error = traceback.format_exc()
        print(json.dumps({"client": client, "check": function.__name__, "error": error}), flush=True)


def raises(kind: type[Exception], call: Callable[[], Any], **attributes: object) -> Any:
    """Return the error that a call raises; it must be of this class, with these attributes."""
    try:
        call()
    except kind as error:
        found = {name: getattr(error, name) for name in attributes}
        if found != attributes:
            raise AssertionError(f"expected {kind} {attributes}, found {error!r} {found}") from error
        return error
    raise AssertionError(f"expected {kind}, found no error")


async def _awaited(result: Any) -> None:
    await result
