"""The one place that knows how the `tokenizers` library fails: by bare `Exception`, or by a panic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mlx_engine.errors import TokenizerError


@contextmanager
def refusals(where: str, what: str) -> Iterator[None]:
    """Whatever the library refuses in this block becomes a TokenizerError; other exceptions pass."""
    try:
        yield
    except BaseException as problem:  # a panic of Rust code is no Exception, and its class has no public name
        if type(problem) is not Exception and type(problem).__name__ != "PanicException":
            raise
        reason = (str(problem).splitlines() or ["no reason given"])[0]
        raise TokenizerError(f"{where}: {what}; the tokenizers library says: {reason}") from None
