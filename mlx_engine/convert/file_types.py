"""Choose the type of each tensor of a quantised GGUF file, for the command `quantize`.

Most values of `--to` are one type for all matrices. `q4_k_m`, `q5_k_m` and `q6_k` are llama.cpp's mixes: matrices whose
rounding errors matter most get more bits, and matrices whose row length is not a multiple of 256 get a type with blocks
of 32 weights, or F16.

Source of the mixes: `llama_tensor_get_type_impl` and `tensor_type_fallback`,
https://github.com/ggml-org/llama.cpp/blob/0c1e57098bba43ac29e6e3b677cdceebdd22334f/src/llama-quant.cpp
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

from mlx_engine.checkpoint.gguf_values import Value
from mlx_engine.convert.gguf_form import Part
from mlx_engine.quant.types import BY_NAME, F16, GGMLType
from mlx_engine.weights.conversion import AUTO, AUTO_MIN_DIM, HEAD, KEEP, LAYER_TYPES, Conversion, layer_type

# Maps values of `--to` to llama.cpp's numbers for them in `general.file_type`, the type of most tensors in a file.
FILE_TYPES = {
    "f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q4_0": 2, "q4_1": 3, "q4_k_m": 15, "q5_k_m": 17, "q6_k": 18,
}  # fmt: skip
# Maps a mix to the type of most of its matrices.
MIXES = {"q4_k_m": "Q4_K", "q5_k_m": "Q5_K", "q6_k": "Q6_K"}
# Maps a type to its replacement for matrices whose row length is not a multiple of 256. If the row length is not a
# multiple of 32 either, the replacement is F16.
FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
TABLE = "token_embd.weight"
# If the head is tied to the embedding table, llama.cpp gives these tables the type of the head.
TABLES = (TABLE, "per_layer_token_embd.weight")
# KEPT is the layer type of a small matrix that llama.cpp never converts. If `--to` is in KEEPING, `quantize` does
# not convert the matrix either, unless `--layer` gives it a type.
KEPT, KEEPING = "per_layer_model_proj", (*MIXES, "f16", "bf16")
# llama.cpp has a separate rule for models that it treats as 70B: those with 80 layers and the architecture "qwen2", or
# "llama" if they have grouped-query attention.
LARGE, LARGE_LAYERS = ("llama", "qwen2"), 80
# llama.cpp has separate rules for models with this number of experts, such as Mixtral 8x7B.
FEW_EXPERTS = 8
_LAYER = re.compile(r"blk\.(\d+)\.")
_VALUES = re.compile(r"attn_(v|qkv)\.weight$")


@dataclass(frozen=True)
class FileConversion(Conversion):
    """The requested types for the matrices of a file: a `Conversion` with more types, and with llama.cpp's mixes."""

    quants: ClassVar[tuple[str, ...]] = (KEEP, *FILE_TYPES)
    layer_quants: ClassVar[tuple[str, ...]] = (
        KEEP, "f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k",
    )  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """The type of a matrix in the new file, and `asked`, the type that the user or the mix requests for it.

    The two types differ if the row length is not a multiple of the requested type's block size.
    """

    type: GGMLType
    asked: GGMLType

    @property
    def is_small(self) -> bool:
        """Whether the type is the requested one, or llama.cpp's replacement for it with blocks of 32 weights."""
        return self.type == self.asked or self.type.name == FALLBACKS.get(self.asked.name)


def types_of(
    parts: Mapping[str, Part], metadata: Mapping[str, object], conversion: Conversion
) -> dict[str, Choice | None]:
    """Map the name of each tensor to its new type, or to None if the tensor is not converted."""
    mix = Mix(parts, metadata, conversion.quant) if conversion.quant in MIXES else None
    found: dict[str, Choice | None] = {}
    for name in sorted(parts, key=lambda name: (_layer(name), name)):  # llama.cpp's order
        kind = kind_of(name, len(parts[name].shape))
        # `Mix.type_of` counts the matrices of each kind, so call it for every matrix.
        mixed = mix.type_of(name) if mix is not None and kind is not None else None
        # The embedding table has the layer type of the head. If the model has a separate head, a type that is given to
        # this layer type is only for the head.
        is_plain_table = name == TABLE and f"{HEAD}.weight" in parts
        given = None if is_plain_table else conversion.given(layer_type(name))
        is_kept = kind is None or (given is None and kind == KEPT and conversion.quant in KEEPING)
        found[name] = None if is_kept else _choice(parts[name], conversion, given, mixed)
    return found


def kind_of(name: str, n_dims: int) -> str | None:
    """Return the layer type of a matrix, or of stacked expert matrices; None for a tensor that is never converted.

    An embedding table has its own name here, not the layer type of the head.
    """
    kind = layer_type(name)
    if n_dims != (3 if kind.endswith("_exps") else 2) or not name.endswith(".weight"):
        return None
    if name == TABLE:
        return "token_embd"
    return kind if kind in LAYER_TYPES else None


def _choice(part: Part, conversion: Conversion, given: str | None, mixed: GGMLType | None) -> Choice | None:
    """Return the new type of a matrix; None if it keeps its type.

    `given` is the type that `conversion.layers` gives to the matrix's layer type, and `mixed` the type that the mix
    gives to the matrix. Each is None if there is no such type.
    """
    quant = conversion.quant if given is None else given
    if quant == KEEP:
        return None
    asked = mixed if mixed is not None and given is None else BY_NAME[quant.upper()]
    least = AUTO_MIN_DIM if conversion.min_dim == AUTO else int(conversion.min_dim)
    if given is None and asked.block_size > 1 and max(part.shape) < least:
        return None
    fallback = BY_NAME.get(FALLBACKS.get(asked.name, ""))
    others = (part.type,) if mixed is None and fallback is None else (fallback or asked, F16)
    return Choice(next(type_ for type_ in (asked, *others) if part.shape[-1] % type_.block_size == 0), asked)


class Mix:
    """llama.cpp's rules for the types of a model's matrices in a mix.

    The type of a matrix `attn_v` or `attn_qkv` depends on its index among all these matrices, in the order of layers.
    The type of a matrix `ffn_down` depends on its index among all `ffn_down`; in models with experts, on the index of
    its layer.
    """

    def __init__(self, names: Collection[str], metadata: Mapping[str, object], quant: str) -> None:
        values = {key: value.value if isinstance(value, Value) else value for key, value in metadata.items()}
        architecture = str(values.get("general.architecture"))

        def number(key: str) -> object:
            return values.get(f"{architecture}.{key}", 0)

        self.quant, self.most = quant, BY_NAME[MIXES[quant]]
        self.is_tied = f"{HEAD}.weight" not in names
        self.n_layers, self.n_experts = int(str(number("block_count"))), int(str(number("expert_count")))
        is_grouped = str(number("attention.head_count")) != str(number("attention.head_count_kv"))
        is_grouped = is_grouped or architecture != "llama"
        self.is_large = architecture in LARGE and self.n_layers == LARGE_LAYERS and is_grouped
        self.n_values = sum(_VALUES.search(name) is not None for name in names)
        self.values_seen = self.downs_seen = 0

    def type_of(self, name: str) -> GGMLType:
        """Return the type of a matrix, before `FALLBACKS` are applied. Call this once per matrix, layer by layer."""
        is_few = self.n_experts == FEW_EXPERTS
        if name == f"{HEAD}.weight" or (name in TABLES and self.is_tied):
            return BY_NAME["Q6_K"]
        if _VALUES.search(name):
            self.values_seen += 1
            asked = self._more_bits(self.values_seen - 1, self.n_values)
            asked = BY_NAME["Q5_K"] if self.is_large and asked.name == "Q4_K" else asked
            return BY_NAME["Q8_0"] if is_few else asked
        if name.endswith("attn_k.weight") and is_few:
            return BY_NAME["Q8_0"]
        if name.endswith("attn_output.weight") and is_few and self.quant == "q4_k_m":
            return BY_NAME["Q5_K"]
        if "ffn_down" in name:
            self.downs_seen += 1
            return self._more_bits(_layer(name) if self.n_experts > 1 else self.downs_seen - 1, self.n_layers)
        return self.most

    def _more_bits(self, i: int, n: int) -> GGMLType:
        """Return Q6_K if i is in the first or last eighth of range(n), and for every third i between; else `most`."""
        has_more = i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2
        return BY_NAME["Q6_K"] if has_more else self.most


def _layer(name: str) -> int:
    found = _LAYER.match(name)
    return int(found[1]) if found else -1
