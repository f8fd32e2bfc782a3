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
        str | None, typer.Argument(help="The prompt; - reads stdin.", show_default=DEFAULT_PROMPT)
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", "-f", help="Read the prompt from this file.")
    ] = None,
    batch_file: Annotated[
        Path | None,
        typer.Option("--batch-file", help="Run every non-blank line of this file as a prompt; - reads stdin."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as one user message through the model's chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option("--system", help="The system message of --chat.")] = None,
    model: Model = "builtin",
    backend: Backend = "auto",
    kv: Annotated[
        bool,
        typer.Option("--kv/--no-kv", help="Use a KV cache, or read the whole sequence again for every token."),
    ] = True,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens", "-n", help="Generate at most N tokens.", show_default="256, or what the context leaves"
        ),
    ] = None,
    context_len: Annotated[
        int | None,
        typer.Option(
            "--context-len",
            help="Limit the prompt and the generated text together to N tokens.",
            show_default="the model's",
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout", help="Stop after S seconds and keep the text so far; in a batch, S seconds for each prompt."
        ),
    ] = None,
    temp: Annotated[
        float, typer.Option("--temp", help="Sampling temperature; 0 always takes the most likely token.")
    ] = 0.0,
    top_k: Annotated[
        int | None, typer.Option("--top-k", help="Sample from the K most likely tokens.", show_default="off")
    ] = None,
    top_p: Annotated[
        float,
        typer.Option("--top-p", help="Sample from the most likely tokens whose probabilities sum to P; 1 is off."),
    ] = 1.0,
    min_p: Annotated[
        float,
        typer.Option(
            "--min-p", help="Drop tokens that are less than P times as likely as the most likely one; 0 is off."
        ),
    ] = 0.0,
    repetition_penalty: Annotated[
        float,
        typer.Option(
            "--repetition-penalty", help="Values above 1 make tokens less likely that occurred before; 1 is off."
        ),
    ] = 1.0,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", help="Random seed for sampling; the same seed gives the same text.", show_default="random"
        ),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="Stop before this string; may be given several times.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue past end-of-text tokens.")] = False,
    quant: Quant = "keep",
    quant_min_dim: QuantMinDim = "auto",
    quant_layer: QuantLayers = None,
    threads: Threads = None,
    no_jit: NoJit = False,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Fail if this machine lacks the backend, instead of running on auto."),
    ] = False,
    log_level: Annotated[
        str | None,
        typer.Option(
            "--log-level",
            help="Log to stderr: info (every token), debug (every forward pass) or trace (every operation).",
        ),
    ] = None,
    no_echo: Annotated[
        bool,
        typer.Option(
            "--no-echo",
            help="Print the generated text alone, without the prompt before it. --chat and --json never print the "
            "prompt.",
        ),
    ] = False,
    per_pass: Annotated[bool, typer.Option("--per-pass", help="Also print the time of every forward pass.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings and errors on stderr.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of text; for a batch, one per line.")
    ] = False,
) -> None:
    """Generate text from a prompt. Text goes to stdout, everything else to stderr."""
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
