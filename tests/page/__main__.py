"""Open the page in Chromium in each size and color scheme, chat, take screenshots, and run axe.

`AXE=axe.min.js python -m tests.page FOLDER` writes the screenshots there, and ends with status 1 if axe complains.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

import mlx_engine
from tests.page.app import app
from tests.page.browser import SIZES, axe, chromium, opened, served, violations

PROMPTS = ["Once upon a time there was a fox.", "Once upon a time there was a bear who", "A boat"]


def fill(page: Any, address: str) -> None:
    """Let three others ask for long answers, so that there is something to see."""
    page.evaluate(
        """([address, prompts]) => prompts.forEach(prompt => fetch(address + "/v1/completions", {
             method: "POST", body: JSON.stringify({prompt, max_tokens: 300, temperature: 1})}))""",
        [address, [*PROMPTS, *PROMPTS]],
    )


def main(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    script, n_found = axe(), 0
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        for size in SIZES:
            for scheme in ("light", "dark"):
                server = app(mlx_engine.load(), slots=4, kv_memory=12_000_000, pause=0.02)
                with served(server) as address, opened(browser, address, size, scheme) as page:
                    page.screenshot(path=folder / f"{size}-{scheme}-empty.png", full_page=True)
                    page.fill("#message", "Once upon a time there was a fox who\nlived in a <b>small</b> house.")
                    page.click("#send")
                    page.wait_for_selector("#log .acts")
                    fill(page, address)
                    page.fill("#message", "The fox saw a bear.")
                    page.click("#send")
                    page.wait_for_timeout(2500)
                    found = violations(page, script) if script else []
                    page.screenshot(path=folder / f"{size}-{scheme}.png", full_page=True)
                    page.screenshot(path=folder / f"{size}-{scheme}-first.png")
                    wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
                    found += [f"the page is {wide} pixels wider than the screen"] if wide > 0 else []
                    print(f"{size}, {scheme}: {len(found)} violations", *found, sep="\n  ")
                    n_found += len(found)
        browser.close()
    return int(n_found > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
