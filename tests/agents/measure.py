"""Measure what a user of an agent waits for: `python -m tests.agents.measure --vocab FILE`, on quiet cores.

The prompts are of 19,000 tokens with 24 tools, in the form of Claude Code's, on all three APIs. Their system text is
Python's manual, because words that the tokenizer has seen before would cost it nothing. Measured are:
- seconds of the chat template and the tokenizer;
- the longest time without an event of the stream while a slow model reads the prompt;
- the new tokens of the second turn, which the server reads after what the prefix cache has.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import httpx

from mlx_engine.checkpoint.sources import BUILTIN
from mlx_engine.tokenizer.chat_prompt import ChatPrompt
from tests.agents.forms import ASKED, CHAT, FORMS, MESSAGES, NOTE, RESPONSES, Form, functions
from tests.agents.programs import MODEL
from tests.scripted import CONTEXT, ScriptedEngine, serving, write_model

TOKENS = 19_000
MOST_SECONDS, MOST_SILENCE, MOST_NEW = 0.5, 10.0, 500


def manual(words: int, start: int = 0) -> str:
    """Return so many words of Python's manual, with their lines."""
    text = "\n".join(topics[name] for name in sorted(topics))
    spaces = list(itertools.islice(re.finditer(r"\s+", text), start, start + words))
    return text[spaces[0].end() : spaces[-1].start()]


def body_of(path: str, words: int, name: str = "") -> dict[str, Any]:
    """Return the first request of a conversation with 24 tools and a system text of so many words."""
    text = f"{name}\n{manual(words)}"
    if path == MESSAGES:
        body = FORMS["claude-code"].first()
        return {**body, "system": [body["system"][0], {"type": "text", "text": text}]}
    if path == RESPONSES:
        body = FORMS["codex"].first()
        head = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": text}]}
        return {**body, "input": [head, *body["input"][2:]]}
    messages = [{"role": "system", "content": text}, {"role": "user", "content": ASKED}]
    return {**FORMS["opencode"].first(), "messages": messages, "tools": functions("bash", "command", 24)}


def words_for(engine: ScriptedEngine) -> int:
    """Return the words of a system text that make a prompt of `TOKENS` tokens."""

    def count(words: int) -> int:
        return len(engine.chat_prompt(prompt_of(words)))

    few, many = count(1000), count(2000)
    return 1000 + round((TOKENS - few) * 1000 / (many - few))


def prompt_of(words: int, start: int = 0) -> ChatPrompt:
    """Return the conversation as the engine takes it, with the words of the manual from `start` on."""
    messages = [("system", manual(words, start)), ("user", ASKED), ("system", NOTE)]
    return ChatPrompt(
        [{"role": role, "content": text} for role, text in messages], tools=functions("Bash", "command", 24)
    )


def encoding(engine: ScriptedEngine, words: int) -> list[float]:
    """Return the seconds of template and tokenizer, of conversations that nothing has seen before."""
    found = []
    for i in range(5):
        prompt = prompt_of(words, (i + 1) * words)
        start = time.perf_counter()
        ids = engine.chat_prompt(prompt)
        found.append(time.perf_counter() - start)
        print(f"template and tokenizer: {len(ids):,} tokens in {found[-1]:.3f} s")
    return found


def streamed(url: str, form: Form, body: dict[str, Any]) -> tuple[list[Any], float, float]:
    """Send a request; return its events, the longest time without one, and the time to the first part of the answer."""
    events: list[Any] = []
    start = last = time.perf_counter()
    silence, first = 0.0, None
    with httpx.stream("POST", url + form.path, json=body, timeout=600) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{form.path}: expected 200, found {response.status_code} {response.read()[:500]!r}")
        for line in response.iter_lines():
            if line.startswith("data: "):
                now = time.perf_counter()
                silence, last = max(silence, now - last), now
                events.append(line if line == "data: [DONE]" else json.loads(line.removeprefix("data: ")))
                if first is None and any(word in line for word in ("arguments.delta", "_delta", "reasoning_content")):
                    first = now - start
    return [event if event != "data: [DONE]" else "[DONE]" for event in events], silence, first or 0.0


def turns(url: str, words: int) -> Iterator[tuple[str, float, float]]:
    """Yield each API, the longest silence of its first turn, and the time to its first part; run the second turn."""
    for path, name in ((MESSAGES, "claude-code"), (RESPONSES, "codex"), (CHAT, "opencode")):
        form, body = FORMS[name], {**body_of(path, words, name), "model": MODEL}
        events, silence, first = streamed(url, form, body)
        streamed(url, form, form.next(body, events))
        yield path, silence, first


def main() -> int:
    """Print the figures; return 1 if one is above its limit."""
    parser = argparse.ArgumentParser(prog="python -m tests.agents.measure", description=__doc__)
    parser.add_argument("--vocab", type=Path, default=BUILTIN, help="GGUF file that has the vocabulary; Qwen2's")
    parser.add_argument("--seconds", type=float, default=40.0, help="seconds that the slow model takes for a prompt")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_model(path, asked.vocab, context=CONTEXT)
        with ScriptedEngine.load(path) as engine:
            words = words_for(engine)
            seconds = encoding(engine, words)
            longest = engine.scheduler(kv_memory=1 << 20)._budget
        record = Path(folder) / "record.jsonl"
        pause = asked.seconds / (TOKENS / longest)
        silences, news = [], []
        with serving(record, "--vocab", str(asked.vocab), "--pause", f"{pause:.3f}", "--name", MODEL) as url:
            for route, silence, first in turns(url, words):
                one, two = (json.loads(line) for line in record.read_text().splitlines()[-2:])
                silences.append(silence)
                news.append(two["prompt"] - two["cached"])
                quiet = f"{one['prompt']:,} tokens read in {first:.1f} s, at most {silence:.1f} s without an event"
                print(f"{route}: {quiet}; the second turn read {news[-1]:,} new tokens of {two['prompt']:,}")
    limits = [(min(seconds), MOST_SECONDS), (max(silences), MOST_SILENCE), (max(news), MOST_NEW)]
    return int(any(found > limit for found, limit in limits))


if __name__ == "__main__":
    sys.exit(main())
