"""What mlx-lm's implementation of an architecture cannot load, and where its results differ. As of mlx-lm 0.32."""

from __future__ import annotations

from typing import Any

from mlx_engine.config.rotation import Rotation
from mlx_engine.errors import ModelError
from mlx_engine.models.qwen3_5 import DELTA

# Architectures whose heads have hidden_size / n_heads elements in mlx-lm, whatever config.json says.
HEADS_OF_SIZE = ("granite", "granitemoehybrid", "lfm2", "mixtral", "phi3", "qwen2", "qwen2_moe")
# Architectures of which mlx-lm knows only the interval between layers that attend to all tokens.
BY_INTERVAL = ("gemma3", "gemma3_text", "qwen3_5", "qwen3_5_moe")
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
    problem = _gpt2(config, has_head=has_head) if model_type == "gpt2" else _layers(model_type, config)
    if model_type in HEADS_OF_SIZE and config.head_dim * config.n_heads != config.hidden_size:
        size = config.hidden_size // config.n_heads
        problem = f"heads of {size} elements, hidden_size / n_heads, found {config.head_dim}"
    if problem is not None:
        raise ModelError(
            f"{where}: expected {problem}; mlx-lm's {model_type!r} has no other models: it would not load the folder "
            "or compute something else; --to q8_0 or q4_0 writes a GGUF file"
        )


def _gpt2(config: Any, *, has_head: bool) -> str | None:
    """Return what mlx-lm expects of a GPT-2, and what was found; None if the model is like that."""
    size = 4 * config.hidden_size
    if config.intermediate_size != size:
        return f"an FFN of {size:,}, 4 times the hidden size, found {config.intermediate_size:,}"
    return "a head that is tied to the embedding table, found a matrix for the head" if has_head else None


def _layers(model_type: str, config: Any) -> str | None:
    """Return what mlx-lm expects of the order of layers, and what was found; None if they have this order.

    It knows of some architectures only the interval between layers that attend to all tokens, and of gpt-oss that there
    are layers of both kinds.
    """
    if model_type in BY_INTERVAL:
        kinds = getattr(config, "kinds", None)
        is_other = [kind == DELTA for kind in kinds] if kinds else [window is not None for window in config.windows]
        n = is_other.index(False) + 1 if False in is_other else 0
        if not n or is_other != [(i + 1) % n != 0 for i in range(len(is_other))]:
            return "every n-th layer to attend to all tokens, found another order of layers"
    if model_type == "gpt_oss" and len({window is None for window in config.windows}) < 2:
        return "layers with a window and layers without, found one kind alone"
    return None


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
