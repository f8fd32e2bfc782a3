"""Parse what a plan's options have: machines, rates and times, such as 4x16GB, 10Gbit/s and 0.1ms."""

from __future__ import annotations

import re
from collections.abc import Callable

from mlx_engine.commands.serve import POWERS, bytes_of
from mlx_engine.errors import OptionError, require

RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)([a-zA-Z]+)/s")
TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|ms|us|µs)")
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
COUNTED = re.compile(r"(\d+)\s*[x*]\s*(.+)")
BITS_PER_BYTE = 8
# More machines than this are a mistake.
MOST_HOSTS = 1024


def memories_of(option: str, text: str) -> list[int]:
    """Parse the memory of each machine: "4x16GB" is four of 16 * 1000**3 bytes, "16GB,2x64GB" is three.

    Raises:
        OptionError: the text is no list of sizes, or a size or the number of machines is out of range.
    """
    found: list[int] = []
    for item in text.split(","):
        match = COUNTED.fullmatch(item.strip())
        n, size = (int(match[1]), match[2]) if match else (1, item)
        require(1 <= n <= MOST_HOSTS, option=option, expected=f"1 to {MOST_HOSTS:,} machines of a kind", found=item)
        try:
            nbytes = bytes_of(option, size)
        except OptionError:
            nbytes = 0
        require(nbytes > 0, option=option, expected="machines such as 4x16GB or 16GB,64GB", found=text)
        found += [nbytes] * n
    return found


def bits_of(option: str, text: str) -> float:
    """Parse the rate of a link in bits per second: 10Gbit/s, or 1.25GB/s for the same.

    Raises:
        OptionError: the text is no such rate, or is 0.
    """
    expected = "a rate such as 10Gbit/s or 1.25GB/s"
    return _rate(option, text, expected, {"bit": 1, "b": 1, "B": BITS_PER_BYTE})


def bandwidth_of(option: str, text: str) -> float:
    """Parse a memory bandwidth in bytes per second, such as 120GB/s.

    Raises:
        OptionError: the text is no such rate, or is 0.
    """
    return _rate(option, text, "a rate such as 120GB/s", {"B": 1})


def compute_of(option: str, text: str) -> float:
    """Parse floating-point operations per second, such as 300GFLOP/s.

    Raises:
        OptionError: the text is no such rate, or is 0.
    """
    return _rate(option, text, "a rate such as 300GFLOP/s or 3.5TFLOP/s", {"FLOP": 1, "FLOPs": 1})


def seconds_of(option: str, text: str) -> float:
    """Parse a time in seconds: 0.1ms, 200us, 1s, or 0.

    Raises:
        OptionError: the text is no time.
    """
    if text.strip() == "0":
        return 0.0
    match = TIME.fullmatch(text.strip())
    if match is None:
        raise OptionError(option=option, expected="a time such as 0.1ms or 200us", found=text)
    return float(match[1]) * SECONDS[match[2]]


def each_host(option: str, text: str, n: int, parse: Callable[[str, str], float]) -> list[float]:
    """Parse one value for all of n machines, or a list of one value for each.

    Raises:
        OptionError: a value is invalid, or their number is neither 1 nor n.
    """
    values = [parse(option, item.strip()) for item in text.split(",")]
    require(len(values) in (1, n), option=option, expected=f"one value, or {n:,} separated by commas", found=text)
    return values * n if len(values) == 1 else values


def _rate(option: str, text: str, expected: str, units: dict[str, int]) -> float:
    match = RATE.fullmatch(text.strip())
    if match is None or match[4] not in units or float(match[1]) == 0:
        raise OptionError(option=option, expected=expected, found=text)
    factor: int = (1024 if match[3] else 1000) ** POWERS[match[2].upper()]
    return float(match[1]) * factor * units[match[4]]
