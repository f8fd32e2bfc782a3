"""What can be loaded and what cannot: copies of good files with one thing changed, and what is said about it."""

import json
import platform
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

import mlx_engine
from mlx_engine.checkpoint.gguf import open_gguf
from mlx_engine.checkpoint.gguf_writer import write_gguf
from mlx_engine.errors import (
    BackendUnavailableError,
    EngineError,
    FormatError,
    ModelError,
    OptionError,
    SourceError,
    TensorMismatchError,
    UnknownArchitectureError,
    UnsupportedConfigError,
    UnsupportedTypeError,
)

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "qwen3-micro"
F32, Q8, HF = DATA / "model-f32.gguf", DATA / "model-q8_0.gguf", DATA / "hf"


@pytest.fixture(scope="module")
def stored():
    """The folder's tensors as (dtype, shape, bytes), read without the package."""
    data = (HF / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return {
        name: (row["dtype"], row["shape"], data[8 + length :][slice(*row["data_offsets"])])
        for name, row in header.items()
    }


def write_safetensors(path, tensors):
    header, blob = {}, b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(blob), len(blob) + len(data)]}
        blob += data
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + blob)


@pytest.fixture
def folder(tmp_path, stored):
    """Makes a copy of the folder with other settings (None removes one) or other tensors."""

    def make(tensors=None, **config):
        path = tmp_path / "copy"
        path.mkdir()
        shutil.copy(HF / "tokenizer.json", path)
        settings = {**json.loads((HF / "config.json").read_text()), **config}
        (path / "config.json").write_text(json.dumps({k: v for k, v in settings.items() if v is not ABSENT}))
        if tensors is None:
            shutil.copy(HF / "model.safetensors", path)
        else:
            write_safetensors(path / "model.safetensors", tensors)
        return path

    return make


ABSENT = object()


@pytest.fixture
def regguf(tmp_path):
    """Makes a copy of the GGUF file with other metadata, or without some tensors."""

    def make(drop=(), remove=(), **metadata):
        with open_gguf(F32) as file:
            values = {k: v for k, v in file.typed_metadata().items() if k not in remove}
            values |= {k.replace("__", "."): v for k, v in metadata.items()}
            weights = [file.weight(name) for name in file.tensors if name not in drop]
            write_gguf(tmp_path / "copy.gguf", values, weights)
        return tmp_path / "copy.gguf"

    return make


def relative(a, b):
    return np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)


# ---- what cannot be loaded ----


@pytest.mark.parametrize(
    "source",
    ["nope.gguf", "models/nope.gguf", "./nope", "nope", "a/b/c", "", "x" * 300, "~no-such-user/model.gguf", "a\0b"],
    ids=["file", "file-below", "path", "name", "deep", "empty", "too-long", "home-of-nobody", "null"],
)
def test_a_source_that_is_not_there_is_a_source_error(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError) as caught:
        mlx_engine.load(source, backend="simd")
    assert source[:10] in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_that_is_no_model_is_a_format_error(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"<html>404</html>" * 10)
    with pytest.raises(FormatError, match="GGUF"):
        mlx_engine.load(path, backend="simd")


def test_a_folder_without_a_model_says_which_file_is_missing(tmp_path):
    with pytest.raises(SourceError, match=r"config\.json"):
        mlx_engine.load(tmp_path, backend="simd")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SourceError, match=r"model\.safetensors"):
        mlx_engine.load(tmp_path, backend="simd")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\udcff", '{"a":' * 10**5], ids=repr)
def test_a_damaged_config_is_a_format_error(folder, text):
    path = folder()
    (path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(FormatError, match=r"config\.json"):
        mlx_engine.load(path, backend="simd")


@pytest.mark.parametrize("backend", ["metal", "parallell", ""])
def test_a_backend_that_is_not_there_says_why_before_any_file_is_opened(backend):
    if backend == "metal" and platform.system() == "Darwin" and platform.machine() == "arm64":
        pytest.skip("this machine has Metal")
    with pytest.raises(BackendUnavailableError) as caught:
        mlx_engine.load("nope.gguf", backend=backend)
    assert caught.value.name == backend
    assert caught.value.reason
    assert caught.value.reason != "None"


@pytest.mark.parametrize(
    ("option", "value"),
    [("quant", "q3"), ("quant", ""), ("quant", "Q8_0"), ("threads", 0), ("threads", -1), ("threads", 1.5)],
)
def test_bad_options_of_load_are_refused_before_any_file_is_opened(option, value):
    with pytest.raises(OptionError) as caught:
        mlx_engine.load("nope.gguf", backend="simd", **{option: value})
    assert caught.value.option == option


@pytest.mark.parametrize("architecture", ["mamba", "QWEN3", "../qwen3", ""])
def test_an_unknown_architecture_is_named_with_those_that_are_known(folder, architecture):
    with pytest.raises(UnknownArchitectureError) as caught:
        mlx_engine.load(folder(model_type=architecture), backend="simd")
    assert caught.value.architecture == architecture
    assert "qwen3" in caught.value.supported


def test_a_config_without_a_model_type_says_so(folder):
    with pytest.raises(EngineError, match=r"model_type|architecture"):
        mlx_engine.load(folder(model_type=ABSENT), backend="simd")


def test_all_wrong_tensors_are_in_one_error(folder, stored):
    tensors = dict(stored)
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = ("F32", [128], bytes(512))
    dtype, shape, data = tensors["model.layers.2.mlp.down_proj.weight"]
    tensors["model.layers.2.mlp.down_proj.weight"] = (dtype, shape[::-1], data)
    with pytest.raises(TensorMismatchError) as caught:
        mlx_engine.load(folder(tensors), backend="simd")
    error = caught.value
    assert set(error.missing) == {"model.norm.weight", "model.layers.1.mlp.up_proj.weight"}
    assert error.unexpected == ("model.layers.0.self_attn.q_proj.bias",)
    assert len(error.misshapen) == 1
    assert "(64, 160)" in error.misshapen[0]
    assert "(160, 64)" in error.misshapen[0]
    for name in (*error.missing, *error.unexpected, *error.misshapen):
        assert name in str(error)


@pytest.mark.parametrize("drop", ["output_norm.weight", "blk.1.attn_k_norm.weight", "token_embd.weight"])
def test_a_gguf_that_lacks_a_tensor_is_a_tensor_mismatch(regguf, drop):
    with pytest.raises(TensorMismatchError) as caught:
        mlx_engine.load(regguf(drop=[drop]), backend="simd")
    assert caught.value.missing == (drop,)


def test_a_layer_more_in_the_settings_is_reported_with_all_its_tensors(folder):
    with pytest.raises(TensorMismatchError) as caught:
        mlx_engine.load(folder(num_hidden_layers=4, layer_types=ABSENT), backend="simd")
    assert len(caught.value.missing) == 11


def test_an_absurd_number_of_layers_is_refused_without_naming_every_tensor(folder):
    with pytest.raises(ModelError) as caught:
        mlx_engine.load(folder(num_hidden_layers=1000, layer_types=ABSENT), backend="simd")
    assert len(str(caught.value)) < 20_000


def test_a_tensor_of_an_unreadable_type_is_refused_by_name(folder, stored):
    tensors = {**stored, "model.norm.weight": ("I64", [64], bytes(512))}
    with pytest.raises(UnsupportedTypeError, match=r"model\.norm\.weight"):
        mlx_engine.load(folder(tensors), backend="simd")


REFUSED = {
    "rope scaling": ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
    "rope type": ("rope_parameters", {"rope_theta": 1e6, "rope_type": "longrope"}, "rope_type"),
    "rope factor": ("rope_parameters", {"rope_theta": 1e6, "rope_type": "default", "factor": 2.0}, "factor"),
    "rope theta": ("rope_parameters", {"rope_theta": 0, "rope_type": "default"}, "rope_theta"),
    "rope theta huge": ("rope_parameters", {"rope_theta": 10**400, "rope_type": "default"}, "rope_theta"),
    "rope no mapping": ("rope_parameters", [1]),
    "experts": ("num_experts", 8),
    "sliding window": ("use_sliding_window", 1),
    "layer types": ("layer_types", ["full_attention", "sliding_attention", "full_attention"]),
    "activation": ("hidden_act", "gelu"),
    "quantised": ("quantization_config", {"bits": 4}, "quantization_config.group_size"),
    "unknown key": ("logit_softcapping", 30.0),
    "unknown key false": ("use_something_new", False),
    "heads zero": ("num_attention_heads", 0),
    "heads bool": ("num_attention_heads", True),
    "heads float": ("num_attention_heads", 4.0),
    "heads string": ("num_attention_heads", "4"),
    "heads negative": ("num_attention_heads", -4),
    "heads null": ("num_attention_heads", None),
    "eps infinite": ("rms_norm_eps", float("inf")),
    "eps NaN": ("rms_norm_eps", float("nan")),
    "eps zero": ("rms_norm_eps", 0),
    "tied a string": ("tie_word_embeddings", "yes"),
    "head width odd": ("head_dim", 31),
    "heads that do not divide": ("num_key_value_heads", 3),
    "size absent": ("hidden_size", ABSENT),
    "layers without end": ("num_hidden_layers", 10**15),
    "layers absent": ("num_hidden_layers", ABSENT),
    "context absent": ("max_position_embeddings", ABSENT),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_setting_that_would_change_the_computation_is_refused_by_name(folder, case):
    key, value, *named = REFUSED[case]
    with pytest.raises(UnsupportedConfigError) as caught:
        mlx_engine.load(folder(**{key: value}), backend="simd")
    assert caught.value.key == (named[0] if named else key)
    assert caught.value.key in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.scaling.type", "longrope"),
        ("rope.scaling.factor", 0.0),
        ("expert_count", 8),
        ("expert_count", [8, 8]),
        ("attention.sliding_window", 4096),
        ("attention.causal", False),
        ("attention.value_length", 16),
        ("attention.key_length", [32, 32]),
        ("rope.dimension_count", 16),
        ("something_new", 1),
        ("rope.scaling.type", ["none", "none"]),
        ("rope.dimension_count", [32, 32]),
    ],
    ids=str,
)
def test_a_gguf_setting_that_would_change_the_computation_is_refused_by_name(regguf, key, value):
    with pytest.raises(UnsupportedConfigError) as caught:
        mlx_engine.load(regguf(**{f"qwen3.{key}": value}), backend="simd")
    assert caught.value.key == key


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "attention.layer_norm_rms_epsilon"])
def test_a_gguf_without_a_needed_setting_is_refused_by_name(regguf, key):
    with pytest.raises(UnsupportedConfigError) as caught:
        mlx_engine.load(regguf(remove=[f"qwen3.{key}"]), backend="simd")
    assert caught.value.key == key


def test_settings_that_change_nothing_are_let_through(folder, golden):
    engine = mlx_engine.load(
        folder(rope_scaling=None, sliding_window=4096, max_window_layers=2, use_cache=False, dtype="bfloat16"),
        backend="simd",
    )
    assert relative(engine.logits([1, 2]), np.asarray(mlx_engine.load(F32, backend="simd").logits([1, 2]))) <= 1e-6


def test_the_settings_of_transformers_4_mean_the_same(folder, golden):
    engine = mlx_engine.load(
        folder(rope_parameters=ABSENT, rope_theta=1e6, rope_scaling=None, layer_types=ABSENT, torch_dtype="float32"),
        backend="simd",
    )
    assert relative(engine.logits(golden["prompt2"].tolist()), golden["logits2"]) <= 1e-5


def test_an_untied_head_is_its_own_matrix(folder, stored, engine):
    dtype, shape, data = stored["model.embed_tokens.weight"]
    doubled = (2 * np.frombuffer(data, "<f4")).tobytes()
    path = folder({**stored, "lm_head.weight": (dtype, shape, doubled)}, tie_word_embeddings=False)
    untied = mlx_engine.load(path, backend="simd")
    assert relative(untied.logits([1, 2, 3]), 2 * np.asarray(engine.logits([1, 2, 3]))) <= 1e-6


def test_an_untied_model_without_a_head_lacks_a_tensor(folder):
    with pytest.raises(TensorMismatchError) as caught:
        mlx_engine.load(folder(tie_word_embeddings=False), backend="simd")
    assert caught.value.missing == ("lm_head.weight",)


def test_a_tied_model_does_not_read_the_head_that_its_file_carries(folder, stored, engine):
    dtype, shape, data = stored["model.embed_tokens.weight"]
    tied = mlx_engine.load(folder({**stored, "lm_head.weight": (dtype, shape, bytes(len(data)))}), backend="simd")
    assert relative(tied.logits([1, 2, 3]), np.asarray(engine.logits([1, 2, 3]))) <= 1e-6


def test_a_folder_in_several_files_is_the_same_model(tmp_path, stored, engine):
    shutil.copy(HF / "config.json", tmp_path)
    names = sorted(stored)
    parts = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, part in parts.items():
        write_safetensors(tmp_path / file, {name: stored[name] for name in part})
    weight_map = {name: file for file, part in parts.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert relative(mlx_engine.load(tmp_path, backend="simd").logits([1, 2]), np.asarray(engine.logits([1, 2]))) <= 1e-6


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b", "..", "", "nul\0l", 7], ids=repr)
def test_an_index_cannot_lead_out_of_its_folder(tmp_path, name):
    shutil.copy(HF / "config.json", tmp_path)
    index = {"weight_map": {"model.norm.weight": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises((FormatError, SourceError), match=r"safetensors\.index\.json|expected a readable file"):
        mlx_engine.load(tmp_path, backend="simd")
