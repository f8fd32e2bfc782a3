"""Agents' loops over HTTP: requests in the form of each program, and a model that calls its tool and then ends."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import pytest

from mlx_engine.loop.request import Request
from tests.agents.__main__ import Outcome, verdict
from tests.agents.forms import FORMS, MESSAGES, RESPONSES, Form
from tests.agents.programs import PROGRAMS
from tests.cells import each
from tests.clients.recorder import Exchange
from tests.scripted import FINAL, SAID, ScriptedEngine, write_model
from tests.serve.served import Served, events, served


@pytest.fixture(scope="module", params=["json", "xml"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedEngine]:
    path = tmp_path_factory.mktemp("scripted") / "model.gguf"
    write_model(path, template=request.param)
    with ScriptedEngine.load(path) as made:
        yield made


@pytest.fixture(scope="module")
def server(engine: ScriptedEngine) -> Iterator[Served]:
    with served(engine=engine, kv_memory=32 << 20, budget=512, model="test-model") as found:
        yield found


def posted(server: Served, form: Form, body: dict[str, Any]) -> list[Any]:
    """Return the events of the answer to a request, of any of the three APIs."""
    response = server.post(form.path, body)
    assert response.status_code == 200, response.text
    if form.path not in (MESSAGES, RESPONSES):
        return events(response.content)
    lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
    return events("".join(f"{line}\n\n" for line in lines).encode())


def n_common(request: Request, later: Request) -> tuple[int, int]:
    """Return how many ids of a prompt and its answer begin a later prompt, and how many there are."""
    ids = [*request.prompt_ids, *request.output.token_ids]
    pairs = zip(ids, later.prompt_ids, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)), len(ids)


@pytest.mark.some(1)
@each("name", FORMS)
def test_an_agent_ends_its_loop_and_its_second_turn_reads_only_what_is_new(
    name: str, engine: ScriptedEngine, server: Served
):
    if engine.form == "xml" and name in ("pi", "cline", "continue", "vibe"):
        return  # their messages are OpenCode's, as far as that template is concerned
    form, body = FORMS[name], FORMS[name].first()
    n = len(engine.requests)
    following = form.next(body, posted(server, form, body))
    last = posted(server, form, following)
    first, second = engine.requests[n:]
    assert second.output.text.endswith(FINAL)
    assert FINAL in "".join(text_of(event) for event in last)
    assert SAID in engine.text_of(second.prompt_ids[first.prompt_array.size :])
    common, whole = n_common(first, second)
    # The end of the turn has not been run: no token followed it.
    assert common >= (whole if form.returns_reasoning else len(first.prompt_ids))
    assert second.n_cached >= min(common, whole - 1)


def text_of(event: Any) -> str:
    """Return the piece of an answer's text in an event of any API."""
    if event == "[DONE]":
        return ""
    if "choices" in event:
        return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    delta = event.get("delta")
    if event["type"] == "response.output_text.delta":
        return str(delta)
    return str(delta.get("text", "")) if event["type"] == "content_block_delta" else ""


@pytest.mark.slow
def test_another_session_of_claude_code_shares_the_prompt(engine: ScriptedEngine, server: Served):
    """Its first block names the session; everything after it is the same."""
    form = FORMS["claude-code"]
    body = form.first()
    posted(server, form, body)
    billing, *others = body["system"]
    changed = {**billing, "text": billing["text"].replace("a3c", "2b1")}
    posted(server, form, {**body, "system": [changed, *others]})
    request = engine.requests[-1]
    assert changed != billing
    assert request.n_cached == len(request.prompt_ids) - 1


def exchange(status: int = 200) -> Exchange:
    return Exchange("POST", MESSAGES, b"{}", status, "application/json", b"no", True)


def test_a_run_of_a_program_is_judged():
    program = PROGRAMS["claude-code"]
    good = [{"tools": 24, "results": [SAID], "prompt": 100, "cached": 0}]
    assert verdict(program, f'{{"result": "{FINAL}"}}', 0, good, [exchange()]) == []
    assert verdict(program, FINAL, 1, good, []) == ["status 1"]
    (found,) = verdict(program, "nothing", 0, good, [])
    assert found.startswith("the final text was not printed")
    (found,) = verdict(program, FINAL, 0, [{**good[0], "results": []}], [])
    assert found == "the tool's output has not reached the model"
    assert verdict(program, FINAL, 0, good, [exchange(404)]) == [f"{MESSAGES}: 404 no"]


def test_a_row_of_the_table():
    served = [{"tools": 0, "prompt": 9, "cached": 0}, *({"tools": 2, "prompt": n, "cached": n - 9} for n in (70, 90))]
    outcome = Outcome("pi", "1.2", "messages", [], served, [exchange(), exchange()], 3.2)
    assert outcome.cells == ["pi", "1.2", "messages", "2", "2", "70", "81", "9", "3", "ok"]
