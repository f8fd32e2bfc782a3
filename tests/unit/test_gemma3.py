"""Gemma 3's settings in every spelling, the model beside one of images, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

import mlx_engine
from mlx_engine.config.settings import Settings
from mlx_engine.errors import UnsupportedConfigError
from mlx_engine.models.gemma3 import Config, text_settings
from tests.golden.convert import read_safetensors, write_safetensors
from tests.golden.goldens import DATA, Golden, check_close

FOLDER = DATA / "gemma3-micro" / "hf"
GOLDEN = Golden("gemma3", FOLDER, DATA / "gemma3-micro" / "golden.npz")
CONFIG = json.loads((FOLDER / "config.json").read_text())
OLD = ("rope_theta", "rope_local_base_freq", "rope_scaling", "sliding_window_pattern")


def hf(config: dict[str, object]) -> Config:
    return Config.read(text_settings(Settings(config, where="here")), "hf")


def nested(**full: object) -> dict[str, object]:
    """The settings as transformers 5 writes them."""
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6, **full},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    types = ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 2
    return {k: v for k, v in CONFIG.items() if k not in OLD} | {
        "rope_parameters": rope,
        "layer_types": types,
        "_sliding_window_pattern": 6,
    }


def test_both_spellings_mean_the_same():
    assert hf(CONFIG) == hf(nested())
    assert hf(CONFIG).is_local == (True,) * 5 + (False,) + (True,) * 2


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_linear_scaling_is_of_global_layers(key: str):
    old = hf({**CONFIG, "rope_scaling": {key: "linear", "factor": 8.0}})
    assert (old.rope.factor, old.rope.theta, old.local_rope.theta) == (8.0, 1e6, 1e4)
    assert old == hf(nested(rope_type="linear", factor=8.0))


def test_scaling_reaches_the_rotation_of_global_layers_alone(tmp_path: Path):
    path = folder(tmp_path, rope_scaling={"rope_type": "linear", "factor": 8.0})
    layers = mlx_engine.load(path, "simd").model.layers  # type: ignore[attr-defined]
    assert [w.mix.rope.frequencies[0] for w in layers] == [1.0] * 5 + [1 / 8] + [1.0] * 2
    assert layers[0].mix.rope.frequencies[1] == pytest.approx(1e4 ** (-1 / 16))


def test_a_model_of_text_and_images_leaves_most_to_defaults():
    """The published settings of the 4B model."""
    scaling = {"factor": 8.0, "rope_type": "linear"}
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": scaling, "sliding_window": 1024}  # fmt: skip
    config = hf({
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255_999, "eoi_token_index": 256_000,
        "eos_token_id": [1, 106], "image_token_index": 262_144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
        "model_type": "gemma3", "text_config": text, "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
        "vision_config": {"hidden_size": 1152},
    })  # fmt: skip
    assert (config.n_heads, config.n_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262_208)
    assert (config.window, config.rope.factor, config.attention_scale) == (1024, 8.0, 1 / 16)
    assert config.is_local.count(False) == 5


def test_the_text_model_is_found_beside_one_of_images(tmp_path: Path):
    tensors = read_safetensors(FOLDER / "model.safetensors")
    around = {k: CONFIG[k] for k in ("architectures", "bos_token_id", "eos_token_id")} | {"model_type": "gemma3"}
    for i, stem in enumerate(("language_model.model.", "model.language_model.")):
        renamed = {stem + name.removeprefix("model."): values for name, values in tensors.items()}
        images = {"vision_tower.x.weight": np.zeros((2, 2)), "model.multi_modal_projector.y": np.zeros(3)}
        path = tmp_path / str(i)
        path.mkdir()
        write_safetensors(path / "model.safetensors", {**renamed, **images})
        (path / "config.json").write_text(json.dumps({**around, "text_config": CONFIG, "vision_config": {}}))
        check_close(GOLDEN.logits(1), np.asarray(mlx_engine.load(path, "simd").logits(GOLDEN.prompt(1))))


def folder(path: Path, **config: object) -> Path:
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    write_safetensors(path / "model.safetensors", read_safetensors(FOLDER / "model.safetensors"))
    return path


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("hidden_activation", "gelu"),
        ("attention_bias", True),
        ("use_bidirectional_attention", True),
        ("tie_word_embeddings", False),
        ("layer_types", ["full_attention"]),
        ("layer_types", ["chunked_attention"] * 8),
        ("num_hidden_layers", 10**9),
        ("something_new", 1),
    ],
)
def test_a_setting_that_would_change_the_computation_is_refused_by_name(key: str, value: object):
    with pytest.raises(UnsupportedConfigError) as caught:
        hf({**CONFIG, key: value})
    assert caught.value.key == key


@pytest.mark.parametrize("scaling", [{"rope_type": "yarn", "factor": 8.0}, {"factor": 8.0, "type": "dynamic"}])
def test_another_scaling_is_refused(scaling: dict[str, object]):
    for config in ({**CONFIG, "rope_scaling": scaling}, nested(**{"rope_type": "yarn", **scaling})):
        with pytest.raises(UnsupportedConfigError, match=r"yarn|dynamic"):
            hf(config)


def test_scaling_of_local_layers_is_refused():
    config = nested()
    config["rope_parameters"]["sliding_attention"] = {"rope_type": "linear", "factor": 2.0}  # type: ignore[index]
    with pytest.raises(UnsupportedConfigError, match="sliding_attention"):
        hf(config)


GGUF_1B = {
    "block_count": 26, "context_length": 32_768, "embedding_length": 1152, "feed_forward_length": 6912,
    "attention.head_count": 4, "attention.head_count_kv": 1, "attention.key_length": 256,
    "attention.value_length": 256, "attention.layer_norm_rms_epsilon": 1e-6, "attention.sliding_window": 512,
    "rope.freq_base": 1e6,
}  # fmt: skip


def gguf(**changed: object) -> Config:
    named = {key.replace("__", "."): value for key, value in changed.items()}
    return Config.read(Settings({**GGUF_1B, **named}, where="here"), "gguf", 262_144)


def test_what_gguf_leaves_out():
    config = gguf()
    assert (config.local_rope.theta, config.rope.factor, config.attention_scale) == (1e4, 1.0, 1 / 16)
    assert [i for i, local in enumerate(config.is_local) if not local] == [5, 11, 17, 23]


def test_gguf_of_the_larger_sizes():
    scaled = gguf(rope__scaling__type="linear", rope__scaling__factor=8.0)
    assert scaled.rope.factor == 8.0
    sizes = {"block_count": 62, "embedding_length": 5376, "attention__head_count": 32, "attention__key_length": 128}
    largest = gguf(**sizes, attention__value_length=128, attention__head_count_kv=16)
    assert largest.attention_scale == 168**-0.5


@pytest.mark.parametrize(
    ("key", "value"),
    [("final_logit_softcapping", 30.0), ("attn_logit_softcapping", 50.0), ("rope__scaling__type", "yarn"),
     ("attention__causal", False), ("something_new", 1)],
)  # fmt: skip
def test_a_gguf_setting_that_would_change_the_computation_is_refused_by_name(key: str, value: object):
    with pytest.raises(UnsupportedConfigError) as caught:
        gguf(**{key: value})
    assert caught.value.key == key.replace("__", ".")
