"""Tensor tables: one `Row` per tensor of an architecture, with its GGUF name, its transformers name and its shape.

The module of an architecture declares its table. `decoder_plan` turns the table into the list of tensors that a
checkpoint must have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypeVar, cast

from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.checkpoint.pooling import CLASSIFIER
from mlx_engine.config.declared import ConfigBase
from mlx_engine.config.settings import Settings
from mlx_engine.weights.plan import Plan, Tensor
from mlx_engine.weights.stored import TensorLayout

# Maps each axis letter in `Row.shape` to the config field with the length of this axis.
AXES = {
    "D": "hidden_size", "F": "intermediate_size", "H": "n_heads", "G": "n_kv_heads", "E": "head_dim", "V": "vocab_size",
    "C": "conv_channels", "W": "conv_width", "U": "n_value_heads", "P": "value_dim", "L": "n_layers",
    "I": "per_layer_size", "X": "n_experts", "M": "mamba_rows", "S": "shared_size",
}  # fmt: skip
EMBEDDINGS, HEAD = "token_embd.weight", "output.weight"

C = TypeVar("C", bound=ConfigBase)

Head: TypeAlias = Literal["required", "optional", "absent"]

AS_IT_IS = TensorLayout("")


@dataclass(frozen=True)
class Row:
    """A row of a tensor table. The key in the table is the GGUF name, where "*" stands for the layer's index.

    Attributes:
        hf: the name in transformers.
        shape: row-major shape in axis letters (`AXES`); "HE D" is a matrix of n_heads * head_dim rows and hidden_size
            columns, "1" an axis of length 1.
        heads: the axis letter of the number of heads, if GGUF files interleave the two halves of each head's rows.
        rotated: the axis letter of the number of heads, or "1" for a single head. The rows of each head are reordered
            on load if RoPE rotates only the first `rotary_dim` of them, or if `interleaved` is set.
        interleaved: whether the two rows of a rotary pair have the indices (2j, 2j + 1) in files; needs `rotated`.
        before, after: if a folder stores the tensor as rows of a larger tensor, the numbers of rows, in axis letters,
            of the tensors that stand before this one and after this one.
        gguf: the name in GGUF files, if it differs from the table's key. If `before` or `after` is set, `gguf` is the
            name of the larger tensor in GGUF files, or None if GGUF files have the tensor by itself.
        plus: the number that is added to the values of a Hugging Face folder to get the model's values.
        times: the factor by which the model's values are multiplied in GGUF files.
        kind: the kind of layers that have this tensor, one of the config's `kinds` (of mixers) or `ffn_kinds`; None if
            every layer has the tensor.
        stored: how GGUF files store the tensor, in addition to the other attributes; its `name` is ignored.
        in_hf: how folders store the tensor; None means the same as `stored`.
        when: the config field that says whether files have the tensor. GGUF has no key for this field. So for a GGUF
            file, the field is true if the first layer has this tensor, or another tensor with the same `when`.
        optional: whether the tensor may be absent.
    """

    hf: str
    shape: str
    heads: str | None = None
    plus: float = 0.0
    times: float = 1.0
    kind: str | None = None
    rotated: str | None = None
    interleaved: bool = False
    gguf: str | None = None
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    stored: TensorLayout = AS_IT_IS
    in_hf: TensorLayout | None = None
    when: str | None = None
    optional: bool = False


Table: TypeAlias = Mapping[str, Row]


def head_of(checkpoint: Checkpoint, s: Settings, *, tied: bool = False) -> Head:
    """Return whether the checkpoint must have ("required") or may have ("optional") a matrix for the head.

    Return "absent" if the model reads no such matrix. `tied` is the default of the key `tie_word_embeddings`.
    """
    if checkpoint.naming == "gguf":  # GGUF has no key: the head is tied if the file has no matrix for it
        return "optional"
    return "absent" if s.flag("tie_word_embeddings", tied) else "required"


def stem_of(checkpoint: Checkpoint, stems: Sequence[str]) -> str:
    """Return the first stem (tensor prefix) whose embedding table is in the folder, else `stems[0]`."""
    return next((stem for stem in stems if f"{stem}embed_tokens.weight" in checkpoint.shapes), stems[0])


def tensors(config: Any, table: Table, head: Head) -> list[Tensor]:
    """Return the tensors of a model: first the tensors outside the layers, then layer by layer."""
    absent = (HEAD,) if head == "absent" else ()
    outside = [(name, row) for name, row in table.items() if "*" not in name and name not in absent]
    made = [
        _tensor(config, name, row, required=name != HEAD or head == "required")
        for name, row in outside
        if _has(config, row)
    ]
    return made + [tensor for i in range(config.n_layers) for tensor in layer_tensors(config, table, i)]


def layer_tensors(config: Any, table: Table, i: int) -> list[Tensor]:
    """Return the tensors of layer i; if i is after the last layer, return the tensors that every layer has."""
    kinds = [getattr(config, name) for name in ("kinds", "ffn_kinds") if hasattr(config, name)]
    own = {None, *(of[i] for of in kinds if i < len(of))}
    rows = ((name, row) for name, row in table.items() if "*" in name and row.kind in own)
    return [_tensor(config, name, row, str(i)) for name, row in rows if _has(config, row)]


def _has(config: Any, row: Row) -> bool:
    """Return whether files with this config have, or may have, the tensor of a row."""
    return row.when is None or bool(getattr(config, row.when))


def said_by_tensors(config: C, checkpoint: Checkpoint, table: Table) -> C:
    """Return the config; for a GGUF file, set each field that a `Row.when` names, as described there."""
    if checkpoint.naming != "gguf":
        return config
    rows = [((row.gguf or name).replace("*", "0"), row.when) for name, row in table.items() if row.when is not None]
    found = {when: any(name in checkpoint.shapes for name, of in rows if of == when) for _, when in rows}
    return cast(C, replace(cast(Any, config), **found)) if found else config


def _tensor(config: Any, name: str, row: Row, layer: str = "*", *, required: bool = True) -> Tensor:
    def size(letters: str) -> int:
        return 1 if letters == "1" else math.prod(int(getattr(config, AXES[letter])) for letter in letters)

    shape, first = tuple(map(size, row.shape.split())), sum(map(size, row.before))
    same: dict[str, Any] = {}
    if row.before or row.after:
        same["rows"] = first, first + shape[0] + sum(map(size, row.after))
    if row.rotated is not None and (row.interleaved or config.rotary_dim != config.head_dim):
        same |= {"heads": size(row.rotated), "rotated": config.rotary_dim, "interleaved": row.interleaved}
    hf = replace(row.in_hf or row.stored, name=row.hf.replace("*", layer), plus=row.plus, **same)
    if row.gguf is None:
        same.pop("rows", None)
    gguf = replace(row.stored, name=(row.gguf or name).replace("*", layer), times=row.times, **same)
    if row.heads is not None:
        gguf = replace(gguf, heads=size(row.heads))
    return Tensor(name.replace("*", layer), hf, shape, required and not row.optional, gguf)


def padded(config: C, checkpoint: Checkpoint, embeddings: str) -> C:
    """Return the config with `vocab_size` set to the number of rows of the embedding table, if this is larger.

    The logits then have a column for each padding row, as in transformers.
    """
    (rows, *_) = checkpoint.shapes.get(embeddings) or (0,)
    if rows <= int(getattr(config, "vocab_size")):  # noqa: B009 - a field of every config
        return config
    return cast(C, replace(cast(Any, config), vocab_size=rows))


def decoder_plan(
    checkpoint: Checkpoint, config_type: type[C], table: Table | Callable[[C], Table], *, tied: bool = False,
    settings: Settings | None = None,
) -> Plan:  # fmt: skip
    """Return the plan of a checkpoint; `table` is the tensor table, or a function that returns the table for a config.

    `settings` are the settings of the text model, by default all settings of the checkpoint. `tied` is the default of
    the key `tie_word_embeddings`. Raise UnsupportedConfigError if a setting is missing, invalid or not implemented.
    """
    s = settings or Settings(checkpoint.settings, where=checkpoint.where)
    head = head_of(checkpoint, s, tied=tied)
    config = config_type.read(s, checkpoint.naming, checkpoint.n_embeddings)
    table = table(config) if callable(table) else table
    embeddings = EMBEDDINGS if checkpoint.naming == "gguf" else table[EMBEDDINGS].hf
    config = padded(config, checkpoint, embeddings)
    config = said_by_tensors(config, checkpoint, table)
    # Tensors that the model does not read: a matrix that some folders have for a tied head, and the classifier in GGUF
    # files of rerankers, which `checkpoint/pooling.py` reads.
    unused = (table[HEAD].hf,) if head == "absent" else (CLASSIFIER,) if checkpoint.naming == "gguf" else ()
    return Plan(config, tensors(config, table, head), unused)
