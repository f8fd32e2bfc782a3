"""Requests of /v1/messages and /v1/responses as the messages and tools of a chat."""

from __future__ import annotations

import json
import time

import pytest

from mlx_engine.serve.errors import ApiError
from mlx_engine.serve.messages import CountRequest, MessagesRequest, count_request, messages_request
from mlx_engine.serve.parameters import NOOPS_OF_CHAT, ChatRequest, parse
from mlx_engine.serve.responses import OWN_REASONING, ResponsesRequest, responses_request

USER = {"role": "user", "content": "hello"}


def message(**parameters) -> MessagesRequest:
    found = messages_request(json.dumps({"max_tokens": 1, "messages": [USER], **parameters}).encode())
    found.check(4)
    return found


def response(**parameters) -> ResponsesRequest:
    found = responses_request(json.dumps({"input": "hello", **parameters}).encode())
    found.check(4)
    return found


def chat(request, template=None):
    return request.read(template).prompts[0].messages


def ignored(request):
    return list(request.read(None).ignored)


def refusal(read, **parameters) -> ApiError:
    with pytest.raises(ApiError) as found:
        read(**parameters).read(None)
    assert found.value.status == 400
    return found.value


# ---- /v1/messages ----


def test_a_system_text_comes_first_without_the_line_that_changes_with_every_session():
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1.fbe; cch=0;"}
    blocks = [
        billing,
        {"type": "text", "text": "Be kind."},
        {"type": "text", "text": "And short.", "cache_control": {}},
    ]
    assert chat(message(system=blocks)) == [{"role": "system", "content": "Be kind.\n\nAnd short."}, USER]
    assert chat(message(system="Be kind.")) == [{"role": "system", "content": "Be kind."}, USER]
    assert chat(message(system=[billing])) == [USER]
    # Only the line is left out: in a system text that is not in blocks, the instructions follow it.
    assert chat(message(system=f"{billing['text']}\n\nBe kind.")) == chat(message(system="Be kind."))


def test_a_system_message_in_the_middle_keeps_its_place():
    later = {"role": "system", "content": [{"type": "text", "text": "Tools changed."}]}
    assert chat(message(messages=[USER, later]))[1] == {"role": "system", "content": "Tools changed."}


def test_blocks_of_an_answer_become_one_turn_and_results_come_before_the_text_of_the_user():
    use = {"type": "tool_use", "id": "t1", "name": "ls", "input": {"path": "/"}}
    answer = [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "text", "text": "Look:"}, use]
    results = [
        {"type": "text", "text": "And?"},
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "a"}], "is_error": False},
        {"type": "tool_result", "tool_use_id": "t2", "content": "no such file", "is_error": True},
        {"type": "tool_result", "tool_use_id": "t3"},
    ]
    found = chat(
        message(messages=[USER, {"role": "assistant", "content": answer}, {"role": "user", "content": results}])
    )
    call = {"id": "t1", "type": "function", "function": {"name": "ls", "arguments": {"path": "/"}}}
    assert found[1:] == [
        {"role": "assistant", "content": "Look:", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "a"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no such file"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": "And?"},
    ]


def test_two_answers_in_a_row_stay_two_turns():
    answer = {"role": "assistant", "content": "a"}
    assert [one["content"] for one in chat(message(messages=[USER, answer, answer, USER]))][1:3] == ["a", "a"]


def test_the_last_answer_is_one_that_has_begun():
    answer = {"role": "assistant", "content": [{"type": "text", "text": "{"}]}
    reading = message(messages=[USER, answer]).read(None)
    assert (reading.begun, reading.begun_in, reading.prompts[0].messages) == ("{", "messages", [USER])
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    reading = message(messages=[USER, {"role": "assistant", "content": [thought]}]).read(None)
    assert (reading.begun, len(reading.prompts[0].messages)) == ("", 2)
    assert message(messages=[USER, answer, USER]).read(None).begun == ""


def test_tools_become_functions_and_those_of_other_servers_are_named():
    own = {"name": "ls", "description": "List.", "input_schema": {"type": "object"}, "cache_control": {}}
    request = message(
        tools=[
            own,
            {"type": "custom", "name": "b", "input_schema": {}, "strict": True},
            {"type": "web_search_20250305", "name": "web_search"},
        ]
    )
    reading = request.read(None)
    assert reading.prompts[0].tools == [
        {"type": "function", "function": {"name": "ls", "description": "List.", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "b", "description": "", "parameters": {}, "strict": True}},
    ]
    assert reading.ignored == ["tool web_search_20250305"]
    assert reading.about["tools"] == reading.prompts[0].tools


def test_what_has_no_effect_is_named_and_labels_and_cache_marks_are_not():
    request = message(context_management={"edits": []}, metadata={"user_id": "x"}, cache_control={}, betas=["x"])
    assert ignored(request) == ["betas", "context_management"]
    blocks = [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "a"}]
    request = message(messages=[USER, {"role": "assistant", "content": blocks}, USER])
    assert (ignored(request), chat(request)[1]["content"]) == (["content of type redacted_thinking"], "a")


def test_images_and_documents_are_refused_by_their_place():
    image = {"type": "image", "source": {}}
    assert refusal(message, messages=[{"role": "user", "content": [image]}]).param == "messages[0].content[0]"
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": ""}, image]}
    error = refusal(message, messages=[{"role": "user", "content": [result]}])
    assert (error.param, error.code) == ("messages[0].content[0].content[1]", "unsupported_content")
    assert "image" in error.message


@pytest.mark.parametrize(
    ("thinking", "variables"),
    [
        (None, {"enable_thinking": False}),
        ({"type": "disabled"}, {"enable_thinking": False}),
        ({"type": "adaptive"}, {"enable_thinking": True}),
        ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True}),
    ],
)
def test_thinking_sets_the_switch_of_the_template_where_it_has_one(thinking, variables):
    request = message(thinking=thinking)
    assert request.read("{{ enable_thinking }}").prompts[0].variables == variables
    assert request.read("{{ messages }}").prompts[0].variables == {}


def test_the_effort_is_that_of_the_template():
    template = "{{ reasoning_effort }}{{ thinking }}"
    for effort, expected in (("high", "high"), ("max", "high"), ("minimal", "low"), ("medium", "medium")):
        assert (
            message(output_config={"effort": effort}).read(template).prompts[0].variables["reasoning_effort"]
            == expected
        )
    assert response(reasoning={"effort": "none"}).read(template).prompts[0].variables == {
        "thinking": False,
        "reasoning_effort": "low",
    }
    ignored = response(reasoning={"effort": "high"}).read("{{ thinking }}")
    assert (ignored.prompts[0].variables, ignored.ignored) == ({}, ["reasoning.effort"])
    assert message(output_config={"effort": "high"}).read("{{ thinking }}").ignored == ["output_config.effort"]
    assert message(output_config={"effort": "high"}).read(template).ignored == []


def test_the_effort_of_a_chat_request_is_that_of_the_template_or_is_named():
    def read(template, **parameters):
        body = json.dumps({"messages": [USER], **parameters}).encode()
        found = parse(body, ChatRequest, NOOPS_OF_CHAT).read(template)
        return found.prompts[0].variables, list(found.ignored)

    assert read("{{ reasoning_effort }}", reasoning_effort="high") == ({"reasoning_effort": "high"}, [])
    assert read("{{ enable_thinking }}", reasoning_effort="none") == ({"enable_thinking": False}, [])
    own = {"reasoning_effort": "low"}
    assert read("{{ reasoning_effort }}", reasoning_effort="high", chat_template_kwargs=own) == (own, [])
    assert read("{{ messages }}", reasoning_effort="high") == ({}, ["reasoning_effort"])
    assert read("{{ messages }}", reasoning_effort="medium") == ({}, [])


def test_stop_sequences_are_stops_and_stop_is_refused():
    assert message(stop_sequences=["a", "b"]).options()["stop"] == ["a", "b"]
    assert refusal(message, stop="a").param == "stop"


def test_a_count_needs_no_limit():
    assert isinstance(count_request(json.dumps({"messages": [USER]}).encode()), CountRequest)
    with pytest.raises(ApiError, match="max_tokens is missing"):
        messages_request(json.dumps({"messages": [USER]}).encode())


@pytest.mark.parametrize(
    "wrong",
    [
        {"messages": []},
        {"messages": [{"role": "assistant", "content": []}]},
        {"messages": [{"role": "tool", "content": "a"}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": "c"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        {"tools": [{"name": 3}]},
        {"tools": [{"name": "a", "input_schema": []}]},
        {"tool_choice": {"type": "some"}},
        {"tool_choice": {"type": "tool"}},
        {"thinking": {"type": "deep"}},
        {"unheard_of": 1},
        {"max_tokens": -1},
    ],
)
def test_wrong_messages_are_refused(wrong):
    refusal(message, **wrong)


# ---- /v1/responses ----

CALL = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "c1",
    "name": "ls",
    "arguments": '{"a": 1}',
    "status": "completed",
}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "b"}]}


def test_items_become_messages():
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    said = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Look:", "annotations": []}],
    }
    developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]}
    found = chat(response(instructions="You are X.", input=[developer, USER, thought, said, CALL, OUTPUT, said]))
    call = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"a": 1}'}}
    assert found == [
        {"role": "system", "content": "You are X."},
        {"role": "developer", "content": "Be kind."},
        USER,
        {"role": "assistant", "content": "Look:", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "b"},
        {"role": "assistant", "content": "Look:"},
    ]
    assert chat(response()) == [USER]


def test_reasoning_comes_back_from_our_own_token_and_that_of_others_is_named():
    own = OWN_REASONING + "SG0u"
    assert (
        chat(response(input=[USER, {"type": "reasoning", "summary": [], "encrypted_content": own}, CALL]))[1][
            "reasoning_content"
        ]
        == "Hm."
    )
    for other in ("gAAAA", OWN_REASONING + "?", None):
        request = response(input=[USER, {"type": "reasoning", "summary": [], "encrypted_content": other}])
        assert (ignored(request), chat(request)) == (["item reasoning without its text"], [USER])


def test_two_messages_of_the_assistant_stay_two_turns_but_text_after_a_call_stays_in_its_turn():
    said = {"role": "assistant", "content": "a"}
    assert [one["content"] for one in chat(response(input=[USER, said, said]))] == ["hello", "a", "a"]
    turns = chat(response(input=[USER, said, CALL, said, OUTPUT]))
    assert [one["role"] for one in turns] == ["user", "assistant", "tool"]
    assert turns[1]["content"] == "aa"


def test_namespaces_are_flattened_and_calls_go_back_under_their_own_names():
    def function(name, **more):
        return {"type": "function", "name": name, "parameters": None, **more}

    namespace = {
        "type": "namespace",
        "name": "mcp__web__",
        "description": "The web.",
        "tools": [function("get"), function("_put")],
    }
    tools = [function("get", description="Get."), namespace, function("mcp__web__get", strict=False)]
    request = response(
        tools=[*tools, {"type": "web_search"}], input=[USER, {**CALL, "name": "get", "namespace": "mcp__web__"}]
    )
    reading = request.read(None)
    named = {tool["function"]["name"]: tool["function"]["description"] for tool in reading.about["tools"]}
    assert named == {
        "get": "Get.",
        "mcp__web__get": "mcp__web__: The web.\n\n",
        "mcp__web__put": "",
        "mcp__web__get_2": "",
    }
    assert reading.about["names"]["mcp__web__put"] == ("mcp__web__", "_put")
    assert reading.about["names"]["mcp__web__get_2"] == (None, "mcp__web__get")
    assert chat(request)[1]["tool_calls"][0]["function"]["name"] == "mcp__web__get"
    assert reading.ignored == ["tool web_search"]
    assert reading.about["echo"]["tools"][1] == namespace


def test_unknown_items_are_left_out_and_named():
    request = response(input=[USER, {"type": "web_search_call", "id": "x"}, {"type": "compaction"}], truncation="auto")
    assert chat(request) == [USER]
    assert ignored(request) == ["truncation auto", "item web_search_call", "item compaction"]
    more = response(include=["reasoning.encrypted_content", "file_search_call.results"], max_tool_calls=3, store=True)
    assert ignored(more) == ["max_tool_calls", "include file_search_call.results"]


@pytest.mark.parametrize("name", ["previous_response_id", "conversation", "prompt", "background", "top_logprobs"])
def test_what_needs_a_store_is_refused_by_name(name):
    value = {"background": True, "top_logprobs": 2, "prompt": {"id": "x"}}.get(name, "x")
    assert refusal(response, **{name: value}).param == name
    response(**{name: None})


@pytest.mark.parametrize(
    "wrong",
    [
        {"input": []},
        {"input": [{"role": "tool", "content": "a"}]},
        {"input": [{"type": "message", "role": "user", "content": [{"type": "input_image"}]}]},
        {"input": [{"type": "function_call", "name": "a"}]},
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
        {"input": [{"type": 3}]},
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "namespace", "name": "a"}]},
        {"tool_choice": "some"},
        {"tool_choice": {"type": "mcp"}},
        {"max_output_tokens": -1},
        {"truncation": "some"},
        {"include": ["message.output_text.logprobs"]},
        {"messages": [USER]},
    ],
)
def test_wrong_responses_are_refused(wrong):
    refusal(response, **wrong)


def test_a_long_conversation_with_many_tools_is_read_in_no_time():
    schema = {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "description": "d" * 200} for i in range(12)},
    }
    tools = [{"name": f"tool{i}", "description": "d" * 500, "input_schema": schema} for i in range(24)]
    turn = [USER, {"role": "assistant", "content": [{"type": "text", "text": "t" * 500}]}]
    body = json.dumps({"max_tokens": 32000, "tools": tools, "messages": [*(turn * 20), USER]}).encode()
    assert len(body) > 76_000
    started = time.thread_time()
    assert len(messages_request(body).read(None).prompts[0].tools) == 24
    assert time.thread_time() - started < 0.1
