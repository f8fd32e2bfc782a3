"""The command line: one module per command, with its options and its output."""

from __future__ import annotations

import gc
import sys

# Typer's options of shell completion.
COMPLETION = ("--install-completion", "--show-completion")


def main() -> None:
    """Run the command line: entry point of `mlx-engine`, `python -m mlx_engine` and cli.py."""
    # A vocabulary is some hundred thousand permanent objects. Garbage collection while they are created would take a
    # tenth of the time to the first token.
    gc.set_threshold(1_000_000)
    try:
        # Imported here, so that Ctrl-C during the import is handled as later.
        from mlx_engine.checkpoint import mapping
        from mlx_engine.commands.app import app
        from mlx_engine.commands.cut_files import say_when_cut
        from mlx_engine.commands.signals import exit_on_signals

        exit_on_signals()
        mapping.before_first_view = say_when_cut
        # A shell completes the words after the installed command, not those after `python cli.py`.
        app(prog_name="mlx-engine" if {*COMPLETION} & {*sys.argv[1:]} else None)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        # Exit without a final garbage collection, which would take 0.2 s.
        gc.freeze()
