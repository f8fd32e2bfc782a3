"""A whole plan: ranks, messages and rates, for printing and as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlx_engine.distributed.hosts import Host, Link
from mlx_engine.distributed.model_parts import ModelParts, Pass
from mlx_engine.distributed.plan import Asked, Rank, pipeline, smallest, tensor
from mlx_engine.distributed.times import Messages, Rates, ShardKind, Timing


@dataclass(frozen=True)
class Summary:
    """A plan.

    Attributes:
        about: model, architecture and backend.
        model: the parts of the model.
        ranks: what lies where.
        link: every link of the ring.
        asked: what the machines shall do.
        shard: "pipeline" or "tensor".
        per_token: the messages of a decoded token.
        chunk: tokens of the longest part of the prompt.
        per_chunk: the messages of this part.
        rates: the expected rates.
        smallest: the smallest number of machines like the last one that hold the model as a pipeline; None if no number
            does.
        measured: "bandwidth" and "compute", where they were measured on this machine.
    """

    about: dict[str, str]
    model: ModelParts
    ranks: Sequence[Rank]
    link: Link
    asked: Asked
    shard: ShardKind
    per_token: Messages
    chunk: int
    per_chunk: Messages
    rates: Rates
    smallest: int | None
    measured: tuple[str, ...]

    @classmethod
    def of(
        cls, slices: Sequence[ModelParts], hosts: Sequence[Host], link: Link, asked: Asked, shard: ShardKind,
        split: Sequence[int] | None = None, *, chunk: int, measured: tuple[str, ...] = (), **about: str,
    ) -> Summary:  # fmt: skip
        """Make the plan of a model on some machines.

        Args:
            slices: the model; with tensor parallelism, what each rank has of it, after the whole model.
            hosts: the host of each rank.
            link: every link.
            asked: what the machines shall do.
            shard: "pipeline" or "tensor".
            split: layers of each rank of a pipeline; None to choose them.
            chunk: the most tokens of a prompt in a pass.
            measured: "bandwidth" and "compute", where they were measured on this machine.
            about: model, architecture and backend.

        Raises:
            OptionError: the model cannot be cut as asked.
        """
        model = slices[0]
        ranks = pipeline(model, hosts, asked, split) if shard == "pipeline" else tensor(slices[1:], hosts, asked)
        timing = Timing(model, ranks, link, shard, asked.best)
        return cls(
            about=about,
            model=model,
            ranks=ranks,
            link=link,
            asked=asked,
            shard=shard,
            per_token=timing.messages(Pass(1, 1, asked.context)),
            chunk=min(chunk, asked.prompt),
            per_chunk=timing.messages(Pass(1, min(chunk, asked.prompt), 0)),
            rates=timing.rates(asked, chunk),
            smallest=smallest(model, hosts[-1], asked),
            measured=measured,
        )

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory that it needs."""
        return all(rank.left >= 0 for rank in self.ranks)

    @property
    def duplicated(self) -> int:
        """Bytes of weights that the ranks hold beyond those of one process."""
        return max(0, sum(rank.weights for rank in self.ranks) - self.model.total)

    @property
    def weights(self) -> int:
        """Bytes of weights on all ranks, without `duplicated`."""
        return sum(rank.weights for rank in self.ranks) - self.duplicated

    @property
    def left(self) -> int:
        """Bytes of embedding tables that stay in the file."""
        return self.model.left + self.model.total - self.weights

    def facts(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        return {
            **self.about,
            "shard": self.shard,
            "n_layers": len(self.model.layers),
            "weights_bytes": self.weights,
            "left_in_file_bytes": self.left,
            "duplicated_bytes": self.duplicated,
            **asdict(self.asked),
            "fits": self.fits,
            "smallest_number_of_hosts": self.smallest,
            "measured_here": list(self.measured),
            "link": {
                "bits_per_second": self.link.rate,
                "latency_s": self.link.latency,
                "overhead_s": self.link.overhead,
            },
            "messages_per_token": {**asdict(self.per_token), "nbytes": self.per_token.nbytes},
            "chunk": self.chunk,
            "messages_per_chunk": {**asdict(self.per_chunk), "nbytes": self.per_chunk.nbytes},
            "rates": asdict(self.rates),
            "ranks": [_facts(rank) for rank in self.ranks],
        }


def _facts(rank: Rank) -> dict[str, Any]:
    return {
        "first_layer": rank.first,
        "n_layers": len(rank.layers),
        "has_tables": rank.tables is not None,
        "has_head": rank.head is not None,
        "weights_bytes": rank.weights,
        "kv_bytes_per_token": rank.kv_token,
        "kv_bytes": rank.kv,
        "workspace_bytes": rank.workspace,
        "usable_bytes": rank.host.memory,
        "left_bytes": rank.left,
        "bandwidth_bytes_per_second": rank.host.bandwidth,
        "compute_flops_per_second": rank.host.compute,
    }
