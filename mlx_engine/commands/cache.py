"""The command `cache`: list the files that the engine keeps on disk, with their sizes, and remove them."""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer

from mlx_engine.commands.console import notice, reports_errors
from mlx_engine.commands.options.groups import takes_groups
from mlx_engine.commands.options.help import Command, Group
from mlx_engine.commands.values import columns, exact, plain, print_json
from mlx_engine.errors import OptionError, SourceError, size
from mlx_engine.options import option

cache = typer.Typer(
    cls=Group,
    add_completion=False,
    no_args_is_help=True,
    help="List and remove what is kept on disk: models, compiled kernels and prefixes.",
)

HUB_PREFIX = "models--"
# A folder of compiled kernels is named by the digest of their source. NUMBA_CACHE_DIR may also have folders of other
# programs, which must not be deleted.
_DIGEST = re.compile(r"[0-9a-f]{16}")

PrefixDir: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--prefix-dir", metavar="DIR", file_okay=False, help="The folder that serve or chat keeps prefixes in."
    ),
]


@dataclass(frozen=True)
class Kept:
    """An item of `cache list`: a model, cached prefixes, compiled kernels, or the measured tuning of Metal kernels.

    Attributes:
        name: a hub id, shape:NAME, kernels, emulator, tuning or prefixes.
        kind: "download" if the item was downloaded, "made" if the engine computed it. If it is needed after its
            deletion, it is downloaded or computed again.
        path: the file or folder that `cache list` prints.
        parts: the paths that `delete` deletes: `path` itself, or the engine's files and folders in it.
        nbytes: total bytes of the files in `parts`; symbolic links do not count.
    """

    name: str
    kind: Literal["download", "made"]
    path: Path
    parts: tuple[Path, ...]
    nbytes: int


@cache.command("list", cls=Command)
@reports_errors
@takes_groups
def list_(
    prefix_dir: PrefixDir = None,
    json: bool = option(False, "Print one JSON object."),
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
    yes: bool = option(False, "Do not ask.", flags=("--yes", "-y")),
) -> None:
    """Remove models, prefixes or compiled kernels from disk. Other programs may use the same downloads of the hub."""
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
        delete(item)
    notice(f"removed {size(sum(item.nbytes for item in chosen))}")


def everything_kept(prefix_dir: Path | None) -> list[Kept]:
    """Return all items on disk, including the prefixes in `prefix_dir` if this folder is given."""
    from mlx_engine.cache.disk import parts_of

    items = kept()
    parts = [] if prefix_dir is None else parts_of(prefix_dir.expanduser())
    if prefix_dir is not None and parts:
        items.append(Kept("prefixes", "made", prefix_dir, tuple(parts), sum(map(size_of, parts))))
    elif prefix_dir is not None:
        notice(f"{prefix_dir}: no prefixes are kept there")
    return items


def named(items: Sequence[Kept], name: str) -> Kept:
    """Return the item of this name; raise OptionError if there is none."""
    item = next((item for item in items if item.name == name), None)
    if item is None:
        known = ", ".join(item.name for item in items) or "nothing"
        message = f"cache remove: no cache entry {name!r}; cache list shows: {known}"
        raise OptionError(message, option="cache remove", found=name)
    return item


def confirmed(items: Sequence[Kept]) -> bool:
    """Ask on the terminal whether to remove the items; raise OptionError if stdin is not a terminal."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise OptionError("cache remove needs --yes where there is no terminal to ask on", option="--yes")
    total = size(sum(item.nbytes for item in items))
    return typer.confirm(f"Remove {'it' if len(items) == 1 else 'these'}, {total} in all?", err=True)


def lines_of(items: Sequence[Kept]) -> list[str]:
    """Return a line per item: name, size, "downloaded" or "made when needed", path."""
    kinds = {"download": "downloaded", "made": "made when needed"}
    rows = [(plain(item.name), size(item.nbytes), kinds[item.kind], plain(str(item.path))) for item in items]
    return columns(rows, "<><<") if rows else []


# ---- what is on disk ----


def kept() -> list[Kept]:
    """Remove unfinished files of processes that have died. Return the items on disk except prefixes, models first."""
    from mlx_engine.checkpoint import shapes
    from mlx_engine.kernels.files import remove_dead

    remove_dead(shapes.cache_folder())
    return [*_downloads(), *_shapes(), *_kernels()]


def delete(item: Kept) -> None:
    """Delete an item; raise SourceError if a part cannot be removed. Processes can still read files that are open."""
    for part in item.parts:
        try:
            if part.is_dir() and not part.is_symlink():
                shutil.rmtree(part)
            else:
                part.unlink(missing_ok=True)
        except OSError as error:
            raise SourceError(
                f"{error.filename or part}: cannot be removed ({error.strerror or error}); check its permissions"
            ) from error


def _downloads() -> Iterator[Kept]:
    from huggingface_hub import constants

    for folder in _folders(Path(constants.HF_HUB_CACHE)):
        if folder.name.startswith(HUB_PREFIX):
            name = folder.name.removeprefix(HUB_PREFIX).replace("--", "/", 1)
            yield Kept(name, "download", folder, (folder,), size_of(folder))


def _shapes() -> Iterator[Kept]:
    from mlx_engine.checkpoint import shapes
    from mlx_engine.checkpoint.sources import PREFIX

    for name in shapes.SHAPES:
        path = shapes.file_of(name)
        if path.exists():
            yield Kept(f"{PREFIX}{name}", "made", path, (path,), size_of(path))


def _kernels() -> Iterator[Kept]:
    from mlx_engine.checkpoint import shapes
    from mlx_engine.kernels.files import ENDING, cache_folder, remove_dead

    compiled = cache_folder("kernels", given=os.environ.get("NUMBA_CACHE_DIR"))
    emulator = cache_folder("emulator")
    remove_dead(emulator)
    found = {
        "kernels": (compiled, [folder for folder in _folders(compiled) if _DIGEST.fullmatch(folder.name)]),
        # The files that are still unfinished after `remove_dead` belong to running processes, and are left out.
        "emulator": (emulator, sorted(path for path in emulator.iterdir() if not path.name.endswith(ENDING))),
        "tuning": (tuning := shapes.cache_folder() / "tuning.json", [tuning] if tuning.is_file() else []),
    }
    for name, (path, parts) in found.items():
        if parts:
            yield Kept(name, "made", path, tuple(parts), sum(map(size_of, parts)))


def _folders(parent: Path) -> list[Path]:
    try:
        return sorted(path for path in parent.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError:
        return []


def size_of(path: Path) -> int:
    """Return the size in bytes of a file, or of all files below a folder; symbolic links do not count."""
    files = [path] if not path.is_dir() else [Path(root, name) for root, _, names in os.walk(path) for name in names]
    sizes = 0
    for file in files:
        try:
            status = file.lstat()
        except OSError:  # removed meanwhile
            continue
        sizes += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return sizes
