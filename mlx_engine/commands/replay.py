"""The command `replay`: run the requests of a journal again, and check that every bit is the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from mlx_engine.commands.console import FAILED, notice, progress_bar, reports_errors
from mlx_engine.commands.options.groups import takes_groups
from mlx_engine.commands.options.model import Backend, choose_backend
from mlx_engine.errors import EngineError, OptionError
from mlx_engine.options import option

if TYPE_CHECKING:
    from mlx_engine.engine import Engine
    from mlx_engine.serve.journal import Entry, ModelId

Numbered = tuple[int, "Entry"]


class Journal(NamedTuple):
    """The requests of a journal.

    Attributes:
        entries: the requests of one model that have generated tokens, each with its line number.
        n_empty: how many requests ended before their first token.
        n_bad: how many lines are damaged, have another model, or have the same model with other options of `load`.
    """

    entries: list[Numbered]
    n_empty: int
    n_bad: int


@reports_errors
@takes_groups
def replay(
    file: Annotated[Path, typer.Argument(help="A journal that `serve --journal` has written.")],
    model: str | None = option(
        None, "The model, if it has been moved.", flags=("--model", "-m"), unset="as in the journal"
    ),
    backend: Backend = "auto",
    slots: str = option("1,4,16", "For each N, run all requests, N answers at a time.", metavar="N,N,..."),
    limit: int | None = option(None, "Run the first N requests only.", least=1),
    threads: int | None = option(None, "Number of threads.", flags=("--threads", "-t"), least=1),
) -> None:
    """Run the requests of a journal again, and check every token and log-probability.

    Exit code 1: a request differs or cannot be run, or a line is damaged or of another model.
    """
    from mlx_engine.bench.samples import numbers
    from mlx_engine.engine import load

    sizes = list(dict.fromkeys(numbers("--slots", [slots], [])))
    if min(sizes) < 1:
        raise OptionError("--slots must be at least 1", option="--slots", found=slots)
    used = choose_backend(backend, strict=False)
    journal, about, source = read(file, model, limit)
    with progress_bar("loading") as progress:
        engine = load(source, used, threads=threads, progress=progress, **about.options)
    others = sorted({entry.backend for _, entry in journal.entries} - {engine.backend.name})
    if others:
        notice(f"The journal is of backend {' and '.join(others)}; this is {engine.backend.name}")
    n_wrong = sum(check(engine, file, journal.entries, n) for n in sizes)
    if journal.n_empty:
        print(f"{journal.n_empty} requests have no tokens to compare: they ended before their first token")
    if n_wrong or journal.n_bad:
        raise typer.Exit(FAILED)


def read(file: Path, source: str | None, limit: int | None) -> tuple[Journal, ModelId, str]:
    """Return the requests of a journal, their model, and the model's source (path, hub id or "builtin").

    Requests without generated tokens are only counted (`Journal.n_empty`). With `limit`, return only the first `limit`
    requests that have generated tokens. If `source` is given, it replaces the source in the journal. Print errors about
    unusable lines.

    Raises:
        EngineError: the journal or the model cannot be read, or no request is for the model.
    """
    from mlx_engine.checkpoint.identity import identity
    from mlx_engine.checkpoint.sources import resolve
    from mlx_engine.serve.journal import read_journal

    lines = list(read_journal(file))
    damaged = [line.entry for line in lines if isinstance(line.entry, EngineError)]
    for error in damaged:
        notice(f"error: {error}")
    found: list[Numbered] = [(n, entry) for n, entry in lines if not isinstance(entry, EngineError)]
    if not found:
        instead = f"all of its {len(damaged)} lines are damaged" if damaged else "it is empty"
        raise OptionError(f"{file} has no requests that serve --journal has written: {instead}", option=str(file))
    source = found[0][1].model.source if source is None else source
    digest = identity(resolve(source))
    same = [(n, entry) for n, entry in found if entry.model.digest == digest]
    if not same:
        other = found[0][1].model
        message = f"{source} has other weights than the model of the journal, {other.name} from {other.source}"
        raise OptionError(message, option="--model", found=source)
    about = same[0][1].model
    kept = [(n, entry) for n, entry in same if entry.model.options == about.options]
    if len(kept) < len(found):
        others = f"{len(found) - len(kept)} requests have another model or other options"
        notice(f"error: {file}: {others}: {numbers_of(found, kept)}")
    entries = [(n, entry) for n, entry in kept if entry.n_tokens][:limit]
    n_empty = sum(not entry.n_tokens for _, entry in kept)
    return Journal(entries, n_empty, len(damaged) + len(found) - len(kept)), about, source


def numbers_of(found: Sequence[Numbered], kept: Sequence[Numbered]) -> str:
    """Return the numbers of the first ten lines of `found` that are not in `kept`, as text."""
    there = {n for n, _ in kept}
    left = [str(n) for n, _ in found if n not in there]
    return f"lines {', '.join(left[:10])}{' and others' if len(left) > 10 else ''}"


def check(engine: Engine, file: Path, entries: Sequence[Numbered], slots: int) -> int:
    """Run requests, `slots` answers at a time. Print the differences from the journal; return how many requests differ.

    A request that cannot be run counts as one that differs.
    """
    from mlx_engine.serve.journal import replay

    wrong = []
    with progress_bar(f"{slots} slots") as progress:
        for done, result in enumerate(replay(engine, entries, slots), start=1):
            progress(done, len(entries))
            if not result.agrees:
                wrong.append(result)
    print(f"slots {slots}: {len(entries) - len(wrong)} of {len(entries)} requests agree")
    for result in sorted(wrong, key=lambda result: result.number):
        for text in result.differences or [f"cannot be run: {result.error}"]:
            print(f"{file}:{result.number}: with {slots} slots: {text}")
    return len(wrong)
