"""The lines of `plan`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mlx_engine.commands.values import columns, plain
from mlx_engine.errors import size

if TYPE_CHECKING:
    from mlx_engine.distributed.summary import Summary
    from mlx_engine.distributed.times import Messages


def print_plan(found: Summary) -> None:
    """Print what lies where, the messages, and the rates, or what is missing."""
    print("\n".join(columns(list(head_rows(found)), "<<")))
    print()
    print("\n".join(columns(list(rank_rows(found)), "<<>>>>>")))
    print()
    print("\n".join(columns([*message_rows(found), *rate_rows(found)], "<<")))


def head_rows(found: Summary) -> Iterator[tuple[str, str]]:
    """Yield the rows about the model, the machines and the links."""
    about, host = found.about, found.ranks[0].host
    left = f" (and {size(found.left)} left in the file)" if found.left else ""
    yield "model", plain(about["where"])
    yield (
        "weights",
        f"{about['architecture']}, {len(found.model.layers):,} layers, {size(found.weights)} on "
        f"{about['backend']}{left}",
    )
    same = len({rank.host for rank in found.ranks}) == 1
    speed = f"{host.bandwidth / 1e9:,.1f} GB/s of memory, {host.compute / 1e9:,.0f} GFLOP/s"
    how = f", {' and '.join(found.measured)} measured on this machine" if found.measured else ""
    yield "ranks", f"{len(found.ranks):,}, {'each' if same else 'the first'} with {speed}{how}"
    link = found.link
    yield (
        "links",
        f"{link.rate / 1e9:g} Gbit/s, {link.latency * 1e3:g} ms, and {link.overhead * 1e3:g} ms for the software of a "
        "message",
    )


def rank_rows(found: Summary) -> Iterator[tuple[str, ...]]:
    """Yield the table of the ranks, with its head."""
    asked = found.asked
    conversations = f"{asked.slots:,} x {asked.context:,} tokens"
    yield "rank", "holds", "weights", "KV of a token", f"KV of {conversations}", "activations", "left"
    for i, rank in enumerate(found.ranks):
        last = rank.first + len(rank.layers) - 1
        layers = f"layer {last}" if last == rank.first else f"layers {rank.first} to {last}"
        parts = [layers if found.shard == "pipeline" else f"1/{len(found.ranks)} of all layers"]
        parts = [*(["tables"] if rank.tables else []), *parts, *(["head"] if rank.head else [])]
        left = size(rank.left) if rank.left >= 0 else f"lacks {size(-rank.left)}"
        yield (
            str(i),
            ", ".join(parts),
            size(rank.weights),
            size(rank.kv_token),
            size(rank.kv),
            size(rank.workspace),
            f"{left} of {size(rank.host.memory)}",
        )


def message_rows(found: Summary) -> Iterator[tuple[str, str]]:
    """Yield the rows about what the links carry."""
    if len(found.ranks) == 1:
        return
    if found.shard == "pipeline":
        yield "split", f"--split {','.join(str(len(rank.layers)) for rank in found.ranks)}"
    if found.duplicated:
        yield "twice", f"{size(found.duplicated)} of weights lie on more than one rank"
    yield "a token", _sent(found.per_token, found.shard)
    yield "a chunk", f"{found.chunk:,} tokens of a prompt: {_sent(found.per_chunk, found.shard)}"


def _sent(of: Messages, shard: str) -> str:
    if shard == "pipeline":
        return f"{of.hidden:,} bytes over each border, {of.logits:,} bytes of logits from the last rank to the first"
    return (
        f"{of.nbytes:,} bytes over each link: {of.n_hidden:,} x {of.hidden:,} for the sums, "
        f"{of.n_logits:,} x {of.logits:,} for the logits"
    )


def rate_rows(found: Summary) -> Iterator[tuple[str, str]]:
    """Yield the rows of the rates, or of what is missing."""
    if not found.fits:
        missing = sum(-rank.left for rank in found.ranks if rank.left < 0)
        yield "fits", f"no: {size(missing)} are missing; {_least(found.smallest)}"
        return
    rates, asked = found.rates, found.asked
    parts = f"{rates.compute_seconds * 1e3:,.1f} ms compute, {rates.link_seconds * 1e3:,.1f} ms links"
    yield "fits", f"yes; {_least(found.smallest)}"
    yield "decode", f"one request: about {_rate(rates.decode)} tokens/s after {asked.context:,} tokens ({parts})"
    if asked.slots > 1:
        yield "", f"{asked.slots:,} requests: about {_rate(rates.decode_all)} tokens/s in all"
    yield "prefill", f"one prompt of {asked.prompt:,} tokens: about {_rate(rates.prefill)} tokens/s"
    if asked.slots > 1 and rates.prefill_all > 1.005 * rates.prefill:
        yield "", f"several prompts: about {_rate(rates.prefill_all)} tokens/s in all"


def _least(n: int | None) -> str:
    if n is None:
        return "as a pipeline, no number of machines like the last one holds it"
    return f"the smallest number of machines like the last one, as a pipeline: {n:,}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
