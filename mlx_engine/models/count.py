"""The size of a model, from any kind of file."""

from __future__ import annotations

import math

from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.models import model_file
from mlx_engine.models.plan import check


def count(checkpoint: Checkpoint) -> tuple[int, int]:
    """Return the number of tensors and of parameters; a tied head counts once, unused tensors do not count.

    Raises:
        TensorMismatchError: the tensors do not match the settings.
    """
    tensors = check(checkpoint, model_file(checkpoint).plan(checkpoint))
    return len(tensors), sum(math.prod(tensor.shape) for tensor in tensors.values())
