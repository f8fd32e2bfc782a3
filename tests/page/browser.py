"""A Chromium that opens the page, and axe, which checks it: both are installed apart from this project.

Chromium is found on the path or by `CHROMIUM`; axe is `axe.min.js` of the npm package `axe-core`, named by `AXE`.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette

SIZES = {"phone": (390, 844), "narrow": (320, 640), "desktop": (1280, 800)}
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


def chromium() -> str | None:
    """Return the browser's program, or None."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


def axe() -> Path | None:
    """Return the script of axe, or None."""
    named = os.environ.get("AXE")
    return Path(named) if named else None


@contextmanager
def served(app: Starlette) -> Iterator[str]:
    """Serve an application on a free port of this machine, and yield its address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started and thread.is_alive():
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def opened(browser: Any, address: str, size: str = "desktop", scheme: str = "light") -> Iterator[Any]:
    """Yield the page at an address; fail if its console had an error, such as one of the Content-Security-Policy."""
    width, height = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, has_touch=size != "desktop"
    )
    page, faults = context.new_page(), []
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda fault: faults.append(str(fault)))
    try:
        page.goto(address)
        yield page
    finally:
        context.close()
    assert [fault for fault in faults if "status of 40" not in fault] == []


def violations(page: Any, script: Path) -> list[str]:
    """Return what axe complains about, with the places."""
    page.evaluate(script.read_text())
    found = page.evaluate(
        "tags => axe.run(document, {runOnly: {type: 'tag', values: tags}, resultTypes: ['violations']})", TAGS
    )
    return [f"{v['id']}: {v['help']}: {[node['html'] for node in v['nodes']]}" for v in found["violations"]]
