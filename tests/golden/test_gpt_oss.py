"""gpt-oss against transformers, from every form of its files; windows are a fifth of the longer prompt."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import mlx_engine
from mlx_engine.backends.base import OpByOp
from mlx_engine.backends.cpu.backend import CompiledProgram
from mlx_engine.backends.cpu.descriptors import Matrix
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.convert.requantize import requantize
from mlx_engine.errors import FormatError, UnsupportedConfigError
from mlx_engine.weights.conversion import Conversion
from tests.contract.check import EMULATED
from tests.golden.convert import read_safetensors, write_safetensors
from tests.golden.goldens import BACKENDS, DATA, Golden, check_close, engine, greedy, in_chunks
from tests.golden.test_dense import with_tokenizer
from tests.unit.test_published_settings import plan

FOLDER = DATA / "gptoss-micro"
FORMS = ("hf", "bf16", "mlx", "mxfp4.gguf", "q8_0.gguf")
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
Goldens = Callable[[str], Golden]


@pytest.fixture(scope="module")
def goldens(tmp_path_factory: pytest.TempPathFactory) -> Goldens:
    made = tmp_path_factory.mktemp("gpt-oss")
    return cache(lambda form: golden(form, made))


def golden(form: str, made: Path) -> Golden:
    path, suffix = made / form, "_q8" if form.startswith("q8_0") else ""
    if form == "hf":
        path = FOLDER / "hf"
    elif form == "mxfp4.gguf":
        requantize(tokenized(made), path, Conversion("f32", layers=dict.fromkeys(EXPERTS, "keep")))
    elif form == "q8_0.gguf":
        requantize(tokenized(made), path, Conversion("q8_0"))
    else:
        folder_of(path, {"bf16": in_floats, "mlx": as_mlx_community}[form](tensors()), quantization=form)
    return Golden(form, path, FOLDER / "golden.npz", suffix)


def tokenized(made: Path) -> Path:
    folder = made / "tokenized"
    return folder if folder.exists() else with_tokenizer(FOLDER / "hf", folder)


def tensors() -> dict[str, np.ndarray]:
    return read_safetensors(FOLDER / "hf" / "model.safetensors")


def folder_of(path: Path, made: dict[str, np.ndarray], quantization: str = "hf", **settings: object) -> Path:
    """A copy of the folder with other tensors and settings."""
    shutil.copytree(FOLDER / "hf", path)
    config = json.loads((path / "config.json").read_text()) | settings
    if quantization != "hf":
        del config["quantization_config"]
    if quantization == "mlx":
        config["quantization"] = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    (path / "config.json").write_text(json.dumps(config))
    write_safetensors(path / "model.safetensors", made)
    return path


def in_floats(stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The experts as transformers has them in memory: floats, transposed."""
    made = {name: values for name, values in stored.items() if not name.endswith(("_blocks", "_scales"))}
    checkpoint = open_checkpoint(FOLDER / "hf")
    for name in stored:
        if name.endswith("_blocks"):
            made[name.removesuffix("_blocks")] = checkpoint.weight(name).dequantize().swapaxes(1, 2)
    return made


def as_mlx_community(stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors as mlx-lm divides and names them."""
    made = {}
    for name, values in stored.items():
        stem, is_expert, part = name.partition(".experts.")
        if not is_expert:
            made[name] = values
            continue
        whole, kind = part.rsplit("_", 1)
        new = {"blocks": "weight", "scales": "scales", "bias": "bias"}[kind]
        if kind == "blocks":
            values = np.ascontiguousarray(values).view(np.uint32).reshape(*values.shape[:2], -1)
        parts = {"down_proj": values}
        if whole == "gate_up_proj":
            parts = {"gate_proj": values[:, ::2], "up_proj": values[:, 1::2]}
        made |= {f"{stem}.experts.{p}.{new}": np.ascontiguousarray(v) for p, v in parts.items()}
    return made


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("backend", "form"),
    [
        # The forms differ in what is read, and `scalar` and the emulator take long.
        pytest.param(
            backend, form, marks=[pytest.mark.slow] * (backend in ("scalar", EMULATED) and form != "mxfp4.gguf")
        )
        for backend in BACKENDS
        for form in FORMS
    ],
)
def test_logits_and_greedy_ids(goldens: Goldens, form: str, backend: str):
    of = goldens(form)
    for i in (1,) if backend in ("scalar", EMULATED) else (0, 1):
        check_close(of.logits(i), np.asarray(engine(of.checkpoint, backend).logits(of.prompt(i))))
    if backend not in ("scalar", EMULATED):
        assert greedy(of, 1, backend, kv=True) == of.greedy(1)


def test_bits_do_not_depend_on_chunks_and_pages(goldens: Goldens):
    of = goldens("hf")
    ids, of_one = of.prompt(1), engine(of.checkpoint, "simd").logits(of.prompt(1))
    for chunk, page in ((1, 64), (7, 5), (16, 16)):
        np.testing.assert_array_equal(in_chunks(of.checkpoint, "simd", ids, chunk, page=page), np.asarray(of_one))


def test_layers_run_as_a_compiled_program_with_the_bits_of_single_operations(goldens: Goldens):
    of = goldens("mxfp4.gguf")
    loaded = mlx_engine.load(of.checkpoint, "simd")
    assert isinstance(loaded.model.program, CompiledProgram)
    at_once = np.asarray(loaded.logits(of.prompt(1)))
    loaded.model.program = OpByOp(loaded.model.backend, loaded.model.definition)
    np.testing.assert_array_equal(np.asarray(loaded.logits(of.prompt(1))), at_once)


def test_every_form_of_the_same_experts_has_the_same_bits(goldens: Goldens):
    """Also the GGUF file, whose other matrices are bfloat16 values in float32."""
    ids = goldens("hf").prompt(1)
    want = np.asarray(engine(goldens("hf").checkpoint, "simd").logits(ids))
    for form in ("mlx", "mxfp4.gguf"):
        np.testing.assert_array_equal(np.asarray(engine(goldens(form).checkpoint, "simd").logits(ids)), want)


@pytest.mark.parametrize("form", ["hf", "mlx", "mxfp4.gguf"])
def test_experts_are_multiplied_as_stored(goldens: Goldens, form: str):
    """Five experts of three matrices of 64 x 128 weights, at 17 bytes for 32 weights; on `mlx` the same bytes."""
    for backend in ("parallel", "mlx"):
        experts = engine(goldens(form).checkpoint, backend).model.layers[0].ffn.experts
        assert experts.nbytes == 5 * 3 * 64 * 128 // 32 * 17
    matrices = [of.weight for of in engine(goldens(form).checkpoint, "parallel").model.layers[0].ffn.experts.up.weights]
    assert all(isinstance(of, Matrix) and of.format == "mxfp4" for of in matrices)
    if form == "mxfp4.gguf":
        assert not any(of.data.flags.owndata for of in matrices)


def test_the_window_is_that_of_every_second_layer(goldens: Goldens):
    for form in ("hf", "mxfp4.gguf"):
        assert engine(goldens(form).checkpoint, "simd").config.windows == (8, None, 8)
        assert not engine(goldens(form).checkpoint, "simd").config.rope.truncate


@pytest.mark.parametrize(
    "settings",
    [
        {"swiglu_limit": 8.0},
        {"swiglu_alpha": 1.0},
        {"attention_bias": False},
        {"hidden_act": "gelu"},
        {"experts_per_token": 3},
        {"rope_scaling": None, "rope_parameters": None},
    ],
    ids=str,
)
def test_settings_that_are_not_implemented(tmp_path: Path, settings: dict[str, object]):
    folder = folder_of(tmp_path / "hf", tensors(), **settings)
    with pytest.raises(UnsupportedConfigError, match=next(iter(settings))):
        mlx_engine.load(folder, "simd")


def test_layers_in_another_order_have_no_gguf_form(tmp_path: Path):
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    folder = with_tokenizer(folder_of(tmp_path / "hf", tensors(), layer_types=kinds), tmp_path / "both")
    assert mlx_engine.load(folder, "simd").config.windows == (None, 8, None)
    with pytest.raises(UnsupportedConfigError, match="is_local"):
        requantize(folder, tmp_path / "out.gguf", Conversion("f32"))


@pytest.mark.parametrize(
    "damaged",
    [
        lambda name, x: None if name.endswith("_scales") else x,
        lambda name, x: x[..., :-1] if name.endswith("_scales") else x,
        lambda name, x: x[..., :8] if name.endswith("_blocks") else x,
        lambda name, x: x.reshape(-1, 16) if name.endswith("_blocks") else x,
        lambda name, x: x.astype(np.float32) if name.endswith("_scales") else x,
        lambda name, x: np.zeros((), np.uint8) if name.endswith("_blocks") else x,
    ],
    ids=["no scales", "fewer scales", "short blocks", "flat blocks", "float scales", "no axes"],
)
def test_blocks_and_scales_that_do_not_fit(tmp_path: Path, damaged: Callable[[str, np.ndarray], np.ndarray | None]):
    made = {name: damaged(name, values) for name, values in tensors().items()}
    folder = folder_of(tmp_path / "hf", {name: x for name, x in made.items() if x is not None})
    with pytest.raises(FormatError, match=r"(gate_up|down)_proj_"):
        mlx_engine.load(folder, "simd")


# As openai/gpt-oss-20b publishes it.
PUBLISHED_20B = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
    "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
    "rms_norm_eps": 1e-05, "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 201088,
}  # fmt: skip


def test_the_published_settings():
    made = plan(PUBLISHED_20B)
    assert made.config.windows == (128, None) * 12
    assert (made.config.n_experts, made.config.n_experts_used, made.config.rope.factor) == (32, 4, 32.0)
    by_name = {tensor.name: tensor for tensor in made.tensors}
    up = by_name["blk.23.ffn_up_exps.31.weight"]
    assert up.stored("hf").name == "model.layers.23.mlp.experts.gate_up_proj_blocks"
    assert up.stored("hf").shape(up.shape) == (32, 5760, 2880)
    assert by_name["blk.0.attn_sinks.weight"].shape == (64,)
