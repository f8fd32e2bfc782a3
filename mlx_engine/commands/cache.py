"""The command `cache`: list what is kept on disk with its sizes, and remove it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from mlx_engine.commands.console import notice, reports_errors
from mlx_engine.commands.options.groups import takes_groups
from mlx_engine.commands.options.help import Command, Group
from mlx_engine.commands.values import columns, exact, plain, print_json
from mlx_engine.errors import OptionError, size

if TYPE_CHECKING:
    from mlx_engine.checkpoint.on_disk import Kept

cache = typer.Typer(
    cls=Group,
    add_completion=False,
    no_args_is_help=True,
    help="List and remove what is kept on disk: models, compiled kernels and prefixes.",
)


PrefixDir: TypeAlias = Annotated[
    Path | None,
    typer.Option("--prefix-dir", metavar="DIR", file_okay=False, help="The folder of --prefix-dir of serve or chat."),
]


@cache.command("list", cls=Command)
@reports_errors
@takes_groups
def list_(
    prefix_dir: PrefixDir = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List downloaded models, models with random weights, compiled kernels and prefixes, with sizes and paths."""
    items = everything_kept(prefix_dir)
    total = sum(item.nbytes for item in items)
    if json:
        rows = [{"name": i.name, "kind": i.kind, "bytes": i.nbytes, "path": str(i.path)} for i in items]
        print_json({"items": rows, "bytes": total})
        return
    for line in lines_of(items):
        print(line)
    print(f"{len(items):,} {'item' if len(items) == 1 else 'items'}, {size(total)} ({exact(total)} bytes)")


@cache.command(cls=Command)
@reports_errors
@takes_groups
def remove(
    names: Annotated[list[str] | None, typer.Argument(help="Names as `cache list` prints them.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove everything that `cache list` prints.")] = False,
    prefix_dir: PrefixDir = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove models, prefixes or compiled kernels from disk. Other programs that use the hub share its downloads."""
    from mlx_engine.checkpoint import on_disk

    if bool(names) == everything:
        message = "cache remove: give either names or --all, not both" if names else "cache remove needs names or --all"
        raise OptionError(message, option="cache remove")
    items = everything_kept(prefix_dir)
    chosen = items if everything else [named(items, name) for name in dict.fromkeys(names or ())]
    for line in lines_of(chosen):
        notice(line)
    if not chosen or not (yes or confirmed(chosen)):
        notice("nothing was removed")
        return
    for item in chosen:
        on_disk.remove(item)
    notice(f"removed {size(sum(item.nbytes for item in chosen))}")


def everything_kept(prefix_dir: Path | None) -> list[Kept]:
    """Return all items on disk, and the prefixes in a folder that was given to `serve` or `chat`."""
    from mlx_engine.cache.disk import parts_of
    from mlx_engine.checkpoint.on_disk import Kept, kept, size_of

    items = kept()
    parts = [] if prefix_dir is None else parts_of(prefix_dir.expanduser())
    if prefix_dir is not None and parts:
        items.append(Kept("prefixes", "made", prefix_dir, tuple(parts), sum(map(size_of, parts))))
    elif prefix_dir is not None:
        notice(f"{prefix_dir}: no prefixes are kept there")
    return items


def named(items: Sequence[Kept], name: str) -> Kept:
    """Return the item of this name.

    Raises:
        OptionError: there is none.
    """
    item = next((item for item in items if item.name == name), None)
    if item is None:
        known = ", ".join(item.name for item in items) or "nothing"
        message = f"cache remove: no cache entry {name!r}; cache list shows: {known}"
        raise OptionError(message, option="cache remove", found=name)
    return item


def confirmed(items: Sequence[Kept]) -> bool:
    """Ask on the terminal whether to remove the items.

    Raises:
        OptionError: stdin is no terminal.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        raise OptionError("cache remove needs --yes where there is no terminal to ask on", option="--yes")
    total = size(sum(item.nbytes for item in items))
    return typer.confirm(f"Remove {'it' if len(items) == 1 else 'these'}, {total} in all?", err=True)


def lines_of(items: Sequence[Kept]) -> list[str]:
    """Return a line per item: name, size, whether it must be downloaded again, path."""
    again = {"download": "downloaded", "made": "made when needed"}
    rows = [(plain(item.name), size(item.nbytes), again[item.kind], plain(str(item.path))) for item in items]
    return columns(rows, "<><<") if rows else []
