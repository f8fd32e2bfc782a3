"""The options `--shard` and `--split`: a run on several machines, whose processes `mlx.launch` has started."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_engine.commands.console import FAILED, INTERRUPTED, WRONG_USE, notice
from mlx_engine.errors import BackendUnavailableError, EngineError, OptionError, Words, require

if TYPE_CHECKING:
    from mlx_engine.distributed.shard import Shard


@dataclass(frozen=True)
class ShardOptions:
    """How the ranks of a run share a model."""

    shard: Annotated[
        str | None,
        typer.Option(
            "--shard",
            metavar="pipeline|tensor",
            help="Share the model with the other processes that mlx.launch has started: by layers, or each layer.",
            show_default="off",
        ),
    ] = None
    split: Annotated[
        str | None,
        typer.Option(
            "--split",
            metavar="N,N,...",
            help="The number of layers of each rank, such as 20,8.",
            show_default="by measured speed and memory",
        ),
    ] = None
    timeline: Annotated[
        bool, typer.Option("--timeline", help="At the end, draw which rank computed which forward pass when.")
    ] = False

    @contextmanager
    def joined(self) -> Iterator[Shard | None]:
        """Yield what this rank shares with the others, or None without --shard; at the end, end all ranks.

        Raises:
            OptionError: an option is invalid, or the process was not started by `mlx.launch`.
            DistributedError: another rank cannot be reached.
        """
        if self.shard is None:
            require(self.split is None, option="--split", expected="--shard pipeline with it", found=self.split)
            require(not self.timeline, option="--timeline", expected="--shard pipeline with it", found=Words("none"))
            yield None
            return
        from mlx_engine.distributed.shard import TensorShard, join

        drawn = self.shard != TensorShard.kind or not self.timeline
        require(drawn, option="--timeline", expected="--shard pipeline with it", found=self.shard)
        from mlx_engine.distributed.split import parsed

        shard = join(self.shard, None if self.split is None else parsed(self.split))
        if not shard.is_leader:  # Ctrl-C reaches all ranks on a machine: rank 0 ends the others
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            yield shard
        except BaseException as error:
            shard.close(exit_code(error), error=str(error) or type(error).__name__)
            if not shard.is_leader and isinstance(error, EngineError | MemoryError):
                raise typer.Exit(exit_code(error)) from None  # rank 0 prints it
            raise
        shard.close(timeline=self.timeline)
        for line in shard.timeline:
            notice(line)


def exit_code(error: BaseException) -> int:
    """Return the exit code of a command that an error ends."""
    if isinstance(error, typer.Exit):
        return error.exit_code
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else FAILED
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return WRONG_USE if isinstance(error, OptionError | BackendUnavailableError) else FAILED


def follow(source: str, backend: str, shard: Shard, options: Mapping[str, Any]) -> None:
    """Run this rank's part of what rank 0 does, silently. The options are those of `load`."""
    from mlx_engine.engine import open_source

    open_source(source, backend, shard=shard, **options).follow()
