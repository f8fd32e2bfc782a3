"""Options for one model on several ranks: processes on one or more machines, which `mlx.launch` starts."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from mlx_engine.commands.console import FAILED, INTERRUPTED, WRONG_USE, notice
from mlx_engine.errors import BackendUnavailableError, EngineError, OptionError, out_of_memory
from mlx_engine.options import option

if TYPE_CHECKING:
    from mlx_engine.distributed.shard import Shard


@dataclass(frozen=True)
class ShardOptions:
    """How the ranks of a run share a model."""

    shard: str | None = option(
        None,
        "Share the model with the other processes that mlx.launch has started. pipeline: each has some "
        "layers; tensor: each has a slice of every matrix.",
        metavar="pipeline|tensor",
        unset="off",
    )
    split: str | None = option(
        None,
        "The number of layers of each rank, such as 20,8.",
        metavar="N,N,...",
        unset="by measured speed and memory",
    )
    timeline: bool = option(False, "At the end, draw which rank computed which forward pass when.")

    @contextmanager
    def joined(self) -> Iterator[Shard | None]:
        """Yield the `Shard` of this rank, or None without --shard. At the end, end all ranks.

        Raises:
            OptionError: an option is invalid, or the process was not started by `mlx.launch`.
            DistributedError: another rank cannot be reached.
        """
        if self.shard in (None, "tensor"):
            for option, given in (("--split", self.split), ("--timeline", self.timeline or None)):
                if given is not None:
                    raise OptionError(f"{option} needs --shard pipeline", option=option, found=given)
        if self.shard is None:
            yield None
            return
        from mlx_engine.distributed.pipeline import parsed
        from mlx_engine.distributed.shard import join

        shard = join(self.shard, None if self.split is None else parsed(self.split))
        if not shard.is_leader:  # Ctrl-C reaches all ranks on a machine; rank 0 handles it
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            yield shard
        except BaseException as error:
            shard.close(exit_code(error), error=described(error))
            if isinstance(error, EngineError | MemoryError) and not shard.is_leader:
                raise typer.Exit(exit_code(error)) from None  # rank 0 prints the error
            if lacks_rank(error) and shard.is_leader:
                notice(f"error: rank 0: {described(error)}")
                if isinstance(error, MemoryError):
                    raise typer.Exit(FAILED) from None
            raise
        shard.close(timeline=self.timeline)
        for line in shard.timeline:
            notice(line)


def described(error: BaseException) -> str:
    """Return the message of an error; prefix the name of its class, except for an EngineError or a MemoryError."""
    if isinstance(error, MemoryError):
        error = out_of_memory("memory", error)
    return str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"


def lacks_rank(error: BaseException) -> bool:
    """Return whether an error's message names no rank, because the error is a lack of memory or a bug."""
    if isinstance(error, OSError) and error.errno is not None:  # the error concerns a file or stdout
        return False
    return isinstance(error, MemoryError) or not isinstance(
        error, EngineError | typer.Exit | SystemExit | KeyboardInterrupt
    )


def exit_code(error: BaseException) -> int:
    """Return the exit code of a command that ends with an error."""
    if isinstance(error, typer.Exit):
        return error.exit_code
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else FAILED
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return WRONG_USE if isinstance(error, OptionError | BackendUnavailableError) else FAILED


def follow(source: str, backend: str, shard: Shard, options: Mapping[str, Any]) -> None:
    """Run this rank's part of every pass that rank 0 starts. `options` are keyword arguments of `open_source`."""
    from mlx_engine.engine import open_source

    open_source(source, backend, shard=shard, **options).follow()
