"""The times of passes on a device that may work while the host does something else."""

from __future__ import annotations

from collections.abc import Callable

# An id that arrives within so many seconds counts as already computed when it was asked for.
AT_ONCE = 1e-4


class PassTimer:
    """Measures passes that follow each other on one device. The clock is a parameter."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ended: float | None = None
        self._waited_for = 0.0

    def since(self, resumed: float) -> float:
        """Return the seconds of a pass that began at `resumed` and ends now."""
        return self._clock() - resumed

    def chunk(self, resumed: float) -> float:
        """Return the seconds of a step that began at `resumed` and submitted a pass without a token to wait for."""
        now = self._clock()
        self._ended = None
        return now - resumed

    def interval(self, resumed: float, asked: float) -> float:
        """Return the seconds of a pass that ends now, on a device that starts each pass when the pass before ends.

        The interval begins when the pass before ended. The caller's code ran until `resumed`, and the host asked for
        the id at `asked`. If the host had to wait for the id, the device was busy all the time, and the pass took the
        whole interval. If not, a slow caller may have left the device idle; then the pass is assumed to take as long as
        the last pass that the host waited for, but at least the time since `resumed`. So a slow caller does not change
        the decode rate.
        """
        now = self._clock()
        whole, inside = now - (resumed if self._ended is None else self._ended), now - resumed
        if self._ended is None or now - asked > AT_ONCE:
            self._waited_for = whole
        self._ended = now
        return max(inside, min(whole, self._waited_for))
