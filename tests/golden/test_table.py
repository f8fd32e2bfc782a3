"""Every architecture from quantised files on every backend, against the same weights expanded to float32.

The columns that transformers' goldens do not have: folders that are quantised for MLX, and GGUF files mixed as Q4_K_M.
The goldens prove the float32 path, which is the reference here.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_engine.checkpoint.gguf_writer import write_gguf
from mlx_engine.checkpoint.mlx_quantization import KEYS
from mlx_engine.checkpoint.model_files import Checkpoint, open_checkpoint
from mlx_engine.checkpoint.safetensors import Entry, write_safetensors
from mlx_engine.convert import mlx_folder, mlx_tensors
from mlx_engine.convert.gguf_form import from_folder
from mlx_engine.convert.mlx_folder import to_mlx_folder
from mlx_engine.convert.requantize import kind_of
from mlx_engine.quant.types import F32
from mlx_engine.quant.weight import Weight
from mlx_engine.weights.model import architecture_of
from tests.contract.check import EMULATED
from tests.golden.goldens import BACKENDS, DATA, LATENT, SAMPLED, check_close, engine, in_chunks
from tests.published import weights
from tests.random_blocks import random_blocks
from tests.unit.test_gguf_form import bytes_only

ARCHITECTURES = tuple(sorted(path.name.removesuffix("-micro") for path in DATA.glob("*-micro")))
COLUMNS = ("mlx-4bit", "Q4_K_M")
GEMMA4 = ("gemma4", "gemma4e", "gemma4moe")
# Blocks of K-quants have 256 weights, so rows are as wide; llama.cpp's mix has Q6_K in these layers.
WIDTH, FINER = 256, ("attn_v", "ffn_down", "ffn_down_exps", "attn_qkv", "ssm_out", "output", "token_embd")
# Longer than twice every window; for the two slow backends short. The others also read the first ones one by one, more
# than a window of 8 has.
IDS = np.random.default_rng(11).integers(0, 64, 44).tolist()
N_SINGLE, SHORT = 10, {"scalar": 3, EMULATED: 5}
# What runs by default on the slow backends, beside the small folders on `scalar`.
DEFAULT = {"scalar": (), EMULATED: ("llama", "qwen3moe")}
# The bound of each backend, on the root mean square and on one logit.
BOUNDS = {EMULATED: (2e-5, 4e-5)}
# One token of these random models is ill-conditioned: from the float32 file, too, single logits differ by up to 8.8e-5,
# 1.2e-4, 3.0e-5, 7.7e-5, 2.8e-5, 9.5e-5 and 3.1e-5 between backends. How much depends on the processor, too.
ONE_OF = {
    "qwen3_5": 1e-4, "qwen3_5moe": 1.5e-4, "gptoss": 4e-5, "qwen2moe": 1e-4, "mixtral": 4e-5, "qwen3_next": 1.2e-4,
    "deepseek3": 4e-5, "mamba2": 1e-4, "granite4h": 6e-5, "mellum": 4e-5, "deepseek2lite": 4e-5, "olmoe": 6e-5,
}  # fmt: skip


CELLS = [
    pytest.param(
        column, name, backend,
        marks=[pytest.mark.slow] * (name in SAMPLED or name not in DEFAULT.get(backend, ARCHITECTURES)),
    )
    for column in COLUMNS
    for name in ARCHITECTURES
    for backend in BACKENDS
    if not (column == "mlx-4bit" and name in LATENT)
    if backend != "simd"  # the bits of `parallel`, which other tests compare
]  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, Path]]:
    """Return a function of column and architecture that writes the file and the same in float32."""
    made = tmp_path_factory.mktemp("table")
    make = {"mlx-4bit": for_mlx, "Q4_K_M": mixed}
    return cache(lambda column, name: make[column](name, made))


@pytest.mark.some(7)
@pytest.mark.parametrize(("column", "name", "backend"), CELLS)
def test_logits_and_greedy_ids(
    files: Callable[[str, str], tuple[Path, Path]], column: str, name: str, backend: str
) -> None:
    stored, expanded = files(column, name)
    ids = IDS[: SHORT.get(backend)]
    want = np.asarray(engine(expanded, "simd --no-jit").logits(ids))
    all_, each = BOUNDS.get(backend, (1e-5, 2e-5))
    each = max(each, ONE_OF.get(name, 0))
    passes = [(len(ids), len(ids))] if backend in SHORT else [(len(ids), len(ids)), (N_SINGLE, 1)]
    for n, chunk in passes:
        found = in_chunks(stored, backend, ids[:n], chunk)
        check_close(want[:n], found, each, all_)
        np.testing.assert_array_equal(found.argmax(-1), want[:n].argmax(-1))


def for_mlx(name: str, made: Path) -> tuple[Path, Path]:
    """Quantise the folder of an architecture to 4 bits, in groups of 32 because its rows are short."""
    stored, expanded = made / f"{name}-mlx", made / f"{name}-mlx-f32"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlx_tensors, "GROUP", 32)
        patch.setattr(mlx_folder, "HEADS_OF_SIZE", ())  # the small Mixtral has other heads than mlx-lm's
        to_mlx_folder(DATA / f"{name}-micro" / "hf", stored, "mlx-4bit")
    checkpoint = open_checkpoint(stored)
    config = json.loads((stored / "config.json").read_text())
    tensors = {tensor: checkpoint.weight(tensor).dequantize() for tensor in checkpoint.shapes}
    write_folder(expanded, {key: value for key, value in config.items() if key not in KEYS}, tensors)
    return stored, expanded


def mixed(name: str, made: Path) -> tuple[Path, Path]:
    """Write a wide model of an architecture as llama.cpp mixes Q4_K_M, with blocks drawn at random."""
    folder, stored, expanded = made / f"{name}-wide", made / f"{name}.gguf", made / f"{name}-f32.gguf"
    config = widened(json.loads((DATA / f"{name}-micro" / "hf" / "config.json").read_text()))
    config.pop("quantization_config", None)
    draft = Checkpoint("wide", "hf", config["model_type"], config, {}, {}, None)  # type: ignore[arg-type]
    tensors = weights(config, {})
    if name in GEMMA4:
        # The scores of Gemma 4 have no scale: trained norms of queries are as small as a scale would be.
        tensors |= {key: of * of.size**-0.5 for key, of in tensors.items() if key.endswith("q_norm.weight")}
    write_folder(folder, config, tensors)
    tokenizer: dict[str, Any] = bytes_only("llama-bpe")
    n = architecture_of(draft).plan(draft).config.vocab_size
    tokenizer["model"]["vocab"] = {text: i for text, i in tokenizer["model"]["vocab"].items() if i < n}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    form = from_folder(folder)
    blocks = [quantized(part.make()) for part in form.parts.values()]
    assert {weight.type.name for weight in blocks} - {"F32"} == {"Q4_K", "Q6_K"}
    write_gguf(stored, form.metadata, blocks)
    write_gguf(expanded, form.metadata, [weight.as_type(F32) for weight in blocks])
    return stored, expanded


def widened(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with rows of 256 weights in all matrices."""
    if "n_embd" in config:
        return config | {"n_embd": WIDTH, "n_head": 4}
    if config["model_type"] == "mamba2":
        return config | {"hidden_size": WIDTH, "head_dim": WIDTH // config["num_heads"]}
    heads = config["num_attention_heads"]
    times = WIDTH // heads // config.get("head_dim", config["hidden_size"] // heads)
    sizes = {
        key: WIDTH
        for key in (
            *("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_intermediate_size"),
            *("shared_expert_intermediate_size", "hidden_size_per_layer_input", "kv_lora_rank", "q_lora_rank"),
            *("moe_shared_expert_intermediate_size", "intermediate_size_mlp"),
        )
        if config.get(key)
    }
    if "linear_num_value_heads" in config:
        sizes["linear_value_head_dim"] = WIDTH // config["linear_num_value_heads"]
    if "v_head_dim" in config:
        sizes["v_head_dim"] = WIDTH // heads
    if "mamba_d_head" in config:
        times_width = config["mamba_expand"] if config["model_type"] == "granitemoehybrid" else 1
        sizes["mamba_d_head"] = times_width * WIDTH // config["mamba_n_heads"]
        sizes |= {"mamba_d_ssm": WIDTH} if "mamba_d_ssm" in config else {}
    if "mamba_head_dim" in config:
        sizes["mamba_head_dim"] = WIDTH // config["mamba_num_heads"]
    made = config | sizes | ({"head_dim": WIDTH // heads} if "head_dim" in config else {})
    if "per_layer_config" in config:
        layers = config["per_layer_config"]
        made["per_layer_config"] = {i: of | {"head_dim": of["head_dim"] * times} for i, of in layers.items()}
    for key in ("rope_scaling", "rope_parameters"):
        if "long_factor" in (config.get(key) or {}):
            n = 1 if "kv_lora_rank" in config else times  # the rotated part of latent attention keeps its size
            factors = {of: np.repeat(config[key][of], n).tolist() for of in ("long_factor", "short_factor")}
            made[key] = config[key] | factors
    return made


def quantized(weight: Weight) -> Weight:
    """Return random blocks in place of a matrix of products or of the embedding table, and all else as it is."""
    kind = kind_of(weight.name, len(weight.shape))
    if kind is None:
        return weight
    rng = np.random.default_rng(zlib.crc32(weight.name.encode()))
    *rows, k = weight.shape
    # Scores of a trained model's size: with larger ones, rounding alone would change single logits by 1e-4.
    size = k**-0.5 / (2 if kind in ("attn_q", "attn_k", "attn_qkv") else 1)
    blocks = random_blocks(rng, weight.name, "Q6_K" if kind in FINER else "Q4_K", int(np.prod(rows)), k, size)
    return Weight(weight.name, weight.shape, blocks.type, blocks.data)


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    """Write a Hugging Face folder in float32."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    entries = [Entry(name, values.shape, F32) for name, values in tensors.items()]
    data = [np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(-1) for values in tensors.values()]
    write_safetensors(folder / "model.safetensors", entries, data)
