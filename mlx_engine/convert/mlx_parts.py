"""The tensors of a folder for MLX: under which names mlx-lm has them, and which tensors of the model each one holds.

A matrix that mlx-lm has as transformers has it keeps its name and its bytes, also one that holds several of the model,
such as Phi-3's queries, keys and values. Experts are stacked. Granite 4's gate and up are cut in two, as mlx-lm does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from mlx_engine.checkpoint.mlx_quantization import BIASES, SCALES, WEIGHT
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.checkpoint.safetensors_writer import Entry
from mlx_engine.convert.mlx_quantize import quantize
from mlx_engine.convert.mlx_targets import target_type
from mlx_engine.convert.requantize import kind_of
from mlx_engine.errors import ModelError, OptionError
from mlx_engine.models.layer_types import GROUPS, HEAD
from mlx_engine.models.plan import Tensor
from mlx_engine.models.stored import Stored
from mlx_engine.quant.group_types import GroupType
from mlx_engine.quant.types import BY_NAME, GGMLType
from mlx_engine.quant.weight import Weight

KEEP, TABLE, OTHERS = "keep", "token_embd", "others"
# The types of quants and of scales in safetensors, beside the floats.
STORED_AS = {"U32": GGMLType(-1, "U32", 1, 4), "U8": GGMLType(-1, "U8", 1, 1), **BY_NAME}
_EXPERT = re.compile(r"ffn_(gate|up|down)_exps\.\d+\.weight")
_BIAS = re.compile(r"_exps\.(?:\d+\.)?bias")
_EXPERTS, _LAYER = re.compile(r"\.(?:experts|switch_mlp)\."), re.compile(r"\.layers\.\d+$")
_DENSE = re.compile(r"\.ffn_(gate|up|down)\.weight")
_SHARED = ".shared_mlp."


@dataclass(frozen=True)
class Part:
    """A tensor of the new folder: its name, layer type and shape, its type before and in the new folder.

    `before` returns the tensor before its conversion.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    type_before: GGMLType
    type: GGMLType
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
        if not isinstance(self.type, GroupType) or self.type == before.type:
            return before
        return quantize(before, self.type)


def parts_of(checkpoint: Checkpoint, tensors: Mapping[str, Tensor], to: str, layers: Mapping[str, str]) -> list[Part]:
    """Return the tensors of the new folder.

    Args:
        checkpoint: the folder that is converted.
        tensors: the model's tensors by GGUF name.
        to: a key of `mlx_targets.TARGETS`.
        layers: the same, or "keep", for layer types or groups of them, and for `token_embd`.

    Raises:
        OptionError: the layers that one matrix holds are to get different types.
        ModelError: a tensor is stored in a form that mlx-lm does not read.
    """
    if any(_BIAS.search(name) for name in tensors):
        raise ModelError(
            f"{checkpoint.where}: expected experts without biases, found biases; models of the architecture "
            f"{checkpoint.architecture!r} cannot be written for MLX yet; use a folder that mlx-lm has quantised"
        )
    held: dict[str, list[Tensor]] = {}
    for tensor in tensors.values():
        held.setdefault(_new_name(tensor), []).append(tensor)
    return [_part(checkpoint, name, of, to, layers, tensors) for name, of in held.items()]


def _new_name(tensor: Tensor) -> str:
    """Return the name of the tensor of mlx-lm that holds a tensor of the model."""
    name, expert, dense = tensor.stored("hf").name, _EXPERT.search(tensor.name), _DENSE.search(tensor.name)
    if expert:
        block = _EXPERTS.split(name)[0]
        # Gemma 4 has experts in the layer itself, other models in a module of the layer.
        stacked = "experts.switch_glu" if _LAYER.search(block) else "switch_mlp"
        return f"{block}.{stacked}.{expert[1]}_proj{WEIGHT}"
    if dense and _SHARED in name:
        return f"{name.split(_SHARED)[0]}.mlp.{dense[1]}_proj{WEIGHT}"
    return name


def _part(
    checkpoint: Checkpoint, name: str, held: Sequence[Tensor], to: str, layers: Mapping[str, str],
    tensors: Mapping[str, Tensor],
) -> Part:  # fmt: skip
    first, stored = held[0], held[0].stored("hf")
    if stored.transposed:
        raise ModelError(
            f"{checkpoint.where}: {stored.name}: expected a matrix (outputs, inputs), found a transposed one; models "
            f"of the architecture {checkpoint.architecture!r} cannot be written for MLX yet"
        )
    type_before = checkpoint.weight(stored.name).type
    shape, before = checkpoint.weight(stored.name).shape, partial(checkpoint.weight, stored.name)
    kinds = [kind_of(tensor.name, len(shape)) for tensor in held]
    if name != stored.name and stored.expert is None and not _EXPERT.search(first.name):
        shape, before = first.shape, partial(first.weight, checkpoint)
    elif _EXPERT.search(first.name):
        shape, kinds = (len(held), *first.shape), [f"ffn_{_EXPERT.search(first.name)[1]}_exps"]  # type: ignore[index]
        if name != stored.name:
            before = partial(_stacked, checkpoint, name, held)
    kind = kinds[0]
    if kind is None:
        return Part(name, OTHERS, shape, type_before, type_before, before)
    asked = _asked(name, [str(kind) for kind in kinds], to, layers, tied=f"{HEAD}{WEIGHT}" not in tensors)
    type_ = None if asked == KEEP else target_type(asked, type_before)
    fits = type_ is not None and shape[-1] % type_.block_size == 0
    return Part(name, kind, shape, type_before, type_ if type_ is not None and fits else type_before, before)


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


def _stacked(checkpoint: Checkpoint, name: str, held: Sequence[Tensor]) -> Weight:
    """Return the matrices of all experts of a layer as one tensor (experts, outputs, inputs)."""
    return Stored(name, expert=(0, len(held))).put([tensor.weight(checkpoint) for tensor in held])
