"""Hidden states: the named intermediate values of forward passes, with the same bits as in every other pass.

The name of a value is the GGUF name of the norm or linear layer that computed it ("blk.0.attn_norm", "blk.0.ffn_down"),
or a name in the code of models ("blk.0.q_rope", "blk.0.attn_out", "blk.0.layer_out"). The layers run op by op, because
fused blocks and compiled programs do not compute all values.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import numpy as np

from mlx_engine.backends.parameters import Array
from mlx_engine.backends.taps import observed
from mlx_engine.cache import SequenceInput
from mlx_engine.cache.pool import LONGEST_PASS
from mlx_engine.errors import ModelError, OptionError, shown
from mlx_engine.loop.forward import forward, wanted_logits
from mlx_engine.weights.model import Model

LOGITS = "logits"
# The values that need the head. With a large vocabulary the head takes as long as several layers.
OF_HEAD = frozenset({"output_norm", LOGITS})

# The meaning of each value, by its name without "blk.N.".
MEANINGS = {
    "embed": "the input of the first layer: embeddings of the tokens",
    "per_layer_proj_norm": "the own inputs of all layers, after their norm",
    "attn_norm": "the layer's input after its norm",
    "attn_q": "queries, heads joined, before norm and rotation",
    "attn_k": "keys, heads joined, before norm and rotation",
    "attn_v": "values, heads joined",
    "attn_qkv": "queries, keys and values of linear attention, joined, before the convolution",
    "attn_gate": "the gate of the attention output, before its sigmoid",
    "attn_q_norm": "queries after their norm",
    "attn_k_norm": "keys after their norm",
    "attn_v_norm": "values after their norm",
    "q_rope": "queries after rotation, by head: what attention compares with the keys",
    "k_rope": "keys after rotation, by head: what the KV cache holds",
    "attn_out": "the output of attention, or of the token mixer, before its projection",
    "attn_output": "the output of attention after its projection",
    "post_attention_norm": "the output of attention after its projection and norm",
    "attn_residual": "the hidden state after attention has been added",
    "shortconv.in_gate": "the gate of the convolution's input",
    "shortconv.out_gate": "the gate of the convolution's output",
    "shortconv.value": "the convolution's input, before its gate",
    "shortconv.out_proj": "the output of the convolution after its projection",
    "delta_gate": "the gate of linear attention, before its activation",
    "ssm_beta": "the rate at which linear attention writes, before its sigmoid",
    "ssm_alpha": "the rate at which linear attention forgets, before its activation",
    "ssm_in": "the gate, input, B, C and time steps of a Mamba2 mixer, joined, before the convolution",
    "ssm_norm": "the output of linear attention by head, or of a Mamba2 mixer, after its norm",
    "ssm_out": "the output of linear attention or of a Mamba2 mixer after its projection",
    "ffn_norm": "the input of the feed-forward network after its norm",
    "pre_ffw_norm_2": "the input of the experts after its norm",
    "ffn_gate": "the gate of the feed-forward network, before its activation",
    "ffn_up": "the feed-forward network's inner values, before the gate",
    "ffn_down": "the output of the feed-forward network",
    "ffn_gate_inp_norm": "the input of the router after its norm",
    "ffn_gate_inp": "the router's score of each expert",
    "ffn_gate_exps": "the gates of the chosen experts, in ascending order of the experts",
    "ffn_up_exps": "the inner values of the chosen experts, before the gates",
    "ffn_down_exps": "the outputs of the chosen experts",
    "ffn_moe": "the weighted sum of the chosen experts",
    "ffn_gate_shexp": "the gate of the shared expert, before its activation",
    "ffn_up_shexp": "the inner values of the shared expert, before the gate",
    "ffn_down_shexp": "the output of the shared expert",
    "post_ffw_norm_1": "the output of the dense network after its norm",
    "post_ffw_norm_2": "the output of the experts after its norm",
    "post_ffw_norm": "the output of the feed-forward network after its norm",
    "inp_gate": "the gate of the layer's own input, before its activation",
    "proj": "the layer's own input after its gate and projection",
    "post_norm": "the layer's own input after its norm, as it is added",
    "layer_out": "the hidden state after the layer",
    "output_norm": "the hidden state after the last norm: the input of the head",
    LOGITS: "the logits",
}


class Tap(NamedTuple):
    """A named intermediate value.

    Attributes:
        name: the name, such as "blk.0.attn_out".
        shape: the shape of the value of one token: (D,), or (H, E) for heads, or (C, N) for chosen experts.
        meaning: a description of the value.
    """

    name: str
    shape: tuple[int, ...]
    meaning: str

    def __str__(self) -> str:
        return f"{self.name:<24} ({', '.join(map(str, ('T', *self.shape)))})  {self.meaning}"


def taps(model: Model) -> list[Tap]:
    """Return all values of a forward pass in the order of computation, from a pass of one token.

    Raises:
        ModelError: several processes share the model.
    """
    found: list[Tap] = []

    def note(name: str, values: np.ndarray) -> None:
        meaning = MEANINGS.get(name.split(".", 2)[-1], "the output of this norm or linear layer")
        found.append(Tap(name, values.shape[1:], meaning))

    _run(model, [0], None, note)
    return found


def matching(names: str | Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the known names that are listed or match a pattern, such as "blk.*.ffn_down" or "blk.[0-3].attn_out".

    Raises:
        OptionError: a name or pattern matches none.
    """
    patterns = [names] if isinstance(names, str) else list(names)
    for pattern in patterns:
        if not isinstance(pattern, str) or not any(fnmatchcase(name, pattern) for name in known):
            close = difflib.get_close_matches(str(pattern).replace("*", "0"), known, n=3)
            hint = f"close are {', '.join(close)}" if close else "tap_names() lists all"
            message = f"names: this model has no value {shown(pattern)}; {hint}"
            raise OptionError(message, option="names", expected="names or patterns of values", found=pattern)
    return [name for name in known if any(fnmatchcase(name, pattern) for pattern in patterns)]


def hidden_states(model: Model, ids: Sequence[int], names: Collection[str]) -> dict[str, np.ndarray]:
    """Return the values (T, ...) of these names for all tokens, in the order of computation.

    Raises:
        ModelError: several processes share the model.
    """
    chunks: dict[str, list[np.ndarray]] = {}

    def keep(name: str, values: np.ndarray) -> None:
        chunks.setdefault(name, []).append(values.copy())  # copied, because kernels reuse the memory

    _run(model, ids, frozenset(names), keep)
    return {name: parts[0] if len(parts) == 1 else np.concatenate(parts) for name, parts in chunks.items()}


def _run(
    model: Model, ids: Sequence[int], names: frozenset[str] | None, note: Callable[[str, np.ndarray], None]
) -> None:
    """Run all tokens op by op, in chunks. Call `note` with the named values of each chunk, or all values if None."""
    if model.is_shared:
        expected, found = "a model that one process runs alone", "one that several processes share"
        raise ModelError(f"hidden states: expected {expected}, found {found}; load it without --shard")
    be, traced, chunk = model.backend, copy.copy(model), ids[:LONGEST_PASS]

    def tap(name: str, x: Array) -> None:
        if names is None or name in names:
            values = be.host(x)
            # Chosen experts have C rows for each token.
            note(name, values if len(values) == len(chunk) else values.reshape(len(chunk), -1, *values.shape[1:]))

    traced.run_on(observed(be, tap))
    if names is not None and not names & OF_HEAD:
        vars(traced)["head"] = _no_head
    with be.session():
        kv = model.scratch_kv(len(ids)) if len(ids) <= LONGEST_PASS else model.new_kv(len(ids))
        for start in range(0, len(ids), LONGEST_PASS):
            chunk = ids[start : start + LONGEST_PASS]
            logits = forward(traced, SequenceInput(chunk, kv, wanted=None))
            if names is None or LOGITS in names:
                tap(LOGITS, wanted_logits(logits))


def _no_head(x: Array, best: int | None = None) -> Array:
    """Return the hidden states in place of logits, which are not used."""
    return x
