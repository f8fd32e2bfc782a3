"""A stream for asyncio. The forward passes run in a separate thread, so that the event loop is never blocked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from mlx_engine.loop.stream import Generation, Stream


class AsyncStream:
    """An asynchronous iterator over pieces of text: `async for piece in engine.astream(prompt)`.

    The run begins with the first piece, and each piece is computed when it is asked for. Cancelling the task,
    `aclose()` and the end of `async with` end the run after the current forward pass. Several streams may
    run at once: their passes take turns. One task at a time reads a stream.
    """

    def __init__(self, begin: Callable[[], Stream]) -> None:
        """Make a stream; `begin` submits the request, and is called in the thread."""
        self._begin = begin
        self._stream: Stream | None = None
        self._thread = ThreadPoolExecutor(1, "mlx_engine-stream")
        self._is_closed = False

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> str:
        if self._is_closed:
            raise StopAsyncIteration
        running = self._thread.submit(self._advance)
        try:
            piece = await asyncio.wrap_future(running)
        except BaseException:  # an error of the run, or the cancellation of the task
            self._leave()
            raise
        if piece is None:
            self._leave()
            raise StopAsyncIteration
        return piece

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the run, and wait until its keys and values are free; `generation` keeps the result so far."""
        ended = self._leave()
        if ended is not None:
            await asyncio.shield(asyncio.wrap_future(ended))

    @property
    def generation(self) -> Generation:
        """The result so far.

        Raises:
            RuntimeError: the run has not begun.
        """
        if self._stream is None:
            raise RuntimeError("generation: expected a stream that has begun, found one without a piece; read it first")
        return self._stream.generation

    def _advance(self) -> str | None:
        """Return the next piece, or None at the end; called in the thread."""
        if self._is_closed:
            return None
        if self._stream is None:
            self._stream = self._begin()
        return next(self._stream, None)

    def _leave(self) -> Future[None] | None:
        """Begin to end the run.

        Return a future that is done when the run has ended, or None if an earlier call did this.
        """
        if self._is_closed:
            return None
        self._is_closed = True
        if self._stream is not None:
            self._stream.cancel()  # a long prompt may need many passes until the next piece
        ended = self._thread.submit(self._end)
        self._thread.shutdown(wait=False)
        return ended

    def _end(self) -> None:
        if self._stream is not None:
            self._stream.close()
