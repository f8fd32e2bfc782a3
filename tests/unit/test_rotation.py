"""Rotary embedding in GGUF files, LongRoPE's tensors, and the names of tensors in folders of models with images."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.rope import Rotation, context_notes, for_context
from mlx_engine.errors import ModelError, UnsupportedConfigError
from mlx_engine.quant.types import F32
from mlx_engine.quant.weight import Weight
from mlx_engine.weights.model import architecture_of
from tests.unit.test_published_dense import MINISTRAL3_8B

SIZES = {
    "block_count": 1, "context_length": 512, "embedding_length": 32, "feed_forward_length": 64,
    "attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-6, "vocab_size": 64,
}  # fmt: skip
LONGROPE = {"rope.scaling.attn_factor": 1.25, "rope.scaling.original_context_length": 64}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}


def gguf(architecture: str, settings: dict[str, Any], divisors: dict[str, list[float]] | None = None) -> Any:
    """Return the config of a GGUF file."""
    made = {name: Weight.pack(name, np.array(values, np.float32), F32) for name, values in (divisors or {}).items()}
    shapes = {name: weight.shape for name, weight in made.items()}
    of = Checkpoint("here", "gguf", architecture, {**SIZES, **settings}, {}, shapes, made.__getitem__)
    return architecture_of(of).plan(of).config


def test_longrope_is_read_from_two_tensors():
    config = gguf("phi3", LONGROPE, {"rope_factors_short.weight": [1.0] * 8, "rope_factors_long.weight": [2.0] * 8})
    assert config.rope == Rotation(
        1e4, "longrope", context=64, attention_factor=1.25, short=(1.0,) * 8, long=(2.0,) * 8
    )


@pytest.mark.parametrize("long", [None, [2.0] * 7, [2.0] * 7 + [0.0], [2.0] * 7 + [float("nan")], [np.inf] * 8])
def test_damaged_divisors_are_named(long: list[float] | None):
    tensors = {"rope_factors_short.weight": [1.0] * 8}
    with pytest.raises(ModelError, match="rope_factors_long"):
        gguf("phi3", LONGROPE, tensors if long is None else {**tensors, "rope_factors_long.weight": long})


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral3", "olmo2", "smollm3", "granite"])
def test_yarn_in_gguf_files(architecture: str):
    config = gguf(architecture, {**YARN, "logit_scale": 1.0} if architecture == "granite" else YARN)
    assert config.rope == Rotation(
        config.rope.theta, "yarn", 4.0, 1.0, 32.0, 64, attention_factor=pytest.approx(0.1 * np.log(4) + 1)
    )


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({**YARN, "rope.scaling.yarn_attn_factor": 1.5}, "rope.scaling.yarn_attn_factor"),
        ({**YARN, "rope.scaling.yarn_ext_factor": 0.5}, "rope.scaling.yarn_ext_factor"),
        ({**YARN, "rope.scaling.yarn_log_multiplier": 0.1}, "rope.scaling.yarn_log_multiplier"),
        ({"rope.scaling.type": "linear", "rope.scaling.attn_factor": 1.5}, "rope.scaling.attn_factor"),
        ({"rope.scaling.type": "invented"}, "rope.scaling.type"),
        ({**YARN, "rope.freq_base": 1.0}, "rope.freq_base"),
    ],
)
def test_a_key_that_is_not_understood_is_refused(settings: dict[str, Any], key: str):
    with pytest.raises(UnsupportedConfigError) as caught:
        gguf("qwen3", settings)
    assert caught.value.key == key


@pytest.mark.parametrize("n", [0, 3, 18])
def test_a_damaged_number_of_rotated_elements_is_refused(n: int):
    with pytest.raises(UnsupportedConfigError, match="dimension_count"):
        gguf("phi3", {"rope.dimension_count": n})


def test_dynamic_ntk_reaches_the_context_that_is_asked_for():
    config = replace(gguf("llama", {}), rope=Rotation(1e4, "dynamic", factor=2.0, context=512))
    usual, long = for_context(config, None), for_context(config, 2048)
    assert (usual.context_length, long.context_length) == (512, 2048)
    assert for_context(config, 100).context_length == 512
    assert usual.rope.for_heads(16).frequencies == Rotation(1e4).for_heads(16).frequencies
    first, *_, last = long.rope.for_heads(16).frequencies
    assert first == 1
    assert last == pytest.approx(usual.rope.for_heads(16).frequencies[-1] / 7)  # 2 * 2048 / 512 - 1
    assert context_notes(usual)
    assert not context_notes(long)


@pytest.mark.parametrize(
    ("model", "head"),
    [
        ("model.", "lm_head.weight"),
        ("language_model.model.", "language_model.lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
    ],
)
def test_the_text_model_is_found_beside_the_image_encoder(model: str, head: str):
    shapes = {f"{model}embed_tokens.weight": (131072, 4096), "model.vision_tower.ln_pre.weight": (8,)}
    of = Checkpoint("here", "hf", "mistral3", MINISTRAL3_8B, {}, shapes, lambda name: pytest.fail(name))
    plan = architecture_of(of).plan(of)
    names = {tensor.name: tensor.stored("hf").name for tensor in plan.tensors}
    assert names["blk.3.attn_q.weight"] == f"{model}layers.3.self_attn.q_proj.weight"
    assert (names["output_norm.weight"], names["output.weight"]) == (f"{model}norm.weight", head)
    assert "model.vision_tower.ln_pre.weight" in plan.unused
