"""The compiled CPU kernels, ready to run: loaded once, from disk where they have been compiled before."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

from mlx_engine.observe.log import LOGGER

if TYPE_CHECKING:
    from kernels.cpu.jit import Task


class Kernels:
    """The modules of `kernels.cpu`, and the addresses of their tasks."""

    def __init__(self) -> None:
        from kernels.cpu import activations, attention, formats, heads, linear, pool, q8_0, vectors

        self.linear, self.attention, self.heads, self.q8_0 = linear, attention, heads, q8_0
        self.activations, self.formats, self.pool = activations, formats, pool
        self.LANES = vectors.LANES
        self.few, self.few_gated = _address(linear.multiply_few), _address(linear.multiply_few_gated)
        self.many, self.many_gated = _address(linear.multiply_many), _address(linear.multiply_many_gated)
        self.pack, self.norm_rope = _address(linear.pack_panels), _address(heads.norm_rope)
        self.attend_one, self.attend_many = _address(attention.attend_one), _address(attention.attend_many)


def _address(task: Task) -> int:
    return task.address


@cache
def load_kernels() -> Kernels | None:
    """The kernels; None where there can be none, said once."""
    try:
        from kernels.cpu import jit
    except ImportError as error:
        reason: object = error
    else:
        reason = jit.lacking()
    if reason is not None:
        LOGGER.log(logging.WARNING, "no compiled kernels, NumPy runs instead: %s", reason)
        return None
    if not jit.is_compiled():
        LOGGER.log(logging.WARNING, "compiling the CPU kernels, once; they are kept in %s", jit.FOLDER)
    return Kernels()
