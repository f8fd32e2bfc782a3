"""The options of prefixes on disk, for `serve` and `chat`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_engine.commands.options.groups import RARE
from mlx_engine.commands.values import bytes_of

if TYPE_CHECKING:
    from mlx_engine.engine import Engine


@dataclass(frozen=True)
class PrefixOptions:
    """Prefixes on disk. Keys and values of prompts, which later runs of the same model read instead of computing."""

    prefix_dir: Annotated[
        Path | None,
        typer.Option(
            "--prefix-dir",
            metavar="DIR",
            file_okay=False,
            help="Keep the keys and values of prompts in this folder, from which prompts can be recovered.",
        ),
    ] = None
    prefix_disk: Annotated[
        str,
        typer.Option(
            "--prefix-disk",
            metavar="SIZE",
            help="Let the files in --prefix-dir take at most this; the least recently used are removed.",
        ),
        RARE,
    ] = "20GiB"

    @property
    def nbytes(self) -> int:
        """The most bytes of files. Raise OptionError if it is no size."""
        return bytes_of("--prefix-disk", self.prefix_disk)

    def use(self, engine: Engine) -> None:
        """Have an engine keep prefixes.

        Raises:
            OptionError: the engine cannot.
        """
        if self.prefix_dir is not None:
            engine.keep_prefixes(self.prefix_dir, self.nbytes)
