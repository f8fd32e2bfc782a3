"""GPT-2.

Paper: "Language Models are Unsupervised Multitask Learners", Radford et al., 2019. Reference: Hugging Face
transformers, models/gpt2. Different from Llama: positions are learned and added to the embedding; layer norms, with a
mean and a bias; every linear layer has a bias; the feed-forward network has no gate, and GELU between its two layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Array, Layer, Token
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.models.decoder import Decoder
from mlx_engine.models.parameters import Parameters, Plan, Stored, Tensor
from mlx_engine.models.settings import HF_HARMLESS, MOST_LAYERS, Settings

# Keys of config.json that concern training or other tasks than the next token; `n_ctx` repeats `n_positions`.
HARMLESS = {
    *HF_HARMLESS,
    "_num_labels",
    "attn_pdrop",
    "embd_pdrop",
    "gradient_checkpointing",
    "n_ctx",
    "n_special",
    "predict_special_tokens",
    "reorder_and_upcast_attn",  # the same product in another order, for half precision
    "resid_pdrop",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
}


@dataclass(frozen=True)
class Config:
    """The sizes of a GPT-2."""

    n_layers: int
    hidden_size: int
    intermediate_size: int
    n_heads: int
    vocab_size: int
    context_length: int
    norm_eps: float

    @property
    def n_kv_heads(self) -> int:
        """Each query head has keys and values of its own."""
        return self.n_heads

    @property
    def head_dim(self) -> int:
        """The model's width is dealt out to the heads."""
        return self.hidden_size // self.n_heads


class Model(Decoder):
    """A token's embedding and that of its position are added; nothing is rotated, and nothing gated."""

    def __init__(self, config: Config, parameters: Parameters, backend: Backend) -> None:
        self.position_embd = parameters.table("position_embd")
        layers = [_layer(parameters, config, f"blk.{i}.") for i in range(config.n_layers)]
        output_norm = parameters.layer_norm("output_norm", config.norm_eps)
        super().__init__(
            config, parameters, backend, layers=layers, output_norm=output_norm, scale=config.head_dim**-0.5
        )

    def embed(self, ids: Sequence[Token], positions: Sequence[int]) -> Array:
        """Return (T, D): the embeddings of tokens and positions."""
        be = self.backend
        return be.add(super().embed(ids, positions), be.embed(self.position_embd, positions))


def _layer(p: Parameters, cfg: Config, blk: str) -> Layer:
    return Layer(
        attn_norm=p.layer_norm(blk + "attn_norm", cfg.norm_eps),
        attn_q=p.linear(blk + "attn_q"),
        attn_k=p.linear(blk + "attn_k"),
        attn_v=p.linear(blk + "attn_v"),
        attn_output=p.linear(blk + "attn_output"),
        ffn_norm=p.layer_norm(blk + "ffn_norm", cfg.norm_eps),
        ffn_up=p.linear(blk + "ffn_up"),
        activation="gelu",
        ffn_down=p.linear(blk + "ffn_down"),
    )


def plan(checkpoint: Checkpoint) -> Plan:
    """The sizes and tensors of a checkpoint.

    Raises:
        UnsupportedConfigError: a setting is missing, makes no sense, or is not implemented.
    """
    settings = Settings(checkpoint.settings, where=checkpoint.where)
    if checkpoint.naming == "gguf":
        # GGUF does not say whether the head is tied: the file has a matrix for it, or it has none.
        config = _config_from_gguf(settings, checkpoint.n_embeddings)
        return Plan(config, tensors(config, head="optional"))
    config, tied = _config_from_hf(settings), settings.flag("tie_word_embeddings", True)
    # Files of the bare model lack the name that the one with a head has for it.
    stem = "" if "wte.weight" in checkpoint.shapes else "transformer."
    # Some files carry the triangle that hides what is to come, in two spellings, or the tied head once more.
    masks = [f"{stem}h.{i}.attn.{name}" for i in range(config.n_layers) for name in ("bias", "masked_bias")]
    unused = (*masks, "lm_head.weight") if tied else tuple(masks)
    return Plan(config, tensors(config, stem=stem, head="absent" if tied else "required"), unused)


def _config_from_gguf(s: Settings, vocab_size: int) -> Config:
    config = Config(
        n_layers=s.whole("block_count"),
        hidden_size=s.whole("embedding_length"),
        intermediate_size=s.whole("feed_forward_length"),
        n_heads=s.whole("attention.head_count"),
        vocab_size=s.whole("vocab_size", vocab_size),
        context_length=s.whole("context_length"),
        norm_eps=s.number("attention.layer_norm_epsilon"),
    )
    s.expect("attention.head_count_kv", config.n_heads)
    s.expect("attention.causal", True)
    s.refuse_rest()
    return _sound(config, s)


def _config_from_hf(s: Settings) -> Config:
    hidden_size = s.whole("n_embd")
    config = Config(
        n_layers=s.whole("n_layer"),
        hidden_size=hidden_size,
        intermediate_size=s.whole("n_inner", 4 * hidden_size),
        n_heads=s.whole("n_head"),
        vocab_size=s.whole("vocab_size"),
        context_length=s.whole("n_positions"),
        norm_eps=s.number("layer_norm_epsilon", 1e-5),
    )
    # Two names of the tanh form.
    s.expect("activation_function", "gelu_new", "gelu_pytorch_tanh")
    s.expect("scale_attn_weights", True)
    s.expect("scale_attn_by_inverse_layer_idx", False)
    s.expect("add_cross_attention", False)
    s.refuse_rest({*HARMLESS, "tie_word_embeddings"})
    return _sound(config, s)


def _sound(config: Config, s: Settings) -> Config:
    if config.hidden_size % config.n_heads:
        raise s.error("n_heads", f"a divisor of the width {config.hidden_size}", config.n_heads)
    if config.n_layers > MOST_LAYERS:
        raise s.error("n_layers", f"at most {MOST_LAYERS:,}", config.n_layers)
    return config


def tensors(
    cfg: Config, *, stem: str = "transformer.", head: Literal["required", "optional", "absent"]
) -> list[Tensor]:
    """The tensors of a model of these sizes, under GGUF's names and under transformers' behind `stem`."""
    D, F, V = cfg.hidden_size, cfg.intermediate_size, cfg.vocab_size
    table = [
        Tensor("token_embd.weight", f"{stem}wte.weight", (V, D)),
        Tensor("position_embd.weight", f"{stem}wpe.weight", (cfg.context_length, D)),
        *_norm("output_norm", f"{stem}ln_f", D),
    ]
    if head != "absent":
        table.append(Tensor("output.weight", "lm_head.weight", (V, D), required=head == "required"))
    for i in range(cfg.n_layers):
        blk, h = f"blk.{i}.", f"{stem}h.{i}."
        table += _norm(blk + "attn_norm", h + "ln_1", D)
        for part, name in enumerate(("attn_q", "attn_k", "attn_v")):
            table += _linear(blk + name, h + "attn.c_attn", D, D, rows=(part * D, 3 * D), gguf=blk + "attn_qkv")
        table += _linear(blk + "attn_output", h + "attn.c_proj", D, D)
        table += _norm(blk + "ffn_norm", h + "ln_2", D)
        table += _linear(blk + "ffn_up", h + "mlp.c_fc", F, D)
        table += _linear(blk + "ffn_down", h + "mlp.c_proj", D, F)
    return table


def _norm(name: str, hf: str, width: int) -> list[Tensor]:
    return [Tensor(f"{name}.{part}", f"{hf}.{part}", (width,)) for part in ("weight", "bias")]


def _linear(
    name: str, hf: str, n_out: int, n_in: int, rows: tuple[int, int] | None = None, gguf: str | None = None
) -> list[Tensor]:
    """A linear layer, which transformers' Conv1D keeps as (in, out)."""
    gguf = gguf or name
    return [
        Tensor(f"{name}.weight", Stored(f"{hf}.weight", rows, transposed=True), (n_out, n_in),
               gguf=Stored(f"{gguf}.weight", rows)),
        Tensor(f"{name}.bias", Stored(f"{hf}.bias", rows), (n_out,), gguf=Stored(f"{gguf}.bias", rows)),
    ]  # fmt: skip
