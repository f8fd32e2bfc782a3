"""The frame of a new model file: what is Llama's is taken from Llama, and what differs is in the file."""

from __future__ import annotations

from typing import Any

from mlx_engine.config.settings import Settings
from mlx_engine.models import llama
from tools.new_model import LETTERS, frame, import_before, rows

DIMENSIONS = {letters: n for n, letters in LETTERS.items()}
DEFAULTS = {
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "clip": "none",
    "vocab_size": 9,
}


def module(text: str) -> dict[str, Any]:
    made: dict[str, Any] = {"__name__": "frame"}
    exec(compile(text, "frame.py", "exec"), made)
    return made


def test_a_frame_has_the_tensors_and_the_settings_that_differ_from_llama():
    names = {row.hf.replace("*", "0"): key.replace("*", "0") for key, row in llama.TENSORS.items() if row.when is None}
    shapes = {
        row.hf.replace("*", "0"): tuple(DIMENSIONS[letters] for letters in row.shape.split())
        for row in llama.TENSORS.values() if row.when is None
    }  # fmt: skip
    del shapes["model.layers.0.mlp.gate_proj.weight"]
    shapes["model.layers.0.self_attn.q_norm.weight"] = (16,)
    names["model.layers.0.self_attn.q_norm.weight"] = "blk.0.attn_q_norm.weight"
    made = module(frame("new", "new-model", rows(shapes, names), DEFAULTS))
    assert made["ARCHITECTURES"] == ("new", "new-model")
    of_llama = {key for key, row in llama.TENSORS.items()}
    assert set(made["TENSORS"]) == of_llama - {"blk.*.ffn_gate.weight"} | {"blk.*.attn_q_norm.weight"}
    assert made["TENSORS"]["blk.*.attn_q_norm.weight"].shape == "E"
    assert made["Config"].expected.hf == {"hidden_act": "silu", "clip": "none"}
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "vocab_size": 9,
    }
    assert made["Config"].read(Settings(sizes | {"vocab_size": 9}, where="here"), "hf").n_layers == 2


def test_an_import_is_inserted_in_order():
    of = "from transformers.models.{0} import modeling_{0}\n".format
    assert import_before(of("cohere1")) == of("cohere")
    assert import_before(of("aaa")) == "from transformers import modeling_rope_utils as rope_utils\n"
