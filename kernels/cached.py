"""`functools.cached_property` without a lock, for objects that are used by several threads in a process that forks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

V = TypeVar("V")


class cached_property(Generic[V]):  # noqa: N801  # named as the class that it replaces
    """A property that is computed when it is first read, and then stored in the object's `__dict__`.

    Before Python 3.12, `functools.cached_property` holds a lock while it computes a value. If another thread forks at
    this time, the lock stays locked in the child process, and a child that reads the property waits forever. Without a
    lock, threads that read the property at the same time may all compute it; all return the value that was stored
    first. A property that overrides a `cached_property` must not read the overridden one, because both would store
    their values under the same name.
    """

    def __init__(self, compute: Callable[[Any], V]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[V]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> V: ...
    def __get__(self, instance: object | None, owner: type) -> cached_property[V] | V:
        """Compute and store the value. Python reads a stored value from the object's `__dict__` without this method."""
        if instance is None:
            return self
        stored: V = instance.__dict__.setdefault(self._name, self._compute(instance))
        return stored
