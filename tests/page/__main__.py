"""Open the page in Chromium in each size and color scheme, chat, take screenshots, and run axe.

`AXE=axe.min.js python -m tests.page FOLDER` writes the screenshots there, and ends with status 1 if axe complains.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from playwright.sync_api import sync_playwright

import mlx_engine
from tests.page.app import app
from tests.page.browser import SIZES, axe, chromium, opened, served, violations

PROMPTS = ["Once upon a time there was a fox.", "Once upon a time there was a bear who", "A boat", "One day", "A"]


def ask(address: str, prompt: str) -> None:
    body = json.dumps({"prompt": prompt, "max_tokens": 300, "temperature": 1}).encode()
    with urllib.request.urlopen(f"{address}/v1/completions", body) as reply:
        reply.read()


def main(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    script, n_found = axe(), 0
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        for size in SIZES:
            for scheme in ("light", "dark"):
                server = app(mlx_engine.load(), slots=4, kv_memory=12_000_000, pause=0.02)
                with (
                    served(server) as address,
                    ThreadPoolExecutor() as others,
                    opened(browser, address, size, scheme) as page,
                ):
                    page.screenshot(path=folder / f"{size}-{scheme}-empty.png", full_page=True)
                    page.fill("#message", "Once upon a time there was a fox who\nlived in a <b>small</b> house.")
                    page.click("#send")
                    page.wait_for_selector("#log .acts")
                    for prompt in PROMPTS:  # so that there is something to see
                        others.submit(ask, address, prompt)
                    page.fill("#message", "The fox saw a bear.")
                    page.click("#send")
                    page.wait_for_timeout(1800)
                    found = violations(page, script) if script else []
                    page.screenshot(path=folder / f"{size}-{scheme}.png", full_page=True)
                    page.screenshot(path=folder / f"{size}-{scheme}-first.png")
                    wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
                    found += [f"the page is {wide} pixels wider than the screen"] if wide > 0 else []
                    server.state.worker.pause = 0
                    print(f"{size}, {scheme}: {len(found)} violations", *found, sep="\n  ")
                    n_found += len(found)
        browser.close()
    return int(n_found > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
