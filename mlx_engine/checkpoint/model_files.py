"""Open a GGUF file or a Hugging Face folder as one type: settings, tensor shapes, weights by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlx_engine.checkpoint import quantized_folder
from mlx_engine.checkpoint.gguf import GGUFFile, open_gguf
from mlx_engine.checkpoint.hf_folder import read_json, shards
from mlx_engine.checkpoint.kinds import refuse_other_folders, refuse_other_kinds
from mlx_engine.checkpoint.mlx_quantization import KEYS, group_entries, read_quantization
from mlx_engine.checkpoint.safetensors import SafetensorsFile
from mlx_engine.errors import FormatError
from mlx_engine.quant.weight import Weight


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a checkpoint, from which a model is built.

    Attributes:
        where: the file or folder, for error messages.
        naming: the naming scheme of tensors and settings.
        architecture: GGUF's general.architecture, or config.json's model_type.
        settings: GGUF metadata under the architecture's prefix, without the prefix; or config.json, without the
            settings of MLX's quantisation.
        metadata: all GGUF metadata; empty for a folder.
        shapes: every tensor's row-major shape; of a matrix that MLX has quantised, the shape of its weights.
        weight: return a stored tensor by name; its bytes are read from disk when first used.
        notes: lines for the user about settings that are ignored.
        is_converted: whether the types of weights are known only when they are read.
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
        """Rows of the GGUF embedding table; if it is missing, the size of the vocabulary, or 1."""
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        n_tokens = len(tokens) if isinstance(tokens, list) else 0
        return (self.shapes.get("token_embd.weight") or (max(n_tokens, 1),))[0]


def open_checkpoint(path: Path, *, expand: bool = True) -> Checkpoint:
    """Open a GGUF file, or a Hugging Face folder with config.json and safetensors.

    Without `expand`, the tensors of quantised layers in a folder are listed as they are stored.

    Raises:
        SourceError: there is no such file or folder, or it cannot be read.
        FormatError: the file or folder is not a valid checkpoint.
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
    return quantized_folder.expanded(checkpoint, files) if expand else checkpoint
