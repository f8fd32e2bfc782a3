"""Buffers between unmapped pages, so that a read or write beyond either end is noticed when it happens."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

PAGE = mmap.PAGESIZE
# Unmapped memory on either side, so much that an index gone wrong still hits it. Only addresses are spent.
GUARD = 64 << 20
# MLX's buffers begin at multiples of this, and kernels may load 16 bytes at a time.
ALIGNMENT = 16
# What fills our pages around a buffer; NaN to who reads it.
CANARY = 0xFF
_CANARIES = bytes([CANARY]) * PAGE
# Inputs of at least as many bytes are kept between calls, up to the total.
RESIDENT = 64 << 10
TOTAL = 2 << 30

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_NONE, _READ, _READ_WRITE = 0, mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class Buffer:
    """Pages of our own with a place for `bytes` bytes at `start`, against the end's or the beginning's guard.

    Attributes:
        start: the address of the first byte.
        bytes: how many may be used.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        size = capacity + 2 * GUARD
        base: int = _libc.mmap(None, size, _NONE, _FLAGS, -1, 0)
        if base in (None, ctypes.c_void_p(-1).value):
            raise MemoryError(f"the kernel emulator: no {size:,} bytes of addresses left")
        self._first: int = base + GUARD
        weakref.finalize(self, _libc.munmap, base, size)
        self._access = _NONE
        self.start: int = self._first
        self.bytes = 0

    def allow(self, *, write: bool) -> None:
        """Make it writable, or read-only."""
        access = _READ_WRITE if write else _READ
        if access != self._access:
            if _libc.mprotect(self._first, self.capacity, access):
                raise MemoryError(f"the kernel emulator: no memory for {self.capacity:,} bytes")
            self._access = access

    def place(self, size: int, *, at_end: bool, alignment: int = ALIGNMENT) -> None:
        """Decide where its bytes lie, and set canaries around them; it is writable afterwards."""
        self.allow(write=True)
        self.bytes = size
        self.start = self._first
        if at_end:
            self.start += (self.capacity - size) // alignment * alignment
        for start, length in self._slack():
            ctypes.memset(start, CANARY, length)

    def _slack(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """What lies before and behind within our pages, less than a page in all."""
        end = self.start + self.bytes
        return (self._first, self.start - self._first), (end, self._first + self.capacity - end)

    def damaged(self) -> int | None:
        """The offset of a byte outside that was written, or None."""
        for start, length in self._slack():
            found = ctypes.string_at(start, length)
            if found != _CANARIES[:length]:
                return int(start + next(i for i, byte in enumerate(found) if byte != CANARY) - self.start)
        return None


def capacity_for(size: int) -> int:
    """Whole pages, at least one."""
    return max(1, -(-size // PAGE)) * PAGE


class _Key(NamedTuple):
    address: int
    size: int
    at_end: bool


class Pool:
    """Buffers that are used again.

    A large input stays where it was put, under the address that it came from. It is compared with what is there now
    before it is used again: MLX may have given the address to another array, and NumPy may have written to it.
    """

    def __init__(self, total: int = TOTAL) -> None:
        self.total = total
        self.copies = 0  # how often a large input was copied
        self._resident: OrderedDict[_Key, Buffer] = OrderedDict()
        self._free: dict[int, list[Buffer]] = {}
        self._lent: list[Buffer] = []
        self._dead: deque[_Key] = deque()  # filled by finalizers, at any moment

    @contextmanager
    def lending(self) -> Iterator[Pool]:
        """Buffers taken within come back at the end."""
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
        """How much memory inputs of earlier calls take."""
        return sum(buffer.capacity for buffer in self._resident.values())

    def writable(self, size: int, *, at_end: bool, alignment: int = ALIGNMENT) -> Buffer:
        """Room for an output; what is in it is not defined."""
        capacity = capacity_for(size)
        free = self._free.get(capacity)
        buffer = free.pop() if free else Buffer(capacity)
        buffer.place(size, at_end=at_end, alignment=alignment)
        self._lent.append(buffer)
        return buffer

    def readable(
        self, address: int, size: int, owner: Any = None, *, at_end: bool, alignment: int = ALIGNMENT
    ) -> Buffer:
        """A read-only copy of memory; a large one is kept for as long as its owner lives."""
        if size < RESIDENT:
            buffer = self.writable(size, at_end=at_end, alignment=alignment)
            ctypes.memmove(buffer.start, address, size)
        else:
            buffer = self._keep(_Key(address, size, at_end), owner)
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
        buffer.place(key.size, at_end=key.at_end)
        ctypes.memmove(buffer.start, key.address, key.size)
        self._resident.move_to_end(key)
        return buffer

    def _forget(self) -> None:
        """Inputs whose arrays are gone, and, beyond the total, those not used for longest."""
        while self._dead:
            self._resident.pop(self._dead.popleft(), None)
        size = self.resident_bytes
        while size > self.total and self._resident:
            size -= self._resident.popitem(last=False)[1].capacity


# The process has one: a call has all of it to itself.
pool = Pool()
