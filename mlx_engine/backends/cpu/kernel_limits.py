"""The limits of the compiled CPU kernels: widths of norms, head dims."""

from __future__ import annotations

from mlx_engine.backends.mixers import Convolution, DeltaRule
from mlx_engine.backends.parameters import Norm
from mlx_engine.kernels.cpu.build import layout


def norm_fits(norm: Norm | None) -> bool:
    """Return whether a panel of normed vectors fits into a thread's scratch memory."""
    return norm is None or 4 * layout.PANEL_TOKENS * int(norm.weight.size) <= layout.SCRATCH_BYTES


def convolution_fits(conv: Convolution) -> bool:
    """Return whether the kernels support this number of channels."""
    return int(conv.weight.shape[1]) % layout.LANES == 0


def rule_fits(rule: DeltaRule) -> bool:
    """Return whether the kernels support the head dims of a delta rule."""
    return rule.key_dim % layout.LANES == 0 and rule.value_dim % layout.LANES == 0 and rule.key_dim <= layout.STRETCH


def heads_fit(group: int, width: int) -> bool:
    """Return whether the kernels support `group` query heads of this width per KV head."""
    return (
        width % layout.LANES == 0
        and width <= layout.STRETCH
        and layout.attention_scratch(group, width) <= layout.SCRATCH_BYTES
    )
