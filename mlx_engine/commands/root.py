"""Options before the command: `--version`. Typer adds those of shell completion."""

from __future__ import annotations

from typing import Annotated

import typer

import mlx_engine


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"mlx-engine {mlx_engine.__version__}")
        raise typer.Exit


def root(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Run language models from GGUF files and Hugging Face folders, and measure where the time goes."""
