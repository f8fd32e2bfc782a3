"""Buffers between unmapped pages, so that a read or write out of bounds faults at once."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

PAGE = mmap.PAGESIZE
# The default alignment of buffers in bytes. Kernels may load 16 bytes at a time, because MLX aligns its buffers so.
ALIGNMENT = 16
# Unused bytes in the pages of an output are canaries. They have this value; read as floats, they are NaN.
CANARY = 0xFF
_CANARIES = bytes([CANARY]) * PAGE
# The unused bytes in the pages of an input have another value, also NaN: if a kernel copies them past the end of an
# output, the output's canaries change.
_BESIDE_INPUTS = b"\xc1\xff" * (PAGE // 2)
RESIDENT = 64 << 10  # copies of inputs of at least this many bytes are kept for later runs
TOTAL = 2 << 30  # after a run, all kept copies together have at most this many bytes

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_NONE, _READ, _READ_WRITE = 0, mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
# Bytes of unmapped memory (a guard) on either side of a buffer, so that a wrong index reaches no other buffer. A guard
# takes addresses but, except in QEMU, no memory. LARGE_GUARD is the reach of any 32-bit index of 16-byte elements, also
# of an unsigned index that has wrapped from -1 to 2**32 - 1. Large guards are used only in processes with 2**47
# addresses, and only while all buffers and guards take at most a quarter of these addresses.
LARGE_GUARD, SMALL_GUARD = 64 << 30, 64 << 20
_SPACE = 1 << 47


class Bounds(NamedTuple):
    """The address and size of a buffer's mapped pages, and of the bytes in them that a kernel may access."""

    pages: int
    page_bytes: int
    start: int
    bytes: int


def _mapped(size: int) -> int | None:
    """Map `size` bytes without access; return their address, or None if there are no addresses left."""
    base: int = _libc.mmap(None, size, _NONE, _FLAGS, -1, 0)
    return None if base in (None, ctypes.c_void_p(-1).value) else base


@cache
def _has_large_space() -> bool:
    """Return whether the process has 2**47 addresses. In QEMU, it has fewer, and guards take memory."""
    base = _mapped(PAGE)
    if base is not None:
        _libc.munmap(base, PAGE)
    return base is not None and base >= _SPACE // 2


class Buffer:
    """Mapped pages with a guard (unmapped memory) before and after them.

    The usable bytes begin directly after the first guard, or end as close to the second guard as their alignment allows
    (`place`).

    Attributes:
        start: the address of the first usable byte.
        bytes: the number of usable bytes.
        guard: the number of unmapped bytes on either side of the pages.
    """

    _reserved = 0  # bytes of addresses that all buffers and their guards take

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        base, self.guard = self._reserve(capacity)
        self._first: int = base + self.guard
        self._access = _NONE
        self.start: int = self._first
        self.bytes = 0

    def _reserve(self, capacity: int) -> tuple[int, int]:
        """Reserve addresses for a guard, `capacity` bytes and a guard; return the first guard's address and size."""
        for guard in (LARGE_GUARD, SMALL_GUARD):
            size = capacity + 2 * guard
            if guard == LARGE_GUARD and (Buffer._reserved + size > _SPACE // 4 or not _has_large_space()):
                continue
            if (base := _mapped(size)) is not None:
                Buffer._reserved += size
                weakref.finalize(self, Buffer._release, base, size)
                return base, guard
        raise MemoryError(f"the kernel emulator: no {size:,} bytes of addresses left")

    @staticmethod
    def _release(base: int, size: int) -> None:
        _libc.munmap(base, size)
        Buffer._reserved -= size

    @property
    def bounds(self) -> Bounds:
        """The addresses and sizes of the pages and of the usable bytes."""
        return Bounds(self._first, self.capacity, self.start, self.bytes)

    def allow(self, *, write: bool) -> None:
        """Make the pages writable or read-only."""
        access = _READ_WRITE if write else _READ
        if access != self._access:
            if _libc.mprotect(self._first, self.capacity, access):
                raise MemoryError(f"the kernel emulator: no memory for {self.capacity:,} bytes")
            self._access = access

    def place(self, size: int, *, at_end: bool, alignment: int = ALIGNMENT) -> None:
        """Choose the place of `size` usable bytes, set canaries around them, and make the pages writable.

        Without `at_end`, the bytes begin where the pages begin. With `at_end`, they begin at the last multiple of
        `alignment` at which they fit into the pages; with an alignment of 1, they end exactly at the guard.
        """
        self.allow(write=True)
        self.bytes = size
        self.start = self._first
        if at_end:
            self.start += (self.capacity - size) // alignment * alignment
        for start, length in self._slack():
            ctypes.memset(start, CANARY, length)

    def mark_as_input(self) -> None:
        """Replace the canaries by the bytes that fill the unused pages of an input (`_BESIDE_INPUTS`)."""
        for start, length in self._slack():
            ctypes.memmove(start, _BESIDE_INPUTS, length)

    def _slack(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the unused ranges of the pages before and after the usable bytes."""
        end = self.start + self.bytes
        return (self._first, self.start - self._first), (end, self._first + self.capacity - end)

    def damaged(self) -> int | None:
        """Return the offset from `start` of the first changed canary (a byte written out of bounds), or None."""
        for start, length in self._slack():
            found = ctypes.string_at(start, length)
            if found != _CANARIES[:length]:
                return int(start + next(i for i, byte in enumerate(found) if byte != CANARY) - self.start)
        return None


def capacity_for(size: int) -> int:
    """Return a size rounded up to whole pages, at least one page."""
    return max(1, -(-size // PAGE)) * PAGE


class _Key(NamedTuple):
    address: int
    size: int
    at_end: bool
    alignment: int  # 1 if the place does not depend on the alignment


class Pool:
    """Lends buffers. Small ones are reused; copies of large inputs (at least RESIDENT bytes) are kept for later runs.

    A kept copy is found by the address of the input. Before the copy is used again, its bytes are compared with the
    input: MLX may have reused the address for another array, or NumPy may have changed the input.
    """

    def __init__(self, total: int = TOTAL) -> None:
        self.total = total
        self.copies = 0  # how often a large input was copied
        self._resident: OrderedDict[_Key, Buffer] = OrderedDict()
        self._free: dict[int, list[Buffer]] = {}
        self._lent: list[Buffer] = []
        # The keys of kept copies whose owner is deleted; finalizers append to it at any time.
        self._dead: deque[_Key] = deque()

    @contextmanager
    def lending(self) -> Iterator[Pool]:
        """Yield this pool; on exit, take back all buffers that were lent since; `_forget` then drops some copies."""
        try:
            yield self
        finally:
            for buffer in self._lent:
                if buffer.capacity < RESIDENT:
                    self._free.setdefault(buffer.capacity, []).append(buffer)
            self._lent.clear()
            self._forget()

    @property
    def resident_bytes(self) -> int:
        """The bytes of all kept copies of large inputs."""
        return sum(buffer.capacity for buffer in self._resident.values())

    def writable(self, size: int, *, at_end: bool, alignment: int = ALIGNMENT) -> Buffer:
        """Return a writable buffer with undefined content."""
        capacity = capacity_for(size)
        free = self._free.get(capacity)
        buffer = free.pop() if free else Buffer(capacity)
        buffer.place(size, at_end=at_end, alignment=alignment)
        self._lent.append(buffer)
        return buffer

    def readable(
        self, address: int, size: int, owner: Any = None, *, at_end: bool, alignment: int = ALIGNMENT
    ) -> Buffer:
        """Return a read-only copy of `size` bytes at `address`.

        `owner` is the object that has these bytes. If the copy is kept, `lending` drops it after `owner` is deleted.
        """
        if size < RESIDENT:
            buffer = self.writable(size, at_end=at_end, alignment=alignment)
            ctypes.memmove(buffer.start, address, size)
            buffer.mark_as_input()
        else:
            buffer = self._keep(_Key(address, size, at_end, alignment if at_end and size % alignment else 1), owner)
        buffer.allow(write=False)
        return buffer

    def _keep(self, key: _Key, owner: Any) -> Buffer:
        buffer = self._resident.get(key)
        if buffer is None:
            buffer = self._resident[key] = Buffer(capacity_for(key.size))
            if owner is not None:
                weakref.finalize(owner, self._dead.append, key).atexit = False
        elif not _libc.memcmp(buffer.start, key.address, key.size):
            self._resident.move_to_end(key)
            return buffer
        self.copies += 1
        buffer.place(key.size, at_end=key.at_end, alignment=key.alignment)
        ctypes.memmove(buffer.start, key.address, key.size)
        buffer.mark_as_input()
        self._resident.move_to_end(key)
        return buffer

    def _forget(self) -> None:
        """Drop copies whose owner is deleted; then drop the least recently used until at most `total` bytes remain."""
        while self._dead:
            self._resident.pop(self._dead.popleft(), None)
        size = self.resident_bytes
        while size > self.total and self._resident:
            size -= self._resident.popitem(last=False)[1].capacity


pool = Pool()  # used only by the thread that holds the lock `runtime.turn`
