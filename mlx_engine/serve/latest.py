"""The latest of several values, for any number of tasks that wait for the next one."""

from __future__ import annotations

import asyncio
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
Seen_co = TypeVar("Seen_co", covariant=True)


class Source(Protocol[Seen_co]):
    """Where the latest value can be waited for. Waiting can be cancelled at any time, and nothing is lost by it."""

    async def after(self, version: int) -> tuple[int, Seen_co] | None:
        """Wait for a value newer than `version`, 0 for any; return its version and the value, None if none follows."""


class Latest(Generic[T]):
    """Holds the latest value. Values that nobody has taken are replaced. Use it on the thread of one event loop."""

    def __init__(self) -> None:
        self._version, self._is_closed = 0, False
        self._value: T
        self._changed = asyncio.Event()

    def publish(self, value: T) -> None:
        """Replace the value."""
        self._version, self._value = self._version + 1, value
        self._notify()

    def close(self) -> None:
        """Say that no value follows: those who wait end, so that a server can shut down."""
        self._is_closed = True
        self._notify()

    async def after(self, version: int) -> tuple[int, T] | None:
        """Wait for a value newer than `version`; return its version and the value, or None after `close`."""
        while self._version <= version and not self._is_closed:
            await self._changed.wait()
        return None if self._version <= version else (self._version, self._value)

    def _notify(self) -> None:
        """Let all go on that wait now; those who wait later wait for the next change."""
        self._changed.set()
        self._changed = asyncio.Event()
