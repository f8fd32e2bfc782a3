"""`generate`: run a prompt, or a file of them, and print the text as it comes."""

from __future__ import annotations

import json as json_module
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_engine.commands.console import is_plain, notice, progress_bar, reports_errors
from mlx_engine.commands.options import (
    Backend,
    Model,
    NoJit,
    Quant,
    QuantLayers,
    QuantMinDim,
    Threads,
    layers_of,
    min_dim_of,
)
from mlx_engine.commands.prompts import DEFAULT_PROMPT, asked, check_prompts, read_prompts, streams
from mlx_engine.errors import BackendUnavailableError

if TYPE_CHECKING:
    from mlx_engine.decode.stream import Generation, Stream
    from mlx_engine.engine import Engine


@reports_errors
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The text to go on from; - reads stdin.", show_default=DEFAULT_PROMPT)
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", "-f", help="Read the prompt from this file instead.")
    ] = None,
    batch_file: Annotated[
        Path | None, typer.Option("--batch-file", help="Run every line of this file that is not blank; - reads stdin.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask the prompt, as one turn through the model's own chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option("--system", help="With --chat: what the model is told first.")] = None,
    model: Model = "builtin",
    backend: Backend = "auto",
    kv: Annotated[
        bool,
        typer.Option("--kv/--no-kv", help="Keep keys and values, or run the whole sequence for every token."),
    ] = True,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", "-n", help="Stop after N tokens.", show_default="256, or the context's end"),
    ] = None,
    context_len: Annotated[
        int | None,
        typer.Option("--context-len", help="Prompt and text take N tokens at most.", show_default="the model's"),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", help="End after S seconds, with the text so far; in a batch, of each.")
    ] = None,
    temp: Annotated[float, typer.Option("--temp", help="Temperature; 0 takes the most likely token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option("--top-k", help="Choose among the K most likely tokens.")] = None,
    top_p: Annotated[float, typer.Option("--top-p", help="Choose among the likeliest tokens of probability P.")] = 1.0,
    min_p: Annotated[
        float, typer.Option("--min-p", help="Drop tokens less than P times as likely as the likeliest.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", help="Above 1, tokens seen before become less likely.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option("--seed", help="Of the draws; the same seed gives the same text.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="End before this string; may be given several times.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past end-of-text tokens.")] = False,
    quant: Quant = "keep",
    quant_min_dim: QuantMinDim = "auto",
    quant_layer: QuantLayers = None,
    threads: Threads = None,
    no_jit: NoJit = False,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Fail where the machine lacks the backend, instead of running on auto."),
    ] = False,
    log_level: Annotated[
        str | None,
        typer.Option("--log-level", help="Events on stderr: info (tokens), debug (passes), trace (operations)."),
    ] = None,
    no_echo: Annotated[
        bool,
        typer.Option(
            "--no-echo",
            help="Print the generated text alone, without the prompt before it. --chat and --json never print the "
            "prompt.",
        ),
    ] = False,
    per_pass: Annotated[bool, typer.Option("--per-pass", help="Also print the time of every pass.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="On stderr, only warnings and errors.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of text; for a batch, one a line.")
    ] = False,
) -> None:
    """Write on from a prompt. Text goes to stdout, everything else to stderr."""
    from mlx_engine.backends.sampling import Sampling
    from mlx_engine.checkpoint.sources import is_cached
    from mlx_engine.commands import diagnostics
    from mlx_engine.decode.options import Options
    from mlx_engine.engine import check_load_options, configure_log, load

    options = Options(
        max_tokens,
        Sampling(temp, top_k, top_p, min_p, repetition_penalty, seed),
        kv,
        tuple(stop or ()),
        ignore_eos,
        timeout,
        context_len,
    )
    conversion = check_load_options(quant, threads, min_dim_of(quant_min_dim), layers_of(quant_layer))
    check_prompts(prompt, prompt_file, batch_file, chat=chat, system=system)
    configure_log(log_level)
    used = choose_backend(backend, strict=strict)
    texts = read_prompts(prompt, prompt_file, batch_file)
    say = _nothing if quiet or json else _lines
    cached = None if quiet or json else is_cached(model)
    with progress_bar("loading") as progress:
        engine = load(model, used, threads=threads, jit=not no_jit, progress=progress, **conversion.options())
    start = time.perf_counter()
    runs = streams(engine, asked(engine, texts, chat=chat, system=system), options)
    say(diagnostics.loaded(engine, model, cached))
    say(diagnostics.reserved(engine, runs, kv=kv, context_len=context_len))
    for i, (text, stream) in enumerate(zip(texts, runs, strict=True), start=1):
        label = "" if batch_file is None else f"[{i}] "
        with progress_bar("reading the prompt") as stream.progress:
            first = next(stream, "")
        if json:
            for _ in stream:
                pass
            print(json_module.dumps(as_json(stream.generation, engine, backend)), flush=True)
        else:
            print_text(label, "" if chat or no_echo else text, first, stream)
    generations, seconds = [stream.generation for stream in runs], time.perf_counter() - start
    if batch_file is not None:
        say(diagnostics.finished_batch(generations, seconds))
    else:
        say(diagnostics.summary(generations[0], engine, seconds, per_pass=per_pass))
    if engine.backend.profiler is not None and not json:
        notice(engine.backend.profiler.table())


def choose_backend(requested: str, *, strict: bool) -> str:
    """The backend to run on: the requested one, or "auto" with a word about why.

    Raises:
        BackendUnavailableError: no backend has this name, or `strict` and this machine lacks it.
    """
    from mlx_engine.backends import auto, unavailable

    reason = None if requested == "auto" else unavailable(requested)
    if reason is None:
        return requested
    if strict:
        raise BackendUnavailableError(name=requested, reason=reason)
    notice(f"backend {requested!r} is not available: {reason}; running on {auto()!r}")
    return "auto"


def print_text(label: str, prompt: str, first: str, stream: Stream) -> None:
    """Print the prompt, dimmed on a terminal, then the first piece of text and every further one as it is generated."""
    if prompt and not is_plain(sys.stdout):
        prompt = f"\x1b[2m{prompt}\x1b[0m"
    print(f"{label}{prompt}{first}", end="", flush=True)
    for piece in stream:
        print(piece, end="", flush=True)
    print()


def as_json(generation: Generation, engine: Engine, requested: str) -> dict[str, object]:
    """The run as one JSON object."""
    return {
        "prompt_ids": generation.prompt_ids,
        "token_ids": generation.token_ids,
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        "backend": {"requested": requested, "used": engine.backend.name, "device": engine.backend.device},
        "metrics": generation.metrics.summary(),
    }


def _lines(lines: Sequence[str]) -> None:
    for line in lines:
        notice(line)


def _nothing(lines: Sequence[str]) -> None:
    pass
