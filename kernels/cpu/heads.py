"""Query and key heads: normed, rotated, and put where attention looks for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu import pool
from kernels.cpu.jit import jit, task
from kernels.cpu.memory import floats, number, word
from kernels.cpu.norms import norm_rotate

# Words of a job: the input has ROW elements per token; OUT takes HEADS x WIDTH of them. A gain of 0 is no norm.
X, ROW, HEADS, WIDTH, GAIN, EPS, COS, SIN, OFFSET, OUT, TOKENS = range(11)
# Tokens of a chunk.
SPAN = 32


@task
def norm_rope(job: Any, chunk: int) -> None:
    """Heads of a span of tokens normed, if there is a gain, and rotated."""
    width = job[WIDTH]
    x, out, cos, sin = floats(job[X]), floats(job[OUT]), floats(job[COS]), floats(job[SIN])
    eps = np.float32(number(job[EPS]) if job[GAIN] != 0 else -1.0)
    for t in range(chunk * SPAN, min((chunk + 1) * SPAN, job[TOKENS])):
        row = (job[OFFSET] + t) * (width // 2)
        norm_rotate(
            x, t * job[ROW], job[HEADS], width, floats(job[GAIN]), eps, cos, sin, row, out, t * job[HEADS] * width
        )


@jit
def _run(control: Any, address: int, x: Any, gain: Any, eps: float, cos: Any, sin: Any, offset: int, out: Any) -> None:
    job = control[pool.JOB :]
    n_tokens, n_heads, width = out.shape
    job[X], job[ROW], job[OUT] = x.ctypes.data, x.strides[0] // 4, out.ctypes.data
    job[HEADS], job[WIDTH], job[TOKENS], job[OFFSET] = n_heads, width, n_tokens, offset
    job[GAIN], job[EPS] = gain.ctypes.data if gain.size else 0, word(eps)
    job[COS], job[SIN] = cos.ctypes.data, sin.ctypes.data
    pool.run(control, address, (n_tokens + SPAN - 1) // SPAN)


@jit
def norm_rope_pair(
    control: Any, address: int, q: Any, k: Any, q_gain: Any, k_gain: Any, q_eps: float, k_eps: float, cos: Any,
    sin: Any, offset: int, q_out: Any, k_out: Any,
) -> None:  # fmt: skip
    """(T, H, E) and (T, K, E) heads from rows of queries and keys; row t is at position `offset + t` of the tables.

    The rows may be columns of a larger array; an empty gain is no norm.
    """
    _run(control, address, q, q_gain, q_eps, cos, sin, offset, q_out)
    _run(control, address, k, k_gain, k_eps, cos, sin, offset, k_out)
