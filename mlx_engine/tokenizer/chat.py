"""Encode a conversation with the model's chat template. Messages cannot forge control tokens.

A control token (marker) that the template writes becomes its one id; the same characters in a message are encoded as
plain text. If no message spells a control token, the ids are those of the whole rendered text, equal to transformers':
the text is not split where messages begin and end.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_engine.errors import ChatTemplateError, require
from mlx_engine.tokenizer import sandbox
from mlx_engine.tokenizer.tokenizer import Tokenizer

Message = Mapping[str, str]
"""A role ("system", "user", "assistant") and its content."""

# Stand-ins are high surrogates, which occur in no text that UTF-8 can encode.
STAND_INS = range(0xD800, 0xDC00)
HALF = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Limits:
    """Resource limits of a template.

    Attributes:
        seconds: CPU time; the limit on wall time is three times this, plus time for the process to start.
        nbytes: address space, on systems that can limit it (Linux).
        characters: length of the rendered text of one conversation.
    """

    seconds: int = 5
    nbytes: int = 1 << 30
    characters: int = 1 << 24


DEFAULT_LIMITS = Limits()

# Roles that templates write into markers, whatever roles a conversation has.
ROLES = ("system", "user", "assistant", "tool")

# Seconds for a process to start on a busy machine.
START_SECONDS = 10

# The signals that end a process which exceeds its CPU time.
AT_THE_LIMIT = {getattr(signal, name, None) for name in ("SIGXCPU", "SIGKILL")}


def chat_ids(tokenizer: Tokenizer, messages: Sequence[Message], limits: Limits = DEFAULT_LIMITS) -> list[int]:
    """Return the ids of a conversation, up to the beginning of the model's answer.

    A BOS is added if the file asks for one and the template has not written it. Roles are trusted, because a program
    sets them; contents are not.

    Raises:
        OptionError: `messages` is not a list of messages.
        ChatTemplateError: there is no template, or it rejects the messages, fails or exceeds its limits.
        TokenizerError: the vocabulary cannot encode the text.
    """
    contents = _contents(messages)
    always = _always_found(tokenizer, {*ROLES, *(message["role"] for message in messages)} - {""})
    markers = {text: i for text, i in (tokenizer.special_tokens | always).items() if text}
    # The template wrote a marker if neither its first nor its last character came from a message.
    ends = sorted({end for text in markers for end in (text[0], text[-1])}.intersection("".join(contents)))
    fits = len(ends) <= len(STAND_INS)
    require(fits, option="messages", expected=f"at most {len(STAND_INS):,} ends of markers", found=len(ends))
    hide = {ord(end): chr(stand_in) for end, stand_in in zip(ends, STAND_INS, strict=False)}
    show = {ord(stand_in): chr(end) for end, stand_in in hide.items()}
    hidden = [{**message, "content": message["content"].translate(hide)} for message in messages]
    plain, guarded = render(tokenizer, (messages, hidden), limits)
    if not plain:
        hint = "the template is empty, or not made for these messages"
        raise ChatTemplateError(where=tokenizer.where, found="one that writes nothing", hint=hint)
    find = re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))) or "(?!)").finditer
    marked = set(markers.values())
    ids, written = tokenizer.encode(plain, special=True), [markers[match[0]] for match in find(guarded)]
    # A template may search its messages: one that removes thoughts finds none when their markers are replaced by
    # stand-ins. If a message also spells a control token, the origin of markers in the plain text is unknown.
    said = "".join(contents)
    is_told = guarded.translate(show) == plain or not any(text in said for text in tokenizer.special_tokens if text)
    if is_told and [i for i in ids if i in marked] == written:
        return _with_bos(tokenizer, ids)
    # A message spells a marker. The parts between the template's own markers are plain text.
    cut = re.compile("|".join(f"(?<={re.escape(text[0])})(?={re.escape(text[1:])})" for text in always) or "(?!)")
    ids, at = [], 0
    for match in [*find(guarded), None]:
        text = guarded[at : match.start() if match else None].translate(show)
        ids += [i for piece in cut.split(text) for i in _as_text(tokenizer, piece, set(always.values()))]
        if match:
            ids.append(markers[match[0]])
            at = match.end()
    return _with_bos(tokenizer, ids)


def _as_text(tokenizer: Tokenizer, text: str, markers: Collection[int]) -> list[int]:
    """Encode plain text without these markers. A normaliser may produce one; splitting the text there prevents it."""
    ids = tokenizer.encode(text)
    if len(text) < 2 or not any(i in markers for i in ids):
        return ids
    half = len(text) // 2
    return [*_as_text(tokenizer, text[:half], markers), *_as_text(tokenizer, text[half:], markers)]


def _always_found(tokenizer: Tokenizer, roles: Collection[str]) -> dict[str, int]:
    """Return user-defined tokens that the template writes: markers too, though `encode` finds them in any text.

    A template may compose them, as in `'<|' + role + '|>'`.
    """
    template = tokenizer.chat_template or ""

    def is_written(text: str) -> bool:
        parts = (text.split(role) for role in roles if role in text)
        return text in template or any(all(part in template for part in around) for around in parts)

    found = tokenizer.user_defined_tokens.items()
    return {text: i for text, i in found if len(text.strip()) > 2 and is_written(text)}


def _contents(messages: Sequence[Message]) -> list[str]:
    """Check the messages and return their contents."""
    expected = 'a list of {"role": ..., "content": ...}, both text'
    sound = isinstance(messages, Sequence) and len(messages) > 0
    for message in messages if sound else ():
        sound = sound and isinstance(message, Mapping) and message.keys() == {"role", "content"}
        sound = sound and all(isinstance(text, str) for text in message.values())
    require(sound, option="messages", expected=expected, found=messages)
    contents = [message["content"] for message in messages]
    halves = next((text for text in contents if HALF.search(text)), None)
    require(halves is None, option="messages", expected="text that UTF-8 can write", found=halves)
    return contents


def _with_bos(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    bos_id = tokenizer.bos_id if tokenizer.add_bos else None
    return ids if bos_id is None or ids[:1] == [bos_id] else [bos_id, *ids]


def render(
    tokenizer: Tokenizer, conversations: Sequence[Sequence[Message]], limits: Limits = DEFAULT_LIMITS
) -> list[str]:
    """Render each conversation with the chat template, up to the beginning of the model's answer.

    Raises:
        ChatTemplateError: there is no template, or it rejects the messages, fails or exceeds its limits.
    """
    if tokenizer.chat_template is None:
        raise ChatTemplateError(where=tokenizer.where, found="none", hint="give the prompt as text instead")
    if HALF.search(tokenizer.chat_template):
        found = "one that is not UTF-8"
        raise ChatTemplateError(where=tokenizer.where, found=found, hint="convert or download the file again")
    roles = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    request = {
        "path": [str(path) for path in sys.path],
        "template": tokenizer.chat_template,
        "conversations": [[dict(message) for message in messages] for messages in conversations],
        "names": {name: tokenizer.token(i) for name, i in roles.items() if i is not None},
        "seconds": limits.seconds,
        "bytes": limits.nbytes,
        "characters": limits.characters,
    }
    return _answer(request, limits, tokenizer.where)


def _answer(request: dict[str, object], limits: Limits, where: str) -> list[str]:
    """Run a request in the sandbox process and return the rendered texts."""
    hint = "the template is damaged, or not made for these messages"
    data = json.dumps(request, ensure_ascii=False).encode(sandbox.ENCODING, sandbox.HALVES)
    command = [sys.executable, "-I", str(Path(sandbox.__file__))]
    try:
        run = subprocess.run(
            command, input=data, capture_output=True, timeout=START_SECONDS + 3 * limits.seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise ChatTemplateError(where=where, found=f"one that takes over {limits.seconds} seconds", hint=hint) from None
    except OSError as error:
        found = f"no way to start {sys.executable or 'Python'} for it: {error.strerror or error}"
        raise ChatTemplateError(where=where, found=found, hint="give the prompt as text instead") from error
    if -run.returncode in AT_THE_LIMIT:
        raise ChatTemplateError(where=where, found=f"one that takes over {limits.seconds} seconds", hint=hint)
    answer: dict[str, Any]
    if run.returncode:
        lines = [line for line in run.stderr.decode(errors="replace").split("\n") if line.strip()]
        answer = {"error": [f"exit status {run.returncode}", *lines][-1]}
    else:
        answer = json.loads(run.stdout.decode(sandbox.ENCODING, sandbox.HALVES))
    if "error" in answer:
        # The message comes from the template and may contain control characters.
        words = "".join(c if c.isprintable() else " " for c in answer["error"])
        raise ChatTemplateError(where=where, found=f"a failure: {words}", hint=hint)
    texts: list[str] = answer["texts"]
    return texts
