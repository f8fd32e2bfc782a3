"""How large a model is, whatever kind of file it came in."""

from __future__ import annotations

import math

from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.models import model_file
from mlx_engine.models.parameters import check


def count(checkpoint: Checkpoint) -> tuple[int, int]:
    """Tensors of a model, and the values in them; a tied head counts once, what is in the file and not used does not.

    Raises:
        TensorMismatchError: the tensors are not those that the settings call for.
    """
    tensors = check(checkpoint, model_file(checkpoint).plan(checkpoint))
    return len(tensors), sum(math.prod(tensor.shape) for tensor in tensors.values())
