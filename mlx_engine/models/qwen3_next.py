"""Qwen3-Next, such as Qwen3-Next-80B-A3B and Qwen3-Coder-Next.

Reference: Hugging Face transformers, models/qwen3_next. The layers are those of Qwen3.5 with a mixture of experts
(`qwen3_5.py`). Differences:

- Folders store the four projections of a delta network as two matrices. Each matrix has the rows of key head 0 and of
  its value heads, then those of key head 1, and so on.
- Older GGUF files have the same two matrices (`ssm_in` and `ssm_ba`). In newer GGUF files, `attn_qkv` and `attn_gate`
  replace `ssm_in`.
- The value heads of a key head are adjacent in GGUF files, as in folders (`are_neighbors`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.declared import Expected, declared, whole
from mlx_engine.config.layer_kinds import layer_kinds
from mlx_engine.models import qwen3_5, standard
from mlx_engine.models.qwen3_5 import ATTENTION, DELTA, INTERVAL, INTERVAL_KEY, NET
from mlx_engine.weights.experts import Names
from mlx_engine.weights.plan import Plan
from mlx_engine.weights.stored import TensorLayout
from mlx_engine.weights.table import Row

ARCHITECTURES = ("qwen3_next", "qwen3next")
GGUF_ARCHITECTURE = "qwen3next"


class RotaryBase(qwen3_5.RotaryBase):
    """The base of the rotary frequencies. Unlike those of Qwen3.5, GGUF files have no `rope.dimension_sections`."""

    def to_gguf(self, value: float) -> Mapping[str, object]:
        return {"rope.freq_base": value}


@dataclass(frozen=True)
class Config(qwen3_5.MoeConfig):
    """The settings of Qwen3.5 with experts (`qwen3_5.MoeConfig`), except for the fields below."""

    are_neighbors: ClassVar[bool] = True
    is_delta: tuple[bool, ...] = layer_kinds(
        INTERVAL, (DELTA, ATTENTION), interval={"gguf": INTERVAL_KEY, "hf": INTERVAL_KEY}
    )
    rope_theta: float = declared(RotaryBase())
    shared_size: int = whole("expert_shared_feed_forward_length", ("shared_expert_intermediate_size", 512))

    expected = Expected(
        gguf=qwen3_5.MoeConfig.expected.gguf,
        hf={
            **{key: of for key, of in qwen3_5.MoeConfig.expected.hf.items() if "output_gate" not in key},
            "mlp_only_layers": ([], None), "use_sliding_window": False,
        },
        harmless=qwen3_5.MoeConfig.expected.harmless,
    )  # fmt: skip


def _delta(cfg: Config, checkpoint: Checkpoint, is_mlx: bool) -> dict[str, Row]:
    G, E, P, r = cfg.n_key_heads, cfg.key_dim, cfg.value_dim, cfg.n_value_heads // cfg.n_key_heads
    # For each key head, the first matrix has the rows of the query "q", the key "k", r value heads "v" and r gates "z";
    # the second matrix has r rows of beta "b" and r rows of alpha "a". `parts` maps each letter to (first row, number
    # of rows); rows are counted from the key head's first row in the matrix.
    parts = {"q": (0, E), "k": (E, E), "v": (2 * E, r * P), "z": (2 * E + r * P, r * P), "b": (0, r), "a": (r, r)}
    size = {part: 2 * r if part in "ba" else 2 * E + 2 * r * P for part in parts}

    def rows(names: str) -> TensorLayout:
        of_parts = ((size[part], *parts[part]) for part in names)
        order = (row for apart, at, n in of_parts for row in qwen3_5.rows_of(range(G), apart, range(n), at))
        return TensorLayout("", rows=(0, G * size[names[0]]), order=tuple(order))

    name, ba = f"{NET}in_proj_qkvz.weight", f"{NET}in_proj_ba.weight"
    is_old = any(of.endswith(".ssm_in.weight") for of in checkpoint.shapes)
    in_gguf = {"attn_qkv": "ssm_in", "delta_gate": "ssm_in"} if is_old else {"delta_gate": "attn_gate"}

    def row(part: str, hf: str, shape: str, names: str) -> Row:
        stored, gguf = rows(names), in_gguf.get(part, "ssm_ba" if hf == ba else part)
        return Row(
            hf, shape, kind=DELTA, gguf=f"blk.*.{gguf}.weight", in_hf=stored,
            stored=stored if gguf in ("ssm_in", "ssm_ba") else TensorLayout(""),
        )  # fmt: skip

    return {
        **qwen3_5.delta_rows(cfg, checkpoint, is_mlx),
        "blk.*.attn_qkv.weight": row("attn_qkv", name, "C D", "qkv"),
        "blk.*.delta_gate.weight": row("delta_gate", name, "UP D", "z"),
        "blk.*.ssm_beta.weight": row("ssm_beta", ba, "U D", "b"),
        "blk.*.ssm_alpha.weight": row("ssm_alpha", ba, "U D", "a"),
    }


Model = qwen3_5.MoeModel


def plan(checkpoint: Checkpoint) -> Plan:
    made = qwen3_5.plan(checkpoint, Config, experts=qwen3_5.of_extra, delta=_delta)
    return standard.with_mixture(made, checkpoint, Names())
