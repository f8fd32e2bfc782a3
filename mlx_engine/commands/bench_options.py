"""The options of `bench`, grouped by subject, and their conversion to tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_engine.commands.options import Model
from mlx_engine.errors import OptionError, is_number, require

if TYPE_CHECKING:
    from mlx_engine.bench.sweep import Plan
    from mlx_engine.models.conversion import Conversion

IGNORED_BY_SWEEP = ("both", "depth", "kv", "no_jit", "no_overlap")


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


def check_values(timing: TimingOptions, output: OutputOptions) -> None:
    """Check the values of options before anything is run.

    Raises:
        OptionError: a value is invalid.
    """
    from mlx_engine.bench.tables import FORMATS

    sound = timing.budget is None or (is_number(timing.budget) and timing.budget >= 0)
    require(sound, option="--budget", expected="a finite number of seconds >= 0", found=timing.budget)
    require(output.output in FORMATS, option="--output", expected=" or ".join(FORMATS), found=output.output)


def refuse_ignored(mode: ModeOptions, given: Mapping[str, str]) -> None:
    """Check that no option was given that a mode would ignore. `given` has the given flags by name.

    Raises:
        OptionError: an option would be ignored.
    """
    option, ignored = "", []
    if mode.compare is not None:
        option, ignored = "--compare", [flag for name, flag in given.items() if name not in ("compare", "out")]
    elif mode.sweep:
        option, ignored = "--sweep", [flag for name, flag in given.items() if name in IGNORED_BY_SWEEP]
    require(not ignored, option=option, expected="no option that it would ignore", found=", ".join(ignored))


def names_of(backends: list[str]) -> list[str]:
    """Return the names of the chosen backends, with `all` and `auto` resolved."""
    from mlx_engine.backends import auto, backend_names

    spelled = {"all": backend_names(), "auto": [auto()]}
    return [name for given in backends for name in spelled.get(given, [given])]


def plan_of(tests: MeasureOptions, timing: TimingOptions, conversion: Conversion, threads: int | None) -> Plan:
    """Return the plan of a sweep; options that were not given have the plan's defaults.

    Raises:
        OptionError: a list cannot be parsed, or has several numbers where only one is allowed.
        BackendUnavailableError: a name is not the name of a backend.
    """
    from mlx_engine.bench.lists import numbers
    from mlx_engine.bench.sweep import BUDGET, Plan

    gens = numbers("-n", tests.n_gen, [Plan.n_gen])
    if len(gens) != 1:
        raise OptionError(option="-n", expected="one number with --sweep", found=",".join(map(str, gens)))
    plan = Plan(
        prompts=numbers("-p", tests.n_prompt, []) or None,
        n_gen=gens[0],
        quant=conversion,
        threads=threads,
        repetitions=timing.repetitions,
        budget=BUDGET if timing.budget is None else timing.budget,
        backends=None if tests.backend is None else names_of(tests.backend),
    )
    plan.rungs()
    return plan
