"""Qwen3.5 with a mixture of experts: forms of folders and GGUF files, and settings that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlx_engine
from mlx_engine.backends.base import OpByOp
from mlx_engine.backends.cpu.backend import CompiledProgram
from mlx_engine.checkpoint.gguf import open_gguf
from mlx_engine.checkpoint.gguf_writer import write_gguf
from mlx_engine.convert.requantize import requantize
from mlx_engine.errors import UnsupportedConfigError
from mlx_engine.quant.types import F32
from mlx_engine.quant.weight import Weight
from mlx_engine.weights.conversion import Conversion
from tests.unit.test_qwen3_5 import IDS, folder, logits, read, written

NAME, N_EXPERTS = "qwen3_5moe", 5


def stacked(tensors: dict[str, np.ndarray], *names: str) -> dict[str, np.ndarray]:
    """Return the tensors with gate, up and down of all experts of a layer as three tensors of these names."""
    made = dict(tensors)
    for i in range(2):
        block = f"model.layers.{i}.mlp"
        for part, name in zip(("gate_proj", "up_proj", "down_proj"), names, strict=True):
            of = [made.pop(f"{block}.experts.{e}.{part}.weight") for e in range(N_EXPERTS)]
            made[f"{block}.{name}"] = np.stack(of)
    return made


def test_a_published_folder_has_fused_experts_and_images_beside_the_text_model(tmp_path: Path):
    text, tensors = read(NAME)
    text |= {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mlp_only_layers": [], "mtp_num_hidden_layers": 1,
             "partial_rotary_factor": 0.25}  # fmt: skip
    config = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
              "text_config": text, "tie_word_embeddings": True, "vision_config": {"depth": 27}}  # fmt: skip
    made = stacked(tensors, "gate", "up", "experts.down_proj")
    for i in range(2):
        block = f"model.layers.{i}.mlp"
        fused = np.concatenate((made.pop(f"{block}.gate"), made.pop(f"{block}.up")), axis=1)
        made[f"{block}.experts.gate_up_proj"] = fused
    made = {name.replace("model.", "model.language_model.", 1): values for name, values in made.items()}
    made |= {"model.visual.blocks.0.norm1.weight": np.ones(4), "mtp.fc.weight": np.ones((2, 4))}
    path = written(tmp_path / "published", config, made)
    np.testing.assert_array_equal(logits(path), logits(folder(NAME)))


def test_the_form_that_mlx_lm_writes(tmp_path: Path):
    config, tensors = read(NAME)
    made = {}
    for stem, values in stacked(
        tensors, *(f"switch_mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
    ).items():
        changed = values.swapaxes(1, 2) if "conv1d" in stem else values
        if stem.endswith("norm.weight") and "linear_attn" not in stem:
            changed = values + np.float32(1)
        made[f"language_model.{stem}"] = changed
    np.testing.assert_array_equal(logits(written(tmp_path / "mlx", config, made)), logits(folder(NAME)))


def test_gguf_files_have_the_same_model_with_experts_apart_or_fused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """llama.cpp's converter writes gate and up as one tensor if it is asked to."""
    monkeypatch.setattr("mlx_engine.convert.gguf_form.to_gguf", lambda *args: {})
    apart, fused = tmp_path / "apart.gguf", tmp_path / "fused.gguf"
    requantize(folder(NAME), apart, Conversion("f32"))
    np.testing.assert_array_equal(logits(apart), logits(folder(NAME)))
    with open_gguf(apart) as file:
        tensors = {name: file.weight(name) for name in file.tensors}
        for i in range(2):
            halves = [tensors.pop(f"blk.{i}.ffn_{part}_exps.weight").dequantize() for part in ("gate", "up")]
            name = f"blk.{i}.ffn_gate_up_exps.weight"
            tensors[name] = Weight.pack(name, np.concatenate(halves, axis=1), F32)
        write_gguf(fused, file.typed_metadata(), tensors.values())
    np.testing.assert_array_equal(logits(fused), logits(folder(NAME)))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ({"num_experts_per_tok": 6}, "at most the number of experts, 5"),
        ({"num_experts": 2**30}, "at most 50,000"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
    ],
)
def test_what_is_not_implemented_is_refused(tmp_path: Path, change: dict[str, Any], found: str):
    config, tensors = read(NAME)
    with pytest.raises(UnsupportedConfigError, match=found):
        mlx_engine.load(written(tmp_path / "changed", {**config, **change}, tensors), "simd")


def test_layers_run_as_a_compiled_program_with_the_bits_of_single_operations():
    loaded = mlx_engine.load(folder(NAME), "simd")
    assert isinstance(loaded.model.program, CompiledProgram)
    at_once = np.asarray(loaded.logits(IDS))
    model: Any = loaded.model
    model.program = OpByOp(model.backend, model.definition)
    np.testing.assert_array_equal(np.asarray(loaded.logits(IDS)), at_once)
