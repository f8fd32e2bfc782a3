"""The types in which a folder for MLX can be written, by the names that users give them."""

from __future__ import annotations

from mlx_engine.quant.groups import AFFINE_BITS, FIXED, GroupType, affine, fixed
from mlx_engine.quant.types import GGMLType

# mlx-lm's default group size of the mode "affine".
GROUP = 64
# The bits of the mode "affine", or another mode.
TARGETS: dict[str, int | str] = {
    **{f"mlx-{bits}bit": bits for bits in AFFINE_BITS},
    **{f"mlx-{mode}": mode for mode in FIXED},
}
# Stored floats whose type scales and biases get, as mlx-lm has it; for all other weights they are float32.
HALVES = ("F16", "BF16")


def target_type(target: str, stored: GGMLType) -> GroupType:
    """Return the type that a matrix of type `stored` gets, for a key of TARGETS."""
    kind = TARGETS[target]
    if isinstance(kind, str):
        return fixed(kind)
    return affine(kind, GROUP, stored.name if stored.name in HALVES else "F32")
