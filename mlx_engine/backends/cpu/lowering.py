"""Lowering: translate the recorded definition of the layers into a program of steps for the compiled CPU kernels.

`lower` turns each recorded operation into a step of `kernels/cpu/program.py`; `lowering_steps.py` has the steps. If the
kernels have no such step, `lower` raises CannotCompileError and the layers run operation by operation. All intermediate
values share one scratch buffer; `allocate` reuses the memory of values that no later step reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_engine.backends.cpu.buffers import Buffer, Place, allocate
from mlx_engine.backends.cpu.experts import ExpertBlock
from mlx_engine.backends.cpu.lowering_steps import Builders, Lowering
from mlx_engine.backends.parameters import LayerNorm, Linear, RMSNorm, Rope
from mlx_engine.backends.program import Fused
from mlx_engine.backends.recording import CannotCompileError, Recording
from mlx_engine.kernels.cpu.build import layout


@dataclass
class Lowered:
    """The steps of a program, and the sizes of the memory that it needs.

    Attributes:
        words: (steps, STEP_WIDTH) int64, the encoded steps.
        x: buffer of the input, the hidden states before the first layer.
        y: location of the result.
        floats: scratch floats per token, for all values.
        inputs: K of the widest product; packing needs so many floats for each token of a panel.
        normed: K of the widest product whose input is normed or padded: so many floats for each token of the pass.
        experts: the mixtures of experts.
        parts: floats per token and block of keys for the partial results of attention.
        kv: the number of KV heads and the head dim, by layer; None for a layer with a state.
        ropes: rotary embeddings, by the index of the step that uses them.
        fused: how many products were fused.
        kept: objects that must stay alive, because `words` only has their addresses.
    """

    words: np.ndarray
    x: Buffer
    y: Place
    floats: int
    inputs: int
    normed: int
    experts: list[ExpertBlock]
    parts: int
    kv: list[tuple[int, int] | None]
    ropes: dict[int, Rope]
    fused: Fused
    kept: list[object]


def lower(recording: Recording, builders: Builders) -> Lowered:
    """Return the recorded layers as the steps of a program.

    Raises:
        CannotCompileError: the kernels do not have an operation, or do not support its arguments.
    """
    lowering = Lowering(builders, recording.batch)
    x = lowering.new(_width(recording), is_wanted=False)
    lowering.places[recording.x] = x
    for step in recording.steps:
        if step.op == "kv_append":
            lowering.views[step.results[0]] = lowering.kv_append(*step.args)
            continue
        if step.op not in LOWERED:
            raise CannotCompileError(f"the operation {step.op}")
        places = getattr(lowering, step.op)(*step.args)
        lowering.places |= dict(zip(step.results, places, strict=True))
    y = lowering.whole(lowering.place(recording.y))
    n_floats = allocate(lowering.steps, x.buffer, y.buffer)  # sets the offsets that `_words` reads
    if sorted(lowering.kv) != list(range(len(lowering.kv))):
        raise CannotCompileError("layers without keys and values")
    return Lowered(
        words=_words(lowering.steps),
        x=x.buffer,
        y=y,
        floats=n_floats,
        inputs=lowering.inputs,
        normed=lowering.normed,
        experts=lowering.experts,
        parts=lowering.parts,
        kv=[lowering.kv[layer] for layer in range(len(lowering.kv))],
        ropes=lowering.ropes,
        fused=Fused(lowering.gate_up, lowering.qkv),
        kept=lowering.kept,
    )


# The operations that have a step; `Lowering` has a method of the same name for each.
LOWERED = (
    *("norm_project", "linear", "project_norm", "project_add", "project_norm_add", "norm_gate_up", "norm_up", "heads"),
    *("merge", "take", "head_norm_rope", "attention", "norm_experts_add", "sigmoid_gate", "short_conv", "delta_net"),
    *("columns", "multiply", "scale", "norm_rope", "norm", "norm_add", "norm_experts", "all_sum", "all_columns"),
)


def _width(recording: Recording) -> int:
    """Return the width of the input of the first layer: D, the width of the norm or linear layer that reads it.

    If the definition reads only some columns of the input at a time, the last of them are its end.
    """
    ends = [step.args[2] for step in recording.steps if step.op == "columns" and step.args[0] is recording.x]
    if ends:
        return int(max(ends))
    for step in recording.steps:
        reader = step.args[1] if len(step.args) > 1 and step.args[0] is recording.x else None
        if isinstance(reader, RMSNorm | LayerNorm):
            return int(reader.weight.size)
        if isinstance(reader, Linear):
            return int(reader.weight.shape[1])
    raise CannotCompileError("hidden states of unknown width: no norm or linear layer reads the input")


def _words(steps: Sequence[dict[int, Any]]) -> np.ndarray:
    words = np.zeros((len(steps), layout.STEP_WIDTH), dtype=np.int64)
    for row, step in zip(words, steps, strict=True):
        for word, value in step.items():
            row[word] = -1 if value is None else value.at if isinstance(value, Buffer) else value
    return words
