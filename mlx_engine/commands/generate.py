"""The command `generate`: generate text from a prompt or a file of prompts, and print it as it is generated."""

from __future__ import annotations

import json as json_module
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_engine.commands.answer_printer import TextWriter
from mlx_engine.commands.console import FAILED, notice, progress_bar, reports_errors
from mlx_engine.commands.logprobs import logprob_row, table
from mlx_engine.commands.options.groups import takes_groups
from mlx_engine.commands.options.model import (
    SUGGESTED,
    Backend,
    EngineOptions,
    Model,
    Strict,
)
from mlx_engine.commands.options.run import RunOptions, SamplingOptions, options_of
from mlx_engine.commands.options.shard import ShardOptions, follow
from mlx_engine.commands.prompts import PromptOptions, longest_of, requests_for
from mlx_engine.errors import BackendUnavailableError, NotFiniteError, require

if TYPE_CHECKING:
    from mlx_engine.engine import Engine
    from mlx_engine.loop.stream import Generation, Stream


@dataclass(frozen=True)
class OutputOptions:
    """Output options."""

    log_level: Annotated[
        str | None,
        typer.Option(
            "--log-level",
            help="Log to stderr: info (every token), debug (every forward pass) or trace (every operation).",
        ),
    ] = None
    no_echo: Annotated[
        bool,
        typer.Option(
            "--no-echo",
            help="Print the generated text alone, without the prompt before it. --chat and --json never print the "
            "prompt.",
        ),
    ] = False
    per_pass: Annotated[bool, typer.Option("--per-pass", help="Also print the time of every forward pass.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings and errors on stderr.")] = False
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Also print the model, its KV cache and all timings on stderr, not one line."
        ),
    ] = False
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of text; for a batch, one per line.")
    ] = False

    def check(self) -> None:
        """Raise OptionError if options exclude each other."""
        require(not (self.quiet and self.verbose), option="--verbose", expected="no --quiet with it", found=self.quiet)

    @property
    def is_silent(self) -> bool:
        """Whether only warnings and errors go to stderr."""
        return self.quiet or (self.json and not self.verbose)

    def report(self, lines: Sequence[str]) -> None:
        """Print lines about the model or a run on stderr, unless it is silent."""
        for line in () if self.is_silent else lines:
            notice(line)


@reports_errors
@takes_groups
def generate(
    *,
    invocation: typer.Context,
    prompts: PromptOptions,
    model: Model = "builtin",
    backend: Backend = "auto",
    run: RunOptions,
    sampling: SamplingOptions,
    compute: EngineOptions,
    suggested: Annotated[
        bool | None, typer.Option("--suggested/--no-suggested", help=SUGGESTED, show_default="no-suggested")
    ] = None,
    strict: Strict = False,
    sharing: ShardOptions,
    output: OutputOptions,
) -> None:
    """Generate text from a prompt. Text goes to stdout, everything else to stderr."""
    from mlx_engine.checkpoint.sources import is_cached
    from mlx_engine.commands import diagnostics
    from mlx_engine.commands.options.suggested import choose_sampling, offered
    from mlx_engine.engine import Engine, configure_log, open_source

    how = {**compute.machine(), **compute.changes()}
    options_of(run, sampling)  # checked before the model is opened
    prompts.check()
    output.check()
    configure_log(output.log_level)
    used = choose_backend(backend, strict=strict)
    with sharing.joined() as shard:
        if shard is not None and not shard.is_leader:
            follow(model, used, shard, how)
            return
        texts = prompts.read(is_example=model == "builtin")
        cached = is_cached(model) if output.verbose else None
        with progress_bar("opening", quiet=output.is_silent) as progress:
            opened = open_source(model, used, progress=progress, shard=shard, **how)
        chosen = choose_sampling(invocation, sampling, opened, suggested=bool(suggested))
        hints = offered(invocation, opened) if suggested is None and not output.is_silent else []
        output.report(chosen.notes)
        for line in chosen.warnings:
            notice(line)
        # Requests check the prompts, which need not wait for the weights.
        messages = prompts.for_model(opened.prompts.tokenizer, texts)
        requests = requests_for(opened.prompts, messages, options_of(run, chosen.sampling))
        opened.check_memory(longest_of(requests) if run.kv else 1)
        with progress_bar("loading", quiet=output.is_silent) as progress:
            engine = Engine(opened, progress)
        del opened  # frees the metadata: 12 MB of merges for a vocabulary of 150,000 tokens
        start = time.perf_counter()
        runs = engine.run_requests(requests)
        if output.verbose:
            output.report(diagnostics.loaded(engine, model, cached))
            output.report(diagnostics.reserved(engine, runs, kv=run.kv, context_len=run.context_len))
        else:
            output.report(engine.notes)
        n_failed = print_runs(texts, runs, engine, backend, prompts, output)
        seconds = time.perf_counter() - start
        output.report(closing(engine, runs, seconds, output, is_batch=prompts.batch_file is not None))
        if not output.is_silent:
            output.report(prompts.hints(engine.tokenizer, texts))
            output.report(hints)
        if engine.backend.profiler is not None and not output.json:
            notice(engine.backend.profiler.table())
        if n_failed:
            raise typer.Exit(FAILED)


def print_runs(
    texts: Sequence[str], runs: Sequence[Stream], engine: Engine, requested: str, prompts: PromptOptions,
    output: OutputOptions,
) -> int:  # fmt: skip
    """Print all runs in order; return how many of a batch have failed."""
    shown = texts if not (prompts.chat or output.no_echo) else [""] * len(texts)
    n_failed = 0
    for i, (text, stream) in enumerate(zip(shown, runs, strict=True), start=1):
        label = "" if prompts.batch_file is None else f"[{i}] "
        try:
            print_run(label, text, stream, engine, requested, output)
        except NotFiniteError as error:
            if not label:
                raise
            n_failed += 1
            print_failure(label, error, stream, engine, requested, json=output.json)
    return n_failed


def choose_backend(requested: str, *, strict: bool) -> str:
    """Return the requested backend, or "auto" with a notice if it is unavailable on this machine.

    Raises:
        BackendUnavailableError: no backend has this name, or it is unavailable and `strict` is set.
    """
    from mlx_engine.backends import auto, unavailable

    reason = None if requested == "auto" else unavailable(requested)
    if reason is None:
        return requested
    if strict:
        raise BackendUnavailableError(name=requested, reason=reason)
    notice(f"backend {requested!r} is not available: {reason}; running on {auto()!r}")
    return "auto"


def print_run(label: str, prompt: str, stream: Stream, engine: Engine, requested: str, output: OutputOptions) -> None:
    """Print a run: the label, the prompt and the text as it is generated; with --json one object when it has ended."""
    with progress_bar("reading the prompt", quiet=output.is_silent) as stream.progress:
        first = next(stream, "")
    if not output.json:
        print_text(label, prompt, first, stream)
        return
    for _ in stream:
        pass
    print(json_module.dumps(as_json(stream.generation, engine, requested)), flush=True)


def print_text(label: str, prompt: str, first: str, stream: Stream) -> None:
    """Print the prompt, dimmed on a terminal, then the first piece of text and every further one as it is generated."""
    with TextWriter(sys.stdout) as out:
        out.write(label)
        out.write(prompt, dim=True)
        for piece in chain([first], stream):
            out.write(piece)
    print()


def print_failure(
    label: str, error: NotFiniteError, stream: Stream, engine: Engine, requested: str, *, json: bool
) -> None:
    """Print the error of one run of a batch, whose other runs continue; with `json` one object with the error."""
    from mlx_engine.loop.stream import failed

    notice(f"{label}error: {error}")
    print(json_module.dumps(as_json(failed(stream, error), engine, requested)) if json else "", flush=True)


def as_json(generation: Generation, engine: Engine, requested: str) -> dict[str, object]:
    """Return the run as one JSON object, with the keys "logprobs" if they were asked for, and "error" if it failed."""
    found: dict[str, object] = {
        "prompt_ids": generation.prompt_ids,
        "token_ids": generation.token_ids,
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        "backend": {"requested": requested, "used": engine.backend.name, "device": engine.backend.device},
        "metrics": generation.metrics.summary(),
    }
    if generation.error is not None:
        found["error"] = str(generation.error)
    if generation.logprobs is None:
        return found
    return found | {"logprobs": [logprob_row(token, engine.tokenizer) for token in generation.logprobs]}


def closing(
    engine: Engine, runs: Sequence[Stream], seconds: float, output: OutputOptions, *, is_batch: bool
) -> list[str]:
    """Return the lines about finished runs: log-probabilities if asked for, tokens, backend and times."""
    from mlx_engine.commands import diagnostics

    generations = [stream.generation for stream in runs]
    tables = [table(run.logprobs, engine.tokenizer) for run in generations if run.logprobs is not None]
    if is_batch:
        tables = [f"[{i}]\n{lines}" for i, lines in enumerate(tables, start=1)]
        if output.verbose:
            return [*tables, *diagnostics.finished_batch(generations, seconds)]
        return [*tables, diagnostics.batch_in_short(generations, engine, seconds)]
    (run,) = generations
    lines = diagnostics.summary(run, engine, seconds) if output.verbose else [diagnostics.in_short(run, engine)]
    if output.verbose or output.per_pass:
        lines.append(run.metrics.text(per_pass=output.per_pass))
    return [*tables, *lines]
