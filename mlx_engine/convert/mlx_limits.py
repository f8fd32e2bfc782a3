"""What mlx-lm's implementation of an architecture cannot load, and where its results differ. As of mlx-lm 0.32."""

from __future__ import annotations

from typing import Any

from mlx_engine.errors import ModelError
from mlx_engine.models.rotation import Rotation

# Architectures whose heads have hidden_size / n_heads elements in mlx-lm, whatever config.json says.
HEADS_OF_SIZE = ("granite", "granitemoehybrid", "lfm2", "mixtral", "phi3", "qwen2", "qwen2_moe")
# Architectures whose window mlx-lm does not have.
WITHOUT_WINDOW = ("gemma2", "phi3")


def check_loads(where: str, model_type: str, config: Any, *, has_head: bool) -> None:
    """Check that mlx-lm can load a model.

    Args:
        where: the folder or file, for the error.
        model_type: `model_type` of config.json.
        config: the sizes of the model.
        has_head: whether the model has a matrix for the head.

    Raises:
        ModelError: mlx-lm has no such model.
    """
    problems = []
    if model_type == "gpt2" and has_head:
        problems.append(("a head that is tied to the embedding table", "a matrix for the head"))
    if model_type == "gpt2" and config.intermediate_size != 4 * config.hidden_size:
        problems.append((f"an FFN of {4 * config.hidden_size:,}, 4 times the hidden size", config.intermediate_size))
    if model_type in HEADS_OF_SIZE and config.head_dim * config.n_heads != config.hidden_size:
        problems.append((f"heads of {config.hidden_size // config.n_heads} elements, hidden_size / n_heads",
                         f"{config.head_dim}"))  # fmt: skip
    for expected, found in problems:
        raise ModelError(
            f"{where}: expected {expected}, found {found}; mlx-lm's {model_type!r} has no other models, so it would "
            "not load the folder; --to q8_0 or q4_0 writes a GGUF file"
        )


def notes_on(model_type: str, config: Any) -> list[str]:
    """Return lines for the user about results of mlx-lm that differ from this engine's."""
    windows = [window for window in config.windows if window is not None]
    found, rope = [], getattr(config, "rope", None)
    if model_type in WITHOUT_WINDOW and windows:
        found.append(f"its attention has no window: its results differ after {min(windows):,} tokens")
    if isinstance(rope, Rotation) and rope.rule == "yarn" and not rope.truncate:
        found.append("it rounds the limits of YaRN, as llama.cpp does: its results differ")
    if isinstance(rope, Rotation) and rope.rule == "longrope":
        found.append(f"it has LongRoPE's long factors only: its results differ up to {rope.context:,} tokens")
    return [f"mlx-lm's {model_type!r}: {line}" for line in found]
