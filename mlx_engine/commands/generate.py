"""The command `generate`: generate text from a prompt or a file of prompts, and print it as it is generated."""

from __future__ import annotations

import json as json_module
import selectors
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_engine.commands.console import (
    BOM,
    FAILED,
    TextWriter,
    checked_text,
    notice,
    progress_bar,
    read_text,
    reports_errors,
)
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
    Speculate,
    Strict,
    Think,
    choose_backend,
    one_adapter,
)
from mlx_engine.commands.options.shard import ShardOptions, follow
from mlx_engine.errors import EngineError, OptionError, SourceError
from mlx_engine.errors import size as size_of
from mlx_engine.options import AUTO_SPECULATION, Options, Sampling, option

if TYPE_CHECKING:
    from mlx_engine.cache.pool import CacheSize
    from mlx_engine.engine import Engine, Prompt, RequestBuilder
    from mlx_engine.loop.logprobs import TokenLogprobs
    from mlx_engine.loop.request import Request
    from mlx_engine.loop.scheduler import Scheduler
    from mlx_engine.loop.stream import Generation, RunError, Stream
    from mlx_engine.tokenizer import Tokenizer


DEFAULT_PROMPT = "Once upon a time"
NO_PROMPT = (
    "no prompt was given, neither as an argument nor with -f FILE nor through a pipe: "
    f"continuing {DEFAULT_PROMPT!r}, an example"
)
# Seconds without data on stdin after which `piped` no longer waits silently. In CI and containers, stdin is often an
# open pipe that nothing writes to.
PATIENCE = 3.0

# A prompt that ends with one of these seems to be a chat message, not a text to continue.
ENDS = (".", "?", "!", "。", "\uff1f", "\uff01")
HAS_TEMPLATE = "hint: this model has a chat template; --chat sends the prompt through it, as a message to answer"
NO_TEMPLATE = "warning: this model has no chat template: it continues the prompt as plain text, and may not answer"


@dataclass(frozen=True)
class PromptOptions:
    """Prompt. Its sources, and whether it is a chat message."""

    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="The prompt; - reads stdin.",
            show_default=f"a pipe, else the example {DEFAULT_PROMPT!r}",
        ),
    ] = None
    prompt_option: Annotated[
        str | None, typer.Option("--prompt", "-p", metavar="PROMPT", help="The same as the argument.")
    ] = None
    prompt_file: Path | None = option(None, "Read the prompt from this file.", flags=("--prompt-file", "-f"))
    batch_file: Path | None = option(None, "Run every non-blank line of this file as a prompt; - reads stdin.")
    chat: bool = option(False, "Send the prompt as one user message through the model's chat template.")
    system: str | None = option(None, "System message, with --chat.")
    think: Think = None
    prompt_cache: Path | None = option(
        None,
        "Reuse the keys and values in this file, up to the first token that differs from the prompt. At the end, "
        "write the keys and values of the prompt and the generated text to the file.",
        metavar="FILE",
        is_rare=True,
    )

    def check(self) -> None:
        """Raise OptionError if options exclude each other, if a needed --chat is missing, or --system is not UTF-8."""
        if self.prompt is not None and self.prompt_option is not None:
            message = "give the prompt either as an argument or with --prompt"
            raise OptionError(message, option="--prompt", found=self.prompt_option)
        other = self.prompt_file if self.text is None else self.text
        if self.batch_file is not None and other is not None:
            raise OptionError("--batch-file cannot be combined with a prompt", option="--batch-file", found=str(other))
        if self.batch_file is not None and self.prompt_cache is not None:
            raise OptionError("--prompt-cache cannot be combined with --batch-file", option="--prompt-cache")
        for flag, value in (("--system", self.system), ("--think", self.think)):
            if value is not None and not self.chat:
                raise OptionError(f"{flag} needs --chat", option=flag, found=value)
        if self.system is not None:
            checked_text(self.system, "--system")

    def scheduler(self, engine: Engine, requests: Sequence[Request]) -> Scheduler | None:
        """Return a scheduler that begins with the keys and values of --prompt-cache; None without this option.

        Raises:
            EngineError: the file cannot be read or is not of this model, or the run has no KV cache.
        """
        if self.prompt_cache is None:
            return None
        if not requests[0].options.kv:
            raise OptionError("--prompt-cache cannot be combined with --no-kv", option="--prompt-cache")
        engine.check_kept("--prompt-cache")
        try:
            if self.prompt_cache.exists():
                engine.load_prefix(self.prompt_cache)
        except OSError as error:
            message = f"{self.prompt_cache}: cannot be read: {error.strerror or error}; check the path"
            raise SourceError(message) from error
        return engine.scheduler_for(requests, keeps=True)

    def save(self, engine: Engine, run: Stream, scheduler: Scheduler | None) -> None:
        """Write the file of --prompt-cache, if the option was given; raise SourceError if it cannot be written."""
        if self.prompt_cache is not None and scheduler is not None:
            done = run.generation
            try:
                engine.save_prefix(self.prompt_cache, [*done.prompt_ids, *done.token_ids], scheduler=scheduler)
            except OSError as error:
                message = f"{self.prompt_cache}: cannot be written: {error.strerror or error}; choose another file"
                raise SourceError(message) from error

    @property
    def text(self) -> str | None:
        """The prompt of the command line; "-" is stdin."""
        return self.prompt if self.prompt_option is None else self.prompt_option

    def read(self, *, is_example: bool) -> list[str]:
        """Return the prompt, or the non-blank lines of the batch file.

        Without prompt and batch file, return the text on stdin or, if stdin has no text, the example prompt. A text of
        a file or of stdin is returned without a byte order mark and without a line end at its end. If `is_example` is
        true (the model is the built-in one), stop waiting for stdin after `PATIENCE` seconds without data.

        Raises:
            OptionError: there is a prompt besides --prompt-file, the batch has no prompt, or a text is not UTF-8.
            SourceError: a file cannot be read.
        """
        if self.batch_file is not None:
            return self._batch(self.batch_file)
        if self.text is not None or self.prompt_file is not None:
            text = read_text(self.text, self.prompt_file, "prompt")
            return [text if self.text not in (None, "-") else without_line_end(text)]
        text = piped(is_example=is_example)
        if not text:
            notice(NO_PROMPT)
        return [without_line_end(text) if text else DEFAULT_PROMPT]

    def _batch(self, file: Path) -> list[str]:
        text = read_text("-", None, "--batch-file") if str(file) == "-" else read_text(None, file, "--batch-file")
        # Split only at line ends: `splitlines` would also split a prompt at a form feed or U+2028.
        lines = [line for line in text.removeprefix(BOM).replace("\r\n", "\n").split("\n") if line.strip()]
        if not lines:
            raise OptionError(f"--batch-file: {file} has no prompt; write one per line", option="--batch-file")
        return lines

    def hints(self, tokenizer: Tokenizer, texts: Sequence[str]) -> list[str]:
        """Return a hint to use --chat if a prompt seems to be a chat message and the model has a chat template."""
        could = not self.chat and tokenizer.chat_template is not None
        return [HAS_TEMPLATE] if could and any(text.rstrip().endswith(ENDS) for text in texts) else []

    def for_model(self, tokenizer: Tokenizer, texts: Sequence[str]) -> list[Prompt]:
        """Return the texts as prompts. With --chat, each prompt is a `ChatPrompt`, for the chat template.

        With --chat, if the model has no chat template, each prompt is the system message, followed by the text.
        """
        if not self.chat:
            return list(texts)
        from mlx_engine.tokenizer.chat_prompt import ChatPrompt, thinking

        variables = thinking(tokenizer.chat_template, self.think)
        if tokenizer.chat_template is None:
            notice(NO_TEMPLATE)
            return [text if self.system is None else f"{self.system}\n\n{text}" for text in texts]
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [ChatPrompt([*first, {"role": "user", "content": text}], variables=variables) for text in texts]


@dataclass(frozen=True)
class OutputOptions:
    """Output."""

    log_level: str | None = option(
        None, "Log to stderr: info (every token), debug (every forward pass) or trace (every operation).", is_rare=True
    )
    no_echo: bool = option(False, "Print the generated text without the prompt before it.")
    per_pass: bool = option(False, "Also print the time of every forward pass.", is_rare=True)
    quiet: bool = option(False, "Print only warnings and errors on stderr.", flags=("--quiet", "-q"))
    verbose: bool = option(False, "Also print the model, its KV cache and all timings.", flags=("--verbose", "-v"))
    json: bool = option(False, "Print one JSON object per prompt instead of text.")

    def check(self) -> None:
        """Raise OptionError if both --verbose and --quiet are given."""
        if self.quiet and self.verbose:
            raise OptionError("--verbose cannot be combined with --quiet", option="--verbose")

    @property
    def is_silent(self) -> bool:
        """Whether only warnings and errors go to stderr."""
        return self.quiet or (self.json and not self.verbose)

    def report(self, lines: Sequence[str]) -> None:
        """Print lines about the model or a run on stderr, unless `is_silent`."""
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
    run: Options,
    constraint: ConstraintOptions,
    compute: ComputeOptions,
    suggested: Annotated[
        bool | None,
        typer.Option(
            "--suggested/--no-suggested",
            help=SUGGESTED,
            show_default="no-suggested",
            rich_help_panel=first_sentence(Sampling.__doc__),
        ),
    ] = None,
    strict: Strict = False,
    speculate: Speculate = AUTO_SPECULATION,
    draft: Draft = None,
    adapter: AdapterPaths = None,
    sharing: Annotated[ShardOptions, RARE],
    output: OutputOptions,
) -> None:
    """Generate text from a prompt. Text goes to stdout, everything else to stderr."""
    from mlx_engine.checkpoint.sources import is_cached
    from mlx_engine.commands.options.suggested import choose_sampling, offered
    from mlx_engine.engine import Engine, configure_log, open_source

    how = {**compute.machine(), **compute.changes(run.context_len), "speculate": speculate, "draft": draft}
    how["adapters"] = one_adapter(adapter)
    prompts.check()
    output.check()
    run = replace(run, constraint=constraint.read())
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
        chosen = choose_sampling(invocation, run.sampling, opened, suggested=bool(suggested))
        hints = offered(invocation, opened) if suggested is None and not output.is_silent else []
        output.report(chosen.notes)
        for line in chosen.warnings:
            notice(line)
        # The requests are made before the weights are loaded, so that a bad prompt is reported early.
        messages = prompts.for_model(opened.prompts.tokenizer, texts)
        requests = requests_for(opened.prompts, messages, replace(run, sampling=chosen.sampling))
        opened.check_memory(longest_of(requests) if run.kv else 1)
        with progress_bar("loading", quiet=output.is_silent) as progress:
            engine = Engine(opened, progress)
        del opened  # frees the metadata: 12 MB of merges for a vocabulary of 150,000 tokens
        start = time.perf_counter()
        scheduler = prompts.scheduler(engine, requests)
        runs = engine.run_requests(requests, scheduler)
        if output.verbose:
            output.report(loaded(engine, model, cached))
            output.report(reserved(engine, runs, kv=run.kv, context_len=run.context_len))
        else:
            output.report(engine.notes)
        n_failed = print_runs(texts, runs, engine, backend, prompts, output)
        seconds = time.perf_counter() - start
        prompts.save(engine, runs[0], scheduler)
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
    """Print all runs in order; return how many have failed. Without --batch-file, raise the error of the single run."""
    from mlx_engine.loop.stream import RUN_ERRORS

    shown = texts if not (prompts.chat or output.no_echo) else [""] * len(texts)
    n_failed = 0
    for i, (text, stream) in enumerate(zip(shown, runs, strict=True), start=1):
        label = "" if prompts.batch_file is None else f"[{i}] "
        try:
            print_run(label, text, stream, engine, requested, output)
        except RUN_ERRORS as error:
            if not label:
                raise
            n_failed += 1
            print_failure(label, error, stream, engine, requested, json=output.json)
    return n_failed


def print_run(label: str, prompt: str, stream: Stream, engine: Engine, requested: str, output: OutputOptions) -> None:
    """Print the label, the prompt, and a run's text as it is generated; with --json, print one object after the run."""
    with progress_bar("reading the prompt", quiet=output.is_silent) as stream.progress:
        first = next(stream, "")
    if not output.json:
        print_text(label, prompt, first, stream)
        return
    for _ in stream:
        pass
    print(json_module.dumps(as_json(stream.generation, engine, requested)), flush=True)


def print_text(label: str, prompt: str, first: str, stream: Stream) -> None:
    """Print the label, the prompt (dimmed on a terminal), and the generated text: `first`, then the stream's pieces."""
    with TextWriter(sys.stdout) as out:
        out.write(label)
        out.write(prompt, dim=True)
        for piece in chain([first], stream):
            out.write(piece)
    print()


def print_failure(label: str, error: RunError, stream: Stream, engine: Engine, requested: str, *, json: bool) -> None:
    """Print the error of a run on stderr. On stdout, print an object with the error if `json`, else a line end."""
    from mlx_engine.loop.stream import failed

    notice(f"{label}error: {error}")
    print(json_module.dumps(as_json(failed(stream, error), engine, requested)) if json else "", flush=True)


def as_json(generation: Generation, engine: Engine, requested: str) -> dict[str, object]:
    """Return a run as a JSON object. "stop" is the stop string or token id that ended the run; "error" is a message."""
    from mlx_engine.backends import types_of
    from mlx_engine.loop.speculation import speculation_of

    found: dict[str, object] = {
        "prompt_ids": generation.prompt_ids,
        "token_ids": generation.token_ids,
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        "backend": {
            "requested": requested,
            "used": engine.backend.name,
            "device": engine.backend.device,
            **types_of(engine.backend),
        },
        "metrics": generation.metrics.summary(),
    }
    if engine.speculation.is_on:
        found["speculation"] = speculation_of([generation.drafters or {engine.speculation.names[0]: (0, 0)}])
    if generation.stop is not None:
        found["stop"] = generation.stop
    if generation.error is not None:
        found["error"] = str(generation.error)
    for name, tokens in (("logprobs", generation.logprobs), ("prompt_logprobs", generation.prompt_logprobs)):
        if tokens is not None:
            found[name] = [logprob_row(token, engine.tokenizer) for token in tokens]
    return found


def closing(
    engine: Engine, runs: Sequence[Stream], seconds: float, output: OutputOptions, *, is_batch: bool
) -> list[str]:
    """Return the lines about finished runs: log-probabilities if asked for, tokens, backend and times."""
    generations = [stream.generation for stream in runs]
    tables = []
    for i, run in enumerate(generations, start=1):
        if tokens := [*(run.prompt_logprobs or ()), *(run.logprobs or ())]:
            tables.append((f"[{i}]\n" if is_batch else "") + table(tokens, engine.tokenizer))
    last = _prompts(generations, seconds) if is_batch else _tokens(generations[0], engine)
    if output.verbose:
        proposals = [] if engine.proposals is None else engine.proposals.report()
        lines = ["", *finished(generations, seconds), last, *proposals]
    else:
        rest = f", {_generated(generations, engine, seconds)}" if is_batch else f": {rates(generations[0])}"
        lines = [last + rest]
    if not is_batch and (output.verbose or output.per_pass):
        lines.append(generations[0].metrics.text(per_pass=output.per_pass))
    return [*tables, *lines]


def without_line_end(text: str) -> str:
    """Return a text without a byte order mark, which some editors write, and without a line end at its end."""
    text = text.removeprefix(BOM)
    return text.removesuffix("\r\n") if text.endswith("\r\n") else text.removesuffix("\n")


def piped(*, is_example: bool) -> str:
    """Return all of stdin if it is a pipe or a file; return an empty text if it is a terminal, or closed.

    If stdin has no data for `PATIENCE` seconds, return an empty text if `is_example` is true (the model is the built-in
    one); otherwise print a line and continue to wait. Raise OptionError if the text is not UTF-8.
    """
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    if _is_silent(PATIENCE):
        if is_example:
            return ""
        notice("waiting for a prompt on stdin")
    return read_text("-", None, "prompt")


def _is_silent(seconds: float) -> bool:
    """Return whether stdin stays open without data for this number of seconds."""
    try:
        with selectors.DefaultSelector() as pipes:
            pipes.register(sys.stdin, selectors.EVENT_READ)
            return not pipes.select(seconds)
    # `select` cannot wait for stdin if it is a file, has no file descriptor or, on Windows, is not a socket.
    except (OSError, ValueError):
        return False


def requests_for(makes: RequestBuilder, prompts: Sequence[Prompt], options: Options) -> list[Request]:
    """Return a request per prompt; raise EngineError if a prompt is empty, too long, or rejected by the template."""
    requests = []
    for i, prompt in enumerate(prompts, start=1):
        try:
            requests.append(makes.request(prompt, options))
        except EngineError:
            if len(prompts) > 1:
                notice(f"prompt {i} of {len(prompts)}:")
            raise
    return requests


def longest_of(requests: Sequence[Request]) -> int:
    """Return the most tokens that the KV cache may hold: those of the `BATCH_SLOTS` longest requests, run at once."""
    from mlx_engine.engine import BATCH_SLOTS

    return sum(sorted((request.longest for request in requests), reverse=True)[:BATCH_SLOTS])


def loaded(engine: Engine, source: str, cached: bool | None) -> list[str]:
    """Return the lines about a loaded model: source, configuration, loading times."""
    cfg, phases = engine.config, engine.phases
    how = {None: "", True: "cached ", False: "downloaded "}[cached]
    where = "" if source == str(engine.path) else f" ({how}{engine.path})"
    has_heads = hasattr(cfg, "n_kv_heads")
    heads = f"{cfg.n_heads} heads, {cfg.n_kv_heads} for keys and values" if has_heads else "no attention"
    reason = engine.model.program.reason
    return [
        f"Model: {source}{where}",
        f"Config: {engine.architecture}, {cfg.n_layers} layers, hidden {cfg.hidden_size:,}, {heads}, "
        f"vocabulary {cfg.vocab_size:,}, context {cfg.context_length:,}",
        f"{engine.n_tensors:,} tensors loaded in {phases['load']:.2f} s",
        *engine.notes,
        *([] if reason is None else [f"Layers run op by op because of {reason}"]),
        f"Warm-up: {phases['warm_up'] * 1e3:.0f} ms",
        f"Model ready: {_short(engine.n_parameters)} params on {engine.backend.description}",
        f"Speculation: {engine.speculation.why}",
    ]


def reserved(engine: Engine, runs: Sequence[Stream], *, kv: bool, context_len: int | None) -> list[str]:
    """Return the lines about the tokenizer and the KV cache.

    Without `context_len`, the line "KV cache" has the size for the longest run. With `context_len`, it has the size for
    this number of tokens, and the line "Reserved" has the size for the longest run.
    """
    kind = f"{engine.tokenizer.vocab_size:,} tokens ({engine.tokenizer.kind}, {Path(engine.tokenizer.where).name})"
    if not kv:
        return [f"Tokenizer: {kind}", "KV cache: none"]
    from mlx_engine.cache.pool import CacheSize

    layers = engine.model.kv_layers
    lines = [kv_cache(CacheSize(layers, max(run.n_read for run in runs)))]
    if context_len is not None:
        whole = CacheSize(layers, min(context_len, engine.config.context_length))
        lines = [kv_cache(whole), f"Reserved: {lines[0].removeprefix('KV cache: ')}"]
    return [f"Tokenizer: {kind}", *lines]


def kv_cache(size: CacheSize) -> str:
    """Return the line about the KV cache: bytes, shape, bytes of recurrent states, bytes that windows save."""
    from mlx_engine.cache.pool import kv_layers, state_of

    layers = kv_layers(size.layers)
    line = "KV cache: none"
    if layers:
        layer, n = layers[0], size.n_tokens
        heads = f"{layer.n_kv_heads} {'head' if layer.n_kv_heads == 1 else 'heads'}"
        shape = f"{len(layers)} layers x {heads} x {n:,} x {layer.head_dim} x {layer.type} x {layer.n_arrays}"
        line = f"KV cache: {size_of(size.whole - size.state)} ({shape})"
    if size.state:
        n_states = sum(state is not None and state.nbytes > 0 for state in map(state_of, size.layers))
        line += f"; states of {n_states} layers: {size_of(size.state)}, whatever the number of tokens"
    if not size.saved:
        return line
    window = next(layer.window for layer in layers if layer.window)
    kind = "sliding windows" if window > 0 else "chunks"
    return (
        f"{line}; {kind} of {abs(window):,} tokens in {size.n_windows} layers save {size_of(size.saved)}: "
        f"{size_of(size.held)} are allocated"
    )


def rates(generation: Generation) -> str:
    """Return a text: the time to the first token, and the decode rate (further tokens per second of their passes)."""
    first, rate = generation.metrics.time_to_first_token_ms, generation.metrics.decode_tokens_per_second
    if first is None or not generation.token_ids:
        return "no token"
    return f"first token after {first:,.1f} ms" + ("" if rate is None else f", then {rate:,.1f} tokens/s")


def _tokens(generation: Generation, engine: Engine) -> str:
    prompt, generated = _count(generation.prompt_ids, "prompt token"), _count(generation.token_ids, "generated token")
    return f"{prompt} and {generated} on {_backend(engine)}, ended by {generation.finish_reason}"


def finished(generations: Sequence[Generation], seconds: float) -> list[str]:
    """Return the lines about the total time of runs and the time of their passes; for a single run, add its `rates`."""
    passes = sum(sum(generation.metrics.shares) for generation in generations)
    n_tokens = _count([i for generation in generations for i in generation.token_ids], "token")
    alone = f": {rates(generations[0])}" if len(generations) == 1 else ", prompts included"
    return [f"Generated in {seconds:.2f} s", f"{n_tokens} in {passes:.2f} s of forward passes{alone}"]


def _generated(generations: Sequence[Generation], engine: Engine, seconds: float) -> str:
    n_tokens = sum(len(generation.token_ids) for generation in generations)
    return f"{n_tokens:,} generated tokens ({n_tokens / seconds:,.1f} tokens/s in all) on {_backend(engine)}"


def _prompts(generations: Sequence[Generation], seconds: float) -> str:
    return f"{_count(generations, 'prompt')} in {seconds:.2f} s ({len(generations) / seconds:.2f} prompts/s)"


def _backend(engine: Engine) -> str:
    return f"backend {engine.backend.description}"


def _count(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


def _short(n: int) -> str:
    return f"{n / 1e9:.2f}B" if n >= 1e9 else f"{n / 1e6:.1f}M"


def logprob_row(token: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, object]:
    """Return a token as a JSON object: id, text, logprob, and "top": these three for each of the most likely tokens.

    If the run has a constraint, "allowed" is the sum of the probabilities of the tokens that the constraint allows.
    """
    top = {"top": [_entry(i, p, tokenizer) for i, p in token.top]}
    allowed = {} if token.allowed is None else {"allowed": token.allowed}
    return _entry(token.token_id, token.logprob, tokenizer) | top | allowed


def _entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, object]:
    return {"id": token_id, "text": _text(token_id, tokenizer), "logprob": logprob}


def table(tokens: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> str:
    """Return a table with a line per token: id, logprob, text, and the most likely tokens at its position."""
    lines = [f"{'id':>7}  {'logprob':>9}  token"]
    for token in tokens:
        shown = (f"{_quoted(i, tokenizer)} {p:.4f}" for i, p in token.top)
        alternatives = f"  ({', '.join(shown)})" if token.top else ""
        lines.append(f"{token.token_id:>7}  {token.logprob:>9.4f}  {_quoted(token.token_id, tokenizer)}{alternatives}")
    return "\n".join(lines)


def _text(token_id: int, tokenizer: Tokenizer) -> str:
    return tokenizer.decode([token_id], at_start=False)


def _quoted(token_id: int, tokenizer: Tokenizer) -> str:
    return json_module.dumps(_text(token_id, tokenizer), ensure_ascii=False)
