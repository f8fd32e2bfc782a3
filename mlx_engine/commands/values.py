"""Format values on one line for people, or as complete JSON for programs; parse times and sizes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_engine.errors import OptionError, size

SHOWN_CHARACTERS = 200
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
TIME, SECONDS = re.compile(r"(\d+(?:\.\d+)?)\s*([smh]?)", re.IGNORECASE), {"": 1, "s": 1, "m": 60, "h": 3600}
POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def print_json(value: object) -> None:
    """Print one line of JSON in ASCII. Bytes that are not UTF-8 appear as escaped surrogates."""
    print(json.dumps(jsonable(value), allow_nan=False))


def jsonable(value: Any) -> Any:
    """Convert `value` to JSON types. Numbers that are not finite become null."""
    if hasattr(value, "tolist"):  # a NumPy value; NumPy is not imported here, because help texts do not need it
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def plain(text: str) -> str:
    """Return `text` on one line, escaped if it is not printable."""
    return text if text.isprintable() else repr(text)[1:-1]


def shown(value: object, kind: str = "") -> str:
    """Format a value on one line.

    Strings and the JSON of dicts are cut to `SHOWN_CHARACTERS`; a list or array becomes "LENGTH x TYPE". If `kind` is
    "float32", floats are written with seven significant digits, about the precision of a float32.
    """
    if isinstance(value, str):
        return repr(value[:SHOWN_CHARACTERS]) + _rest(value)
    if isinstance(value, dict):
        text = json.dumps(value)
        return text[:SHOWN_CHARACTERS] + _rest(text)
    if getattr(value, "ndim", 0):
        array: Any = value
        return f"{len(array):,} x {array.dtype.name}"
    if isinstance(value, list | tuple):
        return f"{len(value):,} x {_common_type(value)}"
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, float):
        return f"{value:.7g}" if kind == "float32" else repr(value)
    return str(value)


def _rest(text: str) -> str:
    return f"... ({len(text):,} characters)" if len(text) > SHOWN_CHARACTERS else ""


def _common_type(values: Sequence[object]) -> str:
    names = {"str": "string", "tuple": "array", "list": "array", "ndarray": "array", "dict": "object"}
    types = {type(value).__name__ for value in values}
    return names.get(*types, *types) if len(types) == 1 else "value"


def exact(n_bytes: int | None) -> str:
    """Return a number of bytes with all its digits; "?" for None."""
    return "?" if n_bytes is None else f"{n_bytes:,}"


def experts_text(nbytes: int, held: int, read: int) -> str:
    """Describe how much of the experts is in memory: `held` of `nbytes` bytes.

    `read` is the number of bytes that a token is expected to read from the file, for experts that are not in memory.
    """
    if held >= nbytes:
        return f"{size(nbytes)}, all in memory"
    return (
        f"{held / nbytes:.0%} of {size(nbytes)} in memory; a token reads about {read / 1e6:,.0f} MB of the rest from "
        "the file, if tokens choose experts as in Qwen3-30B-A3B"
    )


def columns(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Format rows of cells as lines with aligned columns; `align` has `<` or `>` per column. Cells are never cut."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)).rstrip()
        for row in rows
    ]


def seconds_of(option: str, text: str) -> float:
    """Parse a time such as 90, 90s, 10m or 2h to seconds. Raise OptionError if it is 0, or the text is not a time."""
    match = TIME.fullmatch(text.strip())
    seconds = 0.0 if match is None else float(match[1]) * SECONDS[match[2].lower()]
    if not seconds:
        message = f"{option} must be a time such as 90s, 10m or 2h, not {text!r}"
        raise OptionError(message, option=option, found=text)
    return seconds


def bytes_of(option: str, text: str) -> int:
    """Parse a size: 2GiB (or 2G) is 2 * 1024**3 bytes, 2GB is 2 * 1000**3. Raise OptionError for other texts."""
    match = SIZE.fullmatch(text.strip())
    if match is None:
        message = f"{option} must be a size such as 2GiB, 500MB or 1000000, not {text!r}"
        raise OptionError(message, option=option, found=text)
    is_decimal = text.strip().upper().endswith("B") and not match[3]
    return int(float(match[1]) * (1000 if is_decimal else 1024) ** POWERS[match[2].upper()])
