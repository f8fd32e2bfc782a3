"""config.json of newer dense models and mixtures as their repositories publish it."""

from typing import Any

import pytest

from mlx_engine.config.rope import part_of
from mlx_engine.errors import UnsupportedConfigError
from tests.published import PUBLISHED
from tests.unit.test_published_settings import plan

QWEN25_05B = PUBLISHED["Qwen/Qwen2.5-0.5B"]["config"]
SMOLLM3_3B = PUBLISHED["HuggingFaceTB/SmolLM3-3B"]["config"]
PHI4_MINI = PUBLISHED["microsoft/Phi-4-mini-instruct"]["config"]
MINISTRAL3_8B = PUBLISHED["mistralai/Ministral-3-8B-Instruct-2512"]["config"]
GRANITE4_MICRO = PUBLISHED["ibm-granite/granite-4.0-micro"]["config"]
GRANITE4_TINY = PUBLISHED["ibm-granite/granite-4.0-h-tiny"]["config"]
NEMOTRON3_NANO = PUBLISHED["nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"]["config"]
OLMO2_7B = PUBLISHED["allenai/OLMo-2-1124-7B"]["config"]
OLMO3_7B = PUBLISHED["allenai/Olmo-3-1025-7B"]["config"]
QWEN3_CODER = PUBLISHED["Qwen/Qwen3-Coder-30B-A3B-Instruct"]["config"]
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
# Layers, width, query heads, key/value heads, head width, vocabulary, context; the rule of the rotation.
SIZES: dict[str, tuple[tuple[int, ...], str]] = {
    "HuggingFaceTB/SmolLM3-3B": ((36, 2048, 16, 4, 128, 128256, 65536), "default"),
    "microsoft/Phi-3-mini-4k-instruct": ((32, 3072, 32, 32, 96, 32064, 4096), "default"),
    "microsoft/Phi-4-mini-instruct": ((32, 3072, 24, 8, 128, 200064, 131072), "longrope"),
    "microsoft/phi-4": ((40, 5120, 40, 10, 128, 100352, 16384), "default"),
    "mistralai/Ministral-3-8B-Instruct-2512": ((34, 4096, 32, 8, 128, 131072, 262144), "yarn"),
    "mistralai/Mixtral-8x22B-v0.1": ((56, 6144, 48, 8, 128, 32000, 65536), "default"),
    "ibm-granite/granite-3.3-2b-instruct": ((40, 2048, 32, 8, 64, 49159, 131072), "default"),
    "ibm-granite/granite-4.0-micro": ((40, 2560, 40, 8, 64, 100352, 131072), "default"),
    "allenai/OLMo-2-1124-7B": ((32, 4096, 32, 32, 128, 100352, 4096), "default"),
    "allenai/Olmo-3-1025-7B": ((32, 4096, 32, 32, 128, 100278, 65536), "yarn"),
    "google/gemma-2-27b": ((46, 4608, 32, 16, 128, 256000, 8192), "default"),
    "Qwen/Qwen3-30B-A3B": ((48, 2048, 32, 4, 128, 151936, 40960), "default"),
    "Qwen/Qwen3-8B with YaRN": ((36, 4096, 32, 8, 128, 151936, 131072), "yarn"),
    "Qwen/Qwen2.5-0.5B with YaRN": ((24, 896, 14, 2, 64, 151936, 32768), "yarn"),
    "mistralai/Mistral-7B-v0.1 with YaRN": ((32, 4096, 32, 8, 128, 32000, 32768), "yarn"),
}


@pytest.mark.some(4)
@pytest.mark.parametrize("name", SIZES)
def test_sizes_as_published(name: str):
    sizes, rule = SIZES[name]
    found = plan(PUBLISHED[name]["config"]).config
    assert sizes == (
        found.n_layers, found.hidden_size, found.n_heads, found.n_kv_heads, found.head_dim, found.vocab_size,
        found.context_length,
    )  # fmt: skip
    assert found.rope.rule == rule
    assert len(found.rope.for_heads(found.head_dim).frequencies) == found.head_dim // 2


def test_a_part_of_a_head_is_read_as_the_elements_that_were_written():
    for head_dim in range(2, 257):
        assert all(int(head_dim * part_of(n, head_dim)) == n for n in range(2, head_dim, 2))
    changed = {key: value for key, value in PHI4_MINI.items() if key != "rope_scaling"}
    changed |= {"head_dim": 44, "partial_rotary_factor": part_of(30, 44)}
    assert plan(changed).config.rotary_dim == 30


def test_what_is_special_about_each():
    assert plan(SMOLLM3_3B).config.has_rope == (True, True, True, False) * 9
    assert plan(PHI4_MINI).config.rotary_dim == 96
    assert plan(PHI4_MINI).config.rope.attention_factor == pytest.approx(1.1902380714238083)
    assert plan(MINISTRAL3_8B).config.rope.for_heads(128).growth == (0.1, 16384, 0)
    assert plan(MINISTRAL3_8B).config.rope.attention_factor == 1
    assert plan(OLMO3_7B).config.windows[:5] == (4096, 4096, 4096, None, 4096)
    assert plan(OLMO3_7B).config.local_rope.rule == "default"
    granite, nemotron = plan(GRANITE4_TINY).config, plan(NEMOTRON3_NANO).config
    assert [i for i, kind in enumerate(granite.kinds) if kind == "full_attention"] == [5, 15, 25, 35]
    assert (granite.is_rotated, granite.n_experts, granite.inner) == (False, 64, 2 * granite.hidden_size)
    assert [nemotron.kinds.count(kind) for kind in ("mamba", "moe", "full_attention", "mlp")] == [23, 23, 6, 0]
    assert plan({**GRANITE4_MICRO, "position_embedding_type": "nope"}).config.is_rotated is False
    assert plan(OLMO2_7B).config.windows == (None,) * 32


@pytest.mark.parametrize(
    ("settings", "changed", "key"),
    [
        (SMOLLM3_3B, {"use_sliding_window": True}, "use_sliding_window"),
        (QWEN25_05B, {"use_sliding_window": True, "max_window_layers": 2}, "use_sliding_window"),
        (SMOLLM3_3B, {"no_rope_layers": [1, 2] * 18}, "no_rope_layers"),
        (PHI4_MINI, {"partial_rotary_factor": 0.7}, "partial_rotary_factor"),
        (PHI4_MINI, {"rope_scaling": {**PHI4_MINI["rope_scaling"], "long_factor": [1.0] * 47}}, "long_factor"),
        (PHI4_MINI, {"rope_scaling": {**PHI4_MINI["rope_scaling"], "short_factor": [0.0] * 48}}, "0"),
        (MINISTRAL3_8B, {"something_new": 1}, "something_new"),
        (GRANITE4_MICRO, {"position_embedding_type": "alibi"}, "position_embedding_type"),
        (GRANITE4_MICRO, {"layer_types": ["mamba"] * 40}, "layer_types"),
        (GRANITE4_MICRO, {"num_local_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok"),
        (GRANITE4_TINY, {"mamba_d_head": 32}, "mamba_d_head"),
        (GRANITE4_TINY, {"time_step_limit": [0.001, 100.0]}, "time_step_limit"),
        (NEMOTRON3_NANO, {"moe_latent_size": 1024}, "moe_latent_size"),
        (NEMOTRON3_NANO, {"num_hidden_layers": 51}, "num_hidden_layers"),
        (NEMOTRON3_NANO, {"hybrid_override_pattern": "M*E-"}, "hybrid_override_pattern"),
        (NEMOTRON3_NANO, {"hybrid_override_pattern": "M*EX"}, "hybrid_override_pattern"),
        (NEMOTRON3_NANO, {"layers_block_type": ["mamba", "moe"]}, "hybrid_override_pattern"),
        (NEMOTRON3_NANO, {"hybrid_override_pattern": None}, "hybrid_override_pattern"),
        (OLMO2_7B, {"sliding_window": 4096}, "sliding_window"),
        (QWEN3_CODER, {"use_qk_norm": False}, "use_qk_norm"),
        (QWEN3_CODER, {"qkv_bias": True}, "qkv_bias"),
        (QWEN3_CODER, {"shared_expert_intermediate_size": 768}, "shared_expert_intermediate_size"),
        (OLMO3_7B, {"rope_scaling": {**OLMO3_7B["rope_scaling"], "invented": 1}}, "invented"),
        (QWEN25_05B, {"rope_scaling": {"type": "llama3", "factor": 2.0}}, "type"),
        (QWEN25_05B, {"rope_theta": 1.0, "rope_scaling": YARN}, "rope_theta"),
    ],
)
def test_a_setting_that_would_change_the_computation_is_refused_by_name(
    settings: dict[str, Any], changed: dict[str, Any], key: str
):
    with pytest.raises(UnsupportedConfigError) as caught:
        plan({**settings, **changed})
    assert caught.value.key == key
