"""The NumPy twin of the compiled preparation of query and key heads."""

from __future__ import annotations

from kernels.cpu.norms_numpy import Floats, rms_norm, rotate


def norm_rope(x: Floats, gain: Floats, eps: float, cos: Floats, sin: Floats, offset: int, out: Floats) -> None:
    """(T, H, E) heads from T rows, normed unless the gain is empty; row t is at position `offset + t` of the tables."""
    n_tokens, n_heads, width = out.shape
    for t in range(n_tokens):
        for h in range(n_heads):
            head = x[t, h * width : (h + 1) * width].copy()
            if gain.size:
                rms_norm(head, 0, width, gain, eps, head, 0)
            rotate(head, 0, width // 2, cos[offset + t].reshape(-1), sin[offset + t].reshape(-1), 0, out[t, h], 0)
