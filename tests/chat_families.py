"""Chat templates written for tests. Each has the limits of a family of published models, see `FAMILIES`."""

from __future__ import annotations

import json
from pathlib import Path

# Arguments as items, in tags; a system message only at the beginning; reasoning after the last question alone.
TAGGED = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' and '<tool_response>' not in m.content %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- tool | tojson ~ '\\n' }}{%- endfor %}
    {{- (messages[0].content if messages[0].role == 'system' else '') ~ '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' ~ messages[0].content ~ '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'system' %}
        {%- if not loop.first %}{{- raise_exception('System message must be at the beginning.') }}{%- endif %}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and m.reasoning_content %}
            {{- '<think>\\n' ~ m.reasoning_content ~ '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- m.content | trim }}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n<tool_call>\\n<function=' ~ call.function.name ~ '>\\n' }}
            {%- for name, value in call.function.arguments | items %}
                {%- set value = value if value is string else value | tojson %}
                {{- '<parameter=' ~ name ~ '>\\n' ~ value ~ '\\n</parameter>\\n' }}
            {%- endfor %}{{- '</function>\\n</tool_call>' }}
        {%- endfor %}{{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' ~ m.content ~ '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}{{- '<|im_start|>assistant\\n' }}"""

# Turns of a user and the model that alternate; ids of nine letters; text beside calls is left out.
ALTERNATING = """
{{- bos_token }}{%- set ns = namespace(i=0) %}
{%- for m in messages %}
    {%- if m.role == 'system' and not loop.first %}{{- raise_exception('no system message here') }}{%- endif %}
    {%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
        {%- if (m.role == 'user') != (ns.i % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
        {%- set ns.i = ns.i + 1 %}
    {%- endif %}
{%- endfor %}
{%- if tools %}{{- '[TOOLS]' ~ tools | tojson ~ '[/TOOLS]' }}{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{- '[SYSTEM]' ~ m.content ~ '[/SYSTEM]' }}
    {%- elif m.role == 'user' %}{{- '[INST]' ~ m.content ~ '[/INST]' }}
    {%- elif m.role == 'tool' %}{{- '[RESULT]' ~ m.tool_call_id ~ ' ' ~ m.content ~ '[/RESULT]' }}
    {%- elif m.tool_calls %}
        {%- for call in m.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('ids have nine letters') }}{%- endif %}
            {{- '[CALL]' ~ call.function.name ~ ' ' ~ call.id ~ call.function.arguments | tojson }}
        {%- endfor %}{{- eos_token }}
    {%- elif not m.content %}{{- raise_exception('an answer has text') }}
    {%- else %}{{- m.content ~ eos_token }}{%- endif %}
{%- endfor %}"""

# One call in a message; a string in JSON for results; text beside a call is dropped after the final answer.
CHANNELS = """
{%- if messages[0].role in ['system', 'developer'] %}
    {{- '<|im_start|>developer\\n' ~ messages[0].content ~ '<|im_end|>' }}{%- set messages = messages[1:] %}
{%- endif %}
{%- for t in tools or [] %}{{- 'type ' ~ t.function.name ~ ' = ' ~ t.function | tojson }}{%- endfor %}
{%- set ns = namespace(name=none) %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls %}
        {%- if m.content and m.thinking %}{{- raise_exception('content or thinking') }}{%- endif %}
        {%- set later = namespace(final=false) %}
        {%- for each in messages[loop.index:] if each.role == 'assistant' and not each.tool_calls %}
            {%- set later.final = true %}
        {%- endfor %}
        {%- if not later.final and (m.thinking or m.content) %}
            {{- '<|im_start|>analysis\\n' ~ (m.thinking or m.content) ~ '<|im_end|>' }}
        {%- endif %}
        {%- set call = m.tool_calls[0].function %}{%- set ns.name = call.name %}
        {{- '<|im_start|>to=' ~ call.name ~ ' json\\n' ~ call.arguments | tojson ~ '<|im_end|>' }}
    {%- elif m.role == 'assistant' %}{{- '<|im_start|>final\\n' ~ m.content ~ '<|im_end|>' }}
    {%- elif m.role == 'tool' %}
        {%- if ns.name is none %}{{- raise_exception('a result without a call') }}{%- endif %}
        {{- '<|im_start|>' ~ ns.name ~ '\\n' ~ m.content | tojson ~ '<|im_end|>' }}
    {%- elif m.role == 'user' %}{{- '<|im_start|>user\\n' ~ m.content ~ '<|im_end|>' }}{%- endif %}
{%- endfor %}{{- '<|im_start|>' }}"""

# Tools and results, and no calls.
NO_CALLS = """
{{- bos_token }}{%- if tools %}{{- 'List of tools: ' ~ tools | tojson ~ '\\n' }}{%- endif %}
{%- for m in messages %}{{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}{%- endfor %}
{{- '<|im_start|>assistant\\n' }}"""

# A user and the model in turns, and nothing else.
TWO_ROLES = """
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role not in ['user', 'assistant'] %}{{- raise_exception('no role ' ~ m.role) }}{%- endif %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
    {{- '<|im_start|>' ~ ('model' if m.role == 'assistant' else 'user') ~ '\\n' ~ m.content | trim ~ '<|im_end|>\\n' }}
{%- endfor %}{{- '<|im_start|>model\\n' }}"""

# Calls only beside a content that is none; arguments are text; system messages are collected at the beginning.
TEXT_ARGUMENTS = """
{{- bos_token }}
{%- for m in messages if m.role == 'system' %}{{- m.content ~ '\\n\\n' }}{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '<|User|>' ~ m.content }}
    {%- elif m.role == 'assistant' and m.content is none %}
        {%- for call in m.tool_calls %}
            {{- '<|Call|>' + call.function.name + '\\n```json\\n' + call.function.arguments + '\\n```' }}
        {%- endfor %}
    {%- elif m.role == 'assistant' %}
        {{- '<|Assistant|>' ~ m.content.split('</think>')[-1] ~ eos_token }}
    {%- elif m.role == 'tool' %}{{- '<|Result|>' ~ m.content }}{%- endif %}
{%- endfor %}{{- '<|Assistant|>' }}"""

# Reasoning is a part of the content; other lists of parts are written as Python writes them.
PARTS = """
{{- bos_token }}
{%- for m in messages %}
    {{- '<|im_start|>' ~ m.role ~ '\\n' }}
    {%- if m.role == 'assistant' and m.content is not string and m.content is not none %}
        {%- for part in m.content %}
            {{- '[THINK]' ~ part.thinking ~ '[/THINK]' if part.type == 'thinking' else part.text }}
        {%- endfor %}
    {%- else %}{{- m.content }}{%- endif %}
    {%- for call in m.tool_calls or [] %}
        {{- '[CALL]' ~ call.function.name ~ call.function.arguments | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}{{- '<|im_start|>assistant\\n' }}"""

FAMILIES = {
    "tagged": TAGGED, "alternating": ALTERNATING, "channels": CHANNELS, "no calls": NO_CALLS, "two roles": TWO_ROLES,
    "text arguments": TEXT_ARGUMENTS, "reasoning in parts": PARTS,
}  # fmt: skip
"""In this order, those of Qwen3.5; Mistral and Ministral; gpt-oss; LFM2 and Granite 3.3; Gemma 2 and Phi-3.5; DeepSeek;
reasoning in parts as of Ministral."""

STORED: dict[str, str] = json.loads((Path(__file__).parent / "data" / "chat-templates.json").read_text("utf-8"))[
    "templates"
]
"""The templates of tests/data."""
