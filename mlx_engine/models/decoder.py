"""`Decoder`, the base class of all models: embeddings, layers and head; and `decoder_layers`, which runs the layers.

`layer.py` defines one layer. A backend runs `decoder_layers` op by op, or compiles it once to a program
(`Backend.compile`). Of the T tokens of a pass, the R *wanted* tokens are those whose logits or hidden states the caller
needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mlx_engine.backends.base import Backend, Layers, Program
from mlx_engine.backends.batch import Batch, KVView, Wanted
from mlx_engine.backends.parameters import Array, Linear, Mamba2, Norm, Token
from mlx_engine.cache import CacheLayer, KVLayer, KVPool, StateLayer
from mlx_engine.errors import OptionError
from mlx_engine.models.layer import Attention, LatentAttention, Layer, SharedAttention, decoder_layer
from mlx_engine.quant.key_values import fits
from mlx_engine.weights.model import ExtraLayer, Model
from mlx_engine.weights.parameters import Parameters
from mlx_engine.weights.stage import Stage


def decoder_layers(
    be: Backend, x: Array, batch: Batch, *, want: Wanted, layers: Sequence[Layer], masked: tuple[int, int] = (0, 0)
) -> Array:
    """Return the hidden states after all layers: (T, D) of all tokens, or (R, D) of the wanted tokens.

    If layers have per-layer inputs of width I (as in Gemma 4), x is (T, D + L*I): the hidden states, then the inputs of
    all L layers. With LoRA adapters, columns `masked` = [first, end) of x are the masks of the tokens: all adapters are
    joined to one pair of matrices, and a token's mask selects the columns of its adapter (`weights/adapters.py`).
    Without adapters, end is 0.
    """
    views, masks = dict[int, KVView](), None
    if masked[1]:
        x, masks = be.columns(x, 0, masked[0]), be.columns(x, *masked)
    inputs, first, last = x, layers[0].input, layers[-1].input
    if first is not None and last is not None:
        n = first.hidden_size
        x, inputs = be.columns(inputs, 0, n), be.columns(inputs, n, n + last.columns[1])
    if want == "none":  # layers after the last one that writes keys and values, or a state, have no effect
        layers = layers[: 1 + max((i for i, w in enumerate(layers) if writes(w)), default=-1)]
    for i, w in enumerate(layers):
        here = want if i == len(layers) - 1 else "every"
        x = decoder_layer(be, w, i, x, batch, want=here, views=views, inputs=inputs, masks=masks)
    return x


def writes(layer: Layer) -> bool:
    """Return whether a layer writes keys and values or a state."""
    return layer.mix is not None and not isinstance(layer.mix, SharedAttention)


class Decoder(Model):
    """A model: maps a batch to logits. The caller owns the KV cache. The `Model` of each model file is a `Decoder`."""

    config: Any
    backend: Backend
    program: Program

    def __init__(
        self, config: Any, parameters: Parameters, backend: Backend, *, layers: Sequence[Layer],
        output_norm: Norm | None = None, logit_softcap: float | None = None,
    ) -> None:  # fmt: skip
        """Build a model.

        Args:
            config: the sizes of the model: hidden_size, vocab_size and, if `output_norm` is None, norm_eps.
            parameters: the checkpoint's weights. If they have no matrix `output`, the embedding table is also the head.
            backend: runs the operations.
            layers: the parameters of all layers. The model keeps only the layers of this process's pipeline stage.
            output_norm: the norm before the head; None for an RMS norm with the config's epsilon.
            logit_softcap: logits become `logit_softcap * tanh(logit / logit_softcap)`; None for no soft cap.
        """
        self.stage = parameters.stage or Stage(0, len(layers), len(layers))
        layers = parameters.layers(layers)
        self.config, self.adapters = config, parameters.adapters
        self.output_norm = output_norm or parameters.rms_norm("output_norm", config.norm_eps)
        self.layers = tuple(w.counted_from(self.stage.first) for w in layers[self.stage.first : self.stage.end])
        self.whole_kv_layers = _kv_layers(layers, backend.kv_type)
        self.logit_softcap = logit_softcap
        head = "output" if "output.weight" in parameters else "token_embd"
        # The first pipeline stage prepares the embedding table, and the last one prepares the head. If both are one
        # tensor (a tied head), it is prepared twice, because the head may be converted to another type.
        self.token_embd = parameters.table("token_embd") if self.stage.is_first else parameters.elsewhere("token_embd")
        self.output = parameters.linear(head) if self.stage.is_last else Linear(head, parameters.elsewhere(head))
        self.run_on(backend)

    def run_on(self, backend: Backend) -> None:
        """Use a backend, and compile the layers for it. Call `run_on` again after any change to the layers."""
        self.backend, self.program = backend, backend.compile(self.definition, self.width)

    @property
    def width(self) -> int:
        """The width of the first layer's input: D, plus the widths of per-layer inputs and adapter masks, if any."""
        return self._masked[1] or self._masked[0]

    @property
    def _masked(self) -> tuple[int, int]:
        """The columns of the adapter masks in the first layer's input; see `decoder_layers`."""
        own = self.layers[-1].input
        first = int(self.config.hidden_size) + (0 if own is None else own.columns[1])
        return first, 0 if self.adapters is None else first + self.adapters.width

    @property
    def definition(self) -> Layers:
        """`decoder_layers` with the layers of this model filled in."""
        return partial(decoder_layers, layers=self.layers, masked=self._masked)

    def embed(self, ids: Sequence[Token], positions: Sequence[int]) -> Array:
        """Return the embeddings (T, D). With per-layer inputs, subclasses return (T, D + L*I)."""
        return self.backend.embed(self.token_embd, ids)

    def forward(self, batch: Batch) -> Array | None:
        """Run a forward pass and return logits (R, V) of the R wanted tokens, or None if no token is wanted.

        The pass writes keys and values of all new tokens to the KV cache. The caller then commits the new tokens, or
        rolls them back.
        """
        be = self.backend
        x = self._embedded(batch)
        if batch.keeps_hidden:
            x = self.program.run(x, replace(batch, wanted=batch.lengths))
            batch.hidden = be.norm(x, self.output_norm)
            x = x if batch.want == "every" else be.take(x, batch.rows)
        else:
            x = self.program.run(x, batch)
        return None if batch.want == "none" else self.head(x, batch.best)

    def forward_hidden(self, batch: Batch) -> Array | None:
        """Run a forward pass as `forward` does, without the head; return hidden states (R, D) after the last norm."""
        x = self.program.run(self._embedded(batch), batch)
        return None if batch.want == "none" else self.backend.norm(x, self.output_norm)

    def _embedded(self, batch: Batch) -> Array:
        """Return the input of the first layer: the embeddings and, with adapters, the adapter mask of each row."""
        x = self.backend.note("embed", self.embed(batch.ids, batch.positions))
        if self.adapters is None:
            return x
        return self.backend.concat(x, self.backend.as_activations(self.adapters.rows(batch)))

    def head(self, x: Array, best: int | None = None) -> Array:
        """Return logits (R, V) of the hidden states (R, D) after the last layer.

        With tensor parallelism, each rank computes some columns of the logits. The ranks exchange all columns or, if
        `best` is not None, only the `best` largest logits of each row (`Backend.all_best`).
        """
        be, n = self.backend, int(self.config.vocab_size)
        logits = be.norm_head(x, self.output_norm, self.output)
        if self.logit_softcap is not None:
            logits = be.soft_cap(logits, self.logit_softcap)
        if be.group is None:
            return logits
        return be.all_columns(logits, n) if best is None else be.all_best(logits, n, best)

    @property
    def kv_layers(self) -> list[CacheLayer]:
        return self.whole_kv_layers[self.stage.first : self.stage.end]

    def new_pool(self, n_tokens: int, **options: Any) -> KVPool:
        chosen = 0 if self.adapters is None else self.adapters.index(None)
        return KVPool(self.backend, self.kv_layers, n_tokens, adapter=chosen, **options)


class NextToken(ExtraLayer):
    """A layer of multi-token prediction (MTP), which proposes tokens for speculation. Reference: vLLM, qwen3_next_mtp.

    The normed embedding of a token and the normed hidden state of the previous token are concatenated and projected to
    width D. Then a decoder layer and a norm follow. The embedding table is the model's. The head is the first
    `n_vocabulary` rows of the model's head, because the whole head of a small model takes longer than the layer. The
    first rows belong to frequent tokens, because byte-level BPE numbers tokens in order of frequency. FR-Spec (arXiv
    2502.14856) also uses a head for frequent tokens only.
    """

    def __init__(
        self, model: Decoder, layer: Layer, fc: Linear, norms: tuple[Norm, Norm, Norm], head: Linear, n_vocabulary: int
    ) -> None:
        """Make the layer. `norms` are the norms of the embedding, of the hidden state, and of the result."""
        self._model, self._layer, self._fc, self._norms = model, layer, fc, norms
        self._head, self.n_vocabulary = head, n_vocabulary
        definition = partial(decoder_layers, layers=(layer,))
        self._program = model.backend.compile(definition, int(model.config.hidden_size))

    @property
    def kv_layers(self) -> list[CacheLayer]:
        return _kv_layers([self._layer], self._model.backend.kv_type)

    def new_pool(self, n_tokens: int, **options: Any) -> KVPool:
        return KVPool(self._model.backend, self.kv_layers, n_tokens, **options)

    def forward(self, batch: Batch, hidden: Array) -> tuple[Array, Array]:
        be, (of_token, of_hidden, after) = self._model.backend, self._norms
        tokens = be.norm(self._model.embed(batch.ids, batch.positions), of_token)
        x = be.linear(be.concat(tokens, be.norm(hidden, of_hidden)), self._fc)
        x = be.norm(self._program.run(x, batch), after)
        return be.linear(x, self._head), x


def _kv_layers(layers: Sequence[Layer], type_: str) -> list[CacheLayer]:
    """Return what each layer caches, without the layers with `SharedAttention`, which cache nothing.

    The layers with `SharedAttention` are the last ones, so the index of any other layer is the index of its cache.

    Raises:
        OptionError: keys and values of type `type_` have blocks of 32 elements, but the head dim is no multiple of 32.
        TypeError: a layer has several branches, and these are not attention followed by one Mamba2 mixer.
    """
    kept: list[CacheLayer] = []
    for layer in layers:
        mixer, state = layer.mix, None
        for other in layer.branches[1:]:
            if state is not None or not isinstance(mixer, Attention) or not isinstance(other.mix, Mamba2):
                raise TypeError(f"a layer can have attention and one Mamba2 beside it, not {layer.branches}")
            state = StateLayer(other.mix.state)
        if mixer is None:
            kept.append(StateLayer(()))
        elif isinstance(mixer, Attention | LatentAttention):
            if not fits(mixer.head_dim, type_):
                message = (
                    f"{type_} stores keys and values in blocks of 32 elements of a head, and the head dim "
                    f"{mixer.head_dim} is not a multiple of 32; use f16"
                )
                raise OptionError(message, option="kv_type", expected="f32, f16 or bf16", found=type_)
            if isinstance(mixer, LatentAttention):
                kept.append(KVLayer(1, mixer.head_dim, None, type_, 1, state))
            else:
                kept.append(KVLayer(mixer.n_kv_heads, mixer.head_dim, mixer.window, type_, 2, state))
        elif not isinstance(mixer, SharedAttention):
            kept.append(StateLayer(mixer.state))
    return kept
