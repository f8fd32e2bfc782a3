"""The options of `bench`, grouped by subject, and their conversion to tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mlx_engine.commands.options.model import Model

# The default of --out.
SWEEPS_OUT = "none; with --sweep and --concurrency bench-results/MODEL-TIME"


@dataclass(frozen=True)
class MeasureOptions:
    """The tests, and their model and backends."""

    model: Model = "builtin"
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            "-b",
            help="Backend to measure, or all; may be given several times.",
            show_default="auto; with --sweep all",
        ),
    ] = None
    n_prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--n-prompt",
            "-p",
            help="Prompt tokens of a prefill test: 512, 128,512 or 64-256+64.",
            show_default="512; with --sweep what suits the model",
        ),
    ] = None
    n_gen: Annotated[
        list[str] | None, typer.Option("--n-gen", "-n", help="Generated tokens of a decode test.", show_default="64")
    ] = None
    both: Annotated[
        list[str] | None,
        typer.Option(
            "-pg", help="Test of both: P prompt tokens, then N generated tokens, such as 512,64.", metavar="P,N"
        ),
    ] = None
    depth: Annotated[
        list[str] | None,
        typer.Option("--n-depth", "-d", help="Tokens already in the context when a test begins.", show_default="0"),
    ] = None

    def tests(self) -> list[Any]:
        """Return the tests: every combination of the numbers of tokens.

        Raises:
            OptionError: a list cannot be parsed, or there is no test.
        """
        from mlx_engine.bench.lists import tests_of

        return tests_of(self.n_prompt, self.n_gen, self.both, self.depth)


@dataclass(frozen=True)
class TimingOptions:
    """How each test is measured."""

    repetitions: Annotated[int, typer.Option("--repetitions", "-r", min=1, help="Repetitions of every test.")] = 5
    kv: Annotated[
        bool | None,
        typer.Option(
            "--kv/--no-kv", help="Use a KV cache, or recompute the whole sequence for every token.", show_default="kv"
        ),
    ] = None
    no_overlap: Annotated[
        bool, typer.Option("--no-overlap", help="Wait for each token before the next forward pass is queued on a GPU.")
    ] = False
    budget: Annotated[
        float | None,
        typer.Option(
            "--budget",
            help="Seconds for each test on each backend; longer tests are estimated and marked with ~.",
            show_default="none; with --sweep 10",
        ),
    ] = None


@dataclass(frozen=True)
class OutputOptions:
    """Output format and folder."""

    output: Annotated[str, typer.Option("--output", "-o", help="Format of the output: md, csv, json or jsonl.")] = "md"
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for all samples (JSON) and the tables (Markdown).", show_default=SWEEPS_OUT),
    ] = None


@dataclass(frozen=True)
class ModeOptions:
    """Modes other than single tests."""

    sweep: Annotated[
        bool,
        typer.Option(
            "--sweep", help="Measure every backend, slowest first: tables, plots, and the speedup of each step."
        ),
    ] = False
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            "--compare", metavar="OLD NEW", help="Compare two JSON files that bench wrote; nothing is measured."
        ),
    ] = None
