"""Folders and GGUF files that hold no model that can be run: the message says what they are and what helps."""

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

import mlx_engine
from mlx_engine.checkpoint.gguf import open_gguf
from mlx_engine.checkpoint.gguf_values import Value, ValueType
from mlx_engine.checkpoint.gguf_writer import write_gguf
from mlx_engine.errors import FormatError, SourceError

MICRO = Path(__file__).parents[1] / "data" / "qwen3-micro"
PEFT = {"peft_type": "LORA", "base_model_name_or_path": "meta-llama/Llama-3.2-1B"}
# The files of a folder and their contents, and what the message says.
FOLDERS = {
    "bin": (
        {"config.json": {}, "pytorch_model.bin": {}},
        "weights of PyTorch (pytorch_model.bin)",
        "save_pretrained('OUT')",
    ),
    "bin shards": (
        {"config.json": {}, "pytorch_model-00001-of-00002.bin": {}, "pytorch_model.bin.index.json": {}},
        "weights of PyTorch (pytorch_model-00001-of-00002.bin)",
        "AutoModelForCausalLM",
    ),
    "PEFT adapter": (
        {"adapter_config.json": PEFT, "adapter_model.safetensors": {}},
        "a LoRA adapter of meta-llama/Llama-3.2-1B",
        "merge_and_unload()",
    ),
    "MLX adapter": (
        {"adapter_config.json": {"model": "org/base", "fine_tune_type": "lora"}, "adapters.safetensors": {}},
        "a LoRA adapter of org/base",
        "mlx_lm.fuse --model org/base",
    ),
    "damaged adapter": ({"adapter_config.json": [], "config.json": {}}, "a LoRA adapter of BASE", "OUT"),
    "Meta": (
        {"consolidated.00.pth": {}, "params.json": {}},
        "the original form of a Llama",
        "convert_llama_weights_to_hf",
    ),
    "Mistral": (
        {"consolidated.safetensors": {}, "params.json": {}},
        "the original form of a Mistral",
        "published with it",
    ),
    "one GGUF": ({"a.gguf": {}}, "a GGUF file, a.gguf", "name the file: "),
    "GGUFs": ({"b.gguf": {}, "a.gguf": {}, "config.json": {}}, "2 GGUF files, a.gguf, b.gguf", "name one, such as "),
    "TensorFlow": ({"config.json": {}, "tf_model.h5": {}}, "weights of TensorFlow (tf_model.h5)", "safetensors"),
    "other names": ({"config.json": {}, "w.safetensors": {}}, "no model.safetensors, only w.safetensors", "index"),
    "config alone": ({"config.json": {}}, "no model.safetensors", "hf download"),
    "notes alone": ({"README.md": {}}, "no config.json", "name a GGUF file or another folder"),
    "nothing": ({}, "an empty folder", "name a GGUF file or another folder"),
}


@pytest.mark.parametrize(("files", "found", "hint"), FOLDERS.values(), ids=list(FOLDERS))
def test_a_folder_that_is_no_model_is_named_with_what_helps(tmp_path, files, found, hint):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(SourceError) as caught:
        mlx_engine.load(tmp_path, "simd")
    assert f"found {found}" in str(caught.value)
    assert hint in str(caught.value).partition(f"found {found}")[2]
    assert "\n" not in str(caught.value)


@pytest.fixture
def sharded(tmp_path):
    """The micro model's folder in three shards, with an index."""
    folder = shutil.copytree(MICRO / "hf", tmp_path / "hf")
    data = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    header.pop("__metadata__", None)
    (folder / "model.safetensors").unlink()
    names, weight_map = list(header), {}
    for i in range(3):
        rows, blob = {}, b""
        for name in names[i::3]:
            first, last = header[name]["data_offsets"]
            rows[name] = header[name] | {"data_offsets": [len(blob), len(blob) + last - first]}
            blob += body[first:last]
            weight_map[name] = f"model-{i + 1:05}-of-00003.safetensors"
        text = json.dumps(rows).encode()
        (folder / f"model-{i + 1:05}-of-00003.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + blob)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def logits(path):
    return np.array(mlx_engine.load(path, "simd", jit=False).logits([1, 2, 3]))


def test_shards_load_with_and_without_an_index(sharded):
    expected = logits(MICRO / "hf")
    assert (logits(sharded) == expected).all()
    (sharded / "model.safetensors.index.json").unlink()
    assert (logits(sharded) == expected).all()


@pytest.mark.parametrize("indexed", [True, False])
def test_a_missing_shard_is_named(sharded, indexed):
    if not indexed:
        (sharded / "model.safetensors.index.json").unlink()
    (sharded / "model-00002-of-00003.safetensors").unlink()
    expected = r"model-00002-of-00003\.safetensors\. By .*, the model has 3 safetensors files\. Download what"
    with pytest.raises(SourceError, match=expected):
        logits(sharded)


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("general.type", "adapter", "a LoRA adapter"),
        ("general.type", "mmproj", "the encoder of images or sound"),
        ("general.type", "imatrix", "an importance matrix"),
        ("general.architecture", "clip", "the encoder of images or sound"),
        ("general.architecture", "controlvector", "a control vector"),
        ("general.type", "unheard-of", "general.type 'unheard-of'"),
    ],
)
def test_a_gguf_file_that_is_no_model_is_named(tmp_path, key, value, found):
    path = tmp_path / "other.gguf"
    with open_gguf(MICRO / "model-q8_0.gguf") as file:
        metadata = {**file.typed_metadata(), key: Value(ValueType.STRING, value)}
        write_gguf(path, metadata, [file.weight("output_norm.weight")])
    with pytest.raises(FormatError) as caught:
        mlx_engine.load(path, "simd")
    assert (caught.value.expected, found in caught.value.found) == ("a model", True)
