"""Make tests/data/chat-templates.json: chat templates, conversations, and the texts that transformers renders.

    python -m tests.golden.make_chat_goldens     # needs transformers; made with 5.23

The templates are written for this test. Each uses what templates of published models use: tool calls, roles of tools,
namespaces, loops that break, macros, filters, parts of contents.
"""

import json
from pathlib import Path

FILE = Path(__file__).parents[1] / "data" / "chat-templates.json"
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}

TEMPLATES = {
    "calls in tags": """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' }}
        {%- if m.reasoning_content is string and loop.index0 > ns.last %}
            {{- '<think>' + m.reasoning_content.strip('\\n') + '</think>\\n' }}
        {%- endif %}
        {%- if m.content is string %}{{- m.content.split('</think>')[-1].lstrip('\\n') }}{%- endif %}
        {%- for call in m.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    "headers": """
{{- bos_token }}
{%- macro header(role) -%}<|start_header_id|>{{ role }}<|end_header_id|>{{ '\\n\\n' }}{%- endmacro -%}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = 'Be helpful.' %}{%- endif %}
{{- header('system') + system + '<|eot_id|>' }}
{%- for m in messages %}
    {%- if m.tool_calls is defined %}
        {%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {{- header('assistant') + '{"name": ' ~ m.tool_calls[0].function.name | tojson ~ ', "parameters": ' }}
        {{- m.tool_calls[0].function.arguments | tojson }}{{- '}<|eot_id|>' }}
        {%- continue %}
    {%- endif %}
    {{- header('ipython' if m.role == 'tool' else m.role) + (m.content | trim) + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- header('assistant') }}{%- endif %}""",
    "parts": """
{{- bos_token }}
{%- for message in messages %}
    {{- '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) }}
    {{- '(' + message.name + ')' if message.name is defined }}{{ '\\n' }}
    {%- if message['content'] is string %}{{ message['content'] | trim }}
    {%- else %}
        {%- for item in message['content'] %}{%- if item['type'] == 'text' %}{{ item['text'] | trim }}{%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}""",
    "developer": """
{%- for m in messages if m.role in ['system', 'developer'] %}
    {{- '# ' ~ m.role ~ '\\n' ~ m.content ~ '\\n' }}
{%- endfor %}
{%- for m in messages if m.role not in ['system', 'developer'] %}
    {%- if m.tool_calls %}
        {%- for call in m.tool_calls %}
            {{- '[' ~ call.id ~ ' ' ~ call.function.name }}
            {%- for key, value in (call.function.arguments if call.function.arguments is mapping else {}) | dictsort %}
                {{- ' ' ~ key ~ '=' ~ value | tojson(indent=1) }}
            {%- endfor %}{{- ']' }}
        {%- endfor %}
    {%- else %}
        {{- m.role ~ (' ' ~ m.tool_call_id if m.tool_call_id) ~ ': ' ~ m.content ~ eos_token ~ '\\n' }}
    {%- endif %}
{%- endfor %}
{{- 'assistant: ' }}""",
}


def call(arguments):
    function = {"name": "weather", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


def message(role, content, **more):
    return {"role": role, "content": content, **more}


PARTS = [{"type": "text", "text": "One "}, {"type": "text", "text": "two. <b>"}]
SYSTEM, USER = message("system", "Be brief.\n"), message("user", "What is the weather in Zürich?")
RESULT = message("tool", '{"degrees": 21}', tool_call_id="c1")
THOUGHT = message("assistant", "It is 21°.", reasoning_content="\nThe tool says 21.\n")
CONVERSATIONS = {
    "one question": [USER],
    "system": [SYSTEM, USER],
    "several turns": [
        SYSTEM,
        USER,
        message("assistant", "<think>hm</think>\n\nWarm."),
        message("user", " Thanks! 😀 "),
    ],
    "a call in text": [USER, call('{"city": "Zürich",  "days": 2}'), RESULT],
    "a call as an object": [SYSTEM, USER, call({"city": "Zürich", "days": [1, 2.5, None, True]}), RESULT, THOUGHT],
    "developer and names": [message("developer", "Rhyme."), message("user", "Hello", name="ada")],
    "text parts": [message("user", PARTS)],
}


def as_given(template, messages):
    """The messages in the form that the template is made for; transformers leaves that to its caller."""
    given = []
    for m in messages:
        m = dict(m)
        if isinstance(m["content"], list) and "for item in" not in template:
            m["content"] = "One  two. <b>"
        if m["role"] == "developer" and "developer" not in template:
            m["role"] = "system"
        given.append(m)
    return given


def main():
    from transformers.utils.chat_template_utils import render_jinja_template

    texts = {}
    for name, template in TEMPLATES.items():
        for title, messages in CONVERSATIONS.items():
            if "tool_calls" not in template and any("tool_calls" in m for m in messages):
                continue
            given = [as_given(template, messages)]
            (text,), _ = render_jinja_template(given, chat_template=template, add_generation_prompt=True, **NAMES)
            texts.setdefault(name, {})[title] = text
    content = {"names": NAMES, "templates": TEMPLATES, "conversations": CONVERSATIONS, "texts": texts}
    FILE.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
