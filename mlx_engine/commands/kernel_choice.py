"""Which kernels a command runs, and by which executor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_engine.errors import OptionError, Words

if TYPE_CHECKING:
    from mlx_engine.kernels.lab.catalog import Entry
    from mlx_engine.kernels.launch import ExecutorName


def chosen(names: list[str] | None) -> list[Entry]:
    """Return the kernels with these names, or all.

    Raises:
        OptionError: a name is unknown.
    """
    from mlx_engine.kernels.lab.catalog import entries

    every = {entry.name: entry for entry in entries()}
    for name in names or ():
        if name not in every:
            raise OptionError(option="--kernel", expected=f"one of {', '.join(every)}", found=name)
    return [every[name] for name in names] if names else list(every.values())


def executor_of(given: str | None, *, only_gpu: bool = False) -> ExecutorName:
    """Return the given executor, or this machine's default; with `only_gpu` the default is never the emulator.

    Raises:
        OptionError: the name is unknown, or the executor is unavailable.
    """
    from mlx_engine.kernels.launch import EXECUTORS, executors

    if given is not None and given not in EXECUTORS:
        raise OptionError(option="executor", expected=f"one of {', '.join(EXECUTORS)}", found=given)
    reasons = executors()
    have = [name for name, reason in reasons.items() if reason is None]
    if given is not None and given not in have:
        expected = f"one that works here ({', '.join(have) or 'none does'})"
        raise OptionError(option="executor", expected=f"{expected}; {reasons[given]}", found=given)
    if not have:
        raise OptionError(
            option="executor",
            expected=f"one of {', '.join(EXECUTORS)}",
            found=Words("none that works here: " + "; ".join(f"{name}: {reason}" for name, reason in reasons.items())),
        )
    if given is None and only_gpu and have[0] == "emulator":
        raise OptionError(
            option="bench",
            expected="a GPU, since times in the emulator say nothing about one (--executor emulator counts operations)",
            found=Words("none here"),
        )
    return given or have[0]
