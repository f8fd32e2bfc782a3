"""Describe the origin of a measurement: machine, time, versions, commit, model, and the load of other processes."""

from __future__ import annotations

import datetime
import math
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import mlx_engine
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.machine.memory import usable_cores


def machine() -> dict[str, object]:
    """Describe the machine: processor, cores available to this process, memory, caches, system."""
    return {
        "processor": processor(),
        "cores": usable_cores(),
        "memory_bytes": memory_bytes(),
        "cache_bytes": cache_bytes(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def processor() -> str:
    """Return the processor's name, with its widest vector instructions if known."""
    name, flags = platform.processor(), ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = dict(line.split(":", 1) for line in cpuinfo.read_text().splitlines() if ":" in line)
        fields = {key.strip(): value.strip() for key, value in lines.items()}
        name, flags = fields.get("model name", name), fields.get("flags", "")
    elif platform.system() == "Darwin":
        name = output_of("sysctl", "-n", "machdep.cpu.brand_string") or name
    widest = next((label for flag, label in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in flags.split()), None)
    return f"{name}, {widest}" if widest else name


def memory_bytes() -> int | None:
    """Return the size of the memory in bytes, or None if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def cache_bytes() -> int | None:
    """Return the size of the largest processor cache in bytes, or None if unknown."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    files = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    found = [re.fullmatch(r"(\d+)([KMG]?)", file.read_text().strip()) for file in files]
    sizes = [int(match[1]) * units.get(match[2], 1) for match in found if match]
    if platform.system() == "Darwin":
        names = ("l3cachesize", "perflevel0.l2cachesize", "l2cachesize")
        lines = [output_of("sysctl", "-n", f"hw.{name}") for name in names]
        sizes = [int(size) for size in lines if size and size.isdecimal()]
    return max(sizes, default=None)


def output_of(*command: str) -> str | None:
    """Return the output of a command, without white space at the ends; None if the command fails or prints nothing."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


SCHEMA = 1
PACKAGES = ("mlx", "numpy", "numba", "tokenizers")
# Paths that benchmarks write. `commit` ignores changes in these paths.
WRITTEN = ("benchmarks/results", "benchmarks/reports", "BENCHMARKS.md")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect speed."""
    found = {"mlx-engine": mlx_engine.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Return the commit of this checkout, with "+" if tracked files outside `WRITTEN` differ; None without Git."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    head = output_of("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    excluded = [f":(exclude){path}" for path in WRITTEN]
    changed = output_of("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no", "--", ".", *excluded)
    return f"{head}+" if head and changed else head


def origin() -> dict[str, object]:
    """Return the time, commit, machine and versions of a measurement."""
    return {
        "schema": SCHEMA,
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
    }


def describe(checkpoint: Checkpoint) -> dict[str, object]:
    """Return the model's name, the size of its weights in bytes, their number, and the checkpoint's notes, if any."""
    weights = [checkpoint.weight(name) for name in checkpoint.shapes]
    return {
        "model_name": str(checkpoint.metadata.get("general.name") or checkpoint.architecture),
        "model_size": sum(weight.nbytes for weight in weights),
        "model_n_params": sum(math.prod(weight.shape) for weight in weights),
        **({"notes": list(checkpoint.notes)} if checkpoint.notes else {}),
    }


# Figures are usable if other processes used at most this share of the cores.
MOST = 0.05
# Core seconds of other processes that are ignored as rounding errors: the system counts time in ticks of 10 ms.
TICKS = 0.05
# psutil's fields of idle time; and fields to leave out, because their time is also part of `user` and `nice`.
IDLE, TWICE = ("idle", "iowait"), ("guest", "guest_nice")


class OtherProcesses:
    """Counts the time of other processes on the cores that this process may use, from the creation of this object on.

    Other processes are all but this process and its ended children. Time that the host takes from a virtual machine is
    included.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._start = self._times()

    def share(self) -> float | None:
        """Return the share, 0 to 1, of core time that other processes have used; None if unknown."""
        whole, busy, own = (now - then for now, then in zip(self._times(), self._start, strict=True))
        return min(1.0, max(0.0, busy - own - TICKS) / whole) if whole > 0 else None

    def _times(self) -> tuple[float, float, float]:
        """Return core seconds so far: (in total, busy, used by this process and its ended children)."""
        whole = busy = 0.0
        for core in self._cores():
            times = {name: seconds for name, seconds in core._asdict().items() if name not in TWICE}
            whole += sum(times.values())
            busy += sum(seconds for name, seconds in times.items() if name not in IDLE)
        return whole, busy, sum(self._process.cpu_times()[:4])

    def _cores(self) -> Sequence[Any]:
        """Return the times of each core that this process may use, or of all cores if the usable ones are unknown."""
        cores = psutil.cpu_times(percpu=True)
        allowed = self._process.cpu_affinity() if hasattr(self._process, "cpu_affinity") else None
        return [cores[i] for i in allowed] if allowed and max(allowed) < len(cores) else cores


def fields(share: float | None) -> dict[str, Any]:
    """Return `OtherProcesses.share` as fields of a row or a report; `usable` is None if the share is unknown."""
    return {"others_share": share, "usable": None if share is None else share <= MOST}


def disturbed(rows: Sequence[dict[str, Any]]) -> str | None:
    """Return the sentence of `finding` in bold Markdown, or None if there is no sentence."""
    text = finding(rows)
    return None if text is None else f"**{text[0].upper()}{text[1:]}.**"


def finding(rows: Sequence[dict[str, Any]]) -> str | None:
    """Return a sentence about the rows whose figures are not usable, or None if all are usable or unknown.

    A row without the key `test` is the result of the command `report`.
    """
    found = [row for row in rows if row.get("usable") is False]
    if not found:
        return None
    names = list(dict.fromkeys(_name(row) for row in found))
    of = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    most = max(row["others_share"] for row in found)
    return (
        f"not usable: {of}: other processes used {most:.0%} of the cores meanwhile, expected at most {MOST:.0%}; "
        "end them and measure again"
    )


def _name(row: dict[str, Any]) -> str:
    if "test" not in row:
        return "all figures"
    clients = f", {row['concurrency']} clients" if "concurrency" in row else ""
    return f"{row['test']}{clients} on {row.get('rung') or row['backend']}"
