"""Name what is no model: folders of other programs' weights, adapters, and GGUF files beside a model's file."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from mlx_engine.checkpoint.gguf import GGUFFile
from mlx_engine.checkpoint.hf_folder import has_safetensors
from mlx_engine.errors import FormatError, SourceError

# `general.type`, or `general.architecture` of files without one: what such a file is, and what to do.
GGUF_KINDS = {
    "adapter": (
        "a LoRA adapter, which changes a model's weights and has none of its own",
        "merge it with llama.cpp, `llama-export-lora -m MODEL.gguf --lora ADAPTER.gguf -o MERGED.gguf`, and name the "
        "merged file",
    ),
    "mmproj": (
        "the encoder of images or sound of a multimodal model",
        "name the file of the text model, which is published beside it",
    ),
    "imatrix": (
        "an importance matrix, statistics for quantising a model",
        "name the file of the model, which is published beside it",
    ),
    "controlvector": ("a control vector, which steers a model", "name the file of the model"),
}
GGUF_KINDS["clip"] = GGUF_KINDS["mmproj"]
# The converters that come with transformers; OUT is for the user to choose.
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
    """Check that a GGUF file has a model; raise FormatError that says what else it has."""
    type_ = file.metadata.get("general.type", "model")
    kind = type_ if type_ in GGUF_KINDS else architecture
    if kind not in GGUF_KINDS and type_ == "model":
        return
    unknown = (f"general.type {type_!r:.60}", "name the file of a model, or update this program")
    found, hint = GGUF_KINDS.get(kind, unknown)
    raise FormatError(where=str(file.path), expected="a model", found=found, hint=hint)


def refuse_other_folders(folder: Path) -> None:
    """Check that a folder has config.json and safetensors; raise SourceError that says what else it has."""
    if (folder / "config.json").exists() and has_safetensors(folder):
        return
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise SourceError(f"{folder}: expected a readable folder, found {error.strerror or error}") from error
    found, hint = next(filter(None, (kind(folder, names) for kind in FOLDER_KINDS)), _nothing(folder, names))
    raise SourceError(f"{folder}: expected a folder with config.json and safetensors, found {found}; {hint}")


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
        f"merge it into its model, `{_filled(command, folder, base=base)}`, and name the folder OUT",
    )


def _ggufs(folder: Path, names: Sequence[str]) -> Found:
    ggufs = [name for name in names if name.endswith(".gguf")]
    if not ggufs:
        return None
    more = f" and {len(ggufs) - 5:,} more" if len(ggufs) > 5 else ""
    found = f"{'a GGUF file' if len(ggufs) == 1 else f'{len(ggufs):,} GGUF files'}, {', '.join(ggufs[:5])}{more}"
    return found, f"name the file: {folder / ggufs[0]}" if len(ggufs) == 1 else f"name one, such as {folder / ggufs[0]}"


def _meta(folder: Path, names: Sequence[str]) -> Found:
    parts = [name for name in names if name.startswith("consolidated.") and name.endswith((".pth", ".safetensors"))]
    if not parts or ("config.json" in names and "params.json" not in names):
        return None
    if parts[0].endswith(".pth"):
        return "the original form of a Llama model (consolidated.*.pth)", (
            f"convert it, `{_filled(FROM_META, folder)}`, and name the folder OUT"
        )
    return f"the original form of a Mistral model ({parts[0]})", (
        "download the files of transformers, config.json and model*.safetensors, which are published beside it"
    )


def _torch(folder: Path, names: Sequence[str]) -> Found:
    files = [name for name in names if name.endswith((".bin", ".pth", ".pt")) and "training_args" not in name]
    if "config.json" not in names or not any(name.startswith(("pytorch_model", "model")) for name in files):
        return None
    return f"weights of PyTorch ({files[0]}), pickles that could run any code", (
        f"convert them, `{_filled(FROM_TORCH, folder)}`, and name the folder OUT"
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
