"""The page in Chromium: chat, keys, errors and the view of the engine. Slow; skipped without Playwright or Chromium."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

import mlx_engine
from tests.builtin import LONGEST
from tests.page.app import app
from tests.page.browser import SIZES, axe, chromium, opened, served, violations

# The tests import Playwright themselves, because the import takes a quarter of a second whenever tests are collected.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("playwright") is None, reason="no Playwright"),
    pytest.mark.skipif(chromium() is None, reason="no Chromium"),
]


def expect(of: Any) -> Any:
    """Return Playwright's assertions about a page's element, which wait until they hold."""
    from playwright import sync_api

    return sync_api.expect(of)


@pytest.fixture(scope="module")
def engine() -> mlx_engine.Engine:
    return mlx_engine.load()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        launched = play.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def address(engine: mlx_engine.Engine, request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a server; the parameter has options of `app`."""
    options = {"slots": 2, "kv_memory": 6_000_000, "pause": 0.01, **getattr(request, "param", {})}
    with served(app(engine, **options)) as found:
        yield found


def ask(page: Any, text: str) -> Any:
    """Send a message with the keyboard, and return the last entry of the conversation."""
    page.focus("#message")
    page.keyboard.type(text)
    page.keyboard.press("Enter")
    return page.locator("#log > li.assistant").last


def texts(page: Any) -> list[str]:
    return page.locator("#log .text").all_inner_texts()


def test_an_answer_streams_and_is_announced_once(browser: Any, address: str):
    with opened(browser, address) as page:
        page.evaluate(
            """() => {
                window.heard = []; window.sizes = [];
                new MutationObserver(() => heard.push(said.textContent)).observe(said, {childList: true});
                const grown = new MutationObserver(() => sizes.push(log.innerText.length));
                grown.observe(log, {childList: true, subtree: true});
            }"""
        )
        answer = ask(page, "Once upon a time there was a fox.")
        answer.locator(".acts").wait_for()
        assert page.evaluate("sizes.length") > 20
        text = answer.locator(".text").text_content()
        assert page.evaluate("heard") == [f"Answer: {text}"]
        assert "answer 128 tokens" in answer.inner_text()
        assert "ended at the token limit" in answer.inner_text()
        assert page.evaluate("document.activeElement.id") == "message"
        assert '"n_steps"' in answer.locator("pre").text_content()


def test_the_next_turn_is_cached_and_the_view_follows(browser: Any, address: str):
    with opened(browser, address) as page:
        page.fill("#message", "A fox")  # makes the form valid before its settings are opened
        page.click("summary")
        page.fill("#max-tokens", "40")
        page.fill("#system", "You tell stories about animals and their friends in the wood.")
        page.fill("#message", "")
        ask(page, "A fox.").locator(".acts").wait_for()
        second = ask(page, "And then?")
        expect(page.locator("#slots")).to_contain_text("decode")
        second.locator(".acts").wait_for()
        assert int(second.locator(".acts").inner_text().split(" cached")[0].split()[-1]) >= 15
        expect(page.locator("#rate")).to_have_text("idle")
        assert page.locator("#slots li").all_inner_texts() == ["Slot 1: free", "Slot 2: free"]
        assert "You tell stories" in page.locator("#tree").inner_text()
        label = page.locator(".map").get_attribute("aria-label")
        assert page.locator(".map .cell").count() == sum(int(part.split()[-2]) for part in label.split(", "))
        assert page.locator(".map .cell.cached").count() > 0
        assert page.locator("#chart rect").count() > 40


def test_text_stays_text(browser: Any, address: str):
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    with opened(browser, address) as page:
        ask(page, evil).locator(".acts").wait_for()
        assert texts(page)[0] == evil
        expect(page.locator("#tree")).to_contain_text("<")
        assert page.locator("#log img, #log script, #tree img, #tree script").count() == 0


def test_stop_keeps_what_was_said_and_frees_the_slot(browser: Any, address: str):
    with opened(browser, address) as page:
        answer = ask(page, "Once upon a time")
        expect(answer.locator(".text")).to_have_text(re.compile(".{20}"))
        page.click("#stop")
        answer.locator(".acts").wait_for()
        assert "stopped" in answer.inner_text()
        expect(page.locator("#n-slots")).to_have_text("0 of 2")
        assert page.evaluate("document.activeElement.id") == "message"
        page.click("#clear")
        assert texts(page) == []
        assert page.locator("#empty").is_visible()


@pytest.mark.parametrize("address", [{"key": "secret key"}], indirect=True)
def test_a_key_is_asked_for_and_kept_in_memory_only(browser: Any, address: str):
    with opened(browser, address) as page:
        page.wait_for_selector("#key:not([hidden])")
        assert page.evaluate("document.activeElement.id") == "api-key"
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#link")).to_have_text("the server refuses this key")
        page.fill("#api-key", "secret key")
        page.keyboard.press("Enter")
        expect(page.locator("#link")).to_have_text("live")
        answer = ask(page, "A fox.")
        answer.locator(".acts").wait_for()
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
        page.reload()
        page.wait_for_selector("#key:not([hidden])")


@pytest.mark.parametrize("address", [{"key": "a secret"}], indirect=True)
def test_the_request_can_be_copied_and_run_without_telling_the_key(browser: Any, address: str):
    with opened(browser, address) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.fill("#api-key", "a secret")
        page.keyboard.press("Enter")
        answer = ask(page, "It's a fox's \\ \"home\".")
        answer.get_by_role("button", name="Copy as curl").click()
        expect(answer.get_by_role("button")).to_have_text("Copied")
        command = page.evaluate("navigator.clipboard.readText()")
        assert "secret" not in command
        page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
        answer.get_by_role("button").click()
        assert answer.locator("textarea").input_value() == command
    environment = {**os.environ, "API_KEY": "a secret"}
    result = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("address", [{"has_template": False}], indirect=True)
def test_a_model_without_a_template_continues_the_text(browser: Any, address: str):
    with opened(browser, address) as page:
        ask(page, "Once upon a time").locator(".acts").wait_for()
        assert page.locator("#plain").is_visible()
        assert len(texts(page)) == 2


def test_an_error_is_shown_and_the_message_comes_back(browser: Any, address: str):
    with opened(browser, address) as page:
        long = "fox " * LONGEST
        page.fill("#message", long)
        page.click("#send")
        page.wait_for_selector("#log .error")
        limit = f"at most {LONGEST:,} tokens"
        assert limit in page.locator("#log .error").inner_text()
        assert page.input_value("#message") == long
        assert page.locator("#log .user").count() == 0
        assert page.locator("#said").text_content().startswith("Error: ")
        assert page.locator("#send").is_enabled()


def test_the_keyboard_reaches_everything_in_the_order_of_reading(browser: Any, address: str):
    with opened(browser, address, "phone") as page:
        expect(page.locator("#link")).to_have_text("live")
        seen = []
        for _ in range(12):
            page.keyboard.press("Tab")
            seen.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
        expected = ["Skip to the message", "Chat", "Engine", "log", "message", "send", "clear", "Settings"]
        assert seen[: len(expected)] == expected


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_nothing_is_cut_off_and_axe_finds_nothing(browser: Any, address: str, size: str, scheme: str):
    with opened(browser, address, size, scheme) as page:
        ask(page, "A fox " + "with-a-very-long-name" * 5).locator(".acts").wait_for()
        page.wait_for_selector("#tree li")
        page.click("summary")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        script = axe()
        if script is None:
            pytest.skip("AXE names no axe.min.js")
        assert violations(page, script) == []
        page.evaluate("document.querySelector('label[for=message]').remove()")
        assert any(found.startswith("label: ") for found in violations(page, script))
