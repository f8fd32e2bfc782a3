"""Log events: a name and fields, one line each, through Python's own logging under the name "mlx_engine".

Silent unless asked: by `MLX_ENGINE_LOG=info|debug|trace`, by `--log-level`, or by a program that configures logging.
`info` is an event per token, `debug` one per forward pass, `trace` one per operation and a table at the end.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

LOGGER = logging.getLogger("mlx_engine")

TRACE = 5
LEVELS = {"off": logging.WARNING, "info": logging.INFO, "debug": logging.DEBUG, "trace": TRACE}
VARIABLE = "MLX_ENGINE_LOG"


def configure(level: str) -> None:
    """Print events of `level`, a key of `LEVELS`, and above to stderr; "off" leaves only warnings."""
    LOGGER.setLevel(LEVELS[level])
    for handler in [h for h in LOGGER.handlers if isinstance(h, _Lines)]:
        LOGGER.removeHandler(handler)
    LOGGER.addHandler(_Lines())
    LOGGER.propagate = False


def enabled(level: int) -> bool:
    """Whether anybody wants events of this level. Ask before collecting what an event costs to know."""
    return LOGGER.isEnabledFor(level)


def event(level: int, name: str, **fields: Any) -> None:
    """One event. The fields are on the record as `fields`; text says them as `key=value`."""
    LOGGER.log(level, "%s", name, extra={"fields": fields})


class _Lines(logging.Handler):
    """One line per event on whatever stderr is at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        fields = getattr(record, "fields", {})
        parts = [record.getMessage(), *(f"{key}={shown(value)}" for key, value in fields.items())]
        sys.stderr.write(" ".join(parts) + "\n")


def shown(value: object) -> str:
    """A field's value: short floats, quoted text, the rest as it is."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return repr(value) if isinstance(value, str) and not value.isidentifier() else str(value)
