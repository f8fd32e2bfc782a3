"""The page in Chromium: chat, branches, storage, tools, errors, attacks, keys and the view of the engine. Slow; skipped
without Playwright or Chromium.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

import mlx_engine
from tests.page.app import app
from tests.page.browser import SIZES, axe, chromium, opened, served, violations
from tests.page.script import ATTACKS, script

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
def server(engine: mlx_engine.Engine, request: pytest.FixtureRequest) -> Any:
    """The application; the parameter of `address` has options of `app`."""
    options = {"slots": 2, "kv_memory": 6_000_000, "pause": 0.001, "script": script, **getattr(request, "param", {})}
    return app(engine, **options)


@pytest.fixture
def address(server: Any) -> Iterator[str]:
    """The address of the server."""
    with served(server) as found:
        yield found


def ask(page: Any, text: str) -> Any:
    """Send a message with the keyboard, and return the last answer."""
    page.focus("#message")
    page.keyboard.insert_text(text)
    page.keyboard.press("Enter")
    return answer(page)


def answer(page: Any) -> Any:
    """Return the last answer when it is complete."""
    expect(page.locator("#send")).to_be_visible(timeout=30_000)
    return page.locator("#log > li.assistant").last


def texts(page: Any, role: str = "assistant") -> list[str]:
    return page.locator(f"#log > li.{role} > .text").all_inner_texts()


def settings(page: Any, **values: str) -> None:
    """Open the settings of a conversation, change them, and close them."""
    page.click("#settings-toggle")
    for name, value in values.items():
        page.fill(f"#{name}", value)
    page.click("#settings-close")


def test_an_answer_streams_to_its_own_end_and_is_announced(browser: Any, address: str):
    with opened(browser, address) as page:
        page.evaluate(
            """() => {
                window.heard = []; window.sizes = [];
                new MutationObserver(() => heard.push(said.textContent)).observe(said, {childList: true});
                const grown = new MutationObserver(() => sizes.push(log.innerText.length));
                grown.observe(log, {childList: true, subtree: true});
            }"""
        )
        found = ask(page, "Once upon a time there was a fox.")
        text = found.locator(".text").text_content()
        assert page.evaluate("sizes.length") > 20
        heard = page.evaluate("heard")
        assert heard[0] == "The model answers."
        assert text.endswith(heard[-1].strip())
        assert len(text) > 100
        assert "ended at the limit" not in found.inner_text()
        assert page.evaluate("document.activeElement.id") == "message"
        used, left = map(int, re.findall(r"\d+", page.locator("#used").inner_text().replace(",", "")))
        assert used + left == 1024


@pytest.mark.parametrize("size", ["phone", "desktop"])
def test_a_story_with_code_is_edited_regenerated_and_kept(browser: Any, server: Any, address: str, size: str):
    with opened(browser, address, size) as page:
        ask(page, "Write code")
        assert page.locator("#log .code .head span").inner_text() == "python"
        assert page.locator("#log code").last.inner_text() == 'def f(x: str) -> str:\n    return f"<b>{x}</b>"'
        assert page.locator("#log td.right").inner_text() == "2"
        assert page.locator("#log a").evaluate_all("all => all.map(a => [a.href, a.rel])") == [
            ["https://example.org/x", "noopener noreferrer nofollow"],
            ["https://example.org/y", "noopener noreferrer nofollow"],
        ]
        page.locator(".thought summary").click()
        assert page.locator(".thought em").inner_text() == "language"
        first = texts(page)
        page.locator("[data-act=regenerate]").last.click()
        answer(page)
        expect(page.locator(".branches")).to_have_text("2/2")
        page.locator("[data-act=edit]").click()
        page.locator(".edit textarea").fill("Write code, please")
        page.keyboard.press("Enter")
        answer(page)
        assert texts(page, "user") == ["Write code, please"]
        assert [body["messages"][-1]["content"] for body in server.state.bodies] == [
            "Write code",
            "Write code",
            "Write code, please",
        ]
        page.keyboard.press("Tab")
        page.evaluate("document.activeElement.blur()")
        page.keyboard.press("ArrowLeft")
        expect(page.locator("#log > li.user > .text")).to_have_text("Write code")
        page.reload()
        assert texts(page, "user") == ["Write code"]
        assert texts(page) == first
        page.locator("[data-act=next]").first.focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator("#log > li.user > .text")).to_have_text("Write code, please")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_stop_keeps_what_was_said_and_frees_the_slot(browser: Any, engine: mlx_engine.Engine):
    with served(app(engine, slots=2, kv_memory=6_000_000, pause=0.05)) as address, opened(browser, address) as page:
        page.click("#engine-toggle")
        page.focus("#message")
        page.keyboard.type("Once upon a time")
        page.keyboard.press("Enter")
        expect(page.locator("#log .assistant .text")).to_have_text(re.compile(".{20}"))
        page.keyboard.press("Escape")
        found = answer(page)
        assert "stopped" in found.inner_text()
        assert found.locator("[data-act=continue]").is_visible()
        expect(page.locator("#n-slots")).to_have_text("0 of 2")
        assert page.evaluate("document.activeElement.id") == "message"
        text = texts(page)
        page.click("#new")
        assert texts(page) == []
        assert page.locator("#empty").is_visible()
        page.locator("#conversations .open").last.click()
        assert texts(page) == text


def test_an_answer_that_the_limit_cut_goes_on(browser: Any, server: Any, address: str):
    with opened(browser, address) as page:
        settings(page, max_tokens="12")
        assert page.locator("#chips").inner_text() == "at most 12 tokens"
        found = ask(page, "A fox")
        assert "ended at the limit" in found.inner_text()
        begin = texts(page)[0]
        found.locator("[data-act=continue]").click()
        answer(page)
        assert texts(page) == [f"{begin} And on."]
        last = server.state.bodies[-1]
        assert last["continue_final_message"] is True
        assert (last["messages"][-1]["role"], last["max_tokens"]) == ("assistant", 12)


def test_a_server_that_cannot_continue_is_asked_to_in_a_message(browser: Any, server: Any, address: str):
    with opened(browser, address) as page:
        settings(page, max_tokens="12")
        ask(page, "A fox, no continuing").locator("[data-act=continue]").click()
        expect(page.locator("#log > li.user")).to_have_count(2)
        answer(page)
        assert texts(page, "user")[-1] == "Continue."
        assert [message["role"] for message in server.state.bodies[-1]["messages"]] == ["user", "assistant", "user"]


def test_tools_are_called_and_the_user_writes_the_result(browser: Any, server: Any, address: str):
    with opened(browser, address) as page:
        settings(page, tools='[{"name": "weather", "parameters": {"type": "object"}}]', system="Be short.")
        found = ask(page, "What is the weather in Paris?")
        assert found.locator(".call h3").inner_text() == "weather"
        assert json.loads(found.locator(".call pre").inner_text()) == {"city": "Paris"}
        page.locator(".results textarea").fill('{"celsius": 7}')
        page.click(".results button")
        answer(page)
        assert texts(page)[-1] == "It is 7 °C."
        system, user, call, result = server.state.bodies[-1]["messages"]
        assert (system["role"], user["role"], call["tool_calls"][0]["id"]) == ("system", "user", "call_1")
        assert result == {"role": "tool", "content": '{"celsius": 7}', "tool_call_id": "call_1"}
        assert server.state.bodies[-1]["tools"][0]["function"]["name"] == "weather"


def test_a_refused_parameter_is_named_and_can_be_left_out(browser: Any, server: Any, address: str):
    with opened(browser, address) as page:
        settings(page, tools='{"name": "weather"}')
        page.fill("#message", "refuse tools")
        page.keyboard.press("Enter")
        expect(page.locator("#notice")).to_contain_text("refuses tools")
        page.get_by_role("button", name="Open the settings").click()
        assert "no tools" in page.locator("#tools-fault").inner_text()
        page.get_by_role("button", name="Send without it").click()
        assert len(answer(page).locator(".text").inner_text()) > 20
        assert "tools" not in server.state.bodies[-1]
        assert page.locator("#notice").is_hidden()


@pytest.mark.parametrize("size", ["phone", "desktop"])
def test_an_invalid_setting_is_shown_where_it_is_when_the_settings_are_closed(browser: Any, address: str, size: str):
    with opened(browser, address, size) as page:
        settings(page, top_p="2", max_tokens="none")
        assert "2 invalid settings" in page.locator("#chips").inner_text()
        page.fill("#message", "A fox")
        page.keyboard.press("Enter")
        assert page.locator("#top_p-fault").inner_text() == "Expected a number from 0 to 1, found “2”."
        assert page.evaluate("document.activeElement.id") == "top_p"
        assert page.input_value("#message") == "A fox"
        settings_are_right = {"top_p": "0.9", "max_tokens": ""}
        for name, value in settings_are_right.items():
            page.fill(f"#{name}", value)
        page.keyboard.press("Escape")
        page.click("#send")
        answer(page)


def test_a_conversation_that_is_too_long_goes_on(browser: Any, server: Any, address: str):
    with opened(browser, address) as page:
        for turn in range(8):
            ask(page, f"Turn {turn}: " + "the fox and the bear " * 45)
            if page.locator("#notice").is_visible():
                break
        expect(page.locator("#notice")).to_contain_text("too long for the model")
        assert page.locator("#notice").count() == 1
        n = len(texts(page, "user"))
        page.get_by_role("button", name="Leave out the oldest turns").click()
        answer(page)
        assert page.locator("#notice").is_hidden()
        assert len(texts(page, "user")) == n
        assert page.locator(".divider").inner_text().startswith("The turns above are not sent")
        assert len(server.state.bodies[-1]["messages"]) < 2 * n - 1
        assert "max_tokens" not in server.state.bodies[-1]


def test_a_single_message_that_is_too_long_can_be_edited(browser: Any, address: str):
    with opened(browser, address) as page:
        page.fill("#message", "fox " * 2000)
        page.click("#send")
        expect(page.locator("#notice")).to_contain_text("This message is too long")
        assert page.locator("#said").text_content().startswith("This message is too long")
        page.get_by_role("button", name="Edit the message").click()
        page.locator(".edit textarea").fill("A fox")
        page.keyboard.press("Enter")
        answer(page)
        assert len(texts(page)) == 1


@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_answer_does_nothing(browser: Any, address: str, name: str):
    with opened(browser, address, "phone") as page:
        page.evaluate(
            """() => {
                window.longest = 0;
                let last = performance.now();
                const tick = () => { const now = performance.now(); longest = Math.max(longest, now - last); last = now;
                    requestAnimationFrame(tick); };
                requestAnimationFrame(tick);
            }"""
        )
        start = time.monotonic()
        ask(page, f"attack {name}")
        assert time.monotonic() - start < 20
        assert page.evaluate("window.longest") < 2000
        assert page.evaluate("window.attacked") is None
        assert page.locator("#log script, #log img, #log svg:not(.icon), #log iframe").count() == 0
        assert page.locator("#log .text a").evaluate_all("all => all.map(a => new URL(a.href).protocol)") == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        if name in ("script", "links"):
            assert page.locator("#log .assistant .text").text_content() == ATTACKS[name].replace("\t", "\t")
        page.reload()
        assert page.locator("#log .assistant").count() == 1


def test_text_of_the_user_stays_text(browser: Any, address: str):
    evil = "<img src=x onerror=alert(1)> *not bold* <script>alert(2)</script>"
    with opened(browser, address) as page:
        page.click("#engine-toggle")
        ask(page, evil)
        assert texts(page, "user")[0] == evil
        expect(page.locator("#tree")).to_contain_text("<")
        assert page.locator("#log img, #log script, #tree img, #tree script, #log em").count() == 0


def test_files_are_attached_as_fenced_text(browser: Any, server: Any, address: str):
    with opened(browser, address) as page:
        files = [
            {"name": "my notes.md", "mimeType": "text/markdown", "buffer": b"```\ncode\n```\n"},
            {"name": "x.png", "mimeType": "image/png", "buffer": b"\x89PNG\x00\xff"},
        ]
        page.set_input_files("#file", files)
        expect(page.locator("#notice")).to_contain_text("x.png cannot be attached")
        assert page.locator("#files li").count() == 1
        ask(page, "Read it.")
        assert server.state.bodies[-1]["messages"][-1]["content"] == "````my_notes.md\n```\ncode\n```\n````\n\nRead it."
        assert page.locator("#log .user .code .head span").inner_text() == "my_notes.md"
        page.evaluate(
            """() => {
                const data = new DataTransfer();
                data.items.add(new File(["dropped"], "d.txt", {type: "text/plain"}));
                document.body.dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true}));
            }"""
        )
        expect(page.locator("#files li")).to_contain_text("d.txt")


def test_conversations_are_listed_searched_renamed_exported_and_read_again(browser: Any, address: str, tmp_path: Any):
    with opened(browser, address) as page:
        for text in ("A red fox", "A blue bear"):
            page.click("#new")
            ask(page, text)
        names = page.locator("#conversations .name")
        assert names.all_inner_texts() == ["A blue bear", "A red fox"]
        page.keyboard.press("Control+k")
        assert page.evaluate("document.activeElement.id") == "search"
        page.keyboard.type("RED FOX")
        assert names.all_inner_texts() == ["A red fox"]
        page.keyboard.press("Escape")
        page.locator("#conversations [data-act=more]").last.click()
        page.fill("#name", "Old fox")
        page.keyboard.press("Enter")
        assert names.all_inner_texts() == ["A blue bear", "Old fox"]
        with page.expect_download() as waiting:
            page.click("#save-all")
        waiting.value.save_as(tmp_path / "all.json")
        shown = texts(page)
        page.locator("#conversations [data-act=more]").first.click()
        page.click("#delete")
        page.click("#delete")
        expect(names).to_have_count(1)
        page.set_input_files("#load-file", tmp_path / "all.json")
        expect(names).to_have_count(3)  # what is here stays, also with the same id
        assert texts(page) == shown
        (tmp_path / "wrong.json").write_text('{"format": "mlx_engine conversations", "conversations": [{"id": "a"}]}')
        page.set_input_files("#load-file", tmp_path / "wrong.json")
        expect(page.locator("#notice")).to_contain_text("no list of messages")


def test_two_tabs_show_the_same_conversation(browser: Any, address: str):
    with opened(browser, address) as page:
        ask(page, "A blue bear")
        other = page.context.new_page()
        other.goto(address)
        ask(other, "A blue bear again")
        expect(page.locator("#log > li.user")).to_have_count(2)
        assert texts(page) == texts(other)


def test_an_answer_during_which_the_page_is_left_is_kept_and_goes_on(browser: Any, engine: mlx_engine.Engine):
    server = app(engine, slots=2, kv_memory=6_000_000, pause=0.05, script=script)
    with served(server) as address, opened(browser, address) as page:
        page.fill("#message", "Once upon a time")
        page.keyboard.press("Enter")
        expect(page.locator("#log .assistant .text")).to_have_text(re.compile(".{20}"))
        page.reload()
        begin = texts(page)[0]
        assert len(begin) >= 20
        page.locator("[data-act=continue]").click()
        answer(page)
        assert texts(page) == [f"{begin} And on."]


def test_storage_is_bounded_and_says_so(browser: Any, address: str):
    with opened(browser, address) as page:
        page.evaluate("localStorage.setItem('mlx_engine.c.big', 'x'.repeat(3999900))")
        ask(page, "A fox")
        assert page.locator("#full").is_visible()
        page.evaluate("localStorage.removeItem('mlx_engine.c.big')")
        ask(page, "And a bear")
        assert page.locator("#full").is_hidden()
        page.reload()
        assert texts(page, "user") == ["A fox", "And a bear"]


@pytest.mark.parametrize("server", [{"key": "secret key"}], indirect=True)
def test_a_key_is_asked_for_and_kept_in_memory_only(browser: Any, address: str):
    with opened(browser, address) as page:
        page.wait_for_selector("#key-dialog[open]")
        assert page.evaluate("document.activeElement.id") == "api-key"
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key-fault")).to_be_visible()
        page.fill("#api-key", "secret key")
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_have_text("story")
        ask(page, "A fox.")
        assert "secret" not in page.evaluate("JSON.stringify(localStorage) + JSON.stringify(sessionStorage)")
        assert page.evaluate("document.cookie") == ""
        page.reload()
        page.wait_for_selector("#key-dialog[open]")


@pytest.mark.parametrize("server", [{"key": "a secret"}], indirect=True)
def test_the_request_can_be_copied_and_run_without_telling_the_key(browser: Any, address: str):
    with opened(browser, address) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.fill("#api-key", "a secret")
        page.keyboard.press("Enter")
        found = ask(page, "It's a fox's \\ \"home\".")
        found.locator(".receipt summary").click()
        button = found.locator("[data-act=copy-curl]")
        button.click()
        expect(button).to_have_text("Copied")
        expect(button).to_have_text("Copy as curl")
        command = page.evaluate("navigator.clipboard.readText()")
        assert "secret" not in command
        page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
        button.click()
        assert page.input_value("#by-hand") == command
    environment = {**os.environ, "API_KEY": "a secret"}
    result = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.endswith("data: [DONE]\n\n")


def test_the_receipt_is_readable_and_has_the_seed_to_the_digit(browser: Any, address: str):
    with opened(browser, address) as page:
        found = ask(page, "Write code")
        found.locator(".receipt summary").click()
        rows = found.locator(".receipt dl").inner_text()
        assert str(2**62 + 1) in rows
        assert rows.count("d" * 64) == 1
        assert "3 of 5 accepted" in rows


@pytest.mark.parametrize("server", [{"has_template": False}], indirect=True)
def test_a_model_without_a_template_continues_the_text(browser: Any, address: str):
    with opened(browser, address) as page:
        found = ask(page, "Once upon a time")
        assert len(texts(page)) == 1
        assert len(found.locator(".text").inner_text()) > 200


def test_the_view_of_the_engine_keeps_its_size_and_says_what_is_free(browser: Any, engine: mlx_engine.Engine):
    with served(app(engine, slots=2, kv_memory=6_000_000, pause=0.02)) as address, opened(browser, address) as page:
        page.click("#engine-toggle")
        expect(page.locator("#watched")).to_have_text("Live")
        heights = "[...document.querySelectorAll('#slots li')].map(one => one.offsetHeight)"
        expect(page.locator("#slots li").first).to_have_text(re.compile("Slot 1: free"))
        free = page.evaluate(heights)
        page.fill("#message", "A fox")
        page.keyboard.press("Enter")
        expect(page.locator("#slots")).to_contain_text("decode")
        assert page.evaluate(heights) == free
        answer(page)
        expect(page.locator("#rate")).to_have_text("idle")
        expect(page.locator("#n-cached")).to_contain_text("reusable prefix")
        total = page.locator(".map").get_attribute("aria-label")
        assert page.locator(".map .cell").count() == sum(int(part.split()[-2]) for part in total.split(", "))
        assert page.locator("#chart rect").count() > 10


def test_the_keyboard_reaches_everything_in_the_order_of_reading(browser: Any, address: str):
    with opened(browser, address, "phone") as page:
        expect(page.locator("#model")).to_have_text("story")
        seen = []
        page.evaluate("document.activeElement.blur()")
        for _ in range(10):
            page.keyboard.press("Tab")
            seen.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
        ideas = page.locator("#ideas button").all_inner_texts()
        expected = ["Skip to the message", "list-toggle", "new-narrow", "settings-toggle", "engine-toggle", "scroll"]
        assert seen == [*expected, *ideas, "message", "attach"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_nothing_is_cut_off_and_axe_finds_nothing(browser: Any, address: str, size: str, scheme: str):
    with opened(browser, address, size, scheme) as page:
        ask(page, "Write code with-a-very-long-name" * 3)
        page.locator("[data-act=regenerate]").last.click()
        answer(page)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        script = axe()
        if script is None:
            pytest.skip("AXE names no axe.min.js")
        assert violations(page, script) == []
        settings(page, top_p="2")
        page.click("#settings-toggle")
        assert violations(page, script) == []
        page.click("#settings-close")
        page.click("#engine-toggle")
        page.wait_for_selector("#tree li, #slots li")
        assert violations(page, script) == []
        page.click("#engine-close")
        page.evaluate(
            "for (const name of ['title', 'aria-label']) document.querySelector('#attach').removeAttribute(name)"
        )
        assert any(found.startswith("button-name: ") for found in violations(page, script))
