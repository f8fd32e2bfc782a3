"""The decoder-only transformer: the definition of all layers, and a model as embeddings, layers and head.

`layer.py` defines one layer. A backend runs the definition of all layers operation by operation, or lowers it once to a
program (`Backend.compile`). A change of the definition takes effect on every backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from mlx_engine.backends.base import Backend
from mlx_engine.backends.batch import Batch, KVView, Wanted
from mlx_engine.backends.parameters import Array, Linear, Norm, Token
from mlx_engine.backends.program import Layers, Program
from mlx_engine.cache import CacheLayer, KVLayer, KVPool, StateLayer
from mlx_engine.errors import OptionError
from mlx_engine.models.layer import Attention, Layer, SharedAttention, decoder_layer
from mlx_engine.quant.key_values import fits
from mlx_engine.weights.model import Model
from mlx_engine.weights.parameters import Parameters
from mlx_engine.weights.stage import Stage


def decoder_layers(be: Backend, x: Array, batch: Batch, *, want: Wanted, layers: Sequence[Layer]) -> Array:
    """Return the hidden states after all layers: (T, D) of all tokens, or (R, D) of the wanted tokens.

    If layers have inputs of their own, x is (T, D + L*I): the hidden states, and after them the inputs of all layers.
    """
    views, inputs = dict[int, KVView](), x
    first, last = layers[0].input, layers[-1].input
    if first is not None and last is not None:
        n = first.hidden_size
        x, inputs = be.columns(inputs, 0, n), be.columns(inputs, n, n + last.columns[1])
    if want == "none":  # the layers after the last one that writes keys and values have no effect
        layers = layers[: 1 + max((i for i, w in enumerate(layers) if writes(w)), default=-1)]
    for i, w in enumerate(layers):
        here = want if i == len(layers) - 1 else "every"
        x = decoder_layer(be, w, i, x, batch, want=here, views=views, inputs=inputs)
    return x


def writes(layer: Layer) -> bool:
    """Return whether a layer writes keys and values or a state."""
    return layer.mix is not None and not isinstance(layer.mix, SharedAttention)


class Decoder(Model):
    """A model: maps a batch to logits. The caller owns the KV cache. Model files derive `Model` from this class."""

    config: Any
    backend: Backend
    program: Program

    def __init__(
        self, config: Any, parameters: Parameters, backend: Backend, *, layers: Sequence[Layer],
        output_norm: Norm | None = None, logit_softcap: float | None = None,
    ) -> None:  # fmt: skip
        """Build a model.

        Args:
            config: the sizes of the model, at least hidden_size and vocab_size.
            parameters: the checkpoint's weights. Without a matrix for the head, the embedding table is the head.
            backend: runs the operations.
            layers: the parameters of each layer; only those of the process's stage are kept.
            output_norm: the norm before the head; by default an RMS norm with the config's epsilon.
            logit_softcap: logits become `logit_softcap * tanh(logit / logit_softcap)`; None for no soft cap.
        """
        self.stage = parameters.stage or Stage(0, len(layers), len(layers))
        layers = parameters.layers(layers)
        self.config = config
        self.output_norm = output_norm or parameters.rms_norm("output_norm", config.norm_eps)
        self.layers = tuple(w.counted_from(self.stage.first) for w in layers[self.stage.first : self.stage.end])
        self.whole_kv_layers = _kv_layers(layers, backend.kv_type)
        self.logit_softcap = logit_softcap
        head = "output" if "output.weight" in parameters else "token_embd"
        # A tied head may be converted to another type than the embedding table: a stage prepares only the one that it
        # uses.
        self.token_embd = parameters.table("token_embd") if self.stage.is_first else parameters.elsewhere("token_embd")
        self.output = parameters.linear(head) if self.stage.is_last else Linear(head, parameters.elsewhere(head))
        self.run_on(backend)

    def run_on(self, backend: Backend) -> None:
        """Use a backend, and compile the layers for it. Call it again after any change to the layers."""
        self.backend, self.program = backend, backend.compile(self.definition, self.width)

    @property
    def width(self) -> int:
        """The width of the input of the first layer: D, plus the widths of the layers' own inputs."""
        own = self.layers[-1].input
        return int(self.config.hidden_size) + (0 if own is None else own.columns[1])

    @property
    def definition(self) -> Layers:
        """The definition of all layers, as a function of a backend."""
        return partial(decoder_layers, layers=self.layers)

    def embed(self, ids: Sequence[Token], positions: Sequence[int]) -> Array:
        """Return the hidden states (T, D) before the first layer."""
        return self.backend.embed(self.token_embd, ids)

    def forward(self, batch: Batch) -> Array | None:
        """Run a forward pass and return logits (R, V) of the wanted tokens, or None if there are none.

        The pass writes keys and values of all new tokens. The caller then commits the batch, or rolls it back.
        """
        x = self.backend.note("embed", self.embed(batch.ids, batch.positions))
        x = self.program.run(x, batch)
        return None if batch.want == "none" else self.head(x, batch.best)

    def forward_hidden(self, batch: Batch) -> Array | None:
        """Run a forward pass as `forward` does; return hidden states (R, D) after the last norm, without the head."""
        x = self.backend.note("embed", self.embed(batch.ids, batch.positions))
        x = self.program.run(x, batch)
        return None if batch.want == "none" else self.backend.norm(x, self.output_norm)

    def head(self, x: Array, best: int | None = None) -> Array:
        """Return logits (R, V) of the hidden states (R, D) after the last layer; see `Batch.best`."""
        be, n = self.backend, int(self.config.vocab_size)
        logits = be.norm_head(x, self.output_norm, self.output)
        if self.logit_softcap is not None:
            logits = be.soft_cap(logits, self.logit_softcap)
        if be.group is None:
            return logits
        return be.all_columns(logits, n) if best is None else be.all_best(logits, n, best)

    @property
    def kv_layers(self) -> list[CacheLayer]:
        """The cache of each layer of the stage, for `KVPool`: KV heads, head dim and window, or a state's shapes."""
        return self.whole_kv_layers[self.stage.first : self.stage.end]

    def new_pool(self, n_tokens: int, **options: Any) -> KVPool:
        """Return a KV pool for `n_tokens` tokens; the options are those of `KVPool`."""
        return KVPool(self.backend, self.kv_layers, n_tokens, **options)


def _kv_layers(layers: Sequence[Layer], type_: str) -> list[CacheLayer]:
    """Return the cache of each layer of a model; layers that share the keys and values of another have none.

    These layers are the last ones, so that a layer and its store have the same index.

    Raises:
        OptionError: the type has blocks that the heads do not fill.
    """
    kept: list[CacheLayer] = []
    for layer in layers:
        mixer, state = layer.mix, None if layer.beside is None else StateLayer(layer.beside.mix.state)
        if mixer is None:
            kept.append(StateLayer(()))
        elif isinstance(mixer, Attention):
            if not fits(mixer.head_dim, type_):
                message = (
                    f"keys and values of {type_} are blocks of 32 numbers of a head, and heads of {mixer.head_dim} do "
                    "not fill them; use f16"
                )
                raise OptionError(message, option="kv_type", expected="f32, f16 or bf16", found=type_)
            kept.append(KVLayer(mixer.n_kv_heads, mixer.head_dim, mixer.window, type_, state))
        elif not isinstance(mixer, SharedAttention):
            kept.append(StateLayer(mixer.state))
    return kept
