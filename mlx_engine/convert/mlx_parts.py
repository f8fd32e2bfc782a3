"""The tensors of a folder for MLX: which tensors of the model each one holds, its type, and how it is made.

A tensor that the source stores as mlx-lm does keeps its bytes, also one that holds several of the model, such as
Phi-3's queries, keys and values. All others are put together from the tensors of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from mlx_engine.checkpoint.mlx_quantization import BIASES, SCALES, WEIGHT
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.checkpoint.safetensors import Entry
from mlx_engine.config.layer_types import GROUPS, HEAD
from mlx_engine.convert.file_types import kind_of
from mlx_engine.convert.mlx_quantize import quantize
from mlx_engine.convert.mlx_targets import target_type
from mlx_engine.errors import OptionError
from mlx_engine.quant import regroup
from mlx_engine.quant.group_weight import GroupWeight, split
from mlx_engine.quant.groups import GroupType
from mlx_engine.quant.regroup import EXACT, in_groups
from mlx_engine.quant.types import BY_NAME, F32, GGMLType
from mlx_engine.quant.weight import Weight
from mlx_engine.weights.plan import Tensor
from mlx_engine.weights.stored import Stored

KEEP, TABLE, OTHERS = "keep", "token_embd", "others"
# The types of quants and of scales in safetensors, beside the floats.
STORED_AS = {"U32": GGMLType(-1, "U32", 1, 4), "U8": GGMLType(-1, "U8", 1, 1), **BY_NAME}
# The tensors of the model that one tensor of the new folder holds, and how it holds them.
Held: TypeAlias = Sequence[tuple[Tensor, Stored]]
# The end of the layer types of experts. MXFP4, in which gpt-oss publishes them, is kept unless layers ask for a type.
_EXPERTS = "_exps"


@dataclass(frozen=True)
class Part:
    """A tensor of the new folder: its name, layer type and shape, its type before and in the new folder.

    `asked` is the type that was asked for, which rows that do not fill groups cannot have; None for a tensor that is to
    keep its type. `before` returns the tensor before its conversion.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    type_before: GGMLType
    type: GGMLType
    asked: GroupType | None
    before: Callable[[], Weight]

    @property
    def is_quantized(self) -> bool:
        """Whether the new folder stores it in groups."""
        return isinstance(self.type, GroupType)

    def entries(self) -> list[Entry]:
        """Return the tensors that store it in the new folder."""
        if not isinstance(self.type, GroupType):
            return [Entry(self.name, self.shape, self.type)]
        stem, (*outer, width) = self.name.removesuffix(WEIGHT), self.shape
        quants = Entry(self.name, (*outer, width * self.type.bits // 32), STORED_AS["U32"])
        names = (SCALES, BIASES) if self.type.has_biases else (SCALES,)
        groups = (*outer, width // self.type.block_size)
        return [quants, *(Entry(stem + name, groups, STORED_AS[self.type.scale]) for name in names)]

    def new(self, before: Weight) -> Weight:
        """Return the tensor in its new type."""
        if not isinstance(self.type, GroupType):
            return before.as_type(self.type)
        if self.type == before.type:
            return GroupWeight(self.name, self.shape, self.type, split(before, self.type))
        same = in_groups(before)
        return same if same.type == self.type else quantize(before, self.type)


def parts_of(
    checkpoint: Checkpoint, forms: Mapping[str, tuple[Tensor, Stored]], to: str, layers: Mapping[str, str]
) -> list[Part]:
    """Return the tensors of the new folder.

    Args:
        checkpoint: the model that is converted.
        forms: the model's tensors, and how the new folder stores them, by GGUF name.
        to: a key of `mlx_targets.TARGETS`.
        layers: the same, or "keep", for layer types or groups of them, and for `token_embd`.

    Raises:
        OptionError: the layers that one matrix holds are to get different types.
    """
    held: dict[str, list[tuple[Tensor, Stored]]] = {}
    for tensor, stored in forms.values():
        held.setdefault(stored.name, []).append((tensor, stored))
    is_tied = f"{HEAD}{WEIGHT}" not in forms
    return [_part(checkpoint, name, of, to, layers, is_tied=is_tied) for name, of in held.items()]


def _part(
    checkpoint: Checkpoint, name: str, held: Held, to: str, layers: Mapping[str, str],
    *, is_tied: bool,
) -> Part:  # fmt: skip
    held = sorted(held, key=lambda pair: ((pair[1].expert or (0, 0))[0], (pair[1].rows or (0, 0))[0]))
    first, form = held[0]
    shape, type_before = form.shape(first.shape), _type_of(checkpoint, held)
    kinds = [kind_of(tensor.name, len(shape)) for tensor, _ in held]
    kind, wanted = kinds[0], None
    if kind is not None:
        to = KEEP if type_before == regroup.MLX and kind.endswith(_EXPERTS) else to
        asked = _asked(name, [str(kind) for kind in kinds], to, layers, tied=is_tied)
        wanted = None if asked == KEEP else target_type(asked, type_before)
    type_ = type_before if wanted is None or shape[-1] % wanted.block_size else wanted
    if type_.block_size > 1 and not isinstance(type_, GroupType):
        # Folders have no blocks of GGUF: the same values in groups, or in float32.
        type_ = EXACT.get(type_.name, F32) if kind is not None else F32
    return Part(name, kind or OTHERS, shape, type_before, type_, wanted, partial(_before, checkpoint, held))


def _type_of(checkpoint: Checkpoint, held: Held) -> GGMLType:
    """Return the type of the tensor of the new folder before its conversion."""
    types = {checkpoint.weight(tensor.stored(checkpoint.naming).name).type for tensor, _ in held}
    if len(types) > 1 or (held[0][1].is_shifted and not _is_as_stored(checkpoint, held)):
        return F32
    (found,) = types
    return regroup.MLX if found == regroup.GGUF else found


def _is_as_stored(checkpoint: Checkpoint, held: Held) -> bool:
    """Return whether the source has one tensor in the form of the new folder's."""
    stored = [tensor.stored(checkpoint.naming) for tensor, _ in held]
    same = all(replace(before, name=form.name) == form for before, (_, form) in zip(stored, held, strict=True))
    return same and len({before.name for before in stored}) == 1


def _before(checkpoint: Checkpoint, held: Held) -> Weight:
    """Return the tensor of the new folder that holds these tensors of the model, before its conversion."""
    if _is_as_stored(checkpoint, held):
        return regroup.in_mlx_order(checkpoint.weight(held[0][0].stored(checkpoint.naming).name))
    weights = [regroup.in_mlx_order(tensor.weight(checkpoint)) for tensor, _ in held]
    if len({weight.type for weight in weights}) > 1:
        weights = [weight.as_type(F32) for weight in weights]
    parts = [form.in_file_order(weight) for weight, (_, form) in zip(weights, held, strict=True)]
    return held[0][1].put(parts, [form.order for _, form in held if form.order is not None])


def _asked(name: str, kinds: Sequence[str], to: str, layers: Mapping[str, str], *, tied: bool) -> str:
    """Return the target that is asked for a matrix with rows of these layer types."""
    found = set[str]()
    for kind in kinds:
        names = [kind, *([HEAD] if kind == TABLE and tied else [])]
        names += [group for group, members in GROUPS.items() if kind in members]
        found.add(next((layers[name] for name in names if name in layers), to))
    if len(found) > 1:
        asked = ", ".join(sorted(found))
        raise OptionError(
            option="--layer", expected=f"one type for {name}, which holds {', '.join(kinds)}", found=asked
        )
    return found.pop()
