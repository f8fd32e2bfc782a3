"""Open a GGUF file or a Hugging Face folder as a `Checkpoint`: settings, tensor shapes, weights by name."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mlx_engine.checkpoint.gguf import GGUFFile, open_gguf
from mlx_engine.checkpoint.hf_folder import has_safetensors, read_json, shards
from mlx_engine.checkpoint.mlx_quantization import KEYS, group_entries, read_quantization
from mlx_engine.checkpoint.quantized import CONFIG, Layer, quant_method, read_layers
from mlx_engine.checkpoint.safetensors import SafetensorsFile
from mlx_engine.errors import FormatError, SourceError, first
from mlx_engine.quant.weight import Weight


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a checkpoint, from which a model is built.

    Attributes:
        where: the file or folder, for error messages.
        naming: "gguf" or "hf": whether tensors and settings have the names of GGUF or of Hugging Face transformers.
        architecture: GGUF's general.architecture, or config.json's model_type.
        settings: of a GGUF file, the metadata whose keys begin with the architecture's prefix, which is removed from
            the keys. Of a folder, config.json, without the settings of quantisation that `weight` already applies.
        metadata: all GGUF metadata; empty for a folder.
        shapes: maps the name of each tensor to its row-major shape. For a quantised matrix, this is the shape of its
            weights, not of its quants.
        weight: returns a stored tensor by name; its bytes are read from disk when they are first used.
        notes: lines for the user about settings that are ignored.
        is_converted: whether GPTQ, AWQ or a similar program has quantised layers, which `weight` converts. The types of
            the converted weights are unknown until `weight` returns them.
    """

    where: str
    naming: Literal["gguf", "hf"]
    architecture: str
    settings: Mapping[str, object]
    metadata: Mapping[str, object]
    shapes: Mapping[str, tuple[int, ...]]
    weight: Callable[[str], Weight]
    notes: tuple[str, ...] = ()
    is_converted: bool = False

    @property
    def n_embeddings(self) -> int:
        """The number of rows of the GGUF embedding table; without a table, the vocabulary size; without both, 1."""
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        n_tokens = len(tokens) if isinstance(tokens, list) else 0
        return (self.shapes.get("token_embd.weight") or (max(n_tokens, 1),))[0]


def open_checkpoint(path: Path, *, expand: bool = True) -> Checkpoint:
    """Open a GGUF file, or a Hugging Face folder with config.json and safetensors.

    If GPTQ, AWQ or a similar program has quantised a layer, the layer has several tensors. With `expand`, the
    checkpoint has one weight in their place; without `expand`, it has the tensors as they are stored.

    Raises:
        SourceError: there is no such file or folder, or it cannot be read.
        FormatError: the file or folder is not a valid checkpoint.
        ModelError: a folder's quantisation, or one of its settings, is not implemented.
    """
    return _from_folder(path, expand) if path.is_dir() else _from_gguf(open_gguf(path))


def _from_gguf(file: GGUFFile) -> Checkpoint:
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise FormatError(
            where=str(file.path),
            expected="a string general.architecture in the metadata",
            found=repr(architecture),
            hint="this GGUF holds no model; choose another file",
        )
    refuse_other_kinds(file, architecture)
    prefix = architecture + "."
    return Checkpoint(
        where=str(file.path),
        naming="gguf",
        architecture=architecture,
        settings={k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)},
        metadata=file.metadata,
        shapes={name: info.shape for name, info in file.tensors.items()},
        weight=file.weight,
    )


def _from_folder(folder: Path, expand: bool) -> Checkpoint:
    refuse_other_folders(folder)
    config = read_json(folder / "config.json")
    files: dict[str, SafetensorsFile] = {}
    for shard in shards(folder):
        for name in shard.tensors:
            if name in files:
                raise FormatError(
                    where=f"{shard.path}: tensor {name!r}",
                    expected="each tensor in one file only",
                    found=f"it is also in {files[name].path.name}",
                    hint="download the folder again",
                )
            files[name] = shard
    quantization = read_quantization(config, str(folder / "config.json"))
    shapes = {name: file.tensors[name].shape for name, file in files.items()}
    quantized = {} if quantization is None else group_entries(files, quantization)
    for name, entry in quantized.items():
        shapes |= {name: entry.shape}
        for _, part in entry.tensors[1:]:
            del shapes[part]
    checkpoint = Checkpoint(
        where=str(folder),
        naming="hf",
        architecture=str(config.get("model_type")),
        settings=config if quantization is None else {k: v for k, v in config.items() if k not in KEYS},
        metadata={},
        shapes=shapes,
        weight=lambda name: quantized[name].weight(name) if name in quantized else files[name].weight(name),
    )
    values = checkpoint.settings.get(CONFIG)
    if not expand or not isinstance(values, Mapping) or quant_method(values) is None:
        return checkpoint
    return _expanded(checkpoint, read_layers(checkpoint.where, values, files))


def _expanded(checkpoint: Checkpoint, layers: Mapping[str, Layer]) -> Checkpoint:
    """Return a checkpoint with one weight per quantised layer, and without the setting `quantization_config`."""
    parts = {name for layer in layers.values() for name in layer.parts}
    shapes = {name: shape for name, shape in checkpoint.shapes.items() if name not in parts}
    return replace(
        checkpoint,
        settings={key: value for key, value in checkpoint.settings.items() if key != CONFIG},
        shapes={**shapes, **{name: layer.shape for name, layer in layers.items()}},
        weight=lambda name: layers[name].read() if name in layers else checkpoint.weight(name),
        is_converted=True,
    )


# Maps each kind of GGUF file that has no model to a description and a hint. The kind is the file's `general.type` if
# the map has this key, else the file's `general.architecture`.
GGUF_KINDS = {
    "adapter": (
        "a LoRA adapter, which changes a model's weights and has none of its own",
        "merge it with llama.cpp, `llama-export-lora -m MODEL.gguf --lora ADAPTER.gguf -o MERGED.gguf`, and name the "
        "merged file",
    ),
    "mmproj": (
        "the encoder of images or sound of a multimodal model",
        "name the file of the text model, which is published with it",
    ),
    "imatrix": (
        "an importance matrix, statistics for quantising a model",
        "name the file of the model, which is published with it",
    ),
    "controlvector": ("a control vector, which steers a model", "name the file of the model"),
}
GGUF_KINDS["clip"] = GGUF_KINDS["mmproj"]
# Commands that hints suggest, to make a folder with safetensors. The user replaces OUT by the name of this new folder.
FROM_TORCH = (
    'python -c "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
    "[kind.from_pretrained({folder!r}).save_pretrained('OUT') for kind in (M, T)]\""
)
FROM_META = "python -m transformers.models.llama.convert_llama_weights_to_hf --input_dir {folder} --output_dir OUT"
FROM_PEFT = (
    'python -c "from peft import AutoPeftModelForCausalLM as M; '
    "M.from_pretrained({folder!r}).merge_and_unload().save_pretrained('OUT')\""
)
FROM_MLX = "mlx_lm.fuse --model {base} --adapter-path {folder} --save-path OUT"


def refuse_other_kinds(file: GGUFFile, architecture: str) -> None:
    """Raise FormatError if a GGUF file has no model; the message says which kind of file it is."""
    type_ = file.metadata.get("general.type", "model")
    kind = type_ if type_ in GGUF_KINDS else architecture
    if kind not in GGUF_KINDS and type_ == "model":
        return
    unknown = (f"general.type {type_!r:.60}", "name the file of a model, or update this program")
    found, hint = GGUF_KINDS.get(kind, unknown)
    raise FormatError(where=str(file.path), expected="a model", found=found, hint=hint)


def refuse_other_folders(folder: Path) -> None:
    """Raise SourceError if a folder lacks config.json or safetensors; the message says which kind of folder it is."""
    if (folder / "config.json").exists() and has_safetensors(folder):
        return
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise SourceError(f"{folder}: cannot be read ({error.strerror or error})") from error
    found, hint = next(filter(None, (kind(folder, names) for kind in FOLDER_KINDS)), _nothing(folder, names))
    raise SourceError(f"{folder}: not a model folder (config.json and safetensors): found {found}; {hint}")


# Each function in `FOLDER_KINDS` recognises one kind of folder that is not a model folder. It returns a description of
# the folder and a hint, or None if the folder is of another kind.
Found = tuple[str, str] | None


def _adapter(folder: Path, names: Sequence[str]) -> Found:
    if "adapter_config.json" not in names:
        return None
    try:
        config = json.loads((folder / "adapter_config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        config = None
    config = config if isinstance(config, dict) else {}
    base = str(config.get("base_model_name_or_path") or config.get("model") or "BASE")[:120]
    command = FROM_PEFT if "peft_type" in config else FROM_MLX
    return (
        f"a LoRA adapter of {base}, which has no weights of its own",
        f"merge it into its model, `{_filled(command, folder, base=base)}`, and load the folder OUT",
    )


def _ggufs(folder: Path, names: Sequence[str]) -> Found:
    ggufs = [name for name in names if name.endswith(".gguf")]
    if not ggufs:
        return None
    found = f"{'a GGUF file' if len(ggufs) == 1 else f'{len(ggufs):,} GGUF files'}, {first(ggufs, 5)}"
    return found, f"name the file: {folder / ggufs[0]}" if len(ggufs) == 1 else f"name one, such as {folder / ggufs[0]}"


def _meta(folder: Path, names: Sequence[str]) -> Found:
    parts = [name for name in names if name.startswith("consolidated.") and name.endswith((".pth", ".safetensors"))]
    if not parts or ("config.json" in names and "params.json" not in names):
        return None
    if parts[0].endswith(".pth"):
        return "the original form of a Llama model (consolidated.*.pth)", (
            f"convert it, `{_filled(FROM_META, folder)}`, and load the folder OUT"
        )
    return f"the original form of a Mistral model ({parts[0]})", (
        "download the files for transformers, config.json and model*.safetensors, which are published with it"
    )


def _torch(folder: Path, names: Sequence[str]) -> Found:
    files = [name for name in names if name.endswith((".bin", ".pth", ".pt")) and "training_args" not in name]
    if "config.json" not in names or not any(name.startswith(("pytorch_model", "model")) for name in files):
        return None
    return f"weights of PyTorch ({files[0]}), pickles that could run any code", (
        f"convert them, `{_filled(FROM_TORCH, folder)}`, and load the folder OUT"
    )


def _others(folder: Path, names: Sequence[str]) -> Found:
    endings = {".h5": "TensorFlow", ".msgpack": "Flax", ".onnx": "ONNX", ".npz": "NumPy or an old MLX"}
    found = next(((name, program) for end, program in endings.items() for name in names if name.endswith(end)), None)
    if found is None or "config.json" not in names:
        return None
    return f"weights of {found[1]} ({found[0]})", "download the safetensors of this model"


FOLDER_KINDS: tuple[Callable[[Path, Sequence[str]], Found], ...] = (_adapter, _ggufs, _meta, _torch, _others)


def _nothing(folder: Path, names: Sequence[str]) -> tuple[str, str]:
    if "config.json" not in names:
        return "no config.json" if names else "an empty folder", "name a GGUF file or another folder"
    others = [name for name in names if name.endswith(".safetensors")]
    if others:
        return f"no model.safetensors, only {', '.join(others[:5])}", "download the folder again, with its index"
    return "no model.safetensors", f"download it, `hf download ORG/NAME --local-dir {shlex.quote(str(folder))}`"


def _filled(command: str, folder: Path, base: str = "BASE") -> str:
    shell = "python -c" not in command
    return command.format(folder=shlex.quote(str(folder)) if shell else str(folder), base=shlex.quote(base))
