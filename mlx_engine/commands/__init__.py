"""The command line: one module per command, options and printing only."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """The entry point of `mlx-engine`, of `python -m mlx_engine` and of cli.py."""
    # A vocabulary is some hundred thousand objects that stay; looking through them for garbage, over and over while
    # they are made, takes a tenth of the time until the first token.
    gc.set_threshold(1_000_000)
    try:
        # Importing takes a moment, in which Ctrl-C is no different from later.
        from mlx_engine.commands.app import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        # What is left ends with the process. Python would look through all of it for garbage first, for 0.2 s.
        gc.freeze()
