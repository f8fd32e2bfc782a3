"""What the `tokenizers` library says of itself: its failures, as TokenizerError, and the steps of its components."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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


def steps_of(component: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normaliser, pre-tokenizer or decoder as JSON; a sequence has several."""
    if component is not None:
        state = json.loads(component.__getstate__())
        lists = [value for value in state.values() if isinstance(value, list)]
        yield from lists[0] if state["type"] == "Sequence" else [state]
