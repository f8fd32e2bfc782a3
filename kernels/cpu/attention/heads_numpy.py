"""The NumPy twin of the compiled norm and rotation of query and key heads."""

from __future__ import annotations

from ..products.norms_numpy import Floats, rms_norm, rotate


def norm_rope(x: Floats, weight: Floats, eps: float, cos: Floats, sin: Floats, offset: int, out: Floats) -> None:
    """Norm and rotate T rows of heads into (T, H, E); an empty weight is no norm.

    Row t is rotated by row `offset + t` of the cos/sin tables.
    """
    n_tokens, n_heads, width = out.shape
    for t in range(n_tokens):
        for h in range(n_heads):
            head = x[t, h * width : (h + 1) * width].copy()
            if weight.size:
                rms_norm(head, 0, width, weight, eps, head, 0)
            rotate(head, 0, width // 2, cos[offset + t].reshape(-1), sin[offset + t].reshape(-1), 0, out[t, h], 0)
