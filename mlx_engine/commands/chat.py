"""The command `chat`: a conversation with a model, in a terminal or through pipes."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import json
import os
import re
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from mlx_engine.commands.console import BOM, TextWriter, notice, progress_bar, read_text, reports_errors, safe_for
from mlx_engine.commands.generate import NO_TEMPLATE, rates
from mlx_engine.commands.options.constraint import ConstraintOptions
from mlx_engine.commands.options.groups import RARE, takes_groups
from mlx_engine.commands.options.help import first_sentence
from mlx_engine.commands.options.model import (
    SUGGESTED,
    AdapterPaths,
    Backend,
    ComputeOptions,
    Draft,
    Model,
    PrefixOptions,
    Speculate,
    Strict,
    Think,
    choose_backend,
    one_adapter,
)
from mlx_engine.commands.options.suggested import IDLE_IF_GREEDY, described
from mlx_engine.errors import ContextLengthError, EngineError, OptionError, SourceError, shown
from mlx_engine.kernels.files import draft
from mlx_engine.options import AUTO_SPECULATION, Options, Sampling, aliases, declared, option

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.history import History
    from prompt_toolkit.input import Input
    from prompt_toolkit.key_binding import KeyPressEvent
    from prompt_toolkit.output import Output

    from mlx_engine.commands.options.suggested import Chosen
    from mlx_engine.conversation import Conversation
    from mlx_engine.conversation.events import Event
    from mlx_engine.conversation.functions import Function, ToolCall
    from mlx_engine.engine import RequestBuilder

BUILTIN = (
    "This is the small built-in model. It tells short stories for children, and answers greetings and a few simple "
    "questions. It knows English only, and is no assistant.\n"
    "Try: Tell me a story about a fox. Or: What is the capital of France? With --temp 0.8, every story is different."
)


@dataclass(frozen=True)
class PromptOptions:
    """Prompt. What a conversation begins with, and whether typed messages are kept."""

    system: str | None = option(None, "System message.")
    load: Path | None = option(None, "Continue the conversation of a file that /save wrote.")
    session: str | None = option(
        None,
        "Continue the conversation of this name, if there is one, from its saved keys and values; save it at the end.",
        metavar="NAME",
        is_rare=True,
    )
    tools: list[Path] | None = option(
        None,
        "Let the model call the functions of a Python file; chat asks you before each call. May be given several "
        "times.",
        metavar="FILE.py",
    )
    think: Think = None
    no_history: bool = option(False, "Do not keep the typed messages for later runs, nor offer earlier ones.")


@reports_errors
@takes_groups
def chat(
    *,
    invocation: typer.Context,
    prompt: PromptOptions,
    model: Model = "builtin",
    backend: Backend = "auto",
    run: Options,
    constraint: ConstraintOptions,
    compute: ComputeOptions,
    prefixes: Annotated[PrefixOptions, RARE],
    suggested: Annotated[
        bool,
        typer.Option("--suggested/--no-suggested", help=SUGGESTED, rich_help_panel=first_sentence(Sampling.__doc__)),
    ] = True,
    strict: Strict = False,
    speculate: Speculate = AUTO_SPECULATION,
    draft: Draft = None,
    adapter: AdapterPaths = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only warnings and errors on stderr.", rich_help_panel="Output")
    ] = False,
) -> None:
    """Talk with a model. Answers go to stdout, everything else to stderr; /help lists the commands."""
    from mlx_engine import engine
    from mlx_engine.commands.options.suggested import choose_sampling
    from mlx_engine.conversation import Conversation
    from mlx_engine.conversation.functions import tools_of
    from mlx_engine.tokenizer.chat_prompt import thinking

    functions = [function for path in prompt.tools or () for function in functions_of(path)]
    tools = tools_of(functions)
    how = {**compute.machine(), **compute.changes(run.context_len), "speculate": speculate, "draft": draft}
    how["adapters"] = one_adapter(adapter)
    prefixes.check()
    run = engine.constrained(replace(run, constraint=constraint.read()), is_chat=True)
    engine.configure_log()
    used = choose_backend(backend, strict=strict)

    def begin(name: str, messages: Sequence[Any]) -> Conversation:
        with progress_bar("opening", quiet=quiet) as progress:
            opened = engine.open_source(name, used, progress=progress, **how)
        chosen = choose_sampling(invocation, run.sampling, opened, suggested=suggested)
        options = replace(run, sampling=chosen.sampling)
        variables = thinking(opened.prompts.tokenizer.chat_template, prompt.think)
        check(opened.prompts, options, list(messages) or shortest(prompt.system), variables, tools)
        with progress_bar("loading", quiet=quiet) as progress:
            loaded = engine.Engine(opened, progress)
        prefixes.use(loaded)
        conversation = Conversation(loaded, options, system=prompt.system, variables=variables, tools=tools)
        greet(name, conversation, chosen, quiet=quiet)
        return conversation

    kept = None if prompt.session is None else session_file(prompt.session)
    if kept is not None and prompt.load is not None:
        raise OptionError("give either --session or --load", option="--session", found=prompt.session)
    messages = [] if prompt.load is None else read_messages(str(prompt.load))
    conversation = begin(model, messages)
    if kept is not None and kept.exists():
        resume(conversation, kept)
    if prompt.load is not None:
        continue_from(conversation, messages, str(prompt.load))
    typed = typed_messages(completer, keeps_history=not prompt.no_history)
    named = {about["function"]["name"]: each for about, each in zip(tools, functions, strict=True)}
    talking = Chat(conversation, begin, named)
    try:
        talk(talking, typed, quiet=quiet)
    finally:
        if kept is not None:
            keep(talking.conversation, kept)


def session_file(name: str) -> Path:
    """Return the file for the messages of a session (a conversation named with `--session`); create its folder.

    The folder is named `sessions`, and is next to the file `history_file()`.

    Raises:
        OptionError: the name cannot be a file name.
        SourceError: the folder of sessions cannot be used.
    """
    if not re.fullmatch(r"[\w-][\w.-]{0,99}", name):
        expected = "at most 100 letters, digits, '-', '_' and '.', without a '.' at the beginning"
        message = f"--session must be {expected}; not {shown(name)}"
        raise OptionError(message, option="--session", found=name)
    file = history_file().parent / "sessions" / f"{name}.json"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.exists()  # raises if the name is too long, or the folder cannot be searched
    except OSError as error:
        raise SourceError(f"{file}: a session cannot be kept there: {error.strerror}; set XDG_STATE_HOME") from error
    return file


def resume(conversation: Conversation, file: Path) -> None:
    """Continue a session: print its messages, and use its saved keys and values if this model has computed them.

    Raises:
        EngineError: the messages cannot be read or rendered.
    """
    from mlx_engine.checkpoint.hf_folder import parse_json
    from mlx_engine.tokenizer.chat_prompt import joined_parts

    state: Any = parse_json(read_text(None, file, "--session"), str(file), "remove the file")
    damaged = OptionError(f"{file} has no session; remove it", option="--session", found=str(file))
    if not isinstance(state, dict) or not isinstance(state.get("messages"), list):
        raise damaged
    try:
        conversation.engine.load_prefix(file.with_suffix(".kv"))
    except (EngineError, OSError) as error:
        notice(f"the keys and values of the session are computed again: {getattr(error, 'strerror', None) or error}")
    try:
        conversation.restore(state)
    except (LookupError, TypeError) as error:
        raise damaged from error
    for message in conversation.messages:
        begin = {"user": "> ", "assistant": ""}.get(message["role"], f"{message['role']}: ")
        if message["content"]:  # the content is None if the message has only tool calls
            notice(f"{begin}{joined_parts(message['content'])}")


def keep(conversation: Conversation, file: Path) -> None:
    """Write a session's messages to `file`, its keys and values to a .kv file. Only this user can read the files."""
    if not conversation.messages:
        return
    what = "the session is"
    try:
        with draft(file) as new:
            new.chmod(0o600)
            new.write_text(json.dumps(conversation.state(), ensure_ascii=False) + "\n", encoding="utf-8")
            new.replace(file)
        what = "the keys and values of the session are"  # a much larger file, for which the disk may be too full
        conversation.save_prefix(file.with_suffix(".kv"))
    except (EngineError, OSError) as error:
        notice(f"warning: {file}: {what} not kept ({getattr(error, 'strerror', None) or error})")


def greet(model: str, conversation: Conversation, chosen: Chosen, *, quiet: bool) -> None:
    """Print warnings about a model and, unless `quiet` is set, its device and its sampling."""
    if not conversation.has_template:
        notice(NO_TEMPLATE)
    for line in chosen.warnings:
        notice(line)
    if quiet:
        return
    device = conversation.engine.backend.description
    notice(f"{model} on {device}, context {conversation.n_context:,} tokens; /help lists the commands")
    for line in chosen.notes:
        notice(line)
    if model == "builtin":
        notice(BUILTIN)


def shortest(system: str | None) -> list[dict[str, Any]]:
    """Return the messages of the shortest conversation with this system message, for `check`."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": "a"}]


def functions_of(path: Path) -> list[Function]:
    """Run a Python file; return the public functions that it defines, in the order of their definitions.

    Raises:
        OptionError: the file cannot be read or run, or defines no function.
    """
    text = read_text(None, path, "--tools")
    module = types.ModuleType(f"tools of {path.name}")  # `path.stem` may be the name of another module
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # `typing` looks up annotations there
    try:
        exec(compile(text, str(path), "exec"), module.__dict__)  # the user has asked for it
    except (Exception, SystemExit) as error:
        message = f"--tools {path}: the file fails with {type(error).__name__}: {error}"
        raise OptionError(message, option="--tools", found=str(path)) from error
    found: list[Function] = [
        value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]
    if not found:
        message = f"--tools {path}: expected a function whose name does not begin with _, found none"
        raise OptionError(message, option="--tools", found=str(path))
    return found


def check(
    prompts: RequestBuilder,
    options: Options,
    messages: list[Any],
    variables: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Check, before the weights are read, for errors that would make every answer of a conversation fail.

    Raises:
        OptionError: `messages` are invalid, or the model's vocabulary lacks a token that an option names.
        ContextLengthError: the context is too short for an answer.
        ChatTemplateError: the template fails.
    """
    from mlx_engine.conversation import asked, conversation_ids

    conversation_ids(prompts, asked(messages), variables, None, tools)
    prompts.request("a", options)


def talk(chat: Chat, messages: Iterable[str], *, quiet: bool) -> None:
    """Answer messages and run commands. An error ends a turn, not the conversation."""
    messages = iter(messages)
    for text in messages:
        if is_end(text):
            return
        if not text.strip():
            continue
        try:
            ask = perform(chat, text)
            if ask is not None:
                with without_echo():
                    answer(chat.conversation, ask, quiet=quiet)
                while chat.conversation.calls:
                    give = functools.partial(
                        chat.conversation.give, [called(chat, each, messages) for each in chat.conversation.calls]
                    )
                    with without_echo():
                        answer(chat.conversation, give, quiet=quiet)
        except KeyboardInterrupt:  # Ctrl-C while /model loads or a tool runs; `answer` handles Ctrl-C itself
            notice("(stopped)")
        except ContextLengthError as error:
            notice(f"error: {error}; /clear begins a new conversation")
        except EngineError as error:
            notice(f"error: {error}")


DECLINED = "The user does not want this call to be made."


def called(chat: Chat, call: ToolCall, replies: Iterator[str]) -> str:
    """Call a function if the user agrees. Return its result, or a text that tells the model why there is no result.

    `replies` yields the lines that the user types.
    """
    from mlx_engine.conversation.functions import call_function

    function = chat.functions.get(call.name)
    shown_call = f"{call.name}({', '.join(f'{key}={value!r}' for key, value in (call.arguments or {}).items())})"
    if function is None or call.arguments is None:
        why = "there is no such tool" if function is None else f"the arguments are no JSON object: {call.text}"
        notice(f"call {shown_call}: {why}")
        return f"Error: {why}"
    if call.name not in chat.always:
        notice(f"call {shown_call}? y: yes, n: no, always: this tool from now on")
        reply = next(replies, "n").strip().lower()
        if reply in ("a", "always"):
            chat.always.add(call.name)
        elif reply not in ("y", "yes"):
            notice("not called")
            return DECLINED
    result = call_function(function, call.arguments)
    notice(f"{shown_call} = {result}")
    return result


def answer(conversation: Conversation, ask: Ask, *, quiet: bool) -> None:
    """Print an answer while it is generated. Ctrl-C ends it; the tokens so far are kept."""
    before = conversation.generation
    with stopped_by_ctrl_c() as stop:
        try:
            with progress_bar("reading the prompt", quiet=quiet) as show:

                def progress(done: int, total: int) -> None:
                    show(done, total)
                    if stop.is_set() and done < total:
                        raise KeyboardInterrupt

                pieces = ask(progress=progress)
                first = next(pieces, "")
            with closing(pieces):  # type: ignore[type-var]
                print_pieces(chain([first], pieces), stop, conversation, quiet=quiet)
        except KeyboardInterrupt:  # raised by `progress`
            pass
    if stop.is_set():
        notice("(stopped)")
    last = conversation.generation
    if last is not None and last is not before and not quiet:
        notice(f"[{len(last.token_ids):,} tokens: {rates(last)}]")
        for line in limits_reached(conversation):
            notice(line)


def print_pieces(pieces: Iterator[str], stop: threading.Event, conversation: Conversation, *, quiet: bool) -> None:
    """Print the text and reasoning in `pieces`, but no tool calls. Stop if `stop` is set. Finally print a line feed."""
    reader = conversation.reader()
    with AnswerPrinter(quiet=quiet) as printer:
        for piece in pieces:
            printer.print(reader.add(piece, conversation.marks))
            if stop.is_set():
                break
        printer.print(reader.finish(is_cut=True))
    print(flush=True)


class AnswerPrinter(TextWriter):
    """Prints one answer. On a terminal with colours, reasoning is dimmed.

    Without colours, reasoning is printed on stderr; if `quiet` is set, it is left out.
    """

    def __init__(self, *, quiet: bool) -> None:
        super().__init__(sys.stdout)
        self._quiet, self._is_reasoning = quiet, False

    def print(self, events: Iterable[Event]) -> None:
        """Print the text and the reasoning in the next events of the answer."""
        from mlx_engine.conversation.events import ReasoningDelta, TextDelta

        for event in events:
            if isinstance(event, ReasoningDelta | TextDelta):
                is_reasoning = isinstance(event, ReasoningDelta)
                if self._is_reasoning and not is_reasoning:
                    self._print("\n\n", is_reasoning=True)
                self._is_reasoning = is_reasoning
                self._print(event.text, is_reasoning=is_reasoning)

    def _print(self, text: str, *, is_reasoning: bool) -> None:
        if self._has_colors or not is_reasoning:
            self.write(text, dim=is_reasoning)
        elif not self._quiet and sys.stderr is not None:
            print(safe_for(sys.stderr, text), end="", file=sys.stderr, flush=True)


def limits_reached(conversation: Conversation) -> Iterator[str]:
    """If a limit ended the last answer, yield a line that names the limit."""
    generation = conversation.generation
    if generation is None or generation.finish_reason not in ("length", "timeout"):
        return
    if generation.finish_reason == "timeout":
        yield "(ended by --timeout)"
    elif conversation.n_tokens >= conversation.n_context:
        yield f"(the context of {conversation.n_context:,} tokens is full; /clear begins a new conversation)"
    else:
        yield f"(ended after {len(generation.token_ids):,} tokens; --max-tokens or /set max_tokens sets the limit)"


@contextmanager
def stopped_by_ctrl_c() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C sets. A KeyboardInterrupt is not raised, because it could interrupt a forward pass."""
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield pressed
        return
    before = signal.signal(signal.SIGINT, lambda *_: pressed.set())
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


Ask: TypeAlias = Callable[..., Iterator[str]]
"""A function that starts an answer and returns its pieces of text.

Its keyword `progress` is a function that is called with (tokens done, tokens in total) while the prompt is read.
"""

QUIT, SLASHED_QUIT = ("quit", "exit"), ("/quit", "/exit", "/bye")

COMMAND = re.compile(r"(/\S*)(?:\s+(.*))?", re.DOTALL)

# Options that /set changes, in addition to the options of sampling.
LIMITS = ("max_tokens", "timeout")


@dataclass
class Chat:
    """The conversation and its tools and options, for commands such as /set, which change them.

    Attributes:
        begin: loads a model, checks that its template can render the given messages, and returns a new conversation
            without these messages.
        functions: the tools, by name.
        always: the names of the tools that are called without asking.
        changed: the values of the options that /set has changed, by name.
    """

    conversation: Conversation
    begin: Callable[[str, Sequence[Any]], Conversation]
    functions: Mapping[str, Function] = field(default_factory=dict)
    always: set[str] = field(default_factory=set)
    changed: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Command:
    """A command such as /set. `usage` is its name and arguments.

    `run` is called with the chat and the text after the name. It returns a function that starts an answer, or None.
    """

    usage: str
    help: str
    run: Callable[[Chat, str], Ask | None]


def is_end(text: str) -> bool:
    """Return whether the text ends the conversation. With a space before the slash, "/quit" is a message."""
    return text.strip() in QUIT or text.rstrip() in SLASHED_QUIT


def perform(chat: Chat, text: str) -> Ask | None:
    """Handle the user's input. Return a function that starts the answer, or None after a command without an answer.

    A text that begins with a slash is a command. If a space precedes the slash, the text is a message, without the
    space.

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
        meant = f"did you mean {close[0]}?" if close else f"the commands are {', '.join(all_names())}"
        message = f"no command {name[:40]}; {meant}; a space before the slash makes it a message"
        raise OptionError(message, option=name[:40])
    return COMMANDS[name].run(chat, argument)


def all_names() -> list[str]:
    """Return the names of all commands with a slash, including those that end the conversation."""
    return [*COMMANDS, *SLASHED_QUIT]


def completer() -> Completer:
    """Return the completer of commands, of paths after /load, /save and /model, and of options after /set."""
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
    """Replace the conversation with the messages of a file."""
    continue_from(chat.conversation, read_messages(path), path)


def read_messages(path: str) -> list[Any]:
    """Return the list of messages in a JSON file.

    Raises:
        SourceError: the file cannot be read.
        FormatError: the file is not JSON.
        OptionError: `path` is empty, or the file is not UTF-8 or is not a list.
    """
    if not path:
        raise OptionError("/load needs the name of a file", option="/load")
    from mlx_engine.checkpoint.hf_folder import parse_json

    messages: Any = parse_json(read_text(None, _path(path), path), path, "name a file that /save wrote")
    if not isinstance(messages, list):
        raise OptionError(f"{path} has no list of messages, but {shown(messages)}", option=path, found=messages)
    return list(messages)


def continue_from(conversation: Conversation, messages: list[Any], path: str) -> None:
    """Replace the conversation with `messages`, read from `path`; raise EngineError if they are not valid."""
    conversation.load(messages)
    notice(f"{len(messages)} messages loaded from {path}")


def _path(text: str) -> Path:
    """Return a path with a leading ~ expanded, as a shell would have done."""
    try:
        return Path(text).expanduser()
    except RuntimeError:  # no such user
        return Path(text)


def _save(chat: Chat, path: str) -> None:
    conversation = chat.conversation
    if not path:
        raise OptionError("/save needs the name of a file", option="/save")
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
    return [*(f.name for f, _ in declared(Sampling)), *LIMITS]


def _set(chat: Chat, text: str) -> None:
    if not text:
        for name in settings():
            notice(f"{name:18}  {_shown(name, _value(chat.conversation.options, name))}")
        return
    given, *rest = re.split(r"[\s=]+", text, maxsplit=1)
    name = given.lstrip("-").replace("-", "_")
    name = aliases().get(name, name)
    if name not in settings():
        close = difflib.get_close_matches(name, settings(), n=1)
        meant = f"did you mean {close[0]}?" if close else f"the options are {', '.join(settings())}"
        raise OptionError(f"/set has no option {given}; {meant}", option="/set", found=given)
    if not rest:
        raise OptionError(f"/set {name} needs a value, or off for the default", option=name)
    changed = chat.changed | {name: _parsed(name, rest[0])}
    _use(chat.conversation, changed)
    chat.changed = changed
    notice(f"{name} {_shown(name, _value(chat.conversation.options, name))}")
    if name in IDLE_IF_GREEDY and described(chat.conversation.options.sampling).startswith("greedy"):
        notice(f"warning: {name} has no effect at temperature 0; /set temperature T samples")


def _use(conversation: Conversation, changed: dict[str, Any]) -> None:
    """Set options of all further answers. If a value is invalid for this model, raise OptionError and change none."""
    options = conversation.options
    sampling = {f.name for f, _ in declared(Sampling)} & changed.keys()
    limits = {name: value for name, value in changed.items() if name not in sampling}
    new = replace(options, sampling=replace(options.sampling, **{name: changed[name] for name in sampling}), **limits)
    conversation.engine.request("a", new)
    conversation.options = new


def _parsed(name: str, text: str) -> Any:
    """Return the value of an option from its text, or the default for "off". The range of the value is not checked.

    Raises:
        OptionError: the text is not a number, or not a whole number for an option that needs one.
    """
    default, about = next((f.default, about) for f, about in declared() if f.name == name)
    if text == "off":
        return default
    if about.kind is None:  # logit_bias
        return tuple(text.split())
    try:
        return int(text) if about.kind is int else float(text)
    except ValueError:
        expected = f"{'a whole number' if about.kind is int else 'a number'}, or off"
        raise OptionError(
            f"/set {name} needs {expected}, not {text!r}", option=name, expected=expected, found=text
        ) from None


def _value(options: Options, name: str) -> Any:
    return getattr(options if name in LIMITS else options.sampling, name)


def _shown(name: str, value: Any) -> str:
    """Format an option's value. If it is not set, return the default in the option's help, or "off" without one."""
    if value is None or value == ():
        unset = next(about.unset for f, about in declared() if f.name == name)
        return "off" if unset in (None, "none") else unset
    return f"{value:g}" if isinstance(value, float) else str(value)


def _model(chat: Chat, name: str) -> None:
    if not name:
        raise OptionError("/model needs a path, a hub id or builtin", option="/model")
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


def _tools(chat: Chat, _: str) -> None:
    if not chat.functions:
        notice("there are no tools; --tools FILE.py lets the model call the functions of a file")
    for tool in chat.conversation.tools:
        about = tool["function"]
        first = (about["description"].splitlines() or [""])[0]
        allowed = ", called without a question" if about["name"] in chat.always else ""
        notice(f"{about['name']}({', '.join(about['parameters']['properties'])})  {first}{allowed}")


def _help(_: Chat, __: str) -> None:
    width = max(len(command.usage) for command in COMMANDS.values())
    for name, command in COMMANDS.items():
        if command.usage.startswith(name):  # not an alias
            notice(f"{command.usage:{width}}  {command.help}")
    notice(f"{'/bye, quit, exit':{width}}  End the conversation; so does Ctrl-D.")
    notice("Tab completes commands. A space before the slash sends the text to the model.")
    notice("Ctrl-C stops an answer and keeps its text so far. For a message of several lines, end a line with \\,")
    notice('press Alt-Enter, or write """ before the first line and after the last.')


HELP = Command("/help", "List the commands; so does /?.", _help)

COMMANDS = {
    "/help": HELP,
    "/?": HELP,
    "/system": Command("/system [TEXT]", "Set the system message; without TEXT, remove it.", _system),
    "/set": Command("/set [NAME VALUE]", "Set an option: temperature 0.7, or seed off. Without NAME, list all.", _set),
    "/model": Command("/model NAME", "Load another model, and continue the conversation with it.", _model),
    "/tools": Command("/tools", "List the tools that the model may call.", _tools),
    "/clear": Command("/clear", "Begin a new conversation with the same system message.", _clear),
    "/undo": Command("/undo", "Forget the last message and its answer.", _undo),
    "/retry": Command("/retry", "Answer the last message again; at temperature 0 the answer is the same.", _retry),
    "/save": Command("/save FILE", "Write the messages to a JSON file.", _save),
    "/load": Command("/load FILE", "Continue the conversation of a file that /save wrote.", load_file),
    "/stats": Command("/stats", "Show tokens, rates and the use of the context.", _stats),
}


QUOTES = '"""'


def is_complete(text: str) -> bool:
    """Return whether the text is a whole message; if not, another line follows."""
    stripped = text.strip()
    if stripped.startswith(QUOTES):
        return stripped.endswith(QUOTES) and len(stripped) >= 2 * len(QUOTES)
    return not text.endswith("\\")


def unwrapped(text: str) -> str:
    """Return a message without the quotes around it, or without the backslashes at the ends of its lines.

    A message in quotes is not a command: if it begins with a slash, a space is put before the slash.
    """
    stripped = text.strip()
    if stripped.startswith(QUOTES):
        quoted = stripped.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
        return f" {quoted}" if quoted.startswith("/") else quoted
    return text.replace("\\\n", "\n").removesuffix("\\")


def typed_messages(completer: Callable[[], Completer], *, keeps_history: bool = True) -> Iterator[str]:
    """Yield the messages of the user until the input ends.

    In a terminal, the result of `completer()` completes typed text. With `keeps_history`, messages typed in a terminal
    are kept for later runs, and messages of earlier runs are offered.

    Raises:
        OptionError: there is no standard input, or it is not UTF-8.
    """
    if sys.stdin is None:
        raise OptionError("chat needs a terminal or a pipe as stdin", option="stdin")
    if not sys.stdin.isatty():
        return from_lines(sys.stdin.buffer)
    history = kept_history() if keeps_history else None
    return from_terminal(session(history=history, completer=completer()).prompt)


def history_file() -> Path:
    """Return the file of the typed messages, below XDG_STATE_HOME or ~/.local/state."""
    # If the user has no home, `os.path.expanduser` returns the path unchanged, but `Path.expanduser` raises an error.
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")  # noqa: PTH111
    return Path(home) / "mlx_engine" / "chat_history"


def kept_history() -> History | None:
    """Return a history that reads the messages of earlier runs from `history_file()` and adds new messages to the file.

    Only this user can read the file. If the file cannot be used, print a notice and return None.
    """
    from prompt_toolkit.history import FileHistory

    class Kept(FileHistory):
        def store_string(self, string: str) -> None:
            with contextlib.suppress(OSError):  # a full disk must not end the conversation
                super().store_string(string.encode(errors="replace").decode())

    file = history_file()
    try:
        # Without HOME and with an unknown user, the file would be in a folder "~" of the working directory.
        if not file.is_absolute():
            raise OSError("the user has no home")
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.touch(mode=0o600)
        if not file.is_file():  # such as a link to /dev/null, whose permissions must not change
            raise OSError("not a regular file")
        file.chmod(0o600)  # an existing file may have other permissions
        file.read_bytes()
    except OSError as error:
        notice(f"warning: {file}: {error.strerror or error}; messages are not kept for later runs")
        return None
    return Kept(str(file))


@contextlib.contextmanager
def without_echo() -> Iterator[None]:
    """Switch off the echo of typed text in the `with` block; otherwise the text would appear within the answer.

    The next prompt shows the text that was typed meanwhile.
    """
    try:
        import termios

        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
    except Exception:  # no terminal, or no termios; `termios.error` is not an OSError
        yield
        return
    silent = list(before)
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


def from_lines(lines: Iterable[bytes]) -> Iterator[str]:
    """Yield the messages in a pipe's lines, without a byte order mark; raise OptionError if a line is not UTF-8."""
    text = ""
    for i, line in enumerate(lines):
        try:
            text += line.decode("utf-8").removeprefix("" if i else BOM).removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise OptionError(f"stdin is not UTF-8 text: {error}", option="stdin", found=str(error)) from error
        if is_complete(text):
            yield unwrapped(text)
            text = ""
        else:
            text += "\n"
    if text:
        yield unwrapped(text.removesuffix("\n"))


def from_terminal(prompt: Callable[[], str]) -> Iterator[str]:
    """Yield the messages that the user types, until Ctrl-D. Ctrl-C discards the message that is being typed."""
    while True:
        try:
            text = prompt()
        except EOFError:
            return
        except KeyboardInterrupt:
            notice("(Ctrl-D or quit ends the conversation)")
            continue
        yield unwrapped(text)


def session(
    *,
    history: History | None = None,
    completer: Completer | None = None,
    source: Input | None = None,
    screen: Output | None = None,
) -> PromptSession[str]:
    """Return a line editor. By default, it uses the process's terminal, and begins with an empty history."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output
    from prompt_toolkit.shortcuts import CompleteStyle

    bindings = KeyBindings()

    def end_line(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_complete(buffer.text):
            buffer.validate_and_handle()
        else:
            buffer.insert_text("\n")

    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    bindings.add("enter")(end_line)
    bindings.add("escape", "enter")(new_line)
    # If stdout is a file, the line editor must draw on stderr.
    screen = screen or create_output(always_prefer_tty=True)
    return PromptSession(
        "> ",
        multiline=True,
        prompt_continuation="  ",
        key_bindings=bindings,
        history=history,
        completer=completer,
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        input=source,
        output=screen,
        reserve_space_for_menu=0,
    )
