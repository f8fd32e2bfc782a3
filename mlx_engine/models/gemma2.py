"""Gemma 2 and VaultGemma.

Paper: "Gemma 2: Improving Open Language Models at a Practical Size", arXiv 2408.00118. Reference: Hugging Face
transformers, models/gemma2. Differences from Gemma 3: attention scores and logits have soft caps; heads are not normed;
every second layer has sliding-window attention; all layers have the same rotary embedding.

Reference of VaultGemma: models/vaultgemma. Difference from Gemma 2: the outputs of attention and FFN are not normed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlx_engine.backends.parameters import Rope, Scores
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.declared import Expected, Naming, Setting, declared, n_embeddings, whole
from mlx_engine.config.layer_kinds import layer_kinds
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.config.settings import Settings
from mlx_engine.models import gemma3
from mlx_engine.models.gemma3 import AttentionScale, Sizes, scale_factor
from mlx_engine.models.layer import Attention, LayerTensors
from mlx_engine.weights.model import Architecture
from mlx_engine.weights.plan import Plan
from mlx_engine.weights.table import Table, tensors

# Every second layer, beginning with the second layer, is global (attends to all tokens). The other layers are local.
PATTERN = 2
# The number of layers of the 27B model, whose attention scale differs; see `gemma3.LAYERS_OF_27B`.
LAYERS_OF_27B = 46


@dataclass(frozen=True)
class SoftCap(Setting):
    """The setting of a soft cap. Its key is the same in GGUF and config.json; null in config.json means no soft cap.

    `usual` is the soft cap if the key is absent.
    """

    key: str
    usual: float

    def read(self, s: Settings, naming: Naming, known: Any) -> float | None:
        return s.number_or_none(self.key, self.usual)

    def to_gguf(self, value: float | None) -> Mapping[str, object]:
        # A GGUF file without the key has the default soft cap. So for a model without a soft cap, the writer raises an
        # error: it finds that the settings of the new file differ from the model's.
        return {} if value is None else {self.key: value}

    def to_hf(self, value: float | None, config: Any) -> Mapping[str, object]:
        return {self.key: value}


@dataclass(frozen=True)
class Config(Sizes):
    """The sizes of a Gemma 2 model. Fields have the defaults of transformers, because a config.json may omit keys."""

    vocab_size: int = whole(("vocab_size", n_embeddings), ("vocab_size", 256_000))
    context_length: int = whole("context_length", ("max_position_embeddings", 8192))
    rope: Rotation = rotation(rules=("linear",))
    attention_scale: float = declared(AttentionScale(LAYERS_OF_27B))
    score_softcap: float | None = declared(SoftCap("attn_logit_softcapping", 50.0))
    logit_softcap: float | None = declared(SoftCap("final_logit_softcapping", 30.0))
    window: int = whole(("attention.sliding_window", 4096), ("sliding_window", 4096))
    is_local: tuple[bool, ...] = layer_kinds(PATTERN, interval=gemma3.PATTERN_KEYS)

    expected = Expected(
        gguf={"attention.causal": True},
        hf={
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "use_bidirectional_attention": (None, False),
            "sliding_window_pattern": PATTERN,  # transformers ignores the key
            "tie_word_embeddings": True,
        },
        # transformers reads `hidden_activation` and `sliding_window` in place of the first two keys.
        harmless=("hidden_act", "sliding_window_size", "cache_implementation"),
    )


# Gemma 3's tensors without the norms of heads.
TENSORS = {
    name: row
    for name, row in gemma3.TENSORS.items()
    if name not in ("blk.*.attn_q_norm.weight", "blk.*.attn_k_norm.weight")
}
VAULT_TENSORS = {name: row for name, row in TENSORS.items() if "post_" not in name}
QUERIES = "blk.*.attn_q.weight"


class Model(gemma3.Model):
    def mixer(self, config: Config, t: LayerTensors, rope: Rope | None, window: int | None) -> Attention:
        return Attention.read(t, config, rope, Scores(config.attention_scale, config.score_softcap), window)


def planned(checkpoint: Checkpoint, of: Table) -> Plan:
    s = Settings(checkpoint.settings, where=checkpoint.where)
    config = Config.read(s, checkpoint.naming, checkpoint.n_embeddings)
    if checkpoint.naming == "gguf":
        # The head is tied, but some files have a matrix for it.
        return Plan(config, tensors(config, of, "optional"))
    factor = scale_factor(config, LAYERS_OF_27B)
    table = {**of, QUERIES: replace(of[QUERIES], times=factor)}
    in_tensors = () if factor == 1 else ("attention_scale",)
    # A folder may have a second copy of the tied head, `lm_head.weight`, which is not read.
    return Plan(config, tensors(config, table, "absent"), ("lm_head.weight",), in_tensors)


def plan(checkpoint: Checkpoint) -> Plan:
    return planned(checkpoint, TENSORS)


def vault_plan(checkpoint: Checkpoint) -> Plan:
    return planned(checkpoint, VAULT_TENSORS)


ARCHITECTURES = (
    Architecture("Gemma 2", ("gemma2",), "gemma2", Config, Model, plan),
    Architecture("VaultGemma", ("vaultgemma",), "vaultgemma", Config, Model, vault_plan),
)
