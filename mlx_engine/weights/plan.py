"""`Plan` lists the tensors that a model needs; `check` compares the list with the tensors of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.settings import MTP
from mlx_engine.errors import TensorMismatchError
from mlx_engine.quant.weight import Weight
from mlx_engine.weights.stored import TensorLayout

# Names of tensors that are ignored, because their values follow from the settings: rotary tables, and the causal masks
# that older versions of transformers saved in GPT-NeoX models.
BUFFER = re.compile(
    r"(?:^|\.)rotary_emb(?:_local)?\.(?:original_)?(?:inv_freq|cos_cached|sin_cached)$"
    r"|^gpt_neox\.layers\.\d+\.attention\.(?:masked_)?bias$"
)
# Some files have the layers of multi-token prediction (MTP) in a separate module, whose name MTP_MODULE matches. Other
# files number MTP layers after the model's last layer; LAYER matches the number of a layer.
MTP_MODULE, LAYER = re.compile(r"(?:^|\.)mtp(?:_layers)?\."), re.compile(r"(?:^|\.)(?:layers|blk)\.(\d+)\.")


@dataclass(frozen=True)
class Tensor:
    """A tensor of an architecture.

    Attributes:
        name: the GGUF name.
        hf: how Hugging Face folders store the tensor; only its name if they store it unchanged.
        shape: the row-major shape; (N, K) for the matrix of a linear layer.
        required: whether checkpoints without the tensor are refused.
        gguf: how GGUF files store the tensor; None if they store it unchanged, under `name`.
    """

    name: str
    hf: str | TensorLayout
    shape: tuple[int, ...]
    required: bool = True
    gguf: TensorLayout | None = None

    def stored(self, naming: Literal["gguf", "hf"]) -> TensorLayout:
        """Return how files of this kind store the tensor."""
        if naming == "gguf":
            return self.gguf or TensorLayout(self.name)
        return self.hf if isinstance(self.hf, TensorLayout) else TensorLayout(self.hf)

    def weight(self, checkpoint: Checkpoint) -> Weight:
        """Read the tensor from a checkpoint."""
        stored = self.stored(checkpoint.naming)
        return stored.take(checkpoint.weight(stored.name), self.shape)


@dataclass(frozen=True)
class Plan:
    """A checkpoint's config, and the tensors that a model with this config needs.

    Attributes:
        unused: names of tensors that a file may have, but that the model does not read.
        in_tensors: names of config fields for which GGUF has no key. A GGUF file expresses them in its tensors: as a
            factor of a weight, or as a tensor in `gguf_only`. So a conversion to GGUF does not check these fields.
        gguf_only: tensors that GGUF files need in addition, as {name: values}, to store settings that have no key.
        extra: the tensors of an MTP layer; empty unless the checkpoint has all of them.
    """

    config: Any
    tensors: Sequence[Tensor]
    unused: tuple[str, ...] = ()
    in_tensors: tuple[str, ...] = ()
    gguf_only: Mapping[str, Sequence[float]] = field(default_factory=dict)
    extra: Sequence[Tensor] = ()


def mtp_layers(checkpoint: Checkpoint) -> int:
    """Return the number of MTP layers according to the settings; the files may have fewer.

    If no setting has the number, as in Qwen3-Next's config.json, return 1 if the files have an `mtp.fc.weight`, else 0.
    """
    text = checkpoint.settings.get("text_config")
    of = {**(text if isinstance(text, Mapping) else {}), **checkpoint.settings}
    counts = [n for key in (*MTP, "nextn_predict_layers") if isinstance(n := of.get(key), int)]
    return max(counts) if counts else int(any(name.endswith("mtp.fc.weight") for name in checkpoint.shapes))


def is_mtp(name: str, n_layers: int, n: int) -> bool:
    """Return whether a tensor belongs to the n MTP layers after the model's `n_layers` layers."""
    of = LAYER.search(name)
    return MTP_MODULE.search(name) is not None or (of is not None and n_layers <= int(of[1]) < n_layers + n)


def check(checkpoint: Checkpoint, plan: Plan) -> dict[str, Tensor]:
    """Return the plan's tensors that the checkpoint has, by name.

    Raises:
        TensorMismatchError: tensors are missing, unexpected or misshapen; the message lists them all.
    """
    found: dict[str, Tensor] = {}
    # Dictionaries keep the plan's order and drop repeated names: a file may store several tensors of the model as one.
    names, missing, misshapen = set[str](), dict[str, None](), dict[str, None]()
    for tensor in plan.tensors:
        stored = tensor.stored(checkpoint.naming)
        shape, expected = checkpoint.shapes.get(stored.name), stored.shape(tensor.shape)
        if shape is None:
            if tensor.required:
                missing[stored.name] = None
            continue
        found[tensor.name] = tensor
        names.add(stored.name)
        if shape != expected:
            misshapen[f"{stored.name} (expected {expected}, found {shape})"] = None
    unexpected = sorted(set(checkpoint.shapes) - names - set(plan.unused))
    if checkpoint.naming == "hf":
        unexpected = [name for name in unexpected if not BUFFER.search(name)]
    if unexpected and (n := mtp_layers(checkpoint)):
        unexpected = [name for name in unexpected if not is_mtp(name, plan.config.n_layers, n)]
    if missing or unexpected or misshapen:
        raise TensorMismatchError(
            where=checkpoint.where, missing=list(missing), unexpected=unexpected, misshapen=list(misshapen)
        )
    return found
