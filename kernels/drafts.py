"""Drafts: files and folders that are written beside their place and moved there when they are complete.

The process that writes a draft holds a lock on it, which ends with the process, however it ends. A draft that can be
locked has been left by a dead process: the next one that writes to the same folder removes it. File systems without
locks keep their drafts. A process number in the name would not do: numbers are used again, and differ in containers.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

ENDING = ".mlx_engine.part"


@contextlib.contextmanager
def draft(target: Path, *, is_folder: bool = False) -> Iterator[Path]:
    """Provide an empty hidden file or folder beside `target`, for the caller to fill and to move to `target`.

    What is still there at the end is removed. Drafts that dead processes have left in the same folder are removed
    first.

    Raises:
        OSError: the draft cannot be created.
    """
    remove_dead(target.parent)
    path, lock = _created(target, is_folder)
    try:
        yield path
    finally:
        _remove(path)
        os.close(lock)


def remove_dead(folder: Path) -> None:
    """Remove the drafts that dead processes have left in a folder; those of living processes are locked."""
    for path in drafts_in(folder):
        with contextlib.suppress(OSError):
            # Something else of such a name must not block.
            lock = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                if _locked(lock):
                    _remove(path)
            finally:
                os.close(lock)


def drafts_in(folder: Path) -> list[Path]:
    """Return the drafts in a folder, also those that are being written."""
    try:
        return sorted(path for path in folder.glob(f".*{ENDING}") if not path.is_symlink())
    except OSError:
        return []


def _created(target: Path, is_folder: bool) -> tuple[Path, int]:
    """Create a draft; return its path and the descriptor that holds its lock."""
    while True:
        path = target.with_name(f".{target.name}.{secrets.token_hex(4)}{ENDING}")
        if is_folder:
            path.mkdir()
            try:
                lock = os.open(path, os.O_RDONLY)
            except FileNotFoundError:  # another process has taken it for a dead one already
                continue
        else:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        _locked(lock)
        # Between creation and lock another process may have taken the draft for a dead one.
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(lock).st_ino:
                return path, lock
        os.close(lock)


def _locked(descriptor: int) -> bool:
    """Lock a file or a folder; return whether this was possible."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
