"""Where compiled kernels are kept. What lies there is run as it lies there, so nobody else may have put it there."""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path


def cache_folder(name: str, *, given: str | None = None) -> Path:
    """The first of these that is ours to write: `given`, `name` in the user's cache folder, a temporary folder."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - Path's raises
    return _first(name, home, given)


@cache
def _first(name: str, home: str, given: str | None) -> Path:
    ours = next(filter(_is_ours, _candidates(name, home, given)), None)
    if ours is None:
        ours = Path(tempfile.mkdtemp(prefix=f"mlx_engine-{name}-"))
        atexit.register(shutil.rmtree, ours, ignore_errors=True)
    return ours


def _candidates(name: str, home: str, given: str | None) -> Iterator[Path]:
    if given:
        yield Path(given)
    if Path(home).is_absolute():  # else nobody knows where home is
        yield Path(home) / "mlx_engine" / name
    # The same folder each time, so that what is compiled there is found again. Some systems have none.
    yield Path(tempfile.gettempdir()) / f"mlx_engine-{name}-{_user()}"


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


def _is_ours(folder: Path) -> bool:
    """Whether it is a folder that we can write, and nobody else can or has made."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            found = folder.lstat()
    except OSError:
        return False
    if not hasattr(os, "getuid"):
        return True
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
