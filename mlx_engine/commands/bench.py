"""The command `bench`: tokens per second of prefill and decode, the sweep over all backends, comparisons."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_engine.commands.bench_options import MeasureOptions, ModeOptions, OutputOptions, TimingOptions
from mlx_engine.commands.bench_plan import check_values, names_of, plan_of, refuse_ignored, refuse_sharing
from mlx_engine.commands.concurrency_options import ConcurrencyOptions
from mlx_engine.commands.console import notice, reports_errors, still_bar
from mlx_engine.commands.options.groups import flags_given, takes_groups
from mlx_engine.commands.options.model import ComputeOptions
from mlx_engine.commands.options.shard import ShardOptions, follow
from mlx_engine.errors import SourceError

if TYPE_CHECKING:
    from mlx_engine.bench.sweep_plan import Plan
    from mlx_engine.distributed.shard import Shard

Row = dict[str, Any]
Snapshots = Callable[[Callable[[int, int, str], None]], Iterator[list[Row]]]


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
    check_values(timing, output)
    conversion = compute.conversion()
    given = flags_given(tests, timing, compute, output, mode, clients)
    clients.check(given)
    refuse_ignored(mode, given)
    if sharing.shard is not None:
        refuse_sharing(tests, mode, clients)
    with sharing.joined() as shard:
        if shard is not None and not shard.is_leader:
            follow(tests.model, names_of(tests.backend or ["auto"])[0], shard, compute.options() | conversion.options())
        elif clients.is_wanted:
            print_snapshots(clients_rows(clients, tests, timing, compute, given, shard), tests.model, output)
        elif mode.compare is not None:
            print_comparison(*mode.compare, output.out)
        elif mode.sweep:
            run_sweep(tests.model, plan_of(tests, timing, conversion, compute), output.output, output.out)
        else:
            how: dict[str, Any] = {"quant": conversion, "shard": shard, **compute.options()}
            how |= {"repetitions": timing.repetitions, "budget": timing.budget, "overlap": not timing.no_overlap}
            how |= {"kv": (timing.kv is not False,)}
            chosen = tests.tests()
            run_tests(tests.model, names_of(tests.backend or ["auto"]), chosen, output.output, output.out, **how)


def run_tests(model: str, names: list[str], tests: list[Any], output: str, out: Path | None, **options: Any) -> None:
    """Run every test on every backend; print the rows and save them to a folder."""
    from mlx_engine.bench.files import make_folder
    from mlx_engine.bench.run import rows
    from mlx_engine.bench.tables import FORMATS, markdown

    if out is not None:
        make_folder(out)
    found: list[Row] = []
    cells = [f"{test.name} on {name}" for name in names for test in tests]
    try:
        with still_bar() as report:
            report(0, len(cells), cells[0])
            for row in rows(model, names, tests, apart=out is not None, **options):
                keep(found, row)
                report(len(found), len(cells), [*cells, ""][len(found)])
    finally:
        # Results measured before an error or an interruption are still printed and saved.
        if found:
            print(FORMATS[output](found))
            if output == "md":
                print(f"\nbuild: {found[0]['commit'] or found[0]['versions']['mlx-engine']}")
            if out is not None:
                save(out, "bench", found, markdown(found) + "\n")


def clients_rows(
    clients: ConcurrencyOptions,
    tests: MeasureOptions,
    timing: TimingOptions,
    compute: ComputeOptions,
    given: Mapping[str, str],
    shard: Shard | None,
) -> Snapshots:
    """Return a function that measures several clients at once and yields all rows so far, after each round."""
    from mlx_engine.bench.concurrency.rows import engine_rows, server_rows
    from mlx_engine.bench.concurrency.served import Served

    plan = clients.plan(tests, timing)
    if clients.url is not None:
        url, model = clients.url, tests.model if "model" in given else None
        return lambda announce: server_rows(Served(url, model=model, api_key=clients.api_key), plan, announce=announce)
    how: dict[str, Any] = {"quant": compute.conversion(), "shard": shard, **compute.options()}
    how |= {"overlap": not timing.no_overlap, "prefix_cache": clients.caches_prefixes}
    names = names_of(tests.backend or ["auto"])
    return lambda announce: engine_rows(tests.model, names, plan, announce=announce, **how)


def print_snapshots(measure: Snapshots, model: str, output: OutputOptions) -> None:
    """Measure several clients at once; print and save the rows, with a plot."""
    from mlx_engine.bench.concurrency.tables import markdown, page
    from mlx_engine.bench.files import default_folder, make_folder
    from mlx_engine.bench.tables import FORMATS

    folder = default_folder(model) if output.out is None else output.out
    make_folder(folder)
    found: list[Row] = []
    try:
        with still_bar() as report:
            for found in measure(report):  # noqa: B007 - the newest rows are printed
                pass
    finally:
        if found:
            print((FORMATS | {"md": markdown})[output.output](found))
            save(folder, "concurrency", found, page(found, draw(found, folder, "concurrency.plot")))
        elif output.out is None:
            folder.rmdir()


def run_sweep(model: str, plan: Plan, output: str, out: Path | None) -> None:
    """Measure the whole ladder; print and save the report with plots."""
    from mlx_engine.bench.files import default_folder, make_folder
    from mlx_engine.bench.report import page, text
    from mlx_engine.bench.sweep import sweep
    from mlx_engine.bench.tables import FORMATS

    folder = default_folder(model) if out is None else out
    make_folder(folder)
    found: list[Row] = []
    try:
        with still_bar() as report:
            for row in sweep(model, plan, report):
                keep(found, row)
    finally:
        if found:
            print(text(found) if output == "md" else FORMATS[output](found))
            save(folder, "sweep", found, page(found, draw(found, folder, "plots")))
        elif out is None:
            folder.rmdir()


def print_comparison(old: Path, new: Path, out: Path | None) -> None:
    """Print the comparison of two files and save it to a folder."""
    from mlx_engine.bench.compare import page
    from mlx_engine.bench.files import make_folder, write

    text = page(old, new)
    print(text)
    if out is not None:
        make_folder(out)
        write(out / "compare.md", text + "\n")


def save(folder: Path, stem: str, found: list[Row], page: str) -> None:
    """Save results and page, and print the path."""
    from mlx_engine.bench import files

    files.save(folder, stem, found, page)
    notice(f"every sample is in {folder / f'{stem}.json'}")


def keep(found: list[Row], row: Row) -> None:
    """Append a row; warn once if the log timed every operation."""
    if row.get("watched") and not any(other.get("watched") for other in found):
        notice("warning: MLX_ENGINE_LOG is set, so every operation is timed: rates are lower than without it")
    if not found:
        for line in row.get("notes", ()):
            notice(line)
    found.append(row)


def draw(found: list[Row], folder: Path, module: str) -> list[str]:
    """Draw the plots of `mlx_engine.bench.MODULE`; return their names, or none if matplotlib is missing or broken."""
    try:
        plots = importlib.import_module(f"mlx_engine.bench.{module}")
    except ImportError as error:
        notice(f"no plots: matplotlib cannot be imported ({error}); pip install --force-reinstall matplotlib")
        return []
    try:
        names: list[str] = plots.write(found, folder)
        return names
    except OSError as error:
        raise SourceError(f"{folder}: the plots cannot be written ({error.strerror or error})") from error
