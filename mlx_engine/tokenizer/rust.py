"""Convert failures of the `tokenizers` library (a bare `Exception`, or a Rust panic) to TokenizerError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mlx_engine.errors import TokenizerError


@contextmanager
def refusals(where: str, what: str) -> Iterator[None]:
    """Convert the library's failures in this block to TokenizerError; other exceptions pass."""
    try:
        yield
    except BaseException as problem:  # a Rust panic is not an Exception, and its class has no public name
        if type(problem) is not Exception and type(problem).__name__ != "PanicException":
            raise
        reason = (str(problem).splitlines() or ["no reason given"])[0]
        raise TokenizerError(f"{where}: {what}; the tokenizers library says: {reason:.300}") from None
