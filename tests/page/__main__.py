"""Open the page in Chromium in each size and color scheme, use it, take screenshots, and run axe.

`AXE=axe.min.js python -m tests.page FOLDER` writes the screenshots there, and ends with status 1 if axe complains, or
if the page is wider than the screen.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

import mlx_engine
from tests.page.app import app
from tests.page.browser import SIZES, axe, chromium, opened, served, violations
from tests.page.script import script

PROMPTS = ["Once upon a time there was a fox.", "Once upon a time there was a bear who", "A boat", "One day", "A"]
WEATHER = '[{"name": "weather", "description": "Weather of a city", "parameters": {"type": "object"}}]'


def ask(address: str, prompt: str) -> None:
    body = json.dumps({"prompt": prompt, "max_tokens": 300, "temperature": 1}).encode()
    with urllib.request.urlopen(f"{address}/v1/completions", body) as reply:
        reply.read()


def send(page: Any, text: str) -> None:
    """Send a message, and wait for the answer."""
    page.fill("#message", text)
    page.keyboard.press("Enter")
    page.locator("#send").wait_for(timeout=60_000)


def chat(page: Any, shot: Callable[[str], None]) -> None:
    """Use all parts of a conversation."""
    shot("empty")
    send(page, "Tell me a story about a fox who learns to swim.")
    shot("story")
    send(page, "Write code")
    page.locator("[data-act=regenerate]").last.click()
    page.wait_for_timeout(100)
    shot("live")
    page.locator("#send").wait_for()
    page.locator(".receipt summary").last.click()
    shot("code")
    page.locator("[data-act=edit]").last.click()
    shot("edit")
    page.keyboard.press("Escape")
    page.click("#settings-toggle")
    page.fill("#tools", WEATHER)
    page.fill("#top_p", "2")
    shot("settings")
    page.fill("#top_p", "")
    page.click("#settings-close")
    send(page, "What is the weather in Paris?")
    shot("tool")
    page.locator(".results textarea").fill('{"celsius": 7}')
    page.click(".results button")
    page.locator("#send").wait_for()
    page.click("#settings-toggle")
    page.fill("#tools", "")
    page.click("#settings-close")
    send(page, "fox " * 1500)
    shot("long")


def watch(page: Any, address: str, shot: Callable[[str], None]) -> None:
    """Look at the engine while it answers others."""
    with ThreadPoolExecutor() as others:
        for prompt in PROMPTS:
            others.submit(ask, address, prompt)
        page.click("#engine-toggle")
        page.wait_for_timeout(1500)
        shot("engine")
        page.click("#engine-close")


def used(browser: Any, size: str, scheme: str, folder: Path) -> list[str]:
    """Use the page in a size and a scheme; return what is wrong with it."""
    found: list[str] = []
    code = axe()
    server = app(mlx_engine.load(), slots=4, kv_memory=12_000_000, pause=0.01, script=script)
    with served(server) as address, opened(browser, address, size, scheme) as page:

        def shot(name: str) -> None:
            page.screenshot(path=folder / f"{size}-{scheme}-{name}.png")
            wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            found.extend(f"{name}: {one}" for one in (violations(page, code) if code else []))
            found.extend([f"{name}: {wide} pixels wider than the screen"] if wide > 0 else [])

        chat(page, shot)
        watch(page, address, shot)
    return found


def main(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    n_found = 0
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        for size in SIZES:
            for scheme in ("light", "dark"):
                found = used(browser, size, scheme, folder)
                print(f"{size}, {scheme}: {len(found)} violations", *found, sep="\n  ")
                n_found += len(found)
        browser.close()
    return int(n_found > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
