"""The command line: one module per command, options and printing only."""

from __future__ import annotations

import sys


def main() -> None:
    """The entry point of `mlx-engine`, of `python -m mlx_engine` and of cli.py."""
    try:
        # Importing takes a moment, in which Ctrl-C is no different from later.
        from mlx_engine.commands.app import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)
