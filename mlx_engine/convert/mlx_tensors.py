"""Make the tensors of a folder for MLX: choose name, form and type of each tensor, and convert it.

A tensor of the new folder may consist of several tensors of the model (`weights/plan.py`), such as Phi-3's fused
queries, keys and values. If the source stores this tensor in mlx-lm's form, it is read as a whole. If not, it is
assembled from the model's tensors. Then it is converted to its new type.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_engine.checkpoint.mlx_quantization import BIASES, SCALES, WEIGHT
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.checkpoint.safetensors import Entry
from mlx_engine.convert.file_types import kind_of
from mlx_engine.errors import OptionError
from mlx_engine.quant import group_weight
from mlx_engine.quant.group_weight import EXACT, GroupWeight, Parts, in_groups, split
from mlx_engine.quant.groups import AFFINE_BITS, FIXED, GroupType, affine, fixed
from mlx_engine.quant.types import BY_NAME, F32, GGMLType
from mlx_engine.quant.weight import Weight
from mlx_engine.weights.conversion import GROUPS, HEAD
from mlx_engine.weights.plan import Tensor
from mlx_engine.weights.stored import TensorLayout

KEEP, TABLE, OTHERS = "keep", "token_embd", "others"
# Maps the name of each safetensors type to the type. Quants have U32; scales and biases have U8 or a float type.
STORED_AS = {"U32": GGMLType(-1, "U32", 1, 4), "U8": GGMLType(-1, "U8", 1, 1), **BY_NAME}
# The tensors of the model that make up one tensor of the new folder, each with its layout in the new folder.
Held: TypeAlias = Sequence[tuple[Tensor, TensorLayout]]
# The suffix of the layer types of experts, such as "ffn_up_exps". Experts that are stored in MXFP4, as in gpt-oss, stay
# in MXFP4 unless `--layer` names their layer type or its group.
_EXPERTS = "_exps"


@dataclass(frozen=True)
class Part:
    """A tensor of the new folder, with its name and shape there.

    Attributes:
        kind: its layer type, such as "attn_q"; "others" if it is never quantised.
        type_before: its type before the conversion.
        type: its type in the new folder. If `asked` is given and its group size divides the row length, this is
            `asked`. Otherwise, if `type_before` is a block type of GGUF, it is a type of MLX's groups that has
            the same values, or F32; else `type_before`.
        asked: the requested type; None if the tensor is to keep its values.
        before: a function that returns the tensor before its conversion.
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
        """Whether the new folder stores the tensor in quantised groups."""
        return isinstance(self.type, GroupType)

    def entries(self) -> list[Entry]:
        """Return the safetensors entries of this tensor, such as quants, scales and biases."""
        if not isinstance(self.type, GroupType):
            return [Entry(self.name, self.shape, self.type)]
        stem, (*outer, width) = self.name.removesuffix(WEIGHT), self.shape
        quants = Entry(self.name, (*outer, width * self.type.bits // 32), STORED_AS["U32"])
        names = (SCALES, BIASES) if self.type.has_biases else (SCALES,)
        groups = (*outer, width // self.type.block_size)
        return [quants, *(Entry(stem + name, groups, STORED_AS[self.type.scale]) for name in names)]

    def new(self, before: Weight) -> Weight:
        """Return the tensor in its new type, given the tensor before its conversion."""
        if not isinstance(self.type, GroupType):
            return before.as_type(self.type)
        if self.type == before.type:
            return GroupWeight(self.name, self.shape, self.type, split(before, self.type))
        same = in_groups(before)
        return same if same.type == self.type else quantize(before, self.type)


def parts_of(
    checkpoint: Checkpoint, forms: Mapping[str, tuple[Tensor, TensorLayout]], to: str, layers: Mapping[str, str]
) -> list[Part]:
    """Return the tensors of the new folder.

    `forms` maps GGUF names to the model's tensors with their layouts in the new folder. `to` is a key of TARGETS.
    `layers` maps layer types, groups of layer types or `token_embd` to a key of TARGETS or to "keep".

    Raises:
        OptionError: `layers` requests different types for matrices that the new folder stores as one matrix.
    """
    held: dict[str, list[tuple[Tensor, TensorLayout]]] = {}
    for tensor, stored in forms.values():
        held.setdefault(stored.name, []).append((tensor, stored))
    is_tied = f"{HEAD}{WEIGHT}" not in forms
    return [_part(checkpoint, name, of, to, layers, is_tied=is_tied) for name, of in held.items()]


def _part(
    checkpoint: Checkpoint, name: str, held: Held, to: str, layers: Mapping[str, str],
    *, is_tied: bool,
) -> Part:  # fmt: skip
    held = sorted(held, key=lambda pair: pair[1].place)
    first, form = held[0]
    shape, type_before = form.shape(first.shape), _type_of(checkpoint, held)
    kinds = [kind_of(tensor.name, len(shape)) for tensor, _ in held]
    kind, wanted = kinds[0], None
    if kind is not None:
        to = KEEP if type_before == group_weight.MLX and kind.endswith(_EXPERTS) else to
        asked = _asked(name, [str(kind) for kind in kinds], to, layers, tied=is_tied)
        wanted = None if asked == KEEP else target_type(asked, type_before)
    type_ = type_before if wanted is None or shape[-1] % wanted.block_size else wanted
    if type_.block_size > 1 and not isinstance(type_, GroupType):
        # Folders cannot have GGUF's block types, so store the same values in MLX's groups, or in float32.
        type_ = EXACT.get(type_.name, F32) if kind is not None else F32
    return Part(name, kind or OTHERS, shape, type_before, type_, wanted, partial(_before, checkpoint, held))


def _type_of(checkpoint: Checkpoint, held: Held) -> GGMLType:
    """Return the type of a tensor of the new folder before its conversion.

    The type is F32 if the model's tensors in `held` have several types. It is also F32 if the new folder stores values
    that differ from the model's (`TensorLayout.is_shifted`), unless the source stores the tensor in the same layout.
    """
    types = {checkpoint.weight(tensor.stored(checkpoint.naming).name).type for tensor, _ in held}
    if len(types) > 1 or (held[0][1].is_shifted and not _is_as_stored(checkpoint, held)):
        return F32
    (found,) = types
    return group_weight.MLX if found == group_weight.GGUF else found


def _is_as_stored(checkpoint: Checkpoint, held: Held) -> bool:
    """Return whether the source stores these tensors as one tensor in the new folder's layout; the name may differ."""
    stored = [tensor.stored(checkpoint.naming) for tensor, _ in held]
    same = all(replace(before, name=form.name) == form for before, (_, form) in zip(stored, held, strict=True))
    return same and len({before.name for before in stored}) == 1


def _before(checkpoint: Checkpoint, held: Held) -> Weight:
    """Return a tensor of the new folder before its conversion: read as a whole, or joined from the model's tensors."""
    if _is_as_stored(checkpoint, held):
        return group_weight.in_mlx_order(checkpoint.weight(held[0][0].stored(checkpoint.naming).name))
    weights = [group_weight.in_mlx_order(tensor.weight(checkpoint)) for tensor, _ in held]
    if len({weight.type for weight in weights}) > 1:
        weights = [weight.as_type(F32) for weight in weights]
    parts = [form.in_file_order(weight) for weight, (_, form) in zip(weights, held, strict=True)]
    return held[0][1].put(parts, [form.order for _, form in held if form.order is not None])


def _asked(name: str, kinds: Sequence[str], to: str, layers: Mapping[str, str], *, tied: bool) -> str:
    """Return the type that is requested for a matrix of the new folder: a key of TARGETS or "keep".

    `kinds` are the layer types of the model's matrices that make up this matrix.
    """
    found = set[str]()
    for kind in kinds:
        names = [kind, *([HEAD] if kind == TABLE and tied else [])]
        names += [group for group, members in GROUPS.items() if kind in members]
        found.add(next((layers[name] for name in names if name in layers), to))
    if len(found) > 1:
        asked = ", ".join(sorted(found))
        message = f"{name} consists of {', '.join(kinds)}: --layer must give them the same type, not {asked}"
        raise OptionError(message, option="--layer", found=asked)
    return found.pop()


# ---- names and layouts of tensors in mlx-lm's folders ----
# Most tensors have the same name and form as in transformers. The exceptions: experts are stacked, Granite 4's fused
# gate and up are split, GPT-2's matrices are not transposed, and the text model of a multimodal model has another
# prefix.


# Matches the GGUF name of a matrix or bias of one expert.
_EXPERT = re.compile(r"ffn_(gate|up|down)_exps\.(\d+)\.(weight|bias)")
# mlx-lm's names of the up and down matrices, for experts that have no gate.
_WITHOUT_GATE = {"up": "fc1", "down": "fc2"}
# Matches the name of the experts' module in a folder's tensor names. The text before the match is the name of the
# module that contains the experts' module.
_EXPERT_LIST = re.compile(r"\.(?:experts|switch_mlp|(?:in|out)put_linear)\.")
_DENSE = re.compile(r"\.ffn_(gate|up|down)\.weight")
_SHARED = ".shared_mlp."
_LAYER = re.compile(r"\.layers\.\d+$")
# The prefixes in names of tensors: of a multimodal model's text model, of its head, and of GPT-2 in transformers.
_INNER = re.compile(r"^(?:model\.language_model\.|language_model\.model\.|model\.)")
_INNER_HEAD = re.compile(r"^(?:language_model\.)?lm_head\.")
_GPT2 = re.compile(r"^(?:transformer\.|model\.)?")


def mlx_form(tensor: Tensor, model_type: str, *, n_experts: int = 0, is_inner: bool = False) -> TensorLayout:
    """Return the layout of a tensor in a folder that mlx-lm writes.

    `is_inner` says whether the model is the text model of a multimodal model, `language_model` in mlx-lm.
    """
    stored = tensor.stored("hf")
    expert, dense = _EXPERT.search(tensor.name), _DENSE.search(tensor.name)
    if expert:
        block = _EXPERT_LIST.split(stored.name)[0]
        part = _WITHOUT_GATE[expert[1]] if model_type == "nemotron_h" else f"{expert[1]}_proj"
        name = f"{block}.{_module(block, model_type)}.{part}.{expert[3]}"
        stored = TensorLayout(name, expert=(int(expert[2]), n_experts))
    elif dense and _SHARED in stored.name:
        stored = TensorLayout(f"{stored.name.split(_SHARED)[0]}.mlp.{dense[1]}_proj.weight")
    elif model_type == "gpt2":
        stored = replace(stored, name=_GPT2.sub("model.", stored.name), transposed=False)
    if not is_inner:
        return stored
    name = _INNER_HEAD.sub("language_model.lm_head.", _INNER.sub("language_model.model.", stored.name))
    return replace(stored, name=name)


def _module(block: str, model_type: str) -> str:
    """Return the name, relative to the module `block`, of the module that has all experts of a layer in mlx-lm."""
    if model_type in ("gpt_oss", "llama4", "llama4_text"):
        return "experts"
    # In Gemma 4, `block` is the layer's module; in other models, a module inside the layer.
    return "experts.switch_glu" if _LAYER.search(block) else "switch_mlp"


# mlx-lm's default group size of the mode "affine".
GROUP = 64
# The values of `--to` for folders: a number of bits for the mode "affine", or the name of another mode.
TARGETS: dict[str, int | str] = {
    **{f"mlx-{bits}bit": bits for bits in AFFINE_BITS},
    **{f"mlx-{mode}": mode for mode in FIXED},
}
# As in mlx-lm, scales and biases have the weights' type if this is F16 or BF16. If not, they are float32.
HALVES = ("F16", "BF16")


def target_type(target: str, stored: GGMLType) -> GroupType:
    """Return the type that `target`, a key of TARGETS, means for a matrix of type `stored`."""
    kind = TARGETS[target]
    if isinstance(kind, str):
        return fixed(kind)
    return affine(kind, GROUP, stored.name if stored.name in HALVES else "F32")


# Maps F16 and BF16 to the NumPy type in which their bytes are read, and to the MLX type. Weights of these types are
# quantised without conversion to float32, as in mlx-lm; all other weights are first converted to float32.
_DTYPES = {"F16": (np.float16, mx.float16), "BF16": (np.uint16, mx.bfloat16)}
# Weights are quantised in pieces of whole rows, with at most this many weights.
_PIECE = 1 << 24


def quantize(stored: Weight, type_: GroupType) -> GroupWeight:
    """Quantise a tensor (..., N, K) to `type_`, by `mx.quantize` on the CPU."""
    *outer, columns = stored.shape
    rows = math.prod(outer)
    matrix = stored if len(outer) == 1 else Weight(stored.name, (rows, columns), stored.type, stored.data)
    step = max(1, _PIECE // columns)
    pieces = [_quantized(values, type_) for values in _values(matrix, step)]
    quants, scales, *biases = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
    n_groups = rows * columns // type_.block_size
    parts = Parts(
        quants.reshape(n_groups, -1), scales.reshape(n_groups, -1), biases[0].reshape(n_groups, -1) if biases else None
    )
    return GroupWeight(stored.name, stored.shape, type_, parts)


def _values(stored: Weight, step: int) -> Iterator[mx.array]:
    """Yield the matrix as MLX arrays of `step` rows; the last may have fewer."""
    rows, columns = stored.shape
    if stored.type.name in _DTYPES:
        storage, dtype = _DTYPES[stored.type.name]
        raw = np.ascontiguousarray(stored.data).view(storage).reshape(rows, columns)
        yield from (mx.array(raw[at : at + step]).view(dtype) for at in range(0, rows, step))
    else:
        yield from (mx.array(stored.rows(range(at, min(at + step, rows)))) for at in range(0, rows, step))


def _quantized(values: mx.array, type_: GroupType) -> list[NDArray[np.uint8]]:
    """Quantise rows, and return the bytes of their quants, scales and, in the mode "affine", biases."""
    options = {"group_size": type_.block_size, "bits": type_.bits, "mode": type_.mode}
    # In modes without biases, MLX returns two arrays.
    found: Sequence[mx.array] = mx.quantize(values, **options, stream=mx.cpu)  # type: ignore[arg-type]
    return [np.array(mx.contiguous(array).view(mx.uint8)) for array in found]
