"""The command `bench`: measure prefill and decode, all backends, several clients or speculation; compare results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_engine.commands.console import alarm, notice, reports_errors, still_bar
from mlx_engine.commands.options.groups import flags_given, takes_groups
from mlx_engine.commands.options.model import ComputeOptions, Draft, Model
from mlx_engine.commands.options.shard import ShardOptions, follow
from mlx_engine.errors import OptionError, SourceError, is_number, listed, require
from mlx_engine.options import AUTO_SPECULATION, option

if TYPE_CHECKING:
    from mlx_engine.bench import concurrency
    from mlx_engine.bench.sweep import Plan
    from mlx_engine.distributed.shard import Shard

Row = dict[str, Any]
Snapshots = Callable[[Callable[[int, int, str], None]], Iterator[list[Row]]]

# The fields of the options that each mode refuses, because it would ignore them. --compare refuses all but --out.
IGNORED_BY_SWEEP = ("both", "depth", "kv", "no_jit", "no_overlap", "experts_memory")
IGNORED_BY_SPECULATION = (
    "n_prompt", "n_gen", "both", "depth", "kv", "no_overlap", "budget", "sweep", "compare", "concurrency", "url",
)  # fmt: skip
IGNORED_BY_CLIENTS = ("both", "depth", "kv", "sweep", "compare")
# --url also refuses these options, because the measured server determines them.
IGNORED_BY_URL = (
    "backend", "quant", "quant_min_dim", "quant_layer", "threads", "activations", "kv_type", "no_jit", "no_overlap",
    "prefix_cache", "experts_memory",
)  # fmt: skip
ONLY_OF_CLIENTS = ("requests", "prefix_cache", "shared_prefix", "api_key")


@dataclass(frozen=True)
class MeasureOptions:
    """The tests, and their model and backends."""

    model: Model = "builtin"
    backend: list[str] | None = option(
        None,
        "Backend to measure, or all; may be given several times.",
        flags=("--backend", "-b"),
        unset="auto; with --sweep all",
    )
    n_prompt: list[str] | None = option(
        None,
        "Prompt tokens of a prefill test: a number, a list such as 128,512, or a range with a step such as 64-256+64.",
        flags=("--n-prompt", "-p"),
        unset="512; with --sweep lengths that fit the context",
    )
    n_gen: list[str] | None = option(None, "Generated tokens of a decode test.", flags=("--n-gen", "-n"), unset="64")
    both: Annotated[
        list[str] | None,
        typer.Option(
            "-pg", help="Test of prefill and decode: P prompt tokens, then N generated tokens (512,64).", metavar="P,N"
        ),
    ] = None
    depth: Annotated[
        list[str] | None,
        typer.Option("--n-depth", "-d", help="Tokens already in the context when a test begins.", show_default="0"),
    ] = None

    @property
    def names(self) -> list[str]:
        """The chosen backends; without --backend the fastest one."""
        return names_of(self.backend or ["auto"])


@dataclass(frozen=True)
class TimingOptions:
    """How each test is measured."""

    repetitions: int = option(5, "Repetitions of every test.", flags=("--repetitions", "-r"), least=1)
    kv: bool | None = option(
        None, "Use a KV cache, or recompute the whole sequence for every token.", flags=("--kv/--no-kv",), unset="kv"
    )
    no_overlap: bool = option(False, "Wait for each token before the next forward pass is queued on a GPU.")
    budget: float | None = option(
        None,
        "Seconds for each test on each backend; longer tests are estimated and marked with ~.",
        unset="none; with --sweep 10",
    )


@dataclass(frozen=True)
class OutputOptions:
    """Output format and folder."""

    output: str = option("md", "Format of the output: md, csv, json or jsonl.", flags=("--output", "-o"))
    out: Path | None = option(
        None,
        "Folder for all samples (JSON) and the tables (Markdown).",
        unset="none; with --sweep and --concurrency bench-results/MODEL-TIME",
    )


@dataclass(frozen=True)
class ModeOptions:
    """Modes other than single tests."""

    sweep: bool = option(
        False, "Measure every backend, slowest first: tables, plots, and the speedup of each over the one before."
    )
    compare: tuple[Path, Path] | None = option(
        None, "Compare two JSON files that bench wrote; nothing is measured.", metavar="OLD NEW"
    )
    speculate: Path | None = option(
        None,
        "Answer the prompts in this file with and without proposed tokens. Each line is a JSON object with the key "
        "prompt or prompts. Optional keys: name, max_tokens, prediction, drafter, copies, and right (the share of "
        "the proposed tokens that are right).",
        metavar="FILE",
    )
    draft: Draft = None


@dataclass(frozen=True)
class ConcurrencyOptions:
    """Several clients at once."""

    concurrency: str | None = option(
        None,
        "Measure N clients at once, each of which submits its next request when its last one has ended.",
        metavar="N,N...",
        unset="off; with --url 1,2,4,8,16,32",
    )
    requests: int = option(2, "With --concurrency: requests of each client.", least=1)
    prefix_cache: bool | None = option(
        None,
        "With --concurrency: keep prompts for later requests that share a prefix.",
        flags=("--prefix-cache/--no-prefix-cache",),
        unset="no-prefix-cache; with --shared-prefix prefix-cache",
    )
    shared_prefix: int = option(
        0,
        "With --concurrency: all prompts begin with the same K tokens. Prints the time to first token with a new "
        "prefix (cold), with the cached prefix (warm), and without a shared prefix, for prompts of one length.",
        metavar="K",
        least=0,
    )
    url: str | None = option(None, "Measure an OpenAI-compatible server at this address, over HTTP.", unset="off")
    api_key: str | None = option(None, "With --url: the server's key.")

    @property
    def is_wanted(self) -> bool:
        """Whether to measure several clients."""
        return self.concurrency is not None or self.url is not None

    @property
    def caches_prefixes(self) -> bool:
        """Whether the scheduler has a prefix cache."""
        return self.shared_prefix > 0 if self.prefix_cache is None else self.prefix_cache


@reports_errors
@takes_groups
def bench(
    *,
    tests: MeasureOptions,
    timing: TimingOptions,
    compute: ComputeOptions,
    sharing: ShardOptions,
    output: OutputOptions,
    mode: ModeOptions,
    clients: ConcurrencyOptions,
) -> None:
    """Measure prefill and decode in tokens per second. Tokenisation and a warm-up run of every test are not timed."""
    from mlx_engine.bench.samples import tests_of

    check_values(timing, output)
    conversion = compute.conversion()
    given = flags_given(tests, timing, compute, output, mode, clients)
    refuse_ignored(mode, clients, given)
    if sharing.shard is not None:
        refuse_sharing(tests, mode, clients)
    with sharing.joined() as shard:
        if shard is not None and not shard.is_leader:
            follow(tests.model, tests.names[0], shard, compute.options() | conversion.options())
        elif clients.is_wanted:
            print_snapshots(clients_rows(clients, tests, timing, compute, given, shard), tests.model, output)
        elif mode.speculate is not None:
            print_speculation(mode.speculate, mode.draft, tests, timing, compute, shard, output)
        elif mode.compare is not None:
            print_comparison(*mode.compare, output.out)
        elif mode.sweep:
            run_sweep(tests.model, sweep_plan(tests, timing, compute), output)
        else:
            how: dict[str, Any] = {"quant": conversion, "shard": shard, **compute.options()}
            how |= {"repetitions": timing.repetitions, "budget": timing.budget, "overlap": not timing.no_overlap}
            chosen = tests_of(tests.n_prompt, tests.n_gen, tests.both, tests.depth)
            run_tests(tests.model, tests.names, chosen, output, kv=(timing.kv is not False,), **how)


# ---- checks of the options, and plans made of them ----


def check_values(timing: TimingOptions, output: OutputOptions) -> None:
    """Raise OptionError if the value of an option is invalid."""
    from mlx_engine.bench.tables import FORMATS

    require(
        timing.budget is None or (is_number(timing.budget) and timing.budget >= 0),
        option="--budget", expected="a finite number of seconds >= 0", found=timing.budget,
        message=f"--budget: {timing.budget} is no number of seconds",
    )  # fmt: skip
    names = listed(FORMATS)
    require(
        output.output in FORMATS, option="--output", expected=names, found=output.output,
        message=f"--output: unknown format {output.output!r}; choose {names}",
    )  # fmt: skip


def refuse_ignored(mode: ModeOptions, clients: ConcurrencyOptions, given: Mapping[str, str]) -> None:
    """Raise OptionError if the mode would ignore a given option.

    `given` maps the field of each option that was given to the option's flag.
    """
    if mode.speculate is not None:
        refuse("--speculate", [given[name] for name in IGNORED_BY_SPECULATION if name in given])
    elif mode.draft is not None:
        raise OptionError("--draft needs --speculate FILE, which names the texts", option="--draft")
    if clients.url is not None:
        refuse("--url", [given[name] for name in (*IGNORED_BY_CLIENTS, *IGNORED_BY_URL) if name in given])
    elif clients.is_wanted:
        refuse("--concurrency", [given[name] for name in (*IGNORED_BY_CLIENTS, "api_key") if name in given])
    else:
        for flag in (given[name] for name in ONLY_OF_CLIENTS if name in given):
            needed = "--concurrency or --url"
            raise OptionError(f"{flag} needs {needed}", option=flag, expected=needed, found=flag)
        if mode.compare is not None:
            refuse("--compare", [flag for name, flag in given.items() if name not in ("compare", "out")])
        elif mode.sweep:
            refuse("--sweep", [flag for name, flag in given.items() if name in IGNORED_BY_SWEEP])


def refuse_sharing(tests: MeasureOptions, mode: ModeOptions, clients: ConcurrencyOptions) -> None:
    """Raise OptionError if the mode cannot measure a model on several ranks, or if there are several backends."""
    modes = {"--sweep": mode.sweep, "--compare": mode.compare is not None, "--url": clients.url is not None}
    refuse("--shard", [flag for flag, is_given in modes.items() if is_given])
    names = ", ".join(tests.names)
    message = f"--shard measures one backend, not {names}"
    require(len(tests.names) == 1, option="--shard", expected="one backend", found=names, message=message)


def refuse(option: str, others: Sequence[str]) -> None:
    """Raise OptionError if `others`, the given flags that cannot be combined with `option`, is not empty."""
    flags = ", ".join(others)
    message = f"{option} cannot be combined with {flags}"
    require(not others, option=option, expected="no option that it would ignore", found=flags, message=message)


def names_of(backends: Sequence[str]) -> list[str]:
    """Return the names of the chosen backends, with `all` and `auto` resolved."""
    from mlx_engine.backends import auto, backend_names

    spelled = {"all": backend_names(), "auto": [auto()]}
    return [name for given in backends for name in spelled.get(given, [given])]


def sweep_plan(tests: MeasureOptions, timing: TimingOptions, compute: ComputeOptions) -> Plan:
    """Return the plan of a sweep.

    Raises:
        OptionError: a list cannot be parsed, -n has several numbers, or no chosen backend has the type of activations.
        BackendUnavailableError: a name is not the name of a backend.
    """
    from mlx_engine.bench.samples import numbers
    from mlx_engine.bench.sweep import BUDGET, Plan

    plan = Plan(
        prompts=numbers("-p", tests.n_prompt, []) or None,
        n_gen=single("-n", tests.n_gen, Plan.n_gen, "--sweep", least=0),
        quant=compute.conversion(),
        threads=compute.threads,
        allow_settings=compute.allow_settings,
        allow_too_large=compute.allow_too_large,
        repetitions=timing.repetitions,
        budget=BUDGET if timing.budget is None else timing.budget,
        backends=None if tests.backend is None else names_of(tests.backend),
        **compute.types(),
    )
    plan.rungs()  # raises the errors about backends and the type of activations
    return plan


def clients_plan(clients: ConcurrencyOptions, tests: MeasureOptions, timing: TimingOptions) -> concurrency.Plan:
    """Return the plan of a measurement of several clients.

    Raises:
        OptionError: a list cannot be parsed, a number is too small, or there are several lengths of prompts or answers.
    """
    import secrets

    from mlx_engine.bench.clients import Load
    from mlx_engine.bench.concurrency import CONCURRENCY, Plan
    from mlx_engine.bench.samples import numbers

    given = None if clients.concurrency is None else [clients.concurrency]
    counts = list(dict.fromkeys(numbers("--concurrency", given, list(CONCURRENCY))))
    message = "--concurrency must be at least 1"
    require(
        min(counts) >= 1, option="--concurrency", expected="at least one client", found=min(counts), message=message
    )
    # A server gets new random prompts, because its prefix cache may still have the prompts of an earlier run.
    seed = 0 if clients.url is None else secrets.randbits(32)
    n_prompt = single("-p", tests.n_prompt, Load.n_prompt, "--concurrency", least=1)
    n_gen = single("-n", tests.n_gen, Load.n_gen, "--concurrency", least=1)
    load = Load(n_prompt, n_gen, clients.requests, clients.shared_prefix, seed)
    return Plan(counts, load, timing.repetitions, timing.budget)


def single(option: str, texts: list[str] | None, default: int, mode: str, *, least: int) -> int:
    """Return the number given for an option, or `default`. `mode` is the flag of the mode that takes only one number.

    Raises:
        OptionError: several numbers are given, or the number is below `least`.
    """
    from mlx_engine.bench.samples import numbers

    found = numbers(option, texts, [default])
    shown = ",".join(map(str, found))
    message = f"{option}: {mode} takes one number{f', at least {least}' if least else ''}, not {shown}"
    is_one = len(found) == 1 and found[0] >= least
    require(is_one, option=option, expected=f"one number with {mode}", found=shown, message=message)
    return found[0]


# ---- the modes ----


def run_tests(model: str, names: list[str], tests: list[Any], output: OutputOptions, **options: Any) -> None:
    """Run every test on each backend in `names`; print the rows and, with --out, save the rows to that folder."""
    from mlx_engine.bench.run import rows
    from mlx_engine.bench.tables import FORMATS, make_folder, markdown

    out = output.out
    if out is not None:
        make_folder(out)
    found: list[Row] = []
    try:
        with still_bar() as report:
            for row in rows(model, names, tests, profile=out is not None, announce=report, **options):
                keep(found, row)
    finally:
        # Results measured before an error or an interruption are still printed and saved.
        if found:
            print(FORMATS[output.output](found))
            if output.output == "md":
                print(f"\nbuild: {found[0]['commit'] or found[0]['versions']['mlx-engine']}")
            if out is not None:
                save(out, "bench", found, markdown(found) + "\n")
            warn_if_disturbed(found)


def print_speculation(
    file: Path, draft: str | None, tests: MeasureOptions, timing: TimingOptions, compute: ComputeOptions,
    shard: Shard | None, output: OutputOptions,
) -> None:  # fmt: skip
    """Answer the prompts in a file with and without proposed tokens; print the rows and, with --out, save them."""
    from mlx_engine.bench.run import engines
    from mlx_engine.bench.speculation import markdown, rows, texts_of
    from mlx_engine.bench.tables import FORMATS, make_folder

    texts, found = texts_of(file), list[Row]()
    if output.out is not None:
        make_folder(output.out)
    how: dict[str, Any] = {"quant": compute.conversion(), "shard": shard, **compute.options()}
    how |= {"speculate": AUTO_SPECULATION, "draft": draft}
    for about, reason, bench in engines(tests.model, tests.names, lambda opened: opened.check_memory(), **how):
        if bench is None:
            notice(f"{about['backend']} is not available: {reason}")
            continue
        found += [{**about, **row} for row in rows(bench.engine, texts, timing.repetitions)]
    print(markdown(found) if output.output == "md" else FORMATS[output.output](found))
    if output.out is not None:
        save(output.out, "speculation", found, markdown(found) + "\n")


def clients_rows(
    clients: ConcurrencyOptions,
    tests: MeasureOptions,
    timing: TimingOptions,
    compute: ComputeOptions,
    given: Mapping[str, str],
    shard: Shard | None,
) -> Snapshots:
    """Return a function that measures several clients at once, and yields all rows so far after each round."""
    from mlx_engine.bench.clients import Served
    from mlx_engine.bench.concurrency import engine_rows, server_rows

    plan = clients_plan(clients, tests, timing)
    if clients.url is not None:
        url, model = clients.url, tests.model if "model" in given else None
        return lambda announce: server_rows(Served(url, model=model, api_key=clients.api_key), plan, announce=announce)
    how: dict[str, Any] = {"quant": compute.conversion(), "shard": shard, **compute.options()}
    how |= {"overlap": not timing.no_overlap, "prefix_cache": clients.caches_prefixes}
    return lambda announce: engine_rows(tests.model, tests.names, plan, announce=announce, **how)


def print_snapshots(measure: Snapshots, model: str, output: OutputOptions) -> None:
    """Measure several clients at once with `measure`; print the rows, and save them with a plot."""
    from mlx_engine.bench.concurrency import markdown, page

    with results("concurrency", model, output, markdown, page) as found, still_bar() as report:
        for newest in measure(report):
            found[:] = newest


def run_sweep(model: str, plan: Plan, output: OutputOptions) -> None:
    """Measure all backends of the plan; print and save the report with plots, and draw bars in a terminal."""
    from mlx_engine.bench.ladder import page, text
    from mlx_engine.bench.sweep import sweep

    with results("sweep", model, output, text, page) as found, still_bar() as report:
        for row in sweep(model, plan, report):
            keep(found, row)
    if output.output == "md" and sys.stdout.isatty() and "utf" in sys.stdout.encoding.lower():
        print_bars(found)


def print_bars(rows: Sequence[Row]) -> None:
    """Print bars that show the tokens per second of each backend."""
    from rich.console import Console

    from mlx_engine.bench.ladder import bars

    for table in bars(rows):
        print()
        Console().print(table)


def print_comparison(old: Path, new: Path, out: Path | None) -> None:
    """Print the comparison of two files; if `out` is given, also save the comparison to this folder."""
    from mlx_engine.bench.compare import page
    from mlx_engine.bench.tables import make_folder, write

    text = page(old, new)
    print(text)
    if out is not None:
        make_folder(out)
        write(out / "compare.md", text + "\n")


# ---- output ----


@contextmanager
def results(
    stem: str, model: str, output: OutputOptions, text: Callable[[list[Row]], str], page: Callable[..., str]
) -> Iterator[list[Row]]:
    """Yield a list to fill with rows; at the end, print the rows, and save them with plots in a folder.

    Rows measured before an error or an interruption are printed and saved, too. `text` formats the rows for --output
    md. `page` makes the Markdown page to save, from the rows and the names of the plots.
    """
    from mlx_engine.bench.tables import FORMATS, default_folder, make_folder

    folder = default_folder(model) if output.out is None else output.out
    make_folder(folder)
    found: list[Row] = []
    try:
        yield found
    finally:
        if found:
            print(text(found) if output.output == "md" else FORMATS[output.output](found))
            save(folder, stem, found, page(found, draw(found, folder)))
            warn_if_disturbed(found)
        elif output.out is None:
            folder.rmdir()


def save(folder: Path, stem: str, found: list[Row], page: str) -> None:
    """Save the rows as JSON and the Markdown `page`; print the path of the JSON file."""
    from mlx_engine.bench import tables

    tables.save(folder, stem, found, page)
    notice(f"every sample is in {folder / f'{stem}.json'}")


def warn_if_disturbed(found: list[Row]) -> None:
    """If other processes used the cores during the measurement, print a warning that names the unusable figures."""
    from mlx_engine.bench.origin import finding

    if (warning := finding(found)) is not None:
        alarm(warning)


def keep(found: list[Row], row: Row) -> None:
    """Append a row to `found`. Print the notes of the first row; warn of the first row with timed operations."""
    if row.get("watched") and not any(other.get("watched") for other in found):
        notice("warning: MLX_ENGINE_LOG is set, so every operation is timed: rates are lower than without it")
    if not found:
        for line in row.get("notes", ()):
            notice(line)
    found.append(row)


def draw(found: list[Row], folder: Path) -> list[str]:
    """Draw the plots of the rows; return their names, or an empty list if matplotlib cannot be imported."""
    try:
        from mlx_engine.bench import plots
    except ImportError as error:
        notice(f"no plots: matplotlib cannot be imported ({error}); pip install --force-reinstall matplotlib")
        return []
    try:
        return plots.write(found, folder)
    except OSError as error:
        raise SourceError(f"{folder}: the plots cannot be written ({error.strerror or error})") from error
