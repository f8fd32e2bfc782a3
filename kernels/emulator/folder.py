"""Where compiled kernels are kept."""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import tempfile
from functools import cache
from pathlib import Path


def cache_folder() -> Path:
    """The user's cache folder, else a temporary one: the first that is ours to write."""
    return _folder(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111 - Path's raises


@cache
def _folder(home: str) -> Path:
    if Path(home).is_absolute():  # else nobody knows where home is
        ours = Path(home) / "mlx_engine" / "emulator"
        if _is_ours(ours):
            return ours
    # The same folder each time, so that what is compiled there is found again.
    ours = Path(tempfile.gettempdir()) / f"mlx_engine-emulator-{os.getuid()}"
    if not _is_ours(ours):
        ours = Path(tempfile.mkdtemp(prefix="mlx_engine-emulator-"))
        atexit.register(shutil.rmtree, ours, ignore_errors=True)
    return ours


def _is_ours(folder: Path) -> bool:
    """Whether it can be written, and nobody else has made it: compiled code is run as it lies there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            found = folder.lstat()
            return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    except OSError:
        return False
