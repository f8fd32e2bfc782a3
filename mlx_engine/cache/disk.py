"""Keep pages and states of the prefix cache in files, so that later processes need not compute known prompts again.

A page has the keys and values of a fixed number of consecutive tokens. A file has one whole page of a group of layers
(layers with the same window), or the recurrent states of all layers after a whole page. The *chain digest* of a page is
the SHA-256 digest of the previous page's chain digest and this page's token ids, so it stands for all tokens up to the
page's end. The name of a file begins with the first half of the chain digest. A file is only used by engines of the
same *identity*: model, backend, types, source code and format. Each identity has a folder. The header of a file repeats
identity and digest, and a checksum covers header and contents.

Pages are written soon after the prompt has been run, not when they are evicted, so the files exist even if the process
is killed. A thread writes the files. On an eager backend, the thread reads a page in place while passes run. A page of
the prefix cache does not change until the cache drops the page and increments the page's *generation*, a counter. If
the generation has changed while the thread read the page, the thread discards the bytes. So passes never wait for the
thread. On a lazy backend, pages are copied when they are queued, up to `MOST_COPIED` bytes.

A file that fails its checks is removed, and its tokens are computed again. Files are not memory-mapped: if another
program truncated a mapped file, this process would be killed, and a mapped file could change between check and use.
Several processes may share a folder, so a file has a temporary name until it is complete. If all files together exceed
a bound, the least recently used files are removed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
import platform
import queue
import stat
import struct
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import metadata, resources
from io import RawIOBase
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.backends.batch import first_visible
from mlx_engine.cache.pool import KVLayer, KVPool, state_of
from mlx_engine.cache.sequence import KVSequence
from mlx_engine.errors import FormatError
from mlx_engine.kernels.files import draft, remove_dead
from mlx_engine.observe import log
from mlx_engine.quant.key_values import DTYPES, row_length

# The default bound on the bytes of all files in a folder.
DEFAULT_NBYTES = 20 << 30
MAGIC, VERSION = b"mlxekv\r\n", 1
ENDING = ".kv"
# README is a file that describes the whole folder; ABOUT, in each identity's folder, is a file that describes the
# identity. The folder DIGESTS has the digests of models' files.
README, ABOUT, DIGESTS = "README.txt", "about.txt", "digests"
TEXT = """\
This folder has keys and values of prompts, written by mlx_engine. A later start of the same model reads them instead of
computing the prompts again. Prompts can be recovered from keys and values: keep this folder as private as the prompts.
Any file may be removed at any time; `mlx_engine cache remove prefixes` removes all.
"""
# The queue has at most MOST_JOBS jobs, and at most MOST_COPIED bytes of a lazy backend's copies. Further writes are
# dropped.
MOST_JOBS, MOST_COPIED = 4096, 256 << 20
# If requests wait, at most this number of bytes is read from files between two passes, which takes about 0.1 s. Models
# with windows or recurrent states are an exception (`DiskPrefixes.piece`).
MOST_READ = 64 << 20
# The number of threads that read files in advance.
READERS = 2
# PAUSE: after a failed write, nothing is written for this number of seconds. TOUCHED: the time of a file's last use is
# updated at most once in this number of seconds.
PAUSE, TOUCHED = 60.0, 60.0
# The last use of each page is set to this number of ns before the last use of the previous page of the prefix, so the
# last page of a prefix is removed first.
STEP_NS = 1_000_000_000
# Seconds that `close` and the end of the process wait for a place in the queue, and then for the writing thread.
PATIENCE = 20.0
# The most seconds that the first prompt waits until the folder has been opened.
BRIEFLY = 0.5
_HEADER = struct.Struct("<8sI32s32s8sQ")
MAGIC_FILE, _FILE = b"mlxekvs\n", struct.Struct("<8sI32sQ")
_CHECK = hashlib.sha256().digest_size
STATE = "s"


class Key(NamedTuple):
    """The key of a file: a page's chain digest (32 bytes), and the number of its layer group as text, or `STATE`."""

    chain: bytes
    part: str

    @property
    def name(self) -> str:
        """The name of the file that has this page or these states."""
        return f"{self.chain[:16].hex()}-{self.part}{ENDING}"


class Piece(NamedTuple):
    """An array in a file: a layer's page, or array `number` of a layer's state.

    A page has the shape (n_arrays, G, tokens, row): G KV heads, and rows of `row_length` elements.
    """

    layer: int
    number: int
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    @property
    def nbytes(self) -> int:
        """The size of the array in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class DiskStats:
    """Counters of a `SavedPrefixes` since its creation.

    Attributes:
        tokens: prompt tokens whose keys and values were read from files.
        read: files that were read.
        written: files that were written.
        dropped: files that were not written: the queue was full, the page was evicted first, or the write failed.
        damaged: files that failed their checks and are not used again.
        removed: files that were removed because all files together were too large, or the disk was full.
        nbytes: bytes of all files, as far as this process knows.
    """

    tokens: int = 0
    read: int = 0
    written: int = 0
    dropped: int = 0
    damaged: int = 0
    removed: int = 0
    nbytes: int = 0


def chains(ids: np.ndarray, page: int) -> list[bytes]:
    """Return the chain digest at the end of each whole page of token ids (n,)."""
    found, last = [], struct.pack("<q", page)
    numbers = np.ascontiguousarray(ids, dtype="<i8")
    for first in range(0, len(ids) - page + 1, page):
        last = hashlib.sha256(last + numbers[first : first + page].tobytes()).digest()
        found.append(last)
    return found


def pieces(pool: KVPool) -> dict[str, list[Piece]]:
    """Map each part of a pool ("0", "1", ... for groups' pages, "s" for states) to the arrays in each of its files."""
    parts: dict[str, list[Piece]] = {str(group): [] for group in range(len(pool.windows))}
    states: list[Piece] = []
    for i, layer in enumerate(pool.layers):
        if isinstance(layer, KVLayer):
            shape = layer.n_arrays, layer.n_kv_heads, pool.page, row_length(layer.head_dim, layer.type)
            parts[str(pool.stores.group_of[i])].append(Piece(i, 0, shape, np.dtype(DTYPES[layer.type])))
        if (state := state_of(layer)) is not None:
            states += [Piece(i, j, shape, np.dtype(np.float32)) for j, shape in enumerate(state.shapes)]
    return {**parts, **({STATE: states} if states else {})}


def source_digest() -> str:
    """Return a digest of the source code that determines the bits of keys and values.

    Any edit changes the digest, so keys and values with other bits are never reused. After an edit that changes no
    bits, the same keys and values are computed again.
    """
    total = hashlib.sha256()
    for package in ("backends", "models", "weights", "config", "quant", "kernels"):
        root = resources.files(f"mlx_engine.{package}")
        pending = [(package, root)]
        while pending:
            where, folder = pending.pop()
            for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
                name = f"{where}/{entry.name}"
                if entry.is_dir() and entry.name != "__pycache__":
                    pending.append((name, entry))
                elif entry.name.endswith((".py", ".metal", ".h")):
                    total.update(f"{name}\n".encode())
                    total.update(entry.read_bytes())
    return total.hexdigest()


def backend_identity(be: Backend) -> dict[str, str]:
    """Return the properties (a map from names to values) of a backend on which the bits of keys and values depend.

    Compiled CPU kernels give the same bits on every processor (docs/exactness.md has the exceptions). The results of
    other backends also depend on the versions of their libraries and on the device.
    """
    found = {"backend": type(be).__name__, "activations": be.activations, "kv_type": be.kv_type, "format": str(VERSION)}
    if type(be).__name__ == "CompiledBackend":
        return found
    libraries = {name: metadata.version(name) for name in ("numpy", "mlx")}
    machine = {"device": f"{be.name} {be.device}", "machine": platform.machine(), "processor": platform.processor()}
    return {**found, **machine, **libraries}


def identity_of(about: Mapping[str, str]) -> tuple[str, bytes]:
    """Return an identity as text, and the SHA-256 digest of this text."""
    text = "".join(f"{key}: {value}\n" for key, value in sorted(about.items()))
    return text, hashlib.sha256(text.encode()).digest()


class SavedPrefixes:
    """Reads the pages and states in files that `Saver` has written. Each of these files has a whole prefix.

    Attributes:
        identity: the digest of the identity (`identity_of`); empty if it is not known yet.
        saved: maps the `Key.name` of each page or state to its file and its offset in the file.
    """

    def __init__(self, identity: bytes = b"") -> None:
        self.identity, self.stats = identity, DiskStats()
        self.saved: dict[str, tuple[Path, int]] = {}

    def add(self, path: Path, identity: bytes) -> list[int]:
        """Add the pages and states in a file of `Saver`; return its token ids. Raise the errors of `opened`."""
        ids, records = opened(path, identity)
        self.identity = identity
        self.saved |= {name: (path, at) for name, at in records.items()}
        return ids

    @property
    def is_here(self) -> bool:
        """Whether pages can be written. This is false, except in a `PrefixFolder`."""
        return False

    def wait_briefly(self) -> None:
        """Do nothing: only a `PrefixFolder` must first be opened."""

    def flush(self) -> None:
        """Do nothing: only a `PrefixFolder` has queued writes."""

    def close(self) -> None:
        """Do nothing: only a `PrefixFolder` has a thread."""

    def has(self, key: Key) -> bool:
        """Return whether a page or a state is on disk."""
        return key.name in self.saved

    def place(self, key: Key) -> tuple[Path, int, int] | None:
        """Return the file and the offset of a page or a state, and the number of bytes to read beyond its end.

        Return None if the page or state is not on disk.
        """
        found = self.saved.get(key.name)
        return None if found is None else (*found, 0)

    def contents(self, key: Key, nbytes: int, buffer: np.ndarray) -> np.ndarray | None:
        """Read a page or a state into a buffer of `room(nbytes)` bytes, and return its contents (nbytes,) uint8.

        Return None if the page or state is missing, damaged or of another identity. This method is thread-safe; the
        thread that runs passes then calls `count` for each result.
        """
        if (place := self.place(key)) is None:
            return None
        path, at, more = place
        try:
            n = read_into(path, memoryview(buffer.data)[: room(nbytes) - 1 + more], at)
        except OSError:
            n = 0
        return sound(header_of(self.identity, key, nbytes), buffer[:n], nbytes)

    def count(self, key: Key, is_sound: bool) -> None:
        """Count a page or a state that was read. If it is damaged, do not read it again."""
        if is_sound:
            self.stats.read += 1
        elif self.saved.pop(key.name, None) is not None:
            self.stats.damaged += 1


class PrefixFolder(SavedPrefixes):
    """A folder of prefixes: reads the files of one identity, writes new ones in a thread, and bounds the folder's size.

    The thread first opens the folder.

    Attributes:
        ours: the folder of the identity, inside of `path`; None until it is open, or if it cannot be used.

    Args:
        path: the folder, which is created if it does not exist. It has a folder for each identity.
        max_nbytes: the largest number of bytes of all files, of all identities.
        model: the name of the model, with which the name of the identity's folder begins.
        identify: a function that returns the properties of the identity. Its argument is a folder in which it may keep
            the digest of the model's files, so that later processes need not read the model's files again.
    """

    def __init__(self, path: Path, max_nbytes: int, model: str, identify: Callable[[Path], Mapping[str, str]]) -> None:
        super().__init__()
        self.path, self.max_nbytes = path, max_nbytes
        self.ours: Path | None = None
        # Maps the name of each existing file to the time when this process last marked the file as used.
        self._known: dict[str, float] = {}
        # `_claimed` has the names of files that are about to be written, `_bad` the names of damaged files that could
        # not be removed.
        self._claimed: set[str] = set()
        self._bad: set[str] = set()
        self._about = ""
        self._n_new, self._paused_until, self._has_warned = 0, 0.0, False
        self._has_waited = False
        self._process, self._is_open = os.getpid(), threading.Event()
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(MOST_JOBS)
        begin = partial(_opened, weakref.ref(self), self._is_open, model, identify)
        self._thread = threading.Thread(target=_work, args=(self._jobs, begin), name="prefixes", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _ended, self._jobs, self._thread, self._is_open, self._process)

    def wait(self, seconds: float = PATIENCE) -> bool:
        """Wait until the folder is open, but at most `seconds`; return whether the folder is open and can be used."""
        return self._is_open.wait(seconds) and self.ours is not None

    def wait_briefly(self) -> None:
        """At the first call, wait until the folder is open, but at most `BRIEFLY` seconds."""
        if not self._has_waited and self.is_here:
            self._has_waited = True
            self._is_open.wait(BRIEFLY)

    def flush(self) -> None:
        """Wait until every offered page and state has been written or dropped."""
        if self.is_here:
            self._jobs.join()

    def close(self) -> None:
        """Let the thread finish the queued writes and end; wait at most twice `PATIENCE` seconds."""
        self._end()

    @property
    def is_here(self) -> bool:
        """Whether the thread runs. It does not run after `close` or in a forked process."""
        return self._end.alive and self._process == os.getpid()

    def do(self, job: Callable[[], None]) -> bool:
        """Queue a job for the thread; return False if the queue is full."""
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return False
        return True

    def open(self, model: str, about: Mapping[str, str]) -> None:
        """Open the folder of an identity. If it does not exist, create it so that only this user can read it.

        Raises:
            OSError: the folder cannot be created, or another user could read or change it.
        """
        self._about, self.identity = identity_of(about)
        plain = "".join(c if c.isalnum() or c in "-._" else "_" for c in model).lstrip(".")[:60]
        ours = self.path / f"{plain}-{self.identity[:8].hex()}"
        ours.mkdir(mode=0o700, exist_ok=True)
        check_private(ours)
        (ours / "drafts").mkdir(mode=0o700, exist_ok=True)
        remove_dead(ours / "drafts")
        self._mark(ours)
        self._known |= dict.fromkeys(_names(ours), 0.0)
        self.stats.nbytes = sum(size for _, size, _ in files_in(self.path))
        self.ours = ours

    def _mark(self, ours: Path) -> None:
        """Write missing descriptions of the folders: `bound` only removes files from folders with a valid `ABOUT`."""
        for file, content in ((self.path / README, TEXT), (ours / ABOUT, self._about)):
            if not (file.exists() if file.name == README else is_ours(ours)):
                with draft(file) as new:
                    new.write_bytes(content.encode())
                    new.replace(file)

    def has(self, key: Key) -> bool:
        """Return whether a page or a state is on disk, perhaps written by another process."""
        name = key.name
        if super().has(key):
            return True
        if self.ours is None or name in self._bad:
            return False
        if name not in self._known and os.path.exists(self.ours / name):  # noqa: PTH110 - Path.exists may raise
            self._known[name] = 0.0
        return name in self._known

    def claim(self, key: Key) -> bool:
        """Mark a file as about to be written. Return False if it exists, is already marked, or cannot be replaced."""
        if key.name in self._known or key.name in self._claimed or key.name in self._bad:
            return False
        self._claimed.add(key.name)
        return True

    def forget(self, key: Key) -> None:
        """Undo `claim`, because the file was not written."""
        self._claimed.discard(key.name)
        self.stats.dropped += 1

    def place(self, key: Key) -> tuple[Path, int, int] | None:
        """Return the place of a page or state. Beyond the end of a file of this folder, one byte is read.

        If there is such a byte, the file is too long, so it is damaged.
        """
        found = super().place(key)
        return (self.ours / key.name, 0, 1) if found is None and self.ours is not None else found

    def count(self, key: Key, is_sound: bool) -> None:
        """Count a page or a state that was read. If its file is damaged, remove the file."""
        if is_sound or super().has(key):
            super().count(key, is_sound)
        elif self.ours is not None:
            self._remove(key)

    def _remove(self, key: Key) -> None:
        """Remove a file that cannot be used. If the removal fails, ignore the file from now on."""
        assert self.ours is not None  # noqa: S101 - `has` has found the file
        path = self.ours / key.name
        self._known.pop(key.name, None)
        if not os.path.lexists(path):
            # Another process has removed this file, and perhaps many others: list the folder again. Otherwise, each
            # missing file would cause another attempt to read the prefix.
            self._known = {name: self._known.get(name, 0.0) for name in _names(self.ours)}
            return
        self.stats.damaged += 1
        with contextlib.suppress(OSError):
            path.unlink()
        if os.path.lexists(path):
            self._bad.add(key.name)

    def write(self, key: Key, content: np.ndarray, used: int) -> None:
        """Write a file, with `used` as the time of its last use in ns, and remove files if the bound is exceeded.

        Raises:
            OSError: the file cannot be written.
        """
        assert self.ours is not None  # noqa: S101 - `DiskPrefixes._write` has checked it
        header = header_of(self.identity, key, content.nbytes)
        (self.ours / "drafts").mkdir(mode=0o700, exist_ok=True)  # programs that clean up remove empty folders
        with draft(self.ours / "drafts" / key.name) as path:
            with path.open("wb", buffering=0) as file:
                write_all(file, header + check(header, content))
                write_all(file, content.data)
            os.utime(path, ns=(used, used))
            path.replace(self.ours / key.name)
        self._known[key.name] = 0.0
        self._claimed.discard(key.name)
        self.stats.written += 1
        self.stats.nbytes += content.nbytes + len(header) + _CHECK
        self._n_new += content.nbytes
        # Other processes also write to the folder, so count the bytes of all files again from time to time.
        if self.stats.nbytes > self.max_nbytes or self._n_new > self.max_nbytes // 16:
            self.bound()

    def bound(self, *, is_full: bool = False) -> None:
        """If all files together exceed the bound, remove the least recently used ones, down to 15/16 of the bound.

        If the disk is full (`is_full`), always remove files, down to 15/16 of the bound or of the present size,
        whichever is smaller.
        """
        assert self.ours is not None  # noqa: S101 - called after a write
        self._mark(self.ours)
        found = sorted(files_in(self.path))
        self.stats.nbytes, self._n_new = sum(size for _, size, _ in found), 0
        most = min(self.max_nbytes, self.stats.nbytes) if is_full else self.max_nbytes
        if is_full or self.stats.nbytes > most:
            most -= -(-most // 16)
        for _, size, path in found:
            if self.stats.nbytes <= most:
                return
            with contextlib.suppress(OSError):
                path.unlink()
                self.stats.removed += 1
            self.stats.nbytes -= size
            if path.parent == self.ours:
                self._known.pop(path.name, None)

    def use(self, chain: Sequence[bytes], parts: Sequence[str]) -> None:
        """Mark the files of a prefix as used now, unless they were marked in the last `TOUCHED` seconds."""
        now, at = time.monotonic(), time.time_ns()
        for i, key in ((i, Key(end, part)) for i, end in enumerate(chain) for part in parts):
            if self.ours is not None and now - self._known.get(key.name, now) > TOUCHED:
                self._known[key.name] = now
                with contextlib.suppress(OSError):
                    os.utime(self.ours / key.name, ns=(at - i * STEP_NS, at - i * STEP_NS))

    def keep(self, key: Key, content: np.ndarray, used: int) -> None:
        """Write a file. If this fails, warn, and write nothing for `PAUSE` seconds."""
        if time.monotonic() < self._paused_until:
            self.forget(key)
            return
        try:
            self.write(key, content, used)
        except OSError as error:
            self.forget(key)
            self.warn(error)
            self._paused_until = time.monotonic() + PAUSE
            if error.errno in (errno.ENOSPC, errno.EDQUOT):  # the bound may be larger than the disk
                with contextlib.suppress(OSError):  # on a full disk, the description of the folder cannot be written
                    self.bound(is_full=True)

    def warn(self, error: Exception) -> None:
        """Warn that prefixes are not kept, but only at the first call."""
        if not self._has_warned:
            self._has_warned = True
            reason = getattr(error, "strerror", None) or error
            log.warn(f"{self.path}: prefixes are not kept there ({reason}); prompts are computed")


class DiskPrefixes:
    """Reads and writes prefixes on disk for the prefix cache of one pool.

    Its methods run in the thread that runs passes, except `_write`, which runs in the writing thread.
    """

    def __init__(self, pool: KVPool, folder: SavedPrefixes) -> None:
        self._pool, self._backend, self.folder = pool, pool.backend, folder
        self._pieces = pieces(pool)
        self._nbytes = {part: sum(piece.nbytes for piece in of) for part, of in self._pieces.items()}
        self._n_copied, most = 0, room(max(self._nbytes.values(), default=0))
        self._buffers = [np.empty(most, dtype=np.uint8) for _ in range(READERS + 1)]

    @property
    def piece(self) -> int:
        """The most pages that are read at a time if other requests wait."""
        # With windows or states, a prefix can end at few positions, so it is always read as a whole.
        if STATE in self._pieces or any(window is not None for window in self._pool.windows):
            return sys.maxsize
        return max(1, MOST_READ // max(1, sum(self._nbytes.values())))

    def chain(self, ids: np.ndarray) -> list[bytes]:
        """Return the chain digest at the end of each whole page of token ids (n,)."""
        return chains(ids, self._pool.page)

    # ---- reading ----

    def reach(self, chain: Sequence[bytes], first: int, most: int) -> int:
        """Return the number of pages of a prefix that can be used if pages that are not in memory are read from files.

        Groups without a window need every page. Groups with a window need only the pages that later tokens read. Models
        with recurrent states need the states after the last page.

        Args:
            chain: the chain digests of the prefix's pages.
            first: the number of pages that are in memory already; the result is at least this.
            most: at most this number of tokens will be used; the last of them may be inside a page.
        """
        n = len(chain)
        self.folder.wait_briefly()
        for group, window in enumerate(self._pool.windows):
            if window is None:
                n = next((p for p in range(first, n) if not self.folder.has(Key(chain[p], str(group)))), n)
        page, windows = self._pool.page, self._pool.windows
        # The last page may end after more than `most` tokens. Leave this page out if the model has states, which are
        # stored only at page ends. Only the pages are read that are in the window of the token after the last page. So
        # also leave the last page out if the window of the token at position `most` begins in an earlier page.
        reaches = any(first_visible(of, most) // page < first_visible(of, n * page) // page for of in windows)
        if n * page > most and (STATE in self._pieces or reaches):
            n -= 1
        while n > first and not self._ends_at(chain, first, n):
            n -= 1
        return n

    def _ends_at(self, chain: Sequence[bytes], first: int, n: int) -> bool:
        """Return whether a prefix can end after n pages: files must have the states there, and the pages in windows."""
        for group, window in enumerate(self._pool.windows):
            begin = n if window is None else max(first, first_visible(window, n * self._pool.page) // self._pool.page)
            if not all(self.folder.has(Key(chain[p], str(group))) for p in range(begin, n)):
                return False
        return STATE not in self._pieces or self.folder.has(Key(chain[n - 1], STATE))

    def _needed(self, chain: Sequence[bytes], first: int, n: int) -> dict[int, list[Key]]:
        """Map the number of each page of a prefix, `first` to n - 1, to the keys of the files to read for this page."""
        page, windows = self._pool.page, self._pool.windows
        begins = [max(first, first_visible(window, n * page) // page) for window in windows]
        keys = {p: [Key(chain[p], str(g)) for g, begin in enumerate(begins) if p >= begin] for p in range(first, n)}
        if STATE in self._pieces:
            keys[n - 1].append(Key(chain[n - 1], STATE))
        return keys

    def fill(self, kv: KVSequence, chain: Sequence[bytes]) -> bool:
        """Read the missing pages of a prefix from files, and append them to a sequence that has its first pages.

        Return False if a file is unusable.

        Raises:
            CacheFullError: the pool has too few free pages.
        """
        page = self._pool.page
        first, n = kv.length // page, len(chain)
        needed = self._needed(chain, first, n)
        with contextlib.closing(self._read([key for p in range(first, n) for key in needed[p]])) as contents:
            for p in range(first, n):
                kv.begin(page)
                slots = {str(group): int(table[p]) for group, table in enumerate(kv.tables)}
                slots[STATE] = kv.state.newest.slot
                if not all(self._restore(key, next(contents), slots[key.part]) for key in needed[p]):
                    kv.roll_back(page)
                    return False
                kv.commit(page)
        return True

    def _read(self, keys: Sequence[Key]) -> Generator[np.ndarray | None]:
        """Yield the contents of files, or None for a file that cannot be used. An item is valid until the next one.

        Several threads read and check the next files: computing a checksum takes longer than reading and copying.
        """
        waiting, left = deque[tuple[Future[np.ndarray | None], np.ndarray]](), iter(keys)
        with ThreadPoolExecutor(READERS, "prefix-reader") as readers:

            def begin(buffer: np.ndarray) -> None:
                if (key := next(left, None)) is not None:
                    read = readers.submit(self.folder.contents, key, self._nbytes[key.part], buffer)
                    waiting.append((read, buffer))

            try:
                for buffer in self._buffers:
                    begin(buffer)
                while waiting:
                    read, buffer = waiting.popleft()
                    yield read.result()
                    begin(buffer)
            finally:
                readers.shutdown(cancel_futures=True)

    def _restore(self, key: Key, content: np.ndarray | None, slot: int) -> bool:
        """Copy `content` to the page with first slot `slot`, or to the states in `slot`.

        Return False if `content` is None.
        """
        self.folder.count(key, content is not None)
        if content is None:
            return False
        at, stores, states = 0, self._pool.stores.layers, self._pool.states.stores
        for piece in self._pieces[key.part]:
            values = content[at : at + piece.nbytes].view(piece.dtype).reshape(piece.shape)
            at += piece.nbytes
            if key.part == STATE:
                self._backend.state_restore(states[piece.layer][piece.number], slot, values)
            else:
                stores[piece.layer] = self._backend.kv_restore(stores[piece.layer], slot, values)
        return True

    # ---- writing ----

    def offer(self, chain: Sequence[bytes], part: str, slot: int, generations: np.ndarray, number: int) -> None:
        """Queue a page or states to be written, unless their file exists or is already queued.

        Args:
            chain: the chain digests of the prefix, up to this page.
            part: the group of layers, or `STATE`.
            slot: the first slot of the page, or the slot of the states.
            generations: the generations of all pages of the group, or of all slots of states.
            number: the index of the page or slot in `generations`. Before the contents change, `generations[number]`
                is incremented.
        """
        key, generation = Key(chain[-1], part), generations[number]
        folder = self.folder
        if not isinstance(folder, PrefixFolder) or not folder.is_here or not folder.claim(key):
            return
        nbytes = self._nbytes[key.part]
        content = None
        if self._backend.lazy and self._n_copied + nbytes <= MOST_COPIED:
            content = self.copied(key.part, slot)
            self._n_copied += nbytes
        if content is None and self._backend.lazy:
            folder.forget(key)
            return

        def is_current() -> bool:
            return bool(generations[number] == generation)

        used = time.time_ns() - (len(chain) - 1) * STEP_NS
        if not folder.do(partial(self._write, folder, key, slot, is_current, content, used)):
            self._n_copied -= 0 if content is None else nbytes
            folder.forget(key)

    def use(self, chain: Sequence[bytes]) -> None:
        """Queue a job that marks the files of a prefix as used."""
        folder = self.folder
        if chain and isinstance(folder, PrefixFolder) and folder.is_here:
            folder.do(partial(folder.use, chain, tuple(self._pieces)))

    def copied(self, part: str, slot: int) -> np.ndarray:
        """Return a copy of a page or of states as a vector of bytes, in the order in which a file has them."""
        content, at = np.empty(self._nbytes[part], dtype=np.uint8), 0
        for piece in self._pieces[part]:
            if part == STATE:
                values = self._backend.state_read(self._pool.states.stores[piece.layer][piece.number], slot)
            else:
                values = self._backend.kv_read(self._pool.stores.layers[piece.layer], slot, self._pool.page)
            target = content[at : at + piece.nbytes].view(piece.dtype).reshape(piece.shape)
            np.copyto(target, values, casting="no")
            at += piece.nbytes
        return content

    def _write(
        self,
        folder: PrefixFolder,
        key: Key,
        slot: int,
        is_current: Callable[[], bool],
        content: np.ndarray | None,
        used: int,
    ) -> None:
        """Write a file, in the writing thread. If `content` is None, read the page now, unless the cache dropped it."""
        if content is not None:
            self._n_copied -= content.nbytes
        if content is None and is_current():
            content = self.copied(key.part, slot)
            if not is_current():  # the page was dropped while it was read, and perhaps overwritten
                content = None
        if content is None or folder.ours is None:
            folder.forget(key)
            return
        folder.keep(key, content, used)


def header_of(identity: bytes, key: Key, nbytes: int) -> bytes:
    """Return the header of a file."""
    return _HEADER.pack(MAGIC, VERSION, identity, key.chain, key.part.encode().ljust(8, b"\0"), nbytes)


def sound(header: bytes, read: np.ndarray, nbytes: int) -> np.ndarray | None:
    """Return the contents (nbytes,) of the bytes read from a file; None if header, length or checksum are wrong."""
    start = len(header) + _CHECK
    content = read[start:]
    is_sound = len(content) == nbytes and bytes(read[:start]) == header + check(header, content)
    return content if is_sound else None


def write_all(file: RawIOBase, content: bytes | memoryview) -> None:
    """Write all bytes to an unbuffered file."""
    view = memoryview(content)
    while len(view):
        view = view[file.write(view) or 0 :]


def room(nbytes: int) -> int:
    """Return the size of a buffer for a file with `nbytes` bytes of contents, and for one byte beyond (`place`)."""
    return _HEADER.size + _CHECK + nbytes + 1


def check(header: bytes, content: np.ndarray) -> bytes:
    """Return the checksum of a file with this header and these contents."""
    total = hashlib.sha256(header)
    total.update(content.data)
    return total.digest()


def read_into(path: Path, buffer: memoryview, at: int = 0) -> int:
    """Read a regular file from offset `at` on, until the buffer is full or the file ends; return the number of bytes.

    Raises:
        OSError: the file cannot be read, or is no regular file.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(path, flags), "rb", 0) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path}: no regular file")
        file.seek(at)
        n = 0
        while n < len(buffer) and (read := file.readinto(buffer[n:])):
            n += read
        return n


def check_private(folder: Path) -> None:
    """Check that no other user can read or change a folder.

    Raises:
        PermissionError: another user can read or change the folder, or it is no folder.
    """
    found = folder.lstat()
    is_ours = not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & 0o077)
    if not stat.S_ISDIR(found.st_mode) or not is_ours:
        raise PermissionError(f"{folder.name} is not a folder that this user alone can read and write")


def _names(ours: Path) -> list[str]:
    """Return the names of the files in the folder of an identity."""
    try:
        return [entry.name for entry in os.scandir(ours) if entry.name.endswith(ENDING)]
    except OSError:
        return []


def is_ours(folder: Path) -> bool:
    """Return whether a folder belongs to an identity: its name ends with the digest of the file `ABOUT` in it."""
    try:
        text = (folder / ABOUT).read_bytes() if not folder.is_symlink() else b""
    except OSError:
        return False
    return folder.name.endswith(f"-{hashlib.sha256(text).hexdigest()[:16]}")


def files_in(path: Path) -> list[tuple[int, int, Path]]:
    """Return the time of the last use in ns, the size in bytes and the path of each file in a folder of prefixes."""
    found = []
    with contextlib.suppress(OSError):
        for ours in sorted(path.iterdir()):
            if is_ours(ours):
                for entry in os.scandir(ours):
                    if entry.name.endswith(ENDING):
                        with contextlib.suppress(OSError):
                            about = entry.stat(follow_symlinks=False)
                            found.append((about.st_mtime_ns, about.st_size, Path(entry.path)))
    return found


# ---- one file with a whole prefix ----


class Saver:
    """Writes a single file with the pages and states that a prefix cache offers, for `Engine.save_prefix`."""

    def __init__(self, file: RawIOBase, disk: DiskPrefixes, identity: bytes, ids: np.ndarray) -> None:
        self._file, self._disk, self._identity = file, disk, identity
        self.n_pages = 0
        numbers = np.ascontiguousarray(ids, dtype="<i8").tobytes()
        head = _FILE.pack(MAGIC_FILE, VERSION, identity, len(ids)) + numbers
        write_all(file, head + hashlib.sha256(head).digest())

    def chain(self, ids: np.ndarray) -> list[bytes]:
        """Return the chain digest at the end of each whole page of token ids (n,)."""
        return self._disk.chain(ids)

    def offer(self, chain: Sequence[bytes], part: str, slot: int, generations: np.ndarray, number: int) -> None:
        """Write a page or states. The arguments are those of `DiskPrefixes.offer`."""
        _ = generations, number  # not needed, because no pass runs meanwhile
        content, key = self._disk.copied(part, slot), Key(chain[-1], part)
        header = header_of(self._identity, key, content.nbytes)
        write_all(self._file, header + check(header, content))
        write_all(self._file, content.data)
        self.n_pages = max(self.n_pages, len(chain))


def opened(path: Path, identity: bytes) -> tuple[list[int], dict[str, int]]:
    """Return the token ids in a file of `Saver`, and a map from the `Key.name` of each page and state to its offset.

    Pages after a damaged header are left out. Contents are checked when they are read.

    Raises:
        FormatError: `Saver` did not write the file, or wrote it for another model, version or type of keys and values;
            or the token ids are damaged.
        OSError: the file cannot be read.
    """
    where, again = str(path), "remove it, or name another file"
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        head = file.read(_FILE.size)
        fields = _FILE.unpack(head) if len(head) == _FILE.size else (b"", 0, b"", 0)
        if fields[0] != MAGIC_FILE or not 0 <= fields[3] <= size // 8:
            raise FormatError(where=where, expected="saved keys and values", found="a file of another kind", hint=again)
        if fields[1:3] != (VERSION, identity):
            found = "those of another model, of another type of keys and values, or of another version"
            raise FormatError(where=where, expected="keys and values of this model", found=found, hint=again)
        head += file.read(8 * fields[3])
        if file.read(_CHECK) != hashlib.sha256(head).digest():
            raise FormatError(where=where, expected="undamaged token ids", found="a wrong checksum", hint=again)
        ids, records = np.frombuffer(head[_FILE.size :], dtype="<i8").tolist(), dict[str, int]()
        while len(header := file.read(_HEADER.size)) == _HEADER.size:
            magic, _, _, chain, part, nbytes = _HEADER.unpack(header)
            at = file.tell() - len(header)
            if magic != MAGIC or at + room(nbytes) - 1 > size:
                break
            records[Key(chain, part.rstrip(b"\0").decode("ascii", "replace")).name] = at
            file.seek(_CHECK + nbytes, 1)
    return ids, records


def parts_of(path: Path) -> list[Path]:
    """Return the paths that this module has created in a folder of prefixes: identities' folders, digests, README.

    Return [] if there is no folder of an identity.
    """
    digests, readme = path / DIGESTS, path / README
    try:
        ours = list(filter(is_ours, sorted(path.iterdir())))
        others = [digests] if digests.is_dir() and {file.suffix for file in digests.iterdir()} <= {".sha256"} else []
        others += [readme] if readme.is_file() and readme.read_bytes() == TEXT.encode() else []
    except OSError:
        return []
    return [*ours, *others] if ours else []


def _work(jobs: queue.Queue[Callable[[], None] | None], begin: Callable[[], None]) -> None:
    """Run `begin`, then jobs until the queue returns None. This is the writing thread."""
    if sys.platform == "linux":  # a low priority, because passes need the cores
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
    begin()
    while (job := jobs.get()) is not None:
        try:
            job()
        except Exception as error:  # no error may end the thread, because `flush` waits for its jobs
            log.warn(f"prefixes on disk: {error}")
        del job  # the job refers to the pool, whose memory would otherwise stay in use
        jobs.task_done()


def _opened(
    folder: weakref.ref[PrefixFolder],
    is_open: threading.Event,
    model: str,
    identify: Callable[[Path], Mapping[str, str]],
) -> None:
    """Open a folder, in the writing thread, unless the `PrefixFolder` is garbage-collected meanwhile."""
    try:
        if (given := folder()) is None:
            return
        path = given.path
        del given
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        private = path / DIGESTS
        private.mkdir(mode=0o700, exist_ok=True)
        check_private(private)
        about = identify(private)  # reads the model's files
        if (still := folder()) is not None:
            still.open(model, about)
    except Exception as error:  # an error of the disk, or the model's files have been removed
        if (still := folder()) is not None:
            still.warn(error)
    finally:
        is_open.set()


def _ended(
    jobs: queue.Queue[Callable[[], None] | None], thread: threading.Thread, is_open: threading.Event, process: int
) -> None:
    """End the writing thread after its jobs; wait for it, unless it still opens the folder. Do nothing after a fork."""
    if process != os.getpid():
        return
    with contextlib.suppress(queue.Full):
        jobs.put(None, timeout=PATIENCE)
    if thread is not threading.current_thread() and is_open.is_set():
        thread.join(PATIENCE)
