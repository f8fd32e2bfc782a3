"""The limits of the compiled CPU kernels: widths of norms, head dims."""

from __future__ import annotations

from kernels.cpu import layout
from mlx_engine.backends.parameters import Norm


def norm_fits(norm: Norm | None) -> bool:
    """Return whether a panel of normed vectors fits into a thread's scratch memory."""
    return norm is None or 4 * layout.PANEL_TOKENS * int(norm.weight.size) <= layout.SCRATCH_BYTES


def heads_fit(group: int, width: int) -> bool:
    """Return whether the kernels support `group` query heads of this width per KV head."""
    return (
        width % layout.LANES == 0
        and width <= layout.STRETCH
        and layout.attention_scratch(group, width) <= layout.SCRATCH_BYTES
    )
