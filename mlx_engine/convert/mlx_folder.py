"""Quantise a Hugging Face folder or a GGUF file into a folder for MLX, which mlx-lm and this engine load.

Matrices of products and embedding tables are quantised, as mlx-lm does; all other tensors keep their bytes. Rows that
do not fill groups stay as they are.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_engine.checkpoint.hf_folder import INDEX
from mlx_engine.checkpoint.mlx_quantization import KEYS, WEIGHT
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.checkpoint.safetensors_writer import write_safetensors
from mlx_engine.config.layer_types import GROUPS, HEAD, LAYER_TYPES
from mlx_engine.convert.folder_form import from_gguf
from mlx_engine.convert.mixed import Matrix, check_mixed
from mlx_engine.convert.mlx_config import INNER, config_for_mlx
from mlx_engine.convert.mlx_limits import check_loads, notes_on
from mlx_engine.convert.mlx_names import mlx_form
from mlx_engine.convert.mlx_parts import KEEP, OTHERS, TABLE, Part, parts_of
from mlx_engine.convert.mlx_targets import TARGETS, target_type
from mlx_engine.convert.requantize import Line, check_finite
from mlx_engine.errors import OptionError, SourceError, require
from mlx_engine.kernels.drafts import draft
from mlx_engine.quant.group_types import GroupType
from mlx_engine.quant.group_weight import GroupWeight
from mlx_engine.weights.allowed import open_model
from mlx_engine.weights.model import model_file
from mlx_engine.weights.plan import Plan, Tensor, check
from mlx_engine.weights.stored import Stored

# Bytes of tensors per file, as mlx-lm has it.
SHARD_BYTES = 5 << 30
# Files of a folder that are not copied: weights, and what is written anew.
NOT_COPIED = (
    "*.safetensors", "*.index.json", "*.bin", "*.gguf", "*.pth", "*.pt", "config.json", "README.md", ".*",
)  # fmt: skip


def to_mlx_folder(
    source: Path,
    target: Path,
    to: str,
    layers: Mapping[str, str] | None = None,
    *,
    allow_settings: Sequence[str] = (),
    allow_mixed: bool = False,
    note: Callable[[str], None] = lambda line: None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Line]:
    """Write the folder `target` and return totals per layer type. The folder appears only when it is complete.

    Args:
        source: a GGUF file, a Hugging Face folder, or one that MLX has quantised.
        target: a path where nothing is.
        to: a key of `mlx_targets.TARGETS`.
        layers: the same, or "keep", for layer types or groups of them, and for `token_embd`.
        allow_settings: settings that are left out if they are not implemented.
        allow_mixed: write the folder even if most bytes of the matrices cannot have the type that was asked for.
        note: called with lines about such settings, about results of mlx-lm that differ from this engine's, and about
            matrices that get another type than asked for.
        progress: called with (tensors written, tensors in total).

    Raises:
        OptionError: a target or a layer is unknown, there is something at `target`, or most bytes cannot have the type.
        SourceError: the source cannot be read, or the target cannot be written.
        FormatError, ModelError: the source is damaged, has NaN or infinity, or cannot be written for MLX.
        TokenizerError: a GGUF file has no tokenizer, or one that is not implemented.
    """
    layers = dict(layers or {})
    _check_options(target, to, layers)
    checkpoint = open_model(source, allow_settings)
    plan = model_file(checkpoint).plan(checkpoint)
    tensors = check(checkpoint, plan)
    has_head = f"{HEAD}{WEIGHT}" in tensors
    config, write_others = _beside_weights(source, checkpoint, plan, has_head=has_head)
    model_type = str(config.get("model_type"))
    check_loads(checkpoint.where, model_type, plan.config, has_head=has_head)
    for line in (*checkpoint.notes, *notes_on(model_type, plan.config)):
        note(line)
    forms = forms_of(config, plan.config, tensors)
    parts = parts_of(checkpoint, forms, to, layers)
    check_mixed([_matrix(part, part.asked) for part in parts if part.asked], note, allow_mixed=allow_mixed)
    config |= dict.fromkeys(KEYS, _quantization(to, parts))
    try:
        with draft(target.absolute(), is_folder=True) as made:
            lines = _write_tensors(made, parts, progress, checkpoint.where)
            (made / "config.json").write_text(json.dumps(dict(sorted(config.items())), indent=4) + "\n")
            write_others(made)
            made.rename(target)
    except OSError as error:
        raise SourceError(f"{target}: expected a place where a folder can be written, found {error}") from error
    return lines


def _matrix(part: Part, asked: GroupType) -> Matrix:
    nbytes = part.type_before.bytes_for(math.prod(part.shape))
    is_small = isinstance(part.type, GroupType) and part.type.bits <= asked.bits
    return Matrix(part.name, part.shape[-1], nbytes, asked, part.type, is_small=is_small)


def _beside_weights(
    source: Path, checkpoint: Checkpoint, plan: Plan, *, has_head: bool
) -> tuple[dict[str, Any], Callable[[Path], None]]:
    """Return the contents of config.json, and a function that writes the tokenizer and other files into a folder."""
    if source.is_dir():
        config = config_for_mlx(checkpoint.settings, has_head=has_head, known=plan.config.to_hf())
        return config, partial(_copy_others, source)
    form = from_gguf(checkpoint, plan, has_head=has_head)
    return config_for_mlx(form.config, has_head=has_head), partial(_write_files, form.files)


def _check_options(target: Path, to: str, layers: Mapping[str, str]) -> None:
    require(to in TARGETS, option="--to", expected=" or ".join(TARGETS), found=to)
    kinds = (*LAYER_TYPES, *GROUPS, TABLE)
    for name, value in layers.items():
        require(name in kinds, option="--layer", expected=f"layers among {', '.join(kinds)}", found=name)
        allowed = (*TARGETS, KEEP)
        require(value in allowed, option=f"--layer {name}", expected=" or ".join(allowed), found=value)
    if target.exists() or target.is_symlink():
        raise OptionError(option="OUT", expected="a folder that does not exist yet", found=str(target))


def forms_of(config: Mapping[str, Any], sizes: Any, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Stored]]:
    """Return the tensors and how the new folder stores them, by its config.json and the config of the model."""
    model_type, n_experts = str(config.get("model_type")), int(getattr(sizes, "n_experts", 0))
    is_inner = "text_config" in config or model_type in INNER.values()
    how: dict[str, Any] = {"n_experts": n_experts, "is_inner": is_inner}
    # A tensor without a name in folders encodes a setting.
    stored = {name: tensor for name, tensor in tensors.items() if tensor.stored("hf").name}
    return {name: (tensor, mlx_form(tensor, model_type, **how)) for name, tensor in stored.items()}


def _quantization(to: str, parts: Sequence[Part]) -> dict[str, object]:
    """Return the settings of the quantisation: those of `to`, and those of each matrix that differs."""
    whole = settings_of(target_type(to, parts[0].type_before))
    by_name: dict[str, object] = {}
    for part in parts:
        if isinstance(part.type, GroupType) and settings_of(part.type) != whole:
            by_name[part.name.removesuffix(WEIGHT)] = settings_of(part.type)
        elif part.kind != OTHERS and not part.is_quantized:
            by_name[part.name.removesuffix(WEIGHT)] = False
    return {**whole, **by_name}


def settings_of(type_: GroupType) -> dict[str, object]:
    """Return a type as mlx-lm's settings name it."""
    return {"group_size": type_.block_size, "bits": type_.bits, "mode": type_.mode}


def _write_tensors(
    folder: Path, parts: Sequence[Part], progress: Callable[[int, int], None] | None, source: str
) -> list[Line]:
    """Write the shards and their index. `source` names the model in errors."""
    shards, lines = _shards(parts), dict[str, Line]()
    where: dict[str, str] = {}
    done = 0

    def data(shard: Sequence[Part]) -> Iterator[NDArray[np.uint8]]:
        nonlocal done
        for part in shard:
            before = part.before()
            if part.is_quantized and part.type != before.type:
                check_finite(before, source)
            new = part.new(before)
            lines.setdefault(part.kind, Line(part.kind)).add(before, new, source)
            tensors = (new.parts.quants, *new.parts.in_order[:-1]) if isinstance(new, GroupWeight) else (new.data,)
            yield from (np.ascontiguousarray(tensor) for tensor in tensors)
            done += 1
            if progress is not None:
                progress(done, len(parts))

    for i, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{i:05}-of-{len(shards):05}.safetensors"
        entries = [entry for part in shard for entry in part.entries()]
        where |= {entry.name: name for entry in entries}
        write_safetensors(folder / name, entries, data(shard))
    nbytes = sum(entry.nbytes for part in parts for entry in part.entries())
    index = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(where.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=4) + "\n")
    return list(lines.values())


def _shards(parts: Sequence[Part]) -> list[list[Part]]:
    """Return the tensors of each file, in order; a file has at least one."""
    shards: list[list[Part]] = []
    size = 0
    for part in parts:
        nbytes = sum(entry.nbytes for entry in part.entries())
        if not shards or size + nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(part)
        size += nbytes
    return shards


def _write_files(files: Mapping[str, str], target: Path) -> None:
    for name, text in files.items():
        (target / name).write_text(text, encoding="utf-8", newline="")


def _copy_others(source: Path, target: Path) -> None:
    """Copy the tokenizer, the chat template and the generation settings."""
    for file in sorted(source.iterdir()):
        if file.is_file() and not any(fnmatch(file.name, pattern) for pattern in NOT_COPIED):
            shutil.copyfile(file, target / file.name)
