"""What a GGUF file says about a model whose settings came from a config.json: the inverse of reading either.

The names of the keys are those of the `gguf` package, constants.py, 0.19.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_engine.backends.parameters import Rope
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.errors import UnsupportedConfigError
from mlx_engine.models.gemma3_config import LAYERS_OF_27B, LOCAL_THETA, PATTERN
from mlx_engine.models.rotation import rope_to_gguf
from mlx_engine.models.settings import Settings

# Names of config.json's model_type that GGUF has another name for.
ARCHITECTURES = {"gemma3_text": "gemma3"}
# A float32 in the file is the float64 here to so much.
CLOSE = 1e-6


@dataclass(frozen=True)
class Said:
    """How GGUF says a config.

    Attributes:
        keys: those below the architecture's prefix, without it.
        divisors: of the rotation's frequencies, which a tensor holds instead of a rule; none where there is a rule.
        query_gain: what the gain of the queries' norm is multiplied by, for a scale of scores that has no key.
    """

    keys: Mapping[str, object]
    divisors: tuple[float, ...] = ()
    query_gain: float = 1.0

    @property
    def in_tensors(self) -> set[str]:
        """What of the config tensors say, and no key."""
        return {name for name, is_so in (("rope", self.divisors), ("attention_scale", self.query_gain != 1)) if is_so}


def gguf_settings(checkpoint: Checkpoint, config: Any) -> Said:
    """What a GGUF file says instead of a folder's config.json.

    Raises:
        UnsupportedConfigError: GGUF has no key for something that the model needs.
    """
    keys: dict[str, object] = {
        "block_count": config.n_layers,
        "context_length": config.context_length,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads,
        "vocab_size": config.vocab_size,
    }
    architecture = ARCHITECTURES.get(checkpoint.architecture, checkpoint.architecture)
    if architecture == "gpt2":
        return Said(keys | {"attention.layer_norm_epsilon": config.norm_eps})
    keys |= {
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
    }
    if architecture == "gemma3":
        return Said(keys | _gemma3(config), query_gain=_query_gain(config))
    if architecture == "qwen3":
        return Said(keys | {"rope.freq_base": config.rope_theta, "rope.dimension_count": config.head_dim})
    rope, divisors = rope_to_gguf(Settings(checkpoint.settings, where=checkpoint.where), config.head_dim, config.rope)
    if divisors and architecture != "llama":
        raise UnsupportedConfigError(
            where=checkpoint.where, key="rope_type", expected=f"one that GGUF has for {architecture}", found="llama3"
        )
    return Said(keys | rope, tuple(divisors))


def _gemma3(config: Any) -> dict[str, object]:
    keys: dict[str, object] = {
        "attention.sliding_window": config.window,
        "rope.freq_base": config.rope_theta,
        "rope.dimension_count": config.head_dim,
    }
    if config.rope_factor != 1.0:
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": config.rope_factor}
    if config.local_rope_theta != LOCAL_THETA:
        keys["rope.freq_base_swa"] = config.local_rope_theta
    first_global = config.is_local.index(False) + 1 if False in config.is_local else config.n_layers + 1
    if first_global != PATTERN and config.n_layers >= min(first_global, PATTERN):
        keys["attention.sliding_window_pattern"] = first_global
    return keys


def _query_gain(config: Any) -> float:
    """Above 1 where scores are scaled more than llama.cpp scales them: it reads no scale of a Gemma 3."""
    per_head = config.hidden_size / config.n_heads if config.n_layers == LAYERS_OF_27B else config.head_dim
    gain = float(config.attention_scale * per_head**0.5)
    return 1.0 if math.isclose(gain, 1.0, rel_tol=CLOSE) else gain


def differences(one: Any, other: Any) -> list[str]:
    """Where two configs differ by more than what float32 drops."""

    def is_same(a: Any, b: Any) -> bool:
        if isinstance(a, Rope):
            return all(map(is_same, a.frequencies, b.frequencies))
        return math.isclose(a, b, rel_tol=CLOSE) if isinstance(a, float) else bool(a == b)

    return [name for name, value in vars(one).items() if not is_same(value, vars(other)[name])]
