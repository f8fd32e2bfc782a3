"""Make tests/data/chat-templates.json: chat templates, conversations, and the texts that transformers renders.

    python -m tests.golden.make_chat_goldens     # needs transformers; made with 5.23

The templates are written for this test. Each uses what templates of published models use: tool calls, roles of tools,
namespaces, loops that break, macros, filters, parts of contents, tools, documents, variables, training tags, dates.
"""

import json
from pathlib import Path

from tests.golden.chat_conversations import CONVERSATIONS, calls, message
from tests.golden.compare_chat_templates import given, outcome

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
    "tools and documents": """
{%- macro properties(schema) %}
    {%- for name, each in schema.properties | items %}
        {{- name ~ ('' if name in schema.required else '?') ~ ': ' }}
        {{- each.enum | map('tojson') | join(' | ') if each.enum is defined else each.type }}
        {%- if not loop.last %}{{- ', ' }}{%- endif %}
    {%- endfor %}
{%- endmacro %}
{{- bos_token ~ 'Today: ' ~ strftime_now('%d %B %Y')[:0] ~ 'a day' ~ '\\n' }}
{%- if tools is not none %}
    {{- '# Tools\\n' }}
    {%- for tool in tools | sort(attribute='function.name') %}
        {{- tool.function.name ~ '(' ~ properties(tool.function.parameters) ~ ')\\n' }}
        {{- tool | tojson(indent=2) ~ '\\n' }}
        {{- tool.function | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true) ~ '\\n' }}
    {%- endfor %}
{%- endif %}
{%- for document in documents or [] %}{{- document.title | upper ~ ': ' ~ document['text'] ~ '\\n' }}{%- endfor %}
{%- set seen = dict.fromkeys(['user', 'assistant'], 0) %}
{%- for m in messages %}
    {%- if m.role not in seen and m.role not in ['tool', 'system', 'developer'] %}
        {{- raise_exception('Unknown role ' ~ m.role) }}
    {%- endif %}
    {%- if loop.index0 > 30 and m.role == 'assistant' %}{%- continue %}{%- endif %}
    {%- if loop.index0 > 36 %}{%- break %}{%- endif %}
    {%- if m.role == 'assistant' %}
        {%- generation %}
            {{- 'A: ' ~ (m.content or '') }}
            {%- for call in m.tool_calls or [] %}
                {{- '[' ~ call.function.name ~ call.function.arguments | tojson ~ ']' }}
            {%- endfor %}
            {{- eos_token }}
        {%- endgeneration %}
    {%- else %}{{- m.role[0] | upper ~ ': ' ~ m.content ~ '\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'A: ' }}{%- endif %}""",
    "thinking": """
{%- set enable_thinking = enable_thinking if enable_thinking is defined else true %}
{%- set last = (messages | map(attribute='role') | list).index('user') %}
{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' ~ messages[0].content ~ '<|im_end|>\\n' }}{%- endif %}
{%- for m in messages if m.role != 'system' %}
    {{- '<|im_start|>' ~ m.role ~ '\\n' }}
    {%- if m.thinking and loop.last %}{{- '<think>\\n' ~ m.thinking | trim ~ '\\n</think>\\n\\n' }}{%- endif %}
    {{- (m.content or '').split('</think>')[-1].lstrip() ~ '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' ~ ('<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n') }}""",
}


USER = message("user", "What is the weather in Zürich?")


def case(*messages, **more):
    return {"messages": list(messages), **more}


EARLIER = {
    "one more turn": case(USER, message("assistant", "<think>hm</think>\n\nWarm."), message("user", " Thanks! 😀 ")),
    "a call in text": case(USER, calls(("weather", '{"city": "Zürich",  "days": 2}')), message("tool", "21")),
    "a call as an object": case(
        USER, calls(("weather", {"city": "Zürich", "days": [1, 2.5, None, True]})), message("tool", "21")
    ),
    "developer and names": case(message("developer", "Rhyme."), message("user", "Hello", name="ada")),
}


def main():
    texts, conversations = {}, {**EARLIER, **CONVERSATIONS}
    for name, template in TEMPLATES.items():
        for title, raw in conversations.items():
            cell, expected, found = outcome(template, given(template, raw), NAMES)
            if cell in "xn":  # a template that has no tools refuses them
                continue
            assert cell == "=", (name, title, expected, found)
            texts.setdefault(name, {})[title] = expected
    content = {"names": NAMES, "templates": TEMPLATES, "conversations": conversations, "texts": texts}
    FILE.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
