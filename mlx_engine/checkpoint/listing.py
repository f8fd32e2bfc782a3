"""List a checkpoint's header, metadata and tensors, for `inspect`. The model need not be supported."""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_engine.checkpoint.gguf import open_gguf
from mlx_engine.checkpoint.model_files import Checkpoint, open_checkpoint
from mlx_engine.checkpoint.safetensors import open_safetensors
from mlx_engine.errors import FormatError, UnsupportedTypeError
from mlx_engine.quant.weight import Weight


@dataclass(frozen=True)
class TensorRow:
    """One tensor of a listing.

    `type` is the name of the type in GGUF or safetensors. If MLX has quantised the tensor, `type` is the name of its
    `GroupType`, such as "AFFINE4_G64_F16". `nbytes` is None if a tensor in a folder is neither F32, F16 or BF16 nor
    quantised by MLX.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    nbytes: int | None

    @property
    def n_elements(self) -> int:
        """The number of values."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Total:
    """Totals of several tensors; `nbytes` is None if `TensorRow.nbytes` is None for one of the tensors."""

    n_tensors: int
    n_elements: int
    nbytes: int | None


@dataclass(frozen=True)
class Listing:
    """The contents of a GGUF file, a Hugging Face folder or a single safetensors file.

    Attributes:
        format: "GGUF" or "safetensors".
        header: maps names to numbers. The names are file_bytes and n_tensors; for GGUF files and folders also
            n_metadata; for GGUF files also version, alignment and data_offset.
        metadata: GGUF metadata, in the file's order; for a folder `Checkpoint.settings`; empty for a safetensors file.
        kinds: maps each key of the metadata to the GGUF type of its value; empty for a folder or a safetensors file.
        tensors: the tensors, in the order of the file or, for a folder, of its files.
        weight: returns a stored tensor by name.
    """

    path: Path
    format: str
    header: Mapping[str, int]
    metadata: Mapping[str, object]
    kinds: Mapping[str, str]
    tensors: tuple[TensorRow, ...]
    weight: Callable[[str], Weight]

    def value(self, key: str) -> object:
        """Return a metadata value.

        Raises:
            FormatError: there is no such key; the message lists similar keys.
        """
        if key in self.metadata:
            return self.metadata[key]
        keys = list(self.metadata)
        close = [name for name in keys if key in name][:3] or difflib.get_close_matches(key, keys, n=3)
        raise FormatError(
            where=str(self.path),
            expected=f"a metadata key {key!r}",
            found=f"{len(keys):,} others" + (f", such as {', '.join(map(repr, close))}" if close else ""),
            hint="`inspect` without --meta lists them",
        )

    def select(self, pattern: str | None) -> list[TensorRow]:
        """Return the tensors whose name contains `pattern` or, if `pattern` is a glob, matches it; None selects all."""
        if pattern is None:
            return list(self.tensors)
        if any(sign in pattern for sign in "*?["):
            return [row for row in self.tensors if fnmatch.fnmatchcase(row.name, pattern)]
        return [row for row in self.tensors if pattern in row.name]

    def totals(self) -> dict[str, Total]:
        """Return a map from each tensor type to its totals. With several types, "all" maps to their sum."""
        groups: dict[str, list[TensorRow]] = {}
        for row in self.tensors:
            groups.setdefault(row.type, []).append(row)
        if len(groups) > 1:
            groups["all"] = list(self.tensors)
        return {name: _total(rows) for name, rows in groups.items()}


def open_listing(path: Path) -> Listing:
    """Read the headers of a checkpoint; no tensor data is read.

    Raises:
        SourceError: there is no such file or folder, or it cannot be read.
        FormatError: a file violates its format.
        ModelError: a setting of MLX's quantisation in a folder is unknown or invalid.
    """
    if path.is_dir():
        return _of_folder(path)
    return _of_safetensors(path) if path.suffix == ".safetensors" else _of_gguf(path)


def _of_gguf(path: Path) -> Listing:
    file = open_gguf(path)
    header = {
        "file_bytes": sum(part.stat().st_size for part in file.files),
        "version": file.version,
        "n_metadata": len(file.metadata),
        "n_tensors": len(file.tensors),
        "alignment": file.alignment,
        "data_offset": file.data_offset,
    }
    kinds = {key: kind.name.lower() for key, kind in file.kinds.items()}
    rows = tuple(TensorRow(info.name, info.shape, info.type.name, info.nbytes) for info in file.tensors.values())
    return Listing(path, "GGUF", header, file.metadata, kinds, rows, file.weight)


def _of_safetensors(path: Path) -> Listing:
    file = open_safetensors(path)
    rows = tuple(TensorRow(name, t.shape, t.dtype, t.stop - t.start) for name, t in file.tensors.items())
    header = {"file_bytes": path.stat().st_size, "n_tensors": len(rows)}
    return Listing(path, "safetensors", header, {}, {}, rows, file.weight)


def _of_folder(folder: Path) -> Listing:
    checkpoint = open_checkpoint(folder, expand=False)
    rows = tuple(_row(checkpoint, name) for name in checkpoint.shapes)
    header = {
        "file_bytes": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        "n_metadata": len(checkpoint.settings),
        "n_tensors": len(rows),
    }
    return Listing(folder, "safetensors", header, checkpoint.settings, {}, rows, checkpoint.weight)


def _total(rows: Sequence[TensorRow]) -> Total:
    sizes = [row.nbytes for row in rows if row.nbytes is not None]
    nbytes = sum(sizes) if len(sizes) == len(rows) else None
    return Total(len(rows), sum(row.n_elements for row in rows), nbytes)


def _row(checkpoint: Checkpoint, name: str) -> TensorRow:
    try:
        weight = checkpoint.weight(name)
    except UnsupportedTypeError as error:
        return TensorRow(name, checkpoint.shapes[name], error.found, None)
    return TensorRow(name, weight.shape, weight.type.name, weight.nbytes)


# Maps each size in the summary to its GGUF keys, without the architecture's prefix, and its keys in config.json. The
# first key that a file has is used.
_SIZES = {
    "n_layers": (("block_count",), ("num_hidden_layers", "n_layer")),
    "hidden_size": (("embedding_length",), ("hidden_size", "n_embd")),
    "n_heads": (("attention.head_count",), ("num_attention_heads", "n_head")),
    "n_kv_heads": (("attention.head_count_kv",), ("num_key_value_heads",)),
    "head_dim": (("attention.key_length",), ("head_dim",)),
    "intermediate_size": (("feed_forward_length",), ("intermediate_size", "n_inner")),
    "vocab_size": (("vocab_size",), ("vocab_size",)),
    "context_length": (("context_length",), ("max_position_embeddings", "n_positions")),
    "rope_theta": (("rope.freq_base",), ("rope_theta",)),
    "norm_eps": (
        ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"),
        ("rms_norm_eps", "layer_norm_epsilon"),
    ),
    "sliding_window": (("attention.sliding_window",), ("sliding_window",)),
}


def summary(listing: Listing) -> dict[str, object]:
    """Return the architecture, the number of parameters and the sizes that the files state or imply."""
    is_gguf = listing.format == "GGUF"
    architecture = listing.metadata.get("general.architecture" if is_gguf else "model_type")
    settings = listing.metadata if is_gguf else _flat(listing.metadata)
    prefix = f"{architecture}." if is_gguf else ""
    known: dict[str, object] = {}
    for name, (gguf_keys, hf_keys) in _SIZES.items():
        keys = [prefix + key for key in (gguf_keys if is_gguf else hf_keys)]
        known[name] = next((settings[key] for key in keys if settings.get(key) is not None), None)
    if is_gguf:
        _add_defaults(known, listing)
    n_parameters = sum(row.n_elements for row in listing.tensors)
    known = {"architecture": architecture, "n_parameters": n_parameters or None, **known}
    return {name: value for name, value in known.items() if value is not None}


def _flat(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return config.json, with the settings of RoPE and of a multimodal model's text part copied to its top level.

    Transformers 5 writes the settings of RoPE to `rope_parameters`. If kinds of layers have different settings,
    `rope_parameters` has one mapping per kind; the mapping of full attention is used.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = {**config, **text}
    rope = config.get("rope_parameters")
    rope = rope.get("full_attention", rope) if isinstance(rope, Mapping) else None
    return {**rope, **config} if isinstance(rope, Mapping) else config


def _add_defaults(known: dict[str, object], listing: Listing) -> None:
    """Add the sizes that a GGUF file may omit because they follow from other metadata."""
    hidden, heads = known["hidden_size"], known["n_heads"]
    if known["head_dim"] is None and isinstance(hidden, int) and isinstance(heads, int) and heads:
        known["head_dim"] = hidden // heads
    if known["vocab_size"] is None:
        tokens = listing.metadata.get("tokenizer.ggml.tokens")
        known["vocab_size"] = len(tokens) if isinstance(tokens, list) else None
