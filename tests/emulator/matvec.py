"""A Q8_0 product to plant bugs in: rows shared out to SIMD-groups, the last step through threadgroup memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from kernels.emulator import MetalKernel, metal_kernel

HEADER = """
// Four weights, stored with their highest bit flipped, times four activations.
METAL_FUNC float dot4(uint codes, float4 x) {
  const float4 w = float4(as_type<char4>(codes ^ 0x80808080u));
  return (w.x * x.x + w.y * x.y) + (w.z * x.z + w.w * x.w);
}
"""

# Two SIMD-groups share a row: each takes every second stretch of 256 weights, 8 per lane. Template: N, K, V vectors.
SOURCE = """
  threadgroup float partial[2 * ROWS];
  const uint lane = thread_index_in_simdgroup;
  const uint group = simdgroup_index_in_threadgroup;
  const int first = int(threadgroup_position_in_grid.x) * ROWS;
  for (int v = 0; v < V; v++) {
    float sums[ROWS];
    for (int r = 0; r < ROWS; r++) sums[r] = 0.0f;
    for (int k = int(group) * 256 + int(lane) * 8; k < K; k += 512) {
      const float4 low = *(const device float4*)(x + v * K + k);
      const float4 high = *(const device float4*)(x + v * K + k + 4);
      for (int r = 0; r < ROWS; r++) {
        const int row = min(first + r, N - 1);
        const uint2 codes = *(const device uint2*)(wq + (row * K + k) / 4);
        const float scale = float(ws[(row * K + k) / 32]);
        sums[r] += scale * (dot4(codes.x, low) + dot4(codes.y, high));
      }
    }
    for (int r = 0; r < ROWS; r++) sums[r] = simd_sum(sums[r]);
    if (lane == 0)
      for (int r = 0; r < ROWS; r++) partial[group * ROWS + r] = sums[r];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (group == 0 && lane == 0)
      for (int r = 0; r < ROWS; r++)
        if (first + r < N) y[v * N + first + r] = partial[r] + partial[ROWS + r];
    threadgroup_barrier(mem_flags::mem_threadgroup);  // before partial is used again
  }
"""

ROWS = 4


@dataclass(frozen=True)
class Problem:
    """Weights as they are stored, activations, and what comes out: in float64, and the sum of magnitudes."""

    wq: np.ndarray[Any, Any]
    ws: np.ndarray[Any, Any]
    x: np.ndarray[Any, Any]
    exact: np.ndarray[Any, Any]
    magnitude: np.ndarray[Any, Any]

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.ws.shape[0], self.x.shape[1], self.x.shape[0]


def problem(n: int, k: int, vectors: int = 1, seed: int = 0) -> Problem:
    rng = np.random.default_rng(seed)
    q = rng.integers(-128, 128, (n, k)).astype(np.int8)
    ws = rng.uniform(0.001, 0.01, (n, k // 32)).astype(np.float16)
    x = rng.standard_normal((vectors, k)).astype(np.float32)
    w = q.astype(np.float64) * np.repeat(ws.astype(np.float64), 32, axis=1)
    wq = (q.view(np.uint8) ^ 0x80).view(np.uint32)
    return Problem(wq, ws, x, x.astype(np.float64) @ w.T, np.abs(x.astype(np.float64)) @ np.abs(w).T)


def kernel(source: str = SOURCE, header: str = HEADER) -> MetalKernel:
    return metal_kernel("matvec", ["wq", "ws", "x"], ["y"], source, header)


def run(which: MetalKernel, given: Problem, **options: Any) -> np.ndarray[Any, Any]:
    """(V, N)."""
    n, _, vectors = given.sizes
    (y,) = which(
        inputs=[given.wq, given.ws, given.x],
        output_shapes=[(vectors, n)],
        output_dtypes=[mx.float32],
        grid=(-(-n // ROWS) * 64, 1, 1),
        threadgroup=(64, 1, 1),
        template=request(which, given)[3],
        **options,
    )
    return np.array(y)


def request(which: MetalKernel, given: Problem) -> tuple[MetalKernel, list[Any], list[Any], list[tuple[str, int]]]:
    """What `prepare` needs to know for `run`."""
    n, k, vectors = given.sizes
    return which, [given.wq, given.ws, given.x], [mx.float32], [("N", n), ("K", k), ("V", vectors), ("ROWS", ROWS)]


def errors(y: np.ndarray[Any, Any], given: Problem) -> np.ndarray[Any, Any]:
    """In float32 epsilons times the sum of |w||x|; 4 are allowed."""
    return np.abs(y - given.exact) / given.magnitude / np.float64(np.finfo(np.float32).eps)
