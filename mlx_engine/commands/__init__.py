"""The command line: one module per command, with its options and its output."""

from __future__ import annotations

import gc
import importlib
import sys
from collections import UserDict
from typing import Annotated, Any

try:
    import typer

    import mlx_engine
    from mlx_engine.commands import console
    from mlx_engine.commands.options.help import Command, Group
    from mlx_engine.observe import log
except KeyboardInterrupt:
    sys.exit(130)

# Typer's options for shell completion.
COMPLETION = ("--install-completion", "--show-completion")

# Maps each command to its summary, the beginning of its docstring. Help lists commands in this order. The module
# `commands/NAME.py` defines the command NAME, as a function or a typer application of this name.
SUMMARIES = {
    "generate": "Generate text from a prompt",
    "chat": "Talk with a model",
    "serve": "Serve the HTTP APIs of OpenAI and Anthropic",
    "replay": "Run the requests of a journal again, and check every token and log-probability",
    "bench": "Measure prefill and decode in tokens per second",
    "perplexity": "Measure a model's perplexity on a text, and compare its probabilities with those of a reference",
    "report": "Profile a model's forward passes and rank the bottlenecks",
    "quantize": "Quantise a model and write it as a GGUF file or a folder",
    "inspect": "Show the header, metadata and tensors of a model without loading it",
    "models": "List the supported architectures",
    "plan": "Estimate the placement of layers on several machines",
    "tokenize": "Convert text to token ids and back, or show the vocabulary",
    "backends": "List the backends, slowest first, and say why this machine cannot run some of them",
    "cache": "List and remove what is kept on disk: models, compiled kernels and prefixes",
    "kernels": "List, check and measure the GPU kernels, or print their source",
}


class Commands(UserDict[str, Any]):
    """Maps names to commands. A command is imported when it is looked up, so --version and --help import none."""

    def __getitem__(self, name: str) -> Any:
        found = self.data[name]
        if found is None:
            found = getattr(importlib.import_module(f"mlx_engine.commands.{name}"), name)
            if not isinstance(found, typer.Typer):
                alone = typer.Typer(add_completion=False)
                alone.command(name, cls=Command)(found)
                found = alone
            found = self.data[name] = typer.main.get_command(found)
            found.name, found.help = name, found.help or f"{SUMMARIES[name]}."
        return found


class Application(Group):
    """The group of all commands."""

    summaries = SUMMARIES

    def __init__(self, **about: Any) -> None:
        super().__init__(**about | {"commands": Commands(dict.fromkeys(SUMMARIES))})


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"mlx-engine {mlx_engine.__version__}")
        raise typer.Exit


app = typer.Typer(
    name="mlx-engine",
    cls=Application,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Run language models from GGUF files and Hugging Face folders, and measure where the time goes."""


def main() -> None:
    """Run the command line: entry point of `mlx-engine`, `python -m mlx_engine` and cli.py."""
    # The vocabulary has some hundred thousand objects. With the default threshold, making them would start garbage
    # collections, which would take a tenth of the time to the first token.
    gc.set_threshold(1_000_000)
    try:
        console.exit_on_signals()
        log.show_bar = console.bar_of_parts
        # A completion script is always for the installed command: shells cannot complete words after `python cli.py`.
        app(prog_name="mlx-engine" if {*COMPLETION} & {*sys.argv[1:]} else None)
    except KeyboardInterrupt:
        sys.exit(console.INTERRUPTED)
    finally:
        # Exit without a final garbage collection, which would take 0.2 s.
        gc.freeze()
