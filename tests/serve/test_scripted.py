"""The scripted model of the agents' tests: what is scripted is the choice of tokens, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from mlx_engine.tokenizer.chat_prompt import ChatPrompt
from tests.scripted import FINAL, Rendered, ScriptedEngine, agent, write_model
from tests.serve.served import Served, served

TOOL = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
BASH = {"type": "function", "function": {"name": "Bash", "description": "Run it.", "parameters": TOOL}}
ASKED = {"role": "user", "content": "Run the tool."}
CALLED = {
    "role": "assistant",
    "content": "Let me run it.",
    "tool_calls": [{"type": "function", "function": {"name": "Bash", "arguments": {"command": "echo"}}}],
}
RESULT = {"role": "tool", "content": "hello-from-tool"}


@pytest.fixture(scope="module", params=["json", "xml"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedEngine]:
    path = tmp_path_factory.mktemp("scripted") / "model.gguf"
    write_model(path, template=request.param)
    with ScriptedEngine.load(path) as made:
        yield made


@pytest.mark.some(1)
def test_an_agent_calls_its_tool_and_then_ends(engine: ScriptedEngine):
    text = engine.generate(ChatPrompt([ASKED], tools=[BASH])).text
    assert "Let me run it.\n<tool_call>\n" in text
    assert text.endswith("</tool_call>")
    assert "echo hello-from-tool" in text
    last = engine.generate(ChatPrompt([ASKED, CALLED, RESULT], tools=[BASH]))
    assert last.text.endswith(FINAL)
    assert last.finish_reason == "stop"
    assert engine.generate([ASKED]).text == FINAL  # a title is asked for without tools


def test_log_probabilities_are_those_of_the_model(engine: ScriptedEngine):
    prompt = engine.chat_prompt([ASKED])
    made = engine.generate(prompt, logprobs=0)
    logits = np.array(engine.logits([*prompt, *made.token_ids]))[len(prompt) - 1 : -1]
    of = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = of[np.arange(len(made.token_ids)), made.token_ids]
    assert made.logprobs is not None
    np.testing.assert_allclose([one.logprob for one in made.logprobs], expected, atol=1e-4)


def test_a_rendered_prompt_is_taken_apart(engine: ScriptedEngine):
    head = {"role": "system", "content": "Be brief."}
    ids = engine.chat_prompt(ChatPrompt([head, ASKED, CALLED, RESULT, RESULT], tools=[BASH]))
    found = Rendered.of(engine.text_of(ids), "json")
    assert [turn.role for turn in found.turns] == ["system", "user", "assistant", "user"]
    assert list(found.tools) == ["Bash"]
    assert found.results == ["hello-from-tool"] * 2
    assert "Be brief." in found.turns[0].text


@pytest.fixture
def server(engine: ScriptedEngine) -> Iterator[Served]:
    with served(engine=engine, kv_memory=16 << 20, budget=512) as found:
        yield found


def test_requests_of_a_server_are_recorded_and_share_their_prefix(engine: ScriptedEngine, server: Served):
    first = server.chat("Tell me something.").json()
    assert first["choices"][0]["message"]["content"] == FINAL[: len(first["choices"][0]["message"]["content"])]
    n = len(engine.requests)
    second = server.chat("Tell me something.", max_tokens=100, ignore_eos=False).json()
    assert second["choices"][0]["message"]["content"] == FINAL
    (request,) = engine.requests[n:]
    assert request.n_cached == second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_an_agent_without_a_shell_gives_the_final_text():
    assert agent(Rendered.of("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n", "json")) == FINAL
