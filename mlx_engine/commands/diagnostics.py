"""The messages of `generate` on stderr: one line about a run; with --verbose also model, KV cache and timings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_engine.cache.pool import kv_layers
from mlx_engine.cache.size import CacheSize
from mlx_engine.errors import size as size_of

if TYPE_CHECKING:
    from mlx_engine.engine import Engine
    from mlx_engine.loop.stream import Generation, Stream


def loaded(engine: Engine, source: str, cached: bool | None) -> list[str]:
    """Return the lines about a loaded model: source, configuration, loading times."""
    cfg, phases = engine.config, engine.phases
    how = {None: "", True: "cached ", False: "downloaded "}[cached]
    where = "" if source == str(engine.path) else f" ({how}{engine.path})"
    reason = engine.model.program.reason
    heads = f"{cfg.n_heads} heads, {cfg.n_kv_heads} for keys and values"
    return [
        f"Model: {source}{where}",
        f"Config: {engine.architecture}, {cfg.n_layers} layers, hidden {cfg.hidden_size:,}, {heads}, "
        f"vocabulary {cfg.vocab_size:,}, context {cfg.context_length:,}",
        f"{engine.n_tensors:,} tensors loaded in {phases['load']:.2f} s",
        *engine.notes,
        *([] if reason is None else [f"Layers run op by op because of {reason}"]),
        f"Warm-up: {phases['warm_up'] * 1e3:.0f} ms",
        f"Model ready: {_short(engine.n_parameters)} params on {engine.backend.name} ({engine.backend.device})",
    ]


def reserved(engine: Engine, runs: Sequence[Stream], *, kv: bool, context_len: int | None) -> list[str]:
    """Return the lines about the tokenizer and the KV cache of the longest run, and of `context_len` if given."""
    kind = f"{engine.tokenizer.vocab_size:,} tokens ({engine.tokenizer.kind}, {Path(engine.tokenizer.where).name})"
    if not kv:
        return [f"Tokenizer: {kind}", "KV cache: none"]
    layers = engine.model.kv_layers
    lines = [kv_cache(CacheSize(layers, max(run.n_read for run in runs)))]
    if context_len is not None:
        whole = CacheSize(layers, min(context_len, engine.config.context_length))
        lines = [kv_cache(whole), f"Reserved: {lines[0].removeprefix('KV cache: ')}"]
    return [f"Tokenizer: {kind}", *lines]


def kv_cache(size: CacheSize) -> str:
    """Return the line about the KV cache: its bytes, their factors, and the savings of sliding windows."""
    layers = kv_layers(size.layers)
    layer = layers[0]
    heads = f"{layer.n_kv_heads} {'head' if layer.n_kv_heads == 1 else 'heads'}"
    shape = f"{len(layers)} layers x {heads} x {size.n_tokens:,} x {layer.head_dim} x f32 x 2"
    line = f"KV cache: {size_of(size.whole - size.state)} ({shape})"
    if size.state:
        n_states = len(size.layers) - len(layers)
        line += f"; states of {n_states} layers: {size_of(size.state)}, whatever the number of tokens"
    if not size.saved:
        return line
    window = next(layer.window for layer in layers if layer.window)
    return (
        f"{line}; sliding windows of {window:,} tokens in {size.n_windows} layers save {size_of(size.saved)}: "
        f"{size_of(size.held)} are allocated"
    )


def in_short(generation: Generation, engine: Engine) -> str:
    """Return the one line about a finished run: tokens, backend, how it ended, and its two rates."""
    return f"{_tokens(generation, engine)}: {rates(generation)}"


def rates(generation: Generation) -> str:
    """Return the time to the first token, and the decode rate: further tokens, divided by the time of their passes."""
    first, rate = generation.metrics.time_to_first_token_ms, generation.metrics.decode_tokens_per_second
    if first is None or not generation.token_ids:
        return "no token"
    return f"first token after {first:,.1f} ms" + ("" if rate is None else f", then {rate:,.1f} tokens/s")


def summary(generation: Generation, engine: Engine, seconds: float) -> list[str]:
    """Return the lines about the duration of a finished run, its tokens and its backend."""
    return ["", *finished([generation], seconds), _tokens(generation, engine)]


def _tokens(generation: Generation, engine: Engine) -> str:
    prompt, generated = _count(generation.prompt_ids, "prompt token"), _count(generation.token_ids, "generated token")
    return f"{prompt} and {generated} on {_backend(engine)}, ended by {generation.finish_reason}"


def finished(generations: Sequence[Generation], seconds: float) -> list[str]:
    """Return the lines about the duration of runs: in all, and of the forward passes; of one run, also its rates."""
    passes = sum(sum(generation.metrics.shares) for generation in generations)
    n_tokens = _count([i for generation in generations for i in generation.token_ids], "token")
    alone = f": {rates(generations[0])}" if len(generations) == 1 else ", prompts included"
    return [f"Generated in {seconds:.2f} s", f"{n_tokens} in {passes:.2f} s of forward passes{alone}"]


def batch_in_short(generations: Sequence[Generation], engine: Engine, seconds: float) -> str:
    """Return the one line about a finished batch."""
    n_tokens = sum(len(generation.token_ids) for generation in generations)
    tokens = f"{n_tokens:,} generated tokens ({n_tokens / seconds:,.1f} tokens/s in all)"
    return f"{_prompts(generations, seconds)}, {tokens} on {_backend(engine)}"


def finished_batch(generations: Sequence[Generation], seconds: float) -> list[str]:
    """Return the lines about the duration of a batch, with prompts per second."""
    return ["", *finished(generations, seconds), _prompts(generations, seconds)]


def _prompts(generations: Sequence[Generation], seconds: float) -> str:
    return f"{_count(generations, 'prompt')} in {seconds:.2f} s ({len(generations) / seconds:.2f} prompts/s)"


def _backend(engine: Engine) -> str:
    return f"backend {engine.backend.name} ({engine.backend.device})"


def _count(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


def _short(n: int) -> str:
    return f"{n / 1e9:.2f}B" if n >= 1e9 else f"{n / 1e6:.1f}M"
