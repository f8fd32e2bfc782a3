"""The commands that a user types in `chat`: lines that begin with a slash."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from mlx_engine.checkpoint.hf_folder import parse_json
from mlx_engine.commands.console import notice, read_text
from mlx_engine.commands.suggested import described
from mlx_engine.errors import OptionError, SourceError, Words, require

if TYPE_CHECKING:
    from mlx_engine.conversation import Conversation

Ask: TypeAlias = Callable[..., Iterator[str]]
"""Starts an answer and returns its pieces; the argument `progress` is that of `Conversation.ask`."""

QUIT = ("quit", "exit", "/quit", "/exit")

COMMAND = re.compile(r"/([a-z]*)(?:\s+(.*))?", re.DOTALL)


@dataclass(frozen=True)
class Command:
    """A command: how it is written, its line of help, and what it does with the text after its name."""

    usage: str
    help: str
    run: Callable[[Conversation, str], Ask | None]


def perform(conversation: Conversation, text: str) -> Ask | None:
    """Do what the user typed. Return how to start the answer; None if a command has no answer.

    Raises:
        OptionError: there is no such command, or its argument is invalid.
        EngineError: the command failed.
    """
    match = COMMAND.fullmatch(text.strip())
    if match is None:
        return functools.partial(conversation.ask, text)
    name, argument = match[1], (match[2] or "").strip()
    if name not in COMMANDS:
        raise OptionError(option=f"/{name}", expected="a command that /help lists", found=Words("none"))
    return COMMANDS[name].run(conversation, argument)


def load_file(conversation: Conversation, path: str) -> None:
    """Replace the conversation with the messages of a file. Errors are those of the two functions below."""
    continue_from(conversation, read_messages(path), path)


def read_messages(path: str) -> list[Any]:
    """Return the list in a file.

    Raises:
        SourceError: the file cannot be read.
        FormatError: it is not JSON.
        OptionError: it is not a list.
    """
    require(bool(path), option="/load", expected="the name of a file", found=Words("nothing"))
    messages: Any = parse_json(read_text(None, Path(path), path), path, "name a file that /save wrote")
    require(isinstance(messages, list), option=path, expected="a list of messages", found=messages)
    return list(messages)


def continue_from(conversation: Conversation, messages: list[Any], path: str) -> None:
    """Replace the conversation with the messages of a file.

    Raises:
        OptionError: they are no messages.
        EngineError: the template cannot render them.
    """
    conversation.load(messages)
    notice(f"{len(messages)} messages loaded from {path}")


def _save(conversation: Conversation, path: str) -> None:
    require(bool(path), option="/save", expected="the name of a file", found=Words("nothing"))
    text = json.dumps(conversation.messages, ensure_ascii=False, indent=2)
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise SourceError(f"{path}: cannot be written: {error.strerror or error}; choose another file") from error
    notice(f"{len(conversation.messages)} messages saved to {path}")


def _system(conversation: Conversation, text: str) -> None:
    conversation.system = text or None
    notice("system message set" if text else "system message removed")


def _clear(conversation: Conversation, _: str) -> None:
    conversation.clear()
    notice("a new conversation begins")


def _retry(conversation: Conversation, _: str) -> Ask:
    return conversation.retry


def _stats(conversation: Conversation, _: str) -> None:
    turns, generation = conversation.turns, conversation.generation
    notice(f"context: {conversation.n_tokens:,} of {conversation.n_context:,} tokens used")
    notice(f"sampling: {described(conversation.options.sampling)}")
    if generation is None:
        return
    last, metrics = turns[-1], generation.metrics
    notice(f"turns: {len(turns)}, with {sum(turn.n_generated for turn in turns):,} generated tokens")
    notice(
        f"last turn: {last.n_prompt:,} prompt tokens ({last.n_cached:,} of them cached), "
        f"{last.n_generated:,} generated tokens, ended by {generation.finish_reason or 'Ctrl-C'}"
    )
    first, rate = metrics.time_to_first_token_ms, metrics.decode_tokens_per_second
    notice(
        f"last turn: {'-' if first is None else f'{first:.1f}'} ms to the first token, then "
        f"{'-' if rate is None else f'{rate:.1f}'} tokens/s"
    )


def _help(_: Conversation, __: str) -> None:
    width = max(len(command.usage) for command in COMMANDS.values())
    for command in COMMANDS.values():
        notice(f"{command.usage:{width}}  {command.help}")
    notice(f"{'quit, exit':{width}}  End the conversation; so does Ctrl-D.")
    notice("Ctrl-C stops an answer and keeps what was said. For a message of several lines, end a line with \\,")
    notice('press Alt-Enter, or write """ before the first line and after the last.')


COMMANDS = {
    "help": Command("/help", "List the commands.", _help),
    "system": Command("/system [TEXT]", "Set the system message; without TEXT, remove it.", _system),
    "clear": Command("/clear", "Begin a new conversation with the same system message.", _clear),
    "save": Command("/save FILE", "Write the messages to a JSON file.", _save),
    "load": Command("/load FILE", "Continue the conversation of a file that /save wrote.", load_file),
    "retry": Command("/retry", "Answer the last message again; at temperature 0 the answer is the same.", _retry),
    "stats": Command("/stats", "Show tokens, rates and the use of the context.", _stats),
}
