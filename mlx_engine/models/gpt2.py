"""GPT-2; StarCoder and SantaCoder.

Paper: "Language Models are Unsupervised Multitask Learners", Radford et al., 2019. Reference: Hugging Face
transformers, models/gpt2. Differences from Llama: learned position embeddings are added to the token embeddings; norms
are layer norms; the linear layers of attention and FFN have biases; the FFN has no gate, and its activation is GELU.

Paper of StarCoder: "StarCoder: may the source be with you!", arXiv 2305.06161. Reference: models/gpt_bigcode.
Difference from GPT-2: multi-query attention, in which all query heads share one KV head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Activation, Array, Token
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.declared import (
    ConfigBase,
    Expected,
    activation_key,
    believable,
    divides,
    n_embeddings,
    number,
    whole,
)
from mlx_engine.config.settings import Settings
from mlx_engine.models.decoder import Decoder
from mlx_engine.models.layer import Attention, Branch, Layer, LayerTensors, Plain
from mlx_engine.weights.model import Architecture
from mlx_engine.weights.parameters import Parameters
from mlx_engine.weights.plan import Plan, Tensor
from mlx_engine.weights.stored import TensorLayout
from mlx_engine.weights.table import Head, head_of, padded

STEMS = ("transformer.", "", "model.")
ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu", "gelu": "gelu_erf"}


@dataclass(frozen=True)
class Config(ConfigBase):
    n_layers: int = whole("block_count", "n_layer", condition=believable)
    hidden_size: int = whole("embedding_length", "n_embd")
    intermediate_size: int = whole("feed_forward_length", ("n_inner", lambda known: 4 * known.hidden_size))
    n_heads: int = whole(
        "attention.head_count", "n_head", repeated=("attention.head_count_kv",), condition=divides("hidden_size")
    )
    vocab_size: int = whole(("vocab_size", n_embeddings), "vocab_size")
    context_length: int = whole("context_length", "n_positions")
    norm_eps: float = number("attention.layer_norm_epsilon", ("layer_norm_epsilon", 1e-5))
    activation: Activation = activation_key(ACTIVATIONS, gguf="gelu", hf="activation_function")

    expected = Expected(
        gguf={"attention.causal": True},
        hf={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "position_embedding_type": "absolute",
        },
        # These settings concern training, or tasks other than predicting the next token; `n_ctx` repeats `n_positions`.
        harmless=(
            "n_ctx",
            "n_special",
            "predict_special_tokens",
            "reorder_and_upcast_attn",  # the same result computed in another order, for half precision
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        ),
    )

    @property
    def n_kv_heads(self) -> int:
        return self.n_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.n_heads


class Model(Decoder):
    def __init__(self, config: Config, parameters: Parameters, backend: Backend) -> None:
        self.position_embd = parameters.table("position_embd")
        layers = [
            Layer(
                norm=t.norm("attn_norm"), branches=(Branch(Attention.read(t, config, None), t.linear("attn_output")),),
                ffn=Plain(t.norm("ffn_norm"), t.linear("ffn_up"), t.linear("ffn_down"), config.activation),
            )
            for t in LayerTensors.of(parameters, config.n_layers, config.norm_eps)
        ]  # fmt: skip
        output_norm = parameters.layer_norm("output_norm", config.norm_eps)
        super().__init__(config, parameters, backend, layers=layers, output_norm=output_norm)

    def embed(self, ids: Sequence[Token], positions: Sequence[int]) -> Array:
        be = self.backend
        return be.add(super().embed(ids, positions), be.embed(self.position_embd, positions))


def plan(checkpoint: Checkpoint, config_type: type[Config] = Config, *, transposed: bool = True) -> Plan:
    """Return the plan of a checkpoint; `transposed`: whether transformers stores its matrices as (in, out)."""
    s = Settings(checkpoint.settings, where=checkpoint.where)
    head = head_of(checkpoint, s, tied=True)
    # In folders without a head (`GPT2Model`), names have no prefix. mlx-lm writes the prefix "model.", and matrices as
    # (out, in).
    stem = next((stem for stem in STEMS if f"{stem}wte.weight" in checkpoint.shapes), STEMS[0])
    table = "token_embd.weight" if checkpoint.naming == "gguf" else f"{stem}wte.weight"
    config = padded(config_type.read(s, checkpoint.naming, checkpoint.n_embeddings), checkpoint, table)
    # Unused tensors of some files: each layer's causal mask and the score of masked tokens; a copy of the embeddings.
    masks = [f"{stem}h.{i}.attn.{name}" for i in range(config.n_layers) for name in ("bias", "masked_bias")]
    unused = (*masks, "lm_head.weight") if head == "absent" else tuple(masks)
    return Plan(config, tensors(config, head, stem=stem, transposed=transposed and stem != STEMS[-1]), unused)


def tensors(cfg: Config, head: Head, *, stem: str, transposed: bool) -> list[Tensor]:
    """Return the tensors of a model; `stem` is the prefix of their names in Hugging Face folders."""
    linear, GE = partial(_linear, transposed=transposed), cfg.n_kv_heads * cfg.head_dim
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
        for name, n, first in (("attn_q", D, 0), ("attn_k", GE, D), ("attn_v", GE, D + GE)):
            rows = first, D + 2 * GE
            table += linear(blk + name, h + "attn.c_attn", n, D, rows=rows, gguf=blk + "attn_qkv")
        table += linear(blk + "attn_output", h + "attn.c_proj", D, D)
        table += _norm(blk + "ffn_norm", h + "ln_2", D)
        table += linear(blk + "ffn_up", h + "mlp.c_fc", F, D)
        table += linear(blk + "ffn_down", h + "mlp.c_proj", D, F)
    return table


def _norm(name: str, hf: str, width: int) -> list[Tensor]:
    return [Tensor(f"{name}.{part}", f"{hf}.{part}", (width,)) for part in ("weight", "bias")]


def _linear(
    name: str, hf: str, n_out: int, n_in: int, rows: tuple[int, int] | None = None, gguf: str | None = None, *,
    transposed: bool,
) -> list[Tensor]:  # fmt: skip
    """Return weight and bias of a linear layer."""
    gguf = gguf or name
    return [
        Tensor(f"{name}.weight", TensorLayout(f"{hf}.weight", rows, transposed=transposed), (n_out, n_in),
               gguf=TensorLayout(f"{gguf}.weight", rows)),
        Tensor(f"{name}.bias", TensorLayout(f"{hf}.bias", rows), (n_out,), gguf=TensorLayout(f"{gguf}.bias", rows)),
    ]  # fmt: skip


@dataclass(frozen=True)
class StarCoderConfig(Config):
    """GPT-2's settings, with one KV head."""

    n_heads: int = whole("attention.head_count", "n_head", condition=divides("hidden_size"))
    activation: Activation = activation_key(
        {"gelu_pytorch_tanh": "gelu", **ACTIVATIONS}, gguf="gelu", hf="activation_function"
    )

    expected = Expected(
        gguf={"attention.causal": True, "attention.head_count_kv": 1},
        hf={"scale_attn_weights": True, "multi_query": True},
        harmless=(
            *Config.expected.harmless, "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32",
            "num_key_value_heads", "inference_runner", "max_batch_size", "max_sequence_length", "pad_key_length",
            "pre_allocate_kv_cache", "validate_runner_input",
        ),
    )  # fmt: skip

    @property
    def n_kv_heads(self) -> int:
        return 1

    def to_gguf(self) -> dict[str, object]:
        return super().to_gguf() | {"attention.head_count_kv": 1}


starcoder_plan = partial(plan, config_type=StarCoderConfig, transposed=False)
ARCHITECTURES = (
    Architecture("GPT-2", ("gpt2",), "gpt2", Config, Model, plan),
    Architecture(
        "StarCoder and SantaCoder",
        ("gpt_bigcode", "starcoder"), "starcoder", StarCoderConfig, Model, starcoder_plan,
    ),
)  # fmt: skip
