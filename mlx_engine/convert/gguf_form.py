"""Convert a Hugging Face folder to the contents of a GGUF file: metadata and tensors.

The result is verified by reading it back: the model definition must find the same configuration in the GGUF metadata as
in the folder, and all its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.errors import UnsupportedConfigError
from mlx_engine.quant import regroup
from mlx_engine.quant.types import F32, GGMLType
from mlx_engine.quant.weight import Weight
from mlx_engine.weights.allowed import open_model
from mlx_engine.weights.model import model_file
from mlx_engine.weights.plan import Plan, Tensor, check
from mlx_engine.weights.stored import TensorLayout

# Matrices that are no factors of products: llama.cpp requires floats.
FLOATS = (
    "position_embd.weight", ".shortconv.conv.weight", ".ssm_conv1d.weight", ".ssm_norm.weight", ".ssm_a", ".ssm_d",
    ".ffn_gate_inp.weight", ".bias",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A tensor of the file: name, shape and type, and a function that computes its bytes when called."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    make: Callable[[], Weight]


@dataclass(frozen=True)
class GGUFForm:
    """The contents of a GGUF file, and lines for the user about settings that it does not have."""

    metadata: Mapping[str, object]
    parts: Mapping[str, Part]
    notes: tuple[str, ...] = ()


def from_folder(folder: Path, allow_settings: Sequence[str] = ()) -> GGUFForm:
    """Convert a Hugging Face folder's model and tokenizer, without settings in `allow_settings` it cannot implement.

    Raises:
        SourceError: there is no such folder, or a file is missing.
        FormatError: a file is damaged, or a tensor has a type that cannot be read.
        ModelError: the architecture is not implemented, or GGUF cannot represent its configuration.
        TokenizerError: GGUF cannot represent the tokenizer.
    """
    from mlx_engine.convert.tokenizer_to_gguf import to_gguf  # here, because the tokenizers library loads slowly

    checkpoint = open_model(folder, allow_settings)
    module = model_file(checkpoint)
    plan = module.plan(checkpoint)
    tensors, architecture = check(checkpoint, plan), module.GGUF_ARCHITECTURE
    keys = plan.config.to_gguf()
    metadata = {
        "general.architecture": architecture,
        "general.name": folder.resolve().name,
        **{f"{architecture}.{key}": value for key, value in keys.items()},
        **to_gguf(folder / "tokenizer.json", plan.config.vocab_size),
    }
    parts = _parts(checkpoint, tensors, plan)
    _read_back(checkpoint, plan, metadata, keys, parts)
    return GGUFForm(metadata, parts, checkpoint.notes)


def _parts(checkpoint: Checkpoint, tensors: Mapping[str, Tensor], plan: Plan) -> dict[str, Part]:
    """Return the tensors of the file. Several of the model may be rows of one, and some represent a setting."""
    rows: dict[str, list[Tensor]] = {}
    for tensor in tensors.values():
        rows.setdefault(tensor.stored("gguf").name, []).append(tensor)
    parts = {name: _part(checkpoint, of) for name, of in rows.items()}
    for name, values in plan.gguf_only.items():
        parts[name] = Part(name, (len(values),), F32, partial(Weight.pack, name, values, F32))
    return parts


def _part(checkpoint: Checkpoint, tensors: list[Tensor]) -> Part:
    forms = {id(tensor): tensor.stored("gguf") for tensor in tensors}
    tensors = sorted(tensors, key=lambda t: ((forms[id(t)].expert or (0, 0))[0], (forms[id(t)].rows or (0, 0))[0]))
    stored: TensorLayout = tensors[0].stored("gguf")
    shape = stored.shape(tensors[0].shape)
    # llama.cpp requires floats for norms, biases and learned positions, which are not matrices of products. Routers
    # are never quantised.
    is_float = len(shape) == 1 or stored.name.endswith(FLOATS)
    type_ = checkpoint.weight(tensors[0].stored(checkpoint.naming).name).type
    type_ = F32 if is_float or stored.is_shifted else regroup.GGUF if type_ == regroup.MLX else type_
    return Part(stored.name, shape, type_, partial(_make, checkpoint, tensors, stored, type_))


def _make(checkpoint: Checkpoint, tensors: list[Tensor], stored: TensorLayout, type_: GGMLType) -> Weight:
    weights = [regroup.in_gguf_order(tensor.weight(checkpoint)).as_type(type_) for tensor in tensors]
    parts = [tensor.stored("gguf").in_file_order(weight) for tensor, weight in zip(tensors, weights, strict=True)]
    return stored.put(parts, [tensor.stored("gguf").order for tensor in tensors])


def _read_back(
    checkpoint: Checkpoint,
    plan: Plan,
    metadata: Mapping[str, object],
    keys: Mapping[str, object],
    parts: Mapping[str, Part],
) -> None:
    """Check that the GGUF metadata give the same configuration as the folder.

    Raises:
        UnsupportedConfigError: the configuration differs, because GGUF has no key for a setting.
    """
    written = replace(
        checkpoint,
        naming="gguf",
        architecture=str(metadata["general.architecture"]),
        settings=keys,
        metadata=metadata,
        shapes={name: part.shape for name, part in parts.items()},
        weight=lambda name: parts[name].make(),
    )
    again = model_file(written).plan(written)
    check(written, again)
    lost = [name for name in plan.config.differences(again.config) if name not in plan.in_tensors]
    if lost:
        raise UnsupportedConfigError(
            where=checkpoint.where,
            key=lost[0],
            expected=f"a value that GGUF can store, {getattr(again.config, lost[0], None)!r:.60}",
            found=getattr(plan.config, lost[0]),
        )
