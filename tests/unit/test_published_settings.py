"""config.json as well-known repositories publish it: the model runs, or is refused for a reason that is known."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlx_engine
from mlx_engine import load_tokenizer
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.rope import context_notes
from mlx_engine.config.settings import HARMLESS, OFF, Settings
from mlx_engine.errors import ModelError, OptionError, TensorMismatchError, UnsupportedConfigError
from mlx_engine.weights.model import architecture_of
from tests.published import PUBLISHED, write_folder

DATA = Path(__file__).parents[1] / "data"

# Layers, width, query heads, key/value heads, head width, vocabulary, context.
SIZES = {
    "openai-community/gpt2-medium": (24, 1024, 16, 16, 64, 50257, 1024),
    "distilbert/distilgpt2": (6, 768, 12, 12, 64, 50257, 1024),
    "google/gemma-3-1b-it": (26, 1152, 4, 1, 256, 262144, 32768),
    "google/gemma-3-4b-it": (34, 2560, 8, 4, 256, 262208, 131072),
    "Qwen/Qwen2.5-0.5B": (24, 896, 14, 2, 64, 151936, 32768),
    "HuggingFaceTB/SmolLM2-135M": (30, 576, 9, 3, 64, 49152, 8192),
    "meta-llama/Llama-3.2-1B": (16, 2048, 32, 8, 64, 128256, 131072),
    "mistralai/Mistral-7B-v0.1": (32, 4096, 32, 8, 128, 32000, 32768),
    "mistralai/Mistral-Nemo-Base-2407": (40, 5120, 32, 8, 128, 131072, 1024000),
}


def plan(config: dict[str, Any]) -> Any:
    checkpoint = Checkpoint(
        where="here",
        naming="hf",
        architecture=config["model_type"],
        settings=config,
        metadata={},
        shapes={},
        weight=lambda name: pytest.fail(f"{name} was read"),
    )
    return architecture_of(checkpoint).plan(checkpoint)


@pytest.mark.parametrize("name", SIZES)
def test_sizes_as_published(name: str):
    found = plan(PUBLISHED[name]["config"]).config
    assert SIZES[name] == (
        found.n_layers, found.hidden_size, found.n_heads, found.n_kv_heads, found.head_dim, found.vocab_size,
        found.context_length,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("HuggingFaceTB/SmolLM2-135M", "rope_interleaved"),
        ("Qwen/Qwen2.5-0.5B", "use_mrope"),
        ("openai-community/gpt2", "add_cross_attention"),
        ("meta-llama/Llama-3.2-1B", "is_encoder_decoder"),
        ("mistralai/Mistral-7B-v0.1", "attention_bias"),
    ],
)
def test_a_switch_that_is_off_is_refused_when_on(name: str, key: str):
    config = PUBLISHED[name]["config"]
    plan({**config, key: False})
    with pytest.raises(UnsupportedConfigError, match=f"expected {key} to be .*--allow-setting {key} ignores"):
        plan({**config, key: True})


@pytest.mark.some(17)
@pytest.mark.parametrize("name", [name for name in PUBLISHED if "refused" not in PUBLISHED[name]])
def test_a_reduced_model_with_a_published_config_runs(name: str, tmp_path: Path):
    engine = mlx_engine.load(write_folder(tmp_path / "model", PUBLISHED[name]), "simd", jit=False)
    found = np.array(engine.logits(list(range(1, 16))))
    assert found.shape == (15, engine.config.vocab_size)
    assert np.isfinite(found).all()
    # Phi-3.5 and Phi-4-mini have two rotations, of which the option selects one; Qwen2.5-1M has dual chunk attention.
    assert all("--context" in note or "one chunk" in note for note in engine.notes)


def test_dual_chunk_attention_limits_the_context_to_a_chunk_and_says_so(tmp_path: Path):
    found = plan(PUBLISHED["Qwen/Qwen2.5-7B-Instruct-1M"]["config"]).config
    assert found.context_length == 262_144
    note = "context 262,144 tokens, one chunk; dual chunk attention, which is not implemented, would allow 1,010,000"
    assert context_notes(found) == (note,)
    with pytest.raises(UnsupportedConfigError, match="sparse_attention_config"):
        plan(PUBLISHED["Qwen/Qwen2.5-7B-Instruct-1M"]["config"] | {"sparse_attention_config": "x.json"})


@pytest.mark.parametrize("name", [name for name in PUBLISHED if "refused" in PUBLISHED[name]])
def test_a_published_config_is_refused_for_the_reason_that_is_written_down(name: str, tmp_path: Path):
    entry = PUBLISHED[name]
    assert entry["refused"]["why"]
    with pytest.raises(ModelError) as caught:
        mlx_engine.load(write_folder(tmp_path / "model", entry), "simd")
    assert entry["refused"]["setting"] in str(caught.value)


# Keys that older versions of transformers wrote into every config.json, at the values that they wrote.
OLD_KEYS = {
    "_attn_implementation_autoset": True, "add_cross_attention": False, "bad_words_ids": None,
    "begin_suppress_tokens": None, "chunk_size_feed_forward": 0, "cross_attention_hidden_size": None,
    "decoder_start_token_id": None, "diversity_penalty": 0.0, "do_sample": False, "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0, "exponential_decay_length_penalty": None, "finetuning_task": None,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "is_decoder": False, "is_encoder_decoder": False,
    "length_penalty": 1.0, "max_length": 20, "min_length": 0, "no_repeat_ngram_size": 0, "num_beam_groups": 1,
    "num_beams": 1, "num_return_sequences": 1, "output_past": True, "output_scores": False, "pad_token_id": -1,
    "prefix": None, "pruned_heads": {}, "quantization_config": None, "remove_invalid_values": False,
    "repetition_penalty": 1.0, "return_dict_in_generate": False, "sep_token_id": None, "suppress_tokens": None,
    "temperature": 1.0, "tf_legacy_loss": False, "tie_encoder_decoder": False, "tokenizer_class": None,
    "top_k": 50, "top_p": 1.0, "torchscript": False, "typical_p": 1.0, "use_bfloat16": False,
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_keys_of_older_versions_change_nothing(name: str):
    config = PUBLISHED[name]["config"]
    assert plan(config | OLD_KEYS).config == plan(config).config


def test_only_values_that_mean_off_pass():
    settings = Settings({"pruned_heads": {"0": [1]}}, where="here")
    with pytest.raises(UnsupportedConfigError, match="expected pruned_heads to be absent or None"):
        settings.refuse_rest()
    assert not HARMLESS & set(OFF)


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("openai-community/gpt2", "transformer.wte.weight"),
        ("Qwen/Qwen2.5-0.5B", "model.embed_tokens.weight"),
        ("google/gemma-3-1b-it", "model.embed_tokens.weight"),
    ],
)
def test_a_padded_table_gives_logits_for_all_its_rows(name: str, table: str, tmp_path: Path):
    folder = write_folder(tmp_path / "model", PUBLISHED[name])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] - 10}))
    engine = mlx_engine.load(folder, "simd", jit=False)
    assert engine.logits([3, 1]).shape == (2, config["vocab_size"])
    with pytest.raises(OptionError, match=f"token ids from 0 to {config['vocab_size'] - 1}"):
        engine.logits([config["vocab_size"]])


def test_ids_of_padding_have_no_text(tmp_path: Path):
    """As in transformers; without padding, the tokenizer would refuse an id of the model."""
    made = load_tokenizer(DATA / "qwen3-micro" / "hf")
    padded = made.padded(made.vocab_size + 3)
    assert padded.vocab_size == made.vocab_size + 3
    assert padded.decode([5, made.vocab_size + 2, 6]) == made.decode([5, 6])
    assert padded.encode("once") == made.encode("once")
    assert made.padded(4) is made


@pytest.mark.parametrize(
    ("name", "is_derived"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", True),
        ("model.rotary_emb.inv_freq", True),
        ("rotary_emb_local.original_inv_freq", True),
        ("model.layers.1.self_attn.rotary_emb.cos_cached", True),
        ("model.layers.1.self_attn.rotary_emb.weight", False),
        ("model.layers.1.inv_freq", False),
        ("model.layers.1.self_attn.bias", False),
    ],
)
def test_saved_rotary_tables_are_ignored_and_nothing_else(name: str, is_derived: bool, tmp_path: Path):
    entry = PUBLISHED["meta-llama/Llama-3.2-1B"] | {"tensors": {name: [8]}}
    folder = write_folder(tmp_path / "model", entry)
    if is_derived:
        mlx_engine.load(folder, "simd", jit=False)
        return
    with pytest.raises(TensorMismatchError, match=name):
        mlx_engine.load(folder, "simd", jit=False)


@pytest.mark.parametrize("found", [0, -1, 2**31, 2**64, 1.0, True, "1"])
def test_a_whole_number_fits_in_32_bits(found):
    assert Settings({"n": 2**31 - 1}, where="here").whole("n") == 2**31 - 1
    with pytest.raises(UnsupportedConfigError, match="a whole number from 1 to 2,147,483,647"):
        Settings({"n": found}, where="here").whole("n")


GROUPS = {"model_type": "glm4_moe", "n_routed_experts": 8, "num_experts_per_tok": 3, "attention_bias": False}


@pytest.mark.parametrize(
    ("name", "settings", "refused"),
    [
        ("zai-org/GLM-4-9B-0414", {**GROUPS, "n_group": 3}, "n_group"),
        ("zai-org/GLM-4-9B-0414", {**GROUPS, "n_group": 4, "topk_group": 1}, "topk_group"),
        ("MiniMaxAI/MiniMax-M2", {"attn_type_list": [1] * 61 + [0]}, "attn_type_list"),
        ("meta-llama/Llama-3.2-1B", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "alpha": 9.0}}, "alpha"),
    ],
)
def test_groups_linear_attention_and_hunyuan_s_alpha_are_refused(name: str, settings: dict[str, Any], refused: str):
    """Groups of experts must be equal, and those that choose must have enough experts."""
    with pytest.raises(UnsupportedConfigError, match=f"expected (rope_scaling.)?{refused} to be"):
        plan({**PUBLISHED[name]["config"], **settings})
