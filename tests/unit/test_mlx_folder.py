"""Folders written for MLX: the bits of `mx.quantize`, the settings, what is copied, what is refused."""

import importlib.util
import json
import shutil
import subprocess
import sys
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.config.declared import merged
from mlx_engine.convert import mlx_folder, mlx_tensors
from mlx_engine.convert.mlx_folder import config_for_mlx, to_mlx_folder
from mlx_engine.convert.mlx_tensors import TARGETS, target_type
from mlx_engine.convert.requantize import requantize
from mlx_engine.errors import EngineError, ModelError, OptionError
from mlx_engine.weights.conversion import Conversion
from mlx_engine.weights.model import architecture_of
from tests.golden.goldens import DATA, check_close, engine
from tests.golden.test_dense import with_tokenizer
from tests.golden.test_table import ARCHITECTURES, write_folder
from tests.published import weights
from tests.unit.test_command_generate import cli

SOURCE = DATA / "qwen3-micro" / "hf"
IDS = [1, 5, 9, 33, 44, 2, 7]


def written(path, to="mlx-4bit", source=SOURCE, **layers):
    to_mlx_folder(source, path / "out", to, layers, allow_mixed=True)  # many rows of the small models are too short
    return path / "out"


@pytest.mark.some(2)
@pytest.mark.parametrize("to", TARGETS)
def test_matrices_have_the_bits_of_mlx(tmp_path, to):
    name = "model.layers.1.self_attn.q_proj.weight"
    values = mx.array(open_checkpoint(SOURCE).weight(name).dequantize())
    weight = open_checkpoint(written(tmp_path, to)).weight(name)
    type_ = weight.type
    options = {"group_size": type_.block_size, "bits": type_.bits, "mode": type_.mode}
    parts = mx.quantize(values, **options, stream=mx.cpu)
    expected = mx.dequantize(*parts, **options, dtype=mx.float32, stream=mx.cpu)
    np.testing.assert_array_equal(weight.dequantize(), np.asarray(expected))


def test_bfloat16_is_quantised_in_bfloat16(tmp_path):
    """As mlx-lm does it: scales and biases have the type of the weights."""
    source = DATA / "mlx-4bit" / "hf"
    weight = open_checkpoint(source).weight("model.layers.0.mlp.up_proj.weight")
    halves = mx.array(weight.dequantize()).astype(mx.bfloat16)
    from mlx_engine.convert.mlx_tensors import quantize
    from mlx_engine.quant.types import BF16
    from mlx_engine.quant.weight import Weight

    stored = Weight("w", weight.shape, BF16, np.array(halves.view(mx.uint8)).reshape(-1))
    made = quantize(stored, target_type("mlx-4bit", stored.type))
    assert made.type.name == "AFFINE4_G64_BF16"
    quants, scales, biases = mx.quantize(halves, group_size=64, bits=4, stream=mx.cpu)
    for found, expected in zip(made.parts.in_order, (scales, biases, quants), strict=True):
        np.testing.assert_array_equal(found.reshape(-1), np.array(expected.view(mx.uint8)).reshape(-1))


def test_pieces_of_a_matrix_join_without_a_seam(tmp_path, monkeypatch):
    whole = written(tmp_path)
    monkeypatch.setattr("mlx_engine.convert.mlx_tensors._PIECE", 1000)
    monkeypatch.setattr(mlx_folder, "SHARD_BYTES", 60_000)
    cut = tmp_path / "cut"
    to_mlx_folder(SOURCE, cut, "mlx-4bit")
    assert len(list(cut.glob("model-*-of-*.safetensors"))) > 2
    one, other = open_checkpoint(whole), open_checkpoint(cut)
    assert one.shapes == other.shapes
    for name in one.shapes:
        np.testing.assert_array_equal(one.weight(name).data, other.weight(name).data)


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral", "gemma3"])
def test_a_written_folder_is_the_model_of_its_dequantised_weights(tmp_path, name):
    source = DATA / f"{name}-micro" / "hf"
    made = written(tmp_path, "mlx-8bit", source)
    checkpoint = open_checkpoint(made)
    assert any(checkpoint.weight(tensor).type.name.startswith("AFFINE8") for tensor in checkpoint.shapes)
    check_close(
        np.asarray(engine(source, "mlx").logits(IDS)), np.asarray(engine(made, "mlx").logits(IDS)), each=0.5, all_=0.1
    )
    check_close(np.asarray(engine(made, "scalar").logits(IDS)), np.asarray(engine(made, "mlx").logits(IDS)))


def test_settings_of_single_layers(tmp_path):
    made = written(tmp_path, "mlx-4bit", ffn="mlx-mxfp4", attn_v="mlx-8bit", output="keep")
    config = json.loads((made / "config.json").read_text())
    settings = config["quantization"]
    assert settings == config["quantization_config"]
    assert {key: settings[key] for key in ("group_size", "bits", "mode")} == {
        "group_size": 64, "bits": 4, "mode": "affine",
    }  # fmt: skip
    assert settings["model.layers.2.mlp.up_proj"] == {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    assert settings["model.layers.0.self_attn.v_proj"] == {"group_size": 64, "bits": 8, "mode": "affine"}
    assert settings["model.embed_tokens"] is False
    assert "model.layers.0.self_attn.q_proj" not in settings
    checkpoint = open_checkpoint(made)
    assert checkpoint.weight("model.embed_tokens.weight").type.name == "F32"
    assert checkpoint.weight("model.layers.0.mlp.down_proj.weight").type.name == "MLX_MXFP4"


def test_rows_that_do_not_fill_groups_stay(tmp_path):
    made = written(tmp_path)
    assert open_checkpoint(made).weight("model.layers.0.mlp.down_proj.weight").type.name == "F32"
    settings = json.loads((made / "config.json").read_text())["quantization"]
    assert settings["model.layers.0.mlp.down_proj"] is False


def test_other_files_are_copied_and_weights_are_not(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(SOURCE, source)
    for name in ("generation_config.json", "pytorch_model.bin", "README.md"):
        (source / name).write_text("{}")
    names = sorted(file.name for file in written(tmp_path, source=source).iterdir())
    assert names == [
        "config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json",
    ]  # fmt: skip
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "source"]


def test_a_quantised_folder_is_quantised_again_or_kept(tmp_path):
    source = DATA / "mlx-mixed" / "hf"
    made = open_checkpoint(written(tmp_path, "mlx-8bit", source, attention="keep", output="keep"))
    old = open_checkpoint(source)
    kept, new = "model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.gate_proj.weight"
    assert (made.weight(kept).type, made.weight(new).type.name) == (old.weight(kept).type, "AFFINE8_G64_F32")
    np.testing.assert_array_equal(made.weight(kept).data, old.weight(kept).data)


def test_nothing_is_left_behind_after_a_failure(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError("the disk is full")

    monkeypatch.setattr(mlx_folder, "_copy_others", fail)
    with pytest.raises(EngineError, match="the disk is full"):
        written(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("to", "layers", "found"),
    [
        ("mlx-7bit", {}, "unknown type 'mlx-7bit'; choose mlx-2bit, mlx-3bit"),
        ("mlx-4bit", {"ffn": "q8_0"}, "--layer ffn: unknown type 'q8_0'; choose mlx-2bit"),
        ("mlx-4bit", {"norms": "keep"}, "no layer 'norms'; choose attn_q, "),
    ],
)
def test_options_that_are_not_known_are_refused(tmp_path, to, layers, found):
    with pytest.raises(OptionError, match=found):
        written(tmp_path, to, **layers)


def test_an_existing_folder_is_not_replaced(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(OptionError, match="out exists; name a new folder"):
        written(tmp_path)


def test_what_cannot_be_written_for_mlx_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"heads of 8 elements, .*, found 16; mlx-lm's 'mixtral' would refuse"):
        written(tmp_path, source=DATA / "mixtral-micro" / "hf")
    for settings, expected in (
        ({"n_inner": 128}, "FFN of 256"), ({"tie_word_embeddings": False}, "head that is tied")
    ):  # fmt: skip
        config = json.loads((DATA / "gpt2-micro" / "hf" / "config.json").read_text()) | settings
        write_folder(tmp_path / expected, config, weights(config, {}))
        with pytest.raises(ModelError, match=f"expected an? {expected}.*mlx-lm's 'gpt2' would refuse"):
            written(tmp_path, source=tmp_path / expected)


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("gemma3", {"layer_types": [*["sliding_attention"] * 7, "full_attention"]}, None),
        (
            "gemma3",
            {"layer_types": ["full_attention", *["sliding_attention"] * 7]},
            "full attention in every n",
        ),
        (
            "qwen3_5",
            {"layer_types": ["linear_attention", "full_attention", "full_attention"]},
            "full attention in every n",
        ),
        ("gptoss", {"layer_types": ["full_attention"] * 3}, "layers with a window and layers without"),
    ],
)
def test_orders_of_layers_that_mlx_lm_has_not_are_refused(name, settings, expected):
    source = DATA / f"{name}-micro" / "hf"
    checkpoint = open_checkpoint(source)
    n = checkpoint.settings["num_hidden_layers"]
    settings = {key: (value * n)[:n] for key, value in settings.items()}
    config = architecture_of(checkpoint).plan(replace(checkpoint, settings={**checkpoint.settings, **settings})).config
    model_type = {"gemma3": "gemma3_text", "qwen3_5": "qwen3_5", "gptoss": "gpt_oss"}[name]
    if expected is None:
        mlx_folder.check_loads("here", model_type, config, has_head=False)
        return
    with pytest.raises(ModelError, match=f"here: expected {expected}.*mlx-lm's '{model_type}' would refuse"):
        mlx_folder.check_loads("here", model_type, config, has_head=False)


def test_rotary_and_missing_settings_are_written_as_mlx_lm_reads_them():
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    made = config_for_mlx(plain, has_head=True)
    assert made == {"tie_word_embeddings": False, "rope_theta": 5e5, "rope_scaling": None}
    scaled = {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}
    assert config_for_mlx(scaled, has_head=False)["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    bases = {"full_attention": 1e6, "sliding_attention": 1e4}
    two = {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()}}
    made = config_for_mlx(two, has_head=False)
    assert (made["rope_theta"], made["rope_local_base_freq"], made["tie_word_embeddings"]) == (1e6, 1e4, True)
    images = config_for_mlx({"model_type": "mistral3", "text_config": plain}, has_head=True)
    assert images == {"model_type": "mistral3", "text_config": config_for_mlx(plain, has_head=True)}
    nested = {**scaled, "model_type": "ministral3"}
    assert config_for_mlx(nested, has_head=True) == {**nested, "tie_word_embeddings": False}
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "long_factor": [1.0]}
    made = config_for_mlx({"rope_parameters": longrope}, has_head=True)
    assert (made["partial_rotary_factor"], made["rope_scaling"]["type"]) == (0.5, "longrope")
    old = {"rope_theta": 3.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert config_for_mlx(old, has_head=True) == {**old, "tie_word_embeddings": False}
    lacking = config_for_mlx(
        {"n_embd": 8, "n_inner": None}, has_head=True, known={"n_ctx": 9, "n_embd": 7, "n_inner": 6}
    )
    assert lacking == {"n_ctx": 9, "n_embd": 8, "n_inner": 6, "tie_word_embeddings": False}


def test_settings_have_the_names_that_mlx_lm_reads():
    moe = config_for_mlx({"model_type": "qwen3_moe", "num_local_experts": 4}, has_head=True)
    assert moe == {"model_type": "qwen3_moe", "num_experts": 4, "tie_word_embeddings": False}
    granite = config_for_mlx({"model_type": "granitemoehybrid", "layer_types": ["full_attention"]}, has_head=True)
    assert granite["layer_types"] == ["attention"]
    rope = {"rope_parameters": {"rope_theta": 1e7}}
    halves = {"model_type": "minimax_m2", "head_dim": 128, "rope_parameters": {"partial_rotary_factor": 0.5}}
    assert config_for_mlx(halves, has_head=True)["rotary_dim"] == 64
    qwen = {"model_type": "qwen3_5_moe_text", "layer_types": ["linear_attention", "full_attention"], **rope}
    assert config_for_mlx(qwen, has_head=True) == {
        **qwen, "model_type": "qwen3_5_moe", "full_attention_interval": 2, "tie_word_embeddings": False,
    }  # fmt: skip
    gemma = {"model_type": "gemma4_text", "num_hidden_layers": 6, "head_dim": 256, **rope}
    each = {"per_layer_config": {"0": {"head_dim": 256}, "5": {"head_dim": 512, "num_key_value_heads": 2}}}
    assert config_for_mlx({**gemma, **each}, has_head=False) == {
        **gemma, "global_head_dim": 512, "num_global_key_value_heads": 2, "tie_word_embeddings": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "stored", "shape"),
    [
        ("phi3", "model.layers.0.self_attn.qkv_proj", (96, 64)),
        ("granite4", "model.layers.0.mlp.up_proj", (64, 64)),
        ("qwen3moe", "model.layers.1.mlp.switch_mlp.down_proj", None),
        ("mixtral", "model.layers.1.block_sparse_moe.switch_mlp.gate_proj", None),
    ],
)
def test_matrices_have_the_names_that_mlx_lm_reads(tmp_path, monkeypatch, name, stored, shape):
    monkeypatch.setattr(mlx_tensors, "GROUP", 32)
    monkeypatch.setattr(mlx_folder, "HEADS_OF_SIZE", ())  # the small Mixtral has other heads than mlx-lm's
    made = open_checkpoint(written(tmp_path, source=DATA / f"{name}-micro" / "hf"))
    weight = made.weight(f"{stored}.weight")
    assert weight.type.name.startswith("AFFINE4_G32")
    assert shape is None or weight.shape == shape
    assert len(weight.shape) == (3 if "switch_mlp" in stored else 2)
    assert not any("experts" in tensor or "shared_mlp" in tensor for tensor in made.shapes)


def test_a_folder_with_stacked_experts_is_written_again_without_a_change(tmp_path, monkeypatch):
    monkeypatch.setattr(mlx_tensors, "GROUP", 32)
    once = written(tmp_path, source=DATA / "qwen3moe-micro" / "hf")
    to_mlx_folder(once, tmp_path / "again", "mlx-4bit")
    for name in ("model.safetensors", "config.json"):
        assert (once / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_layers_that_one_matrix_holds_get_one_type(tmp_path):
    with pytest.raises(
        OptionError, match=r"qkv_proj.weight consists of attn_q, attn_k, attn_v: .* same type, not keep, mlx-4bit"
    ):
        written(tmp_path, source=DATA / "phi3-micro" / "hf", attn_k="keep")


@pytest.mark.slow
def test_the_command(tmp_path):
    command = [sys.executable, "cli.py", "quantize", str(SOURCE), str(tmp_path / "out"), "--to", "mlx-4bit"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "out")
    assert "AFFINE4_G64_F32" in done.stderr
    refused = cli(*command[2:], "--min-dim", "64")
    assert refused.code == 2
    assert "--min-dim" in refused.err


# Settings in which mlx-lm's results differ, as `notes_on` reports, and others in their place.
LIKE_MLX_LM = {
    "gemma2": {"sliding_window": 64},
    "gptoss": {"rope_parameters": {"truncate": True}},
    "phi3": {"sliding_window": 64, "rope_parameters": {"short_factor": [1.0, 1.5, 3.0, 5.0, 8.0, 12.0]}},
}


def source_of(name, tmp_path):
    """A small model's folder, with settings of which mlx-lm makes the same model as this engine."""
    source = DATA / f"{name}-micro" / "hf"
    if name not in LIKE_MLX_LM:
        return source
    shutil.copytree(source, tmp_path / "source")
    config = merged(json.loads((source / "config.json").read_text()), LIKE_MLX_LM[name])
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    return tmp_path / "source"


def inside(source, path, model_type):
    """Write a text model as the one inside of a model of images."""
    of, config = open_checkpoint(source), json.loads((source / "config.json").read_text())
    tensors = {name: of.weight(name).dequantize() for name in of.shapes}
    inner = {name.replace("model.", "model.language_model.", 1): values for name, values in tensors.items()}
    write_folder(path, {"model_type": model_type, "text_config": config}, inner)
    return path


@pytest.mark.some(1)
@pytest.mark.parametrize(("name", "model_type"), [("gemma3", "gemma3"), ("gemma4e", "gemma4"), ("qwen3_5", "qwen3_5")])
def test_a_text_model_inside_of_another_has_the_prefix_of_mlx_lm(tmp_path, monkeypatch, name, model_type):
    monkeypatch.setattr(mlx_tensors, "GROUP", 32)
    source = DATA / f"{name}-micro" / "hf"
    made = written(tmp_path, source=inside(source, tmp_path / "inner", model_type))
    assert all(tensor.startswith("language_model.") for tensor in open_checkpoint(made).shapes)
    config = json.loads((made / "config.json").read_text())
    assert model_type == "qwen3_5" or config["vocab_size"] == config["text_config"]["vocab_size"]
    to_mlx_folder(source, tmp_path / "alone", "mlx-4bit")
    found, want = (np.asarray(engine(folder, "simd").logits(IDS)) for folder in (made, tmp_path / "alone"))
    check_close(want, found, each=0.5, all_=0.1)  # the type of scales differs
    if importlib.util.find_spec("mlx_lm") is not None:
        from tests.golden.make_mlx_goldens import in_float32, logits_of

        check_close(logits_of(in_float32(made), IDS), found, each=3e-5, all_=1.5e-5)


def test_qwen3_5_alone_has_the_name_and_the_prefix_of_mlx_lm(tmp_path):
    made = written(tmp_path, source=DATA / "qwen3_5-micro" / "hf")
    assert json.loads((made / "config.json").read_text())["model_type"] == "qwen3_5"
    assert all(tensor.startswith("language_model.model.") for tensor in open_checkpoint(made).shapes)


def test_settings_in_whose_defaults_mlx_lm_differs_are_written(tmp_path):
    """transformers has them in other keys, or another default."""
    made = written(tmp_path, source=DATA / "gemma4-micro" / "hf")
    config = json.loads((made / "config.json").read_text())
    assert (config["global_head_dim"], config["num_global_key_value_heads"]) == (32, 1)
    assert config["rope_parameters"]["full_attention"]["partial_rotary_factor"] == 0.25
    (tmp_path / "out").rename(tmp_path / "gemma4")
    config = json.loads((written(tmp_path, source=DATA / "gpt2-micro" / "hf") / "config.json").read_text())
    assert (config["n_ctx"], config["layer_norm_epsilon"]) == (128, 1e-5)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("gemma2", "its attention ignores the window, so its results differ after 8 tokens"),
        ("gptoss", "it rounds the limits of YaRN"),
        ("phi3", "only LongRoPE's long factors, so its results differ up to 64 tokens"),
        ("qwen3", None),
    ],
)
def test_the_user_is_told_where_results_of_mlx_lm_differ(tmp_path, name, line):
    notes = []
    to_mlx_folder(DATA / f"{name}-micro" / "hf", tmp_path / "out", "mlx-4bit", note=notes.append)
    assert any(line in note for note in notes) if line else not any("mlx-lm" in note for note in notes)


@pytest.mark.skipif(importlib.util.find_spec("mlx_lm") is None, reason="mlx-lm is not installed")
@pytest.mark.parametrize("to", ["mlx-4bit", "mlx-3bit", "mlx-mxfp4"])
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "mixtral"])
def test_mlx_lm_has_the_same_greedy_ids(tmp_path, monkeypatch, name, to):
    from tests.golden.make_mlx_goldens import in_float32, logits_of

    monkeypatch.setattr(mlx_tensors, "GROUP", 32)
    made = written(tmp_path, to, source_of(name, tmp_path))
    theirs, ours = in_float32(made), engine(made, "simd")
    check_close(logits_of(theirs, IDS), np.asarray(ours.logits(IDS)), each=3e-5, all_=1.5e-5)
    ids = list(IDS)
    for _ in range(12):
        chosen = int(np.asarray(ours.logits(ids))[-1].argmax())
        assert chosen == int(logits_of(theirs, ids)[-1].argmax())
        ids.append(chosen)


@pytest.mark.skipif(importlib.util.find_spec("mlx_lm") is None, reason="mlx-lm is not installed")
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "mixtral"])
def test_mlx_lm_loads_what_a_gguf_file_becomes(tmp_path, monkeypatch, name):
    from mlx_lm.utils import load_tokenizer

    from tests.golden.make_mlx_goldens import in_float32, logits_of

    monkeypatch.setattr(mlx_tensors, "GROUP", 32)
    source = DATA / f"{name}-micro" / "hf" if name == "gptoss" else source_of(name, tmp_path)
    requantize(with_tokenizer(source, tmp_path / "both"), tmp_path / "source.gguf", Conversion("q8_0"))
    made = written(tmp_path, source=tmp_path / "source.gguf")
    if name == "gptoss":  # GGUF has no key for rounded limits of YaRN
        config = json.loads((made / "config.json").read_text())
        config["rope_scaling"]["truncate"] = True
        (made / "config.json").write_text(json.dumps(config))
    theirs, ours = in_float32(made), engine(made, "simd")
    check_close(logits_of(theirs, IDS), np.asarray(ours.logits(IDS)), each=3e-5, all_=1.5e-5)
    tokenizer = load_tokenizer(made)
    assert tokenizer.encode("A,B", add_special_tokens=False) == ours.tokenizer.encode("A,B")
    assert tokenizer.decode(ours.tokenizer.encode("A,B")) == "A,B"
