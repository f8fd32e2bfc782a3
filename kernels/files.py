"""Write files safely through drafts, and find a safe cache folder for compiled kernels.

A draft is a temporary file or folder beside its target path; it is renamed to the target when it is complete. The
process that writes a draft locks it. The system releases the lock when the process ends, even by a crash. So a draft
that can be locked is left over from a dead process. The next process that makes a draft in the same folder removes
it. On file systems without locks, such drafts remain. (Process ids in file names could not replace locks: ids are
reused.)

The files of the cache folder are executed, so other users must not be able to write them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

ENDING = ".mlx_engine.part"


@contextlib.contextmanager
def draft(target: Path, *, is_folder: bool = False) -> Iterator[Path]:
    """Create an empty hidden file or folder beside `target`, for the caller to fill and then move to `target`.

    On exit, a draft that the caller has not moved is removed. Raise OSError if the draft cannot be created.
    """
    remove_dead(target.parent)
    path, lock = _created(target, is_folder)
    try:
        yield path
    finally:
        _remove(path)
        os.close(lock)


def remove_dead(folder: Path) -> None:
    """Remove the drafts of dead processes in a folder."""
    for path in drafts_in(folder):
        with contextlib.suppress(OSError):
            # O_NONBLOCK, because the path may be a named pipe, and opening a pipe would wait for a writer.
            lock = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                if _locked(lock):
                    _remove(path)
            finally:
                os.close(lock)


def drafts_in(folder: Path) -> list[Path]:
    """Return all drafts in a folder, including those of living processes."""
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
            except FileNotFoundError:  # another process has removed the folder, which was not locked yet
                continue
        else:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        _locked(lock)
        # Before the draft was locked, another process may have locked and removed it. Then try again.
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(lock).st_ino:
                return path, lock
        os.close(lock)


def _locked(descriptor: int) -> bool:
    """Try to lock a file or a folder; return whether this succeeded."""
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


def cache_folder(name: str, *, given: str | None = None) -> Path:
    """Return `given` if usable, else a folder for `name` in the user's cache, else one in the temporary folder.

    A folder is usable if this user owns it and can write to it, and no other user can. If all three are unusable,
    create a folder with a random name in the temporary folder, and remove it at exit.
    """
    # `os.path.expanduser` keeps the `~` if the home folder is unknown; `Path.expanduser` would raise an error.
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
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
    if Path(home).is_absolute():  # `home` is relative if the home folder is unknown or XDG_CACHE_HOME is invalid
        yield Path(home) / "mlx_engine" / name
    # `gettempdir` raises an error if there is no temporary folder, so call it only if no folder above is usable.
    yield Path(tempfile.gettempdir()) / f"mlx_engine-{name}-{_user()}"


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


def _is_ours(folder: Path) -> bool:
    """Create the folder if needed; return whether this user owns it and can write to it, and no other user can."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            found = folder.lstat()
    except OSError:
        return False
    if not hasattr(os, "getuid"):
        return True
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
