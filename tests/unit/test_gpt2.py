"""GPT-2's files in the shapes they are found in, and the settings that are refused."""

import json
from pathlib import Path

import numpy as np
import pytest

import mlx_engine
from mlx_engine.errors import TensorMismatchError, UnsupportedConfigError
from tests.golden.convert import convert, read_safetensors, write_safetensors
from tests.golden.goldens import DATA, Golden, check_close

FOLDER = DATA / "gpt2-micro" / "hf"
GOLDEN = Golden("gpt2", FOLDER, DATA / "gpt2-micro" / "golden.npz")


def made(path: Path, tensors: dict[str, np.ndarray] | None = None, **config: object) -> Path:
    """A copy of the folder with other settings (None stays null) or other tensors."""
    settings = {**json.loads((FOLDER / "config.json").read_text()), **config}
    (path / "config.json").write_text(json.dumps(settings))
    write_safetensors(path / "model.safetensors", tensors or read_safetensors(FOLDER / "model.safetensors"))
    return path


def check_logits(folder: Path) -> None:
    check_close(GOLDEN.logits(1), np.asarray(mlx_engine.load(folder, "simd").logits(GOLDEN.prompt(1))))


def test_the_bare_names_of_the_published_files_with_their_masks(tmp_path: Path):
    tensors = read_safetensors(FOLDER / "model.safetensors")
    bare = {name.removeprefix("transformer."): values for name, values in tensors.items()}
    triangle = np.tril(np.ones((1, 1, 128, 128), dtype=np.float32))
    masks = {f"h.{i}.attn.bias": triangle for i in range(3)} | {"h.0.attn.masked_bias": np.float32([-1e4])}
    check_logits(made(tmp_path, {**bare, **masks}))


def test_the_settings_of_the_published_files(tmp_path: Path):
    check_logits(made(tmp_path, n_ctx=128, task_specific_params={"text-generation": {"do_sample": True}}))


def test_a_tied_head_that_is_stored_once_more_is_not_read(tmp_path: Path):
    tensors = read_safetensors(FOLDER / "model.safetensors")
    check_logits(made(tmp_path, {**tensors, "lm_head.weight": np.zeros((512, 64), dtype=np.float32)}))


def test_a_head_of_its_own_is_read(tmp_path: Path):
    tensors = read_safetensors(FOLDER / "model.safetensors")
    head = 2 * tensors["transformer.wte.weight"]
    engine = mlx_engine.load(made(tmp_path, {**tensors, "lm_head.weight": head}, tie_word_embeddings=False), "simd")
    check_close(2 * GOLDEN.logits(1), np.asarray(engine.logits(GOLDEN.prompt(1))))


def test_a_missing_tensor_is_named_as_the_file_names_it(tmp_path: Path):
    tensors = read_safetensors(FOLDER / "model.safetensors")
    del tensors["transformer.h.1.attn.c_attn.weight"]
    with pytest.raises(TensorMismatchError) as caught:
        mlx_engine.load(made(tmp_path, tensors), "simd")
    assert caught.value.missing == ("transformer.h.1.attn.c_attn.weight",)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("activation_function", "relu"),
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("add_cross_attention", True),
        ("n_inner", 0),
        ("n_positions", "many"),
        ("something_new", 1),
    ],
)
def test_a_setting_that_would_change_the_computation_is_refused_by_name(tmp_path: Path, key: str, value: object):
    with pytest.raises(UnsupportedConfigError) as caught:
        mlx_engine.load(made(tmp_path, **{key: value}), "simd")
    assert caught.value.key == key


def test_heads_must_divide_the_width(tmp_path: Path):
    with pytest.raises(UnsupportedConfigError) as caught:
        mlx_engine.load(made(tmp_path, n_head=5), "simd")
    assert caught.value.key == "n_head"


def test_linear_layers_are_converted_on_load_and_tables_are_not():
    """As q8_0 of the folder the embedding stays float32, so the logits lie between those of the two golden files."""
    ids = GOLDEN.prompt(1)
    as_q8, as_f32 = (np.asarray(mlx_engine.load(FOLDER, "simd", quant).logits(ids)) for quant in ("q8_0", "keep"))
    error = np.linalg.norm(as_q8 - as_f32) / np.linalg.norm(as_f32)
    assert 1e-4 < error < 3e-2


def test_a_context_that_is_too_long_is_refused_before_positions_run_out():
    engine = mlx_engine.load(FOLDER, "simd")
    assert len(engine.generate([1] * 120, 8, ignore_eos=True).token_ids) == 8
    with pytest.raises(mlx_engine.errors.ContextLengthError):
        engine.generate([1] * 120, 9)


def test_verify_finds_nothing_wrong(tmp_path: Path):
    from mlx_engine.convert.verify import Level, verify

    convert(FOLDER, tmp_path / "model.gguf", "F32")
    for path in (FOLDER, tmp_path / "model.gguf"):
        wrong = [f for f in verify(path) if f.level is Level.FAIL and f.check != "tokenizer"]
        assert wrong == []
