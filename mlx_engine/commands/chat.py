"""The command `chat`: a conversation with a model, in a terminal or through pipes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_engine.commands import chat_commands, chat_input
from mlx_engine.commands.answer_printer import AnswerPrinter
from mlx_engine.commands.console import notice, progress_bar, reports_errors
from mlx_engine.commands.diagnostics import rates
from mlx_engine.commands.generate import choose_backend
from mlx_engine.commands.options.groups import takes_groups
from mlx_engine.commands.options.model import (
    SUGGESTED,
    Backend,
    EngineOptions,
    Model,
    Strict,
    Think,
)
from mlx_engine.commands.options.run import RunOptions, SamplingOptions, options_of
from mlx_engine.commands.prompts import NO_TEMPLATE
from mlx_engine.errors import ContextLengthError, EngineError

if TYPE_CHECKING:
    from mlx_engine.commands.options.suggested import Chosen
    from mlx_engine.conversation import Conversation
    from mlx_engine.decode.options import Options
    from mlx_engine.prompts import Prompts
    from mlx_engine.tokenizer.thinking import Reasoning

BUILTIN = (
    "This is the small built-in model. It tells short stories for children, and answers greetings and a few simple "
    "questions. It knows English only, and is no assistant.\n"
    "Try: Tell me a story about a fox. Or: What is the capital of France? With --temp 0.8 every story is another one."
)


@reports_errors
@takes_groups
def chat(
    *,
    invocation: typer.Context,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    load: Annotated[
        Path | None, typer.Option("--load", help="Continue the conversation of a file that /save wrote.")
    ] = None,
    model: Model = "builtin",
    backend: Backend = "auto",
    run: RunOptions,
    sampling: SamplingOptions,
    compute: EngineOptions,
    suggested: Annotated[bool, typer.Option("--suggested/--no-suggested", help=SUGGESTED)] = True,
    think: Think = None,
    strict: Strict = False,
    no_history: Annotated[
        bool,
        typer.Option("--no-history", help="Do not keep the typed messages for later runs, nor offer earlier ones."),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings and errors on stderr.")] = False,
) -> None:
    """Talk with a model. Answers go to stdout, everything else to stderr; /help lists the commands."""
    from mlx_engine import engine
    from mlx_engine.commands.options.suggested import choose_sampling
    from mlx_engine.conversation import Conversation
    from mlx_engine.tokenizer.chat_prompt import thinking

    how = {**compute.machine(), **compute.changes()}
    options_of(run, sampling)  # checked before the model is opened
    engine.configure_log()
    used = choose_backend(backend, strict=strict)

    def begin(name: str, messages: Sequence[Any]) -> Conversation:
        with progress_bar("opening", quiet=quiet) as progress:
            opened = engine.open_source(name, used, progress=progress, **how)
        chosen = choose_sampling(invocation, sampling, opened, suggested=suggested)
        options = options_of(run, chosen.sampling)
        variables = thinking(opened.prompts.tokenizer.chat_template, think)
        check(opened.prompts, options, list(messages) or shortest(system), variables)
        with progress_bar("loading", quiet=quiet) as progress:
            loaded = engine.Engine(opened, progress)
        conversation = Conversation(loaded, options, system=system, variables=variables)
        greet(name, conversation, chosen, quiet=quiet)
        return conversation

    messages = [] if load is None else chat_commands.read_messages(str(load))
    conversation = begin(model, messages)
    if load is not None:
        chat_commands.continue_from(conversation, messages, str(load))
    typed = chat_input.messages(chat_commands.completer, keeps_history=not no_history)
    talk(chat_commands.Chat(conversation, begin), typed, quiet=quiet)


def greet(model: str, conversation: Conversation, chosen: Chosen, *, quiet: bool) -> None:
    """Print what the user must know about a model, and unless `quiet` is set its device and its sampling."""
    if not conversation.has_template:
        notice(NO_TEMPLATE)
    for line in chosen.warnings:
        notice(line)
    if quiet:
        return
    backend = conversation.engine.backend
    device = f"{backend.name} ({backend.device})"
    notice(f"{model} on {device}, context {conversation.n_context:,} tokens; /help lists the commands")
    for line in chosen.notes:
        notice(line)
    if model == "builtin":
        notice(BUILTIN)


def shortest(system: str | None) -> list[dict[str, Any]]:
    """Return the shortest conversation."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": "a"}]


def check(prompts: Prompts, options: Options, messages: list[Any], variables: Mapping[str, Any]) -> None:
    """Check what would make every answer of a conversation fail. No weight is needed for it.

    Raises:
        OptionError: they are no messages, or the model's vocabulary lacks a token of the options.
        ContextLengthError: the context is too short for an answer.
        ChatTemplateError: the template fails.
    """
    from mlx_engine.conversation import asked, conversation_ids

    conversation_ids(prompts, asked(messages), variables)
    prompts.request("a", options)


def talk(chat: chat_commands.Chat, messages: Iterable[str], *, quiet: bool) -> None:
    """Answer messages and run commands until there are no more. An error ends a turn, not the conversation."""
    for text in messages:
        if chat_commands.is_end(text):
            return
        if not text.strip():
            continue
        try:
            ask = chat_commands.perform(chat, text)
            if ask is not None:
                with chat_input.without_echo():
                    answer(chat.conversation, ask, quiet=quiet)
        except KeyboardInterrupt:  # while /model loads; an answer handles its own
            notice("(stopped)")
        except ContextLengthError as error:
            notice(f"error: {error}; /clear begins a new conversation")
        except EngineError as error:
            notice(f"error: {error}")


def answer(conversation: Conversation, ask: chat_commands.Ask, *, quiet: bool) -> None:
    """Print an answer as it is generated. Ctrl-C stops it, and what was generated is kept."""
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
                print_pieces(chain([first], pieces), stop, conversation.reasoning(), quiet=quiet)
        except KeyboardInterrupt:  # raised by `progress`
            pass
    if stop.is_set():
        notice("(stopped)")
    last = conversation.generation
    if last is not None and last is not before and not quiet:
        notice(f"[{len(last.token_ids):,} tokens: {rates(last)}]")
        for line in limits_reached(conversation):
            notice(line)


def print_pieces(pieces: Iterator[str], stop: threading.Event, reasoning: Reasoning, *, quiet: bool) -> None:
    """Print pieces of text until they end or `stop` is set, and a line feed.

    Reasoning is dimmed in a terminal, with an empty line after it; elsewhere it goes to stderr, unless `quiet` is set.
    """
    with AnswerPrinter(quiet=quiet) as printer:
        for piece in pieces:
            printer.print(reasoning.add(piece))
            if stop.is_set():
                break
        printer.print(reasoning.finish())
    print(flush=True)


def limits_reached(conversation: Conversation) -> Iterator[str]:
    """Yield what the user must know about the end of the last answer, if the model did not end it."""
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
    """Provide an event that Ctrl-C sets, in place of an exception in the middle of a forward pass."""
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield pressed
        return
    before = signal.signal(signal.SIGINT, lambda *_: pressed.set())
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
