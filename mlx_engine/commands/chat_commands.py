"""The commands that a user types in `chat`: lines that begin with a slash."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, get_args, get_type_hints

from mlx_engine.checkpoint.hf_folder import parse_json
from mlx_engine.commands.console import notice, read_text
from mlx_engine.commands.diagnostics import rates
from mlx_engine.commands.options.run import RunOptions, SamplingOptions, biases_of
from mlx_engine.commands.options.suggested import IDLE_IF_GREEDY, described
from mlx_engine.errors import EngineError, OptionError, SourceError, Words, require

if TYPE_CHECKING:
    from prompt_toolkit.completion import Completer

    from mlx_engine.conversation import Conversation
    from mlx_engine.options import Options

Ask: TypeAlias = Callable[..., Iterator[str]]
"""Starts an answer and returns its pieces; the argument `progress` is that of `Conversation.ask`."""

QUIT, SLASHED_QUIT = ("quit", "exit"), ("/quit", "/exit", "/bye")

COMMAND = re.compile(r"(/\S*)(?:\s+(.*))?", re.DOTALL)

# Options that /set changes, beside those of sampling.
LIMITS = ("max_tokens", "timeout")


@dataclass
class Chat:
    """What the commands change.

    Attributes:
        conversation: the conversation.
        begin: returns an empty conversation with the model of this name, which can answer these messages.
        changed: the options that /set has changed.
    """

    conversation: Conversation
    begin: Callable[[str, Sequence[Any]], Conversation]
    changed: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Command:
    """A command: how it is written, its line of help, and what it does with the text after its name."""

    usage: str
    help: str
    run: Callable[[Chat, str], Ask | None]


def is_end(text: str) -> bool:
    """Return whether the user ends the conversation; a space before the slash makes it a message, as in `perform`."""
    return text.strip() in QUIT or text.rstrip() in SLASHED_QUIT


def perform(chat: Chat, text: str) -> Ask | None:
    """Do what the user typed. Return how to start the answer; None if a command has no answer.

    A text that begins with a slash is a command. A space before the slash makes it a message; the space is left out.

    Raises:
        OptionError: there is no such command, or its argument is invalid.
        EngineError: the command failed.
    """
    match = COMMAND.fullmatch(text.rstrip())
    if match is None:
        is_escaped = text.startswith(" /")
        return functools.partial(chat.conversation.ask, text[1:] if is_escaped else text)
    name, argument = match[1], (match[2] or "").strip()
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, all_names(), n=1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        expected = f"one of {', '.join(all_names())}{meant}, or a space before the slash of a message"
        raise OptionError(option=name[:40], expected=expected, found=Words("no such command"))
    return COMMANDS[name].run(chat, argument)


def all_names() -> list[str]:
    """Return the names of all commands."""
    return [*COMMANDS, *SLASHED_QUIT]


def completer() -> Completer:
    """Return what completes commands, paths after /load, /save and /model, and options after /set."""
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    files = PathCompleter(expanduser=True)

    class Commands(Completer):
        def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
            name, space, argument = document.text_before_cursor.partition(" ")
            if space and name in ("/load", "/save", "/model"):
                return files.get_completions(Document(argument), complete_event)
            if space:
                words, begun = settings() if name == "/set" else [], argument
            else:
                words, begun = all_names() if name.startswith("/") else [], name
            return [Completion(word, -len(begun)) for word in words if word.startswith(begun)]

    return Commands()


def load_file(chat: Chat, path: str) -> None:
    """Replace the conversation with the messages of a file. Errors are those of the two functions below."""
    continue_from(chat.conversation, read_messages(path), path)


def read_messages(path: str) -> list[Any]:
    """Return the list in a file.

    Raises:
        SourceError: the file cannot be read.
        FormatError: it is not JSON.
        OptionError: it is not a list.
    """
    require(bool(path), option="/load", expected="the name of a file", found=Words("nothing"))
    messages: Any = parse_json(read_text(None, _path(path), path), path, "name a file that /save wrote")
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


def _path(text: str) -> Path:
    """Return a path; a leading ~ is the user's home, which no shell has replaced."""
    try:
        return Path(text).expanduser()
    except RuntimeError:  # no such user
        return Path(text)


def _save(chat: Chat, path: str) -> None:
    conversation = chat.conversation
    require(bool(path), option="/save", expected="the name of a file", found=Words("nothing"))
    text = json.dumps(conversation.messages, ensure_ascii=False, indent=2)
    try:
        _path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise SourceError(f"{path}: cannot be written: {error.strerror or error}; choose another file") from error
    notice(f"{len(conversation.messages)} messages saved to {path}")


def _system(chat: Chat, text: str) -> None:
    chat.conversation.system = text or None
    notice("system message set" if text else "system message removed")


def _clear(chat: Chat, _: str) -> None:
    chat.conversation.clear()
    notice("a new conversation begins")


def _retry(chat: Chat, _: str) -> Ask:
    return chat.conversation.retry


def _undo(chat: Chat, _: str) -> None:
    question = chat.conversation.undo()
    notice(f"forgotten: {question if len(question) <= 60 else question[:59] + '…'!r}")


def settings() -> list[str]:
    """Return the names of the options that /set changes."""
    return [*(f.name for f in fields(SamplingOptions)), *LIMITS]


def _set(chat: Chat, text: str) -> None:
    if not text:
        for name in settings():
            notice(f"{name:18}  {_shown(name, _value(chat.conversation.options, name))}")
        return
    from mlx_engine.options import ALIASES

    given, *rest = re.split(r"[\s=]+", text, maxsplit=1)
    name = given.lstrip("-").replace("-", "_")
    name = ALIASES.get(name, name)
    close = difflib.get_close_matches(name, settings(), n=1)
    meant = f" (did you mean {close[0]}?)" if close else ""
    expected = f"one of {', '.join(settings())}{meant}"
    require(name in settings(), option="/set", expected=expected, found=Words(given))
    require(bool(rest), option=f"/set {name}", expected="a value, or off for the default", found=Words("none"))
    changed = chat.changed | {name: _parsed(name, rest[0])}
    _use(chat.conversation, changed)
    chat.changed = changed
    notice(f"{name} {_shown(name, _value(chat.conversation.options, name))}")
    if name in IDLE_IF_GREEDY and described(chat.conversation.options.sampling).startswith("greedy"):
        notice(f"warning: {name} has no effect at temperature 0; /set temperature T samples")


def _use(conversation: Conversation, changed: dict[str, Any]) -> None:
    """Set some options of all further answers.

    Raises:
        OptionError: a value is invalid, or the model's vocabulary lacks a token; no option is set.
    """
    options = conversation.options
    sampling = {f.name for f in fields(options.sampling)} & changed.keys()
    limits = {name: value for name, value in changed.items() if name not in sampling}
    new = replace(options, sampling=replace(options.sampling, **{name: changed[name] for name in sampling}), **limits)
    conversation.engine.request("a", new)
    conversation.options = new


def _parsed(name: str, text: str) -> Any:
    """Return the value of an option; its range is checked later.

    Raises:
        OptionError: the text is not of the option's type.
    """
    group = RunOptions if name in LIMITS else SamplingOptions
    if text == "off":
        return () if name == "logit_bias" else next(f.default for f in fields(group) if f.name == name)
    if name == "logit_bias":
        return tuple(biases_of(text.split()))
    is_whole = int in get_args(get_type_hints(group)[name])
    try:
        return int(text) if is_whole else float(text)
    except ValueError:
        expected = "a whole number, or off" if is_whole else "a number, or off"
        raise OptionError(option=f"/set {name}", expected=expected, found=text) from None


def _value(options: Options, name: str) -> Any:
    return getattr(options if name in LIMITS else options.sampling, name)


def _shown(name: str, value: Any) -> str:
    """Format the value of an option; "off" or what the command line's help says if there is none."""
    if value is None or value == ():
        group = RunOptions if name in LIMITS else SamplingOptions
        default = get_type_hints(group, include_extras=True)[name].__metadata__[0].show_default
        return default if isinstance(default, str) else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _model(chat: Chat, name: str) -> None:
    require(bool(name), option="/model", expected="a path, a hub id or builtin", found=Words("nothing"))
    old = chat.conversation
    new = chat.begin(str(_path(name)) if name.startswith("~") else name, old.messages)
    try:
        _use(new, chat.changed)
        new.load(old.messages)
    except EngineError:
        new.engine.close()
        raise
    chat.conversation = new
    old.engine.close()


def _stats(chat: Chat, _: str) -> None:
    conversation = chat.conversation
    turns = conversation.turns
    notice(f"context: {conversation.n_tokens:,} of {conversation.n_context:,} tokens used")
    notice(f"sampling: {described(conversation.options.sampling)}")
    if not turns:
        return
    last = turns[-1]
    notice(f"turns: {len(turns)}, with {sum(turn.n_generated for turn in turns):,} generated tokens")
    notice(
        f"last turn: {last.n_prompt:,} prompt tokens ({last.n_cached:,} of them cached), "
        f"{last.n_generated:,} generated tokens, ended by {last.generation.finish_reason or 'Ctrl-C'}"
    )
    notice(f"last turn: {rates(last.generation)}")


def _help(_: Chat, __: str) -> None:
    width = max(len(command.usage) for command in COMMANDS.values())
    for name, command in COMMANDS.items():
        if command.usage.startswith(name):  # not an alias
            notice(f"{command.usage:{width}}  {command.help}")
    notice(f"{'/bye, quit, exit':{width}}  End the conversation; so does Ctrl-D.")
    notice("Tab completes commands. A space before the slash sends the text to the model.")
    notice("Ctrl-C stops an answer and keeps what was said. For a message of several lines, end a line with \\,")
    notice('press Alt-Enter, or write """ before the first line and after the last.')


HELP = Command("/help", "List the commands; so does /?.", _help)

COMMANDS = {
    "/help": HELP,
    "/?": HELP,
    "/system": Command("/system [TEXT]", "Set the system message; without TEXT, remove it.", _system),
    "/set": Command("/set [NAME VALUE]", "Set an option, such as temperature 0.7 or seed off; alone, list all.", _set),
    "/model": Command("/model NAME", "Load another model, and continue the conversation with it.", _model),
    "/clear": Command("/clear", "Begin a new conversation with the same system message.", _clear),
    "/undo": Command("/undo", "Forget the last message and its answer.", _undo),
    "/retry": Command("/retry", "Answer the last message again; at temperature 0 the answer is the same.", _retry),
    "/save": Command("/save FILE", "Write the messages to a JSON file.", _save),
    "/load": Command("/load FILE", "Continue the conversation of a file that /save wrote.", load_file),
    "/stats": Command("/stats", "Show tokens, rates and the use of the context.", _stats),
}
