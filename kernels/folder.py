"""The cache folder of compiled kernels. Its files are executed, so other users must not be able to write it."""

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
    """Return the first folder that only this user can write: `given`, `name` in the user's cache, a temporary one."""
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
    if Path(home).is_absolute():  # else there is no known home
        yield Path(home) / "mlx_engine" / name
    # A fixed name, so that a later process finds the compiled files. Some systems have no temporary folder.
    yield Path(tempfile.gettempdir()) / f"mlx_engine-{name}-{_user()}"


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


def _is_ours(folder: Path) -> bool:
    """Return whether only this user can write the folder and owns it; create it if needed."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            found = folder.lstat()
    except OSError:
        return False
    if not hasattr(os, "getuid"):
        return True
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
