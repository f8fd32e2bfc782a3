"""The messages of `generate` on stderr: the loaded model, the KV cache, and timings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_engine.cache.pool import kv_layers
from mlx_engine.cache.size import CacheSize

if TYPE_CHECKING:
    from mlx_engine.engine import Engine
    from mlx_engine.schedule.stream import Generation, Stream

# The usual unit for cache sizes.
MB = 1 << 20


def loaded(engine: Engine, source: str, cached: bool | None) -> list[str]:
    """Return the lines about a loaded model: source, configuration, loading times."""
    cfg, phases = engine.config, engine.phases
    how = {None: "", True: "cached ", False: "downloaded "}[cached]
    where = "" if source == str(engine.path) else f" ({how}{engine.path})"
    heads = f"{cfg.n_heads} heads, {cfg.n_kv_heads} for keys and values"
    return [
        f"Model: {source}{where}",
        f"Config: {engine.architecture}, {cfg.n_layers} layers, hidden {cfg.hidden_size:,}, {heads}, "
        f"vocabulary {cfg.vocab_size:,}, context {cfg.context_length:,}",
        f"{engine.n_tensors:,} tensors loaded in {phases['load']:.2f}s",
        *engine.notes,
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
    line = f"KV cache: {_mb(size.whole - size.state)} ({shape})"
    if size.state:
        n_states = len(size.layers) - len(layers)
        line += f"; states of {n_states} layers: {_mb(size.state)}, whatever the number of tokens"
    if not size.saved:
        return line
    window = next(layer.window for layer in layers if layer.window)
    return (
        f"{line}; sliding windows of {window:,} tokens in {size.n_windows} layers save {_mb(size.saved)}: "
        f"{_mb(size.held)} are allocated"
    )


def summary(generation: Generation, engine: Engine, seconds: float, *, per_pass: bool) -> list[str]:
    """Return the lines about a finished run: tokens, backend and times."""
    return [
        "",
        *finished([generation], seconds),
        f"{len(generation.prompt_ids)} prompt tokens and {len(generation.token_ids)} generated tokens on backend "
        f"{engine.backend.name} ({engine.backend.device}), ended by {generation.finish_reason}",
        generation.metrics.text(per_pass=per_pass),
    ]


def finished(generations: Sequence[Generation], seconds: float) -> list[str]:
    """Return the lines about the duration of runs: in all, and of the forward passes alone.

    The rate of all passes is below that of decode, because it includes the passes of the prompt: of one run, both are
    on one line.
    """
    n_tokens = sum(len(generation.token_ids) for generation in generations)
    passes = sum(sum(generation.metrics.shares) for generation in generations)
    rate = f" ({n_tokens / passes:.1f} tokens/sec), prompt included" if n_tokens else ""
    decode = generations[0].metrics.decode_tokens_per_second if len(generations) == 1 else None
    alone = "" if decode is None else f"; decode alone: {decode:.1f} tokens/sec"
    return [f"Generated in {seconds:.2f}s", f"{n_tokens} tokens in {passes:.2f}s{rate}{alone}"]


def finished_batch(generations: Sequence[Generation], seconds: float) -> list[str]:
    """Return the same for a batch, with prompts per second."""
    n = len(generations)
    prompts = f"{n} {'prompt' if n == 1 else 'prompts'} in {seconds:.2f}s ({n / seconds:.2f} prompts/sec)"
    return ["", *finished(generations, seconds), prompts]


def _mb(nbytes: int) -> str:
    return f"{nbytes / MB:,.1f} MB" if nbytes >= MB else f"{nbytes / MB:.3f} MB"


def _short(n: int) -> str:
    return f"{n / 1e9:.2f}B" if n >= 1e9 else f"{n / 1e6:.1f}M"
