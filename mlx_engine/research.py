"""Functions for research: sessions with logits token by token, probabilities of given texts, and hidden states.

`Engine.session`, `Engine.choose`, `Engine.tap_names` and `Engine.hidden_states` use this module. On backends with a
fixed order of sums (docs/exactness.md), logits and log-probabilities are bit-identical to those of `Engine.logits` and
`Engine.generate`. Hidden states are bit-identical to the values in ordinary passes, with the exceptions that `observed`
(`backends/observed.py`) describes. The results do not depend on how tokens are divided among passes.

Hidden states are the named intermediate values of forward passes. To get them, the layers run op by op, because fused
blocks and compiled programs keep some values only in registers. The name of a value is the GGUF name of the norm or
linear layer that computed it ("blk.0.attn_norm"), or a name from the code in `models/` ("blk.0.q_rope").
"""

from __future__ import annotations

import copy
import difflib
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from mlx_engine.backends.observed import observed
from mlx_engine.backends.parameters import Array
from mlx_engine.cache import KVPool, KVSequence, SequenceInput
from mlx_engine.cache.pool import LONGEST_PASS, PAGE, tokens_that_fit
from mlx_engine.errors import (
    ClosedError,
    ContextLengthError,
    ModelError,
    NotCopyableError,
    OptionError,
    is_whole,
    shown,
)
from mlx_engine.loop.forward import check_logits, forward, forward_logits, wanted_logits
from mlx_engine.loop.logprobs import token_logprobs
from mlx_engine.loop.memory import spare_bytes
from mlx_engine.weights.model import Model

if TYPE_CHECKING:
    import mlx.core as mx

# The most texts, and the most rows of logits, in a pass of `choose`. 128 rows of 152,000 float32 logits take 74 MiB.
MOST_TEXTS, MOST_ROWS = 32, 128


@dataclass(eq=False)
class _Family:
    """The objects that a session and its forks share."""

    model: Model
    pool: KVPool
    context: int  # the largest number of tokens of a session
    slots: int  # the largest number of open sessions
    sessions: weakref.WeakSet[Session] = field(default_factory=weakref.WeakSet)

    def check_slot(self) -> None:
        """Raise OptionError if all slots are in use."""
        if len(self.sessions) >= self.slots:
            message = f"slots: all {self.slots:,} slots for this session and its forks are in use"
            raise OptionError(f"{message}; close a fork, or pass a larger slots", option="slots", found=self.slots)


class Session:
    """A sequence of tokens whose keys and values are kept, so that `logits` runs only the new tokens.

    Made by `Engine.session`; `with engine.session(...) as session:` closes the session at the end. Only one thread at a
    time may use a session and its forks.
    """

    def __init__(self, family: _Family, ids: Sequence[int], kv: KVSequence, row: np.ndarray | None = None) -> None:
        self._family, self._ids, self._kv, self._row = family, list(ids), kv, row
        family.sessions.add(self)
        # Free the pages when the session is garbage-collected.
        self._free = weakref.finalize(self, kv.close)
        self._free.atexit = False

    @classmethod
    def begin(cls, model: Model, ids: Sequence[int], *, slots: int, n_tokens: int | None = None) -> Session:
        """Return a session with the tokens `ids`; the other arguments and OptionError are as for `Engine.session`."""
        given: dict[str, Any] = {"slots": slots} | ({} if n_tokens is None else {"n_tokens": n_tokens})
        for name, value in given.items():
            if not is_whole(value) or value < 1:
                raise OptionError(f"{name} must be a whole number of at least 1, not {shown(value)}", option=name)
        context = int(model.config.context_length)
        most = n_tokens or tokens_that_fit(model.kv_layers, spare_bytes(model), slots, most=context)
        if most < len(ids):
            message = f"the memory for keys and values has room for {most:,} tokens, and the prompt has {len(ids):,}"
            raise OptionError(message, option="prompt", expected=f"at most {most:,} tokens", found=len(ids))
        pool = model.new_pool(most, n_sequences=slots)
        return cls(_Family(model, pool, context, slots), ids, pool.sequence())

    @property
    def ids(self) -> list[int]:
        """All tokens so far."""
        return list(self._ids)

    @property
    def n_kept(self) -> int:
        """Number of tokens whose keys and values are kept. The next pass runs the others, at least the last one."""
        return self._kv.length

    def logits(self, next_ids: int | Sequence[int] = ()) -> mx.array:
        """Append tokens, and return float32 logits (V,) after the last one.

        A call without tokens returns the logits after the tokens so far. If the call fails, the session is unchanged.

        Raises:
            OptionError: an id is not in the vocabulary.
            ContextLengthError: the tokens exceed the context.
            CacheFullError: no page is free in the KV pool of the session and its forks.
            NotFiniteError: logits are NaN or infinite.
            ClosedError: the session or its engine has been closed.
        """
        import mlx.core as mx

        return mx.array(self.row(next_ids))

    def row(self, next_ids: int | Sequence[int] = ()) -> np.ndarray:
        """Do the same as `logits`, but return a NumPy array. Never write to it: later calls may return it again."""
        self._check_open()
        more = self._checked([next_ids] if is_whole(next_ids) else next_ids)  # type: ignore[arg-type]
        n = len(self._ids)
        if more or self._row is None:
            before, self._row, self._ids = self._row, None, [*self._ids, *more]
            try:
                self._row = self._run()
            except BaseException:
                self._cut(n)
                self._row = before
                raise
        return self._row

    def fork(self) -> Session:
        """Return another session with the same tokens, which shares the keys and values so far.

        Raises:
            OptionError: all `slots` are in use.
            CacheFullError: the last page is not full, and no page is free for its copy.
            ClosedError: the session or its engine has been closed.
        """
        self._check_open()
        self._family.check_slot()
        with self._family.model.backend.session():
            return Session(self._family, self._ids, self._kv.fork(), self._row)

    def rewind(self, n: int) -> None:
        """Discard the last n tokens; at least one token must be left.

        If the next call of `logits` appends no token, it runs the last remaining token again. If the model has
        recurrent states, or sliding windows whose keys and values have partly been freed, the next call runs all
        remaining tokens again.

        Raises:
            OptionError: n is not from 0 to the number of tokens minus 1.
            ClosedError: the session has been closed.
        """
        self._check_open()
        most = len(self._ids) - 1
        if not is_whole(n) or not 0 <= n <= most:
            expected = f"from 0 to {most:,}"
            message = f"rewind: n must be {expected}, not {shown(n)}; at least one token must be left"
            raise OptionError(message, option="n", expected=expected, found=n)
        if n:
            self._cut(len(self._ids) - n)
            self._row = None

    def close(self) -> None:
        """Free the keys and values. Forks are not affected."""
        self._family.sessions.discard(self)
        self._free()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise NotCopyableError(name="session", hint="pickle its `ids`, or use `fork` to make another session")

    def __repr__(self) -> str:
        n = len(self._ids)
        state = f"{n:,} token{'' if n == 1 else 's'}" if self._free.alive else "closed"
        return f"<Session: {state}>"

    def _check_open(self) -> None:
        if not self._free.alive:
            raise ClosedError("the session has been closed; make another one with engine.session")

    def _checked(self, next_ids: Sequence[Any]) -> list[int]:
        """Return the next tokens as ints; raise OptionError or ContextLengthError as `logits` does."""
        model, context = self._family.model, self._family.context
        values = [i.item() if hasattr(i, "item") else i for i in next_ids]
        expected = f"token ids from 0 to {model.config.vocab_size - 1}"
        if isinstance(next_ids, str | bytes) or not all(
            is_whole(i) and 0 <= i < model.config.vocab_size for i in values
        ):
            message = f"next_ids must be {expected}, not {shown(next_ids)}"
            raise OptionError(message, option="next_ids", expected=expected, found=next_ids)
        if len(self._ids) + len(values) > context:
            message = f"the session has {len(self._ids):,} tokens and gets {len(values):,} more"
            expected = f"at most {context:,} tokens"
            raise ContextLengthError(
                f"{message}; the model's context has {context:,}", option="next_ids", expected=expected,
                found=len(self._ids) + len(values),
            )  # fmt: skip
        return [int(i) for i in values]

    def _run(self) -> np.ndarray:
        """Run the tokens that are not in the KV cache, at least the last one, and return logits (V,) after them."""
        model, pool = self._family.model, self._family.pool
        be, n = model.backend, len(self._ids)
        with be.session():
            self._truncate(n - 1)
            while True:
                start = self._kv.length
                end = min(n, start + pool.longest_pass)
                logits = forward(model, SequenceInput(self._ids[start:end], self._kv, wanted=int(end == n)))
                if end == n:
                    break
                be.wait(pool.stores.arrays)  # otherwise a lazy backend would keep the graphs of all chunks in memory
            found = wanted_logits(logits)
            check_logits(model, found, self._ids)
            return np.array(be.host(found)[0])

    def _cut(self, length: int) -> None:
        self._ids = self._ids[:length]
        self._truncate(length)

    def _truncate(self, length: int) -> None:
        """Discard the keys and values after the first `length` tokens, or all if the KV cache cannot be cut there."""
        if self._kv.length > length:
            try:
                self._kv.truncate(length)
            except ValueError:
                self._kv.close()


@dataclass(frozen=True)
class TextChoice:
    """One of several texts, with its probability after a prompt.

    Attributes:
        text: the text; None if it was given as ids.
        index: the index of the text in the argument `texts`.
        token_ids: the tokens of the text.
        logprobs: the log-probability of each token, given the prompt and the earlier tokens of the text (float32).
        logprob: the log-probability of the whole text: the sum of `logprobs`.
        share: the probability of the text, divided by the sum of the probabilities of all texts.
    """

    text: str | None
    index: int
    token_ids: list[int]
    logprobs: list[float]
    logprob: float
    share: float

    @property
    def probability(self) -> float:
        """The probability of the whole text."""
        return math.exp(self.logprob)


def choose(model: Model, prompt_ids: Sequence[int], texts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return, for each text, the log-probabilities of its tokens after a prompt. The prompt is run once.

    Raises:
        NotFiniteError: logits are NaN or infinite.
    """
    n = min(MOST_TEXTS, len(texts))
    longest = max(map(len, texts))
    # Each fork copies the last page of the prompt, and the text's last page may be partly empty.
    n_tokens = len(prompt_ids) + PAGE + n * (longest + 2 * PAGE)
    be, found = model.backend, []
    with Session.begin(model, prompt_ids, slots=n + 1, n_tokens=n_tokens) as prompt:
        row = prompt.row()
        for first in range(0, len(texts), n):
            some = texts[first : first + n]
            with be.session():
                logprobs = [[token_logprobs(be, row, ids[0]).logprob] for ids in some]
                _extend(prompt, some, logprobs)
            found += logprobs
    return found


def _extend(prompt: Session, texts: Sequence[Sequence[int]], logprobs: list[list[float]]) -> None:
    """Append the log-probabilities of each text's second and later tokens to its list in `logprobs`.

    Each pass runs tokens of all unfinished texts.
    """
    model, forks = prompt._family.model, {i: prompt.fork() for i, ids in enumerate(texts) if len(ids) > 1}
    try:
        while forks:
            n_rows = max(1, MOST_ROWS // len(forks))
            parts = {i: texts[i][len(logprobs[i]) - 1 : -1][:n_rows] for i in forks}
            inputs = [SequenceInput(part, forks[i]._kv, wanted=None) for i, part in parts.items()]
            logits = forward_logits(model, *inputs)
            rows = iter(model.backend.host(logits))
            for i, part in parts.items():
                _read(prompt, texts[i], rows, len(part), logprobs[i])
            for i in [i for i in forks if len(logprobs[i]) == len(texts[i])]:
                forks.pop(i).close()
    finally:
        for fork in forks.values():
            fork.close()


def _read(prompt: Session, ids: Sequence[int], rows: Iterator[np.ndarray], n: int, logprobs: list[float]) -> None:
    """Take n rows of logits (V,) from `rows`, and append the log-probabilities of the next n tokens of a text."""
    model = prompt._family.model
    for _ in range(n):
        row, at = next(rows), len(logprobs)
        check_logits(model, model.backend.array(row[None]), [*prompt.ids, *ids[:at]])
        logprobs.append(token_logprobs(model.backend, row, ids[at]).logprob)


def ranked(
    texts: Sequence[str | None], ids: Sequence[Sequence[int]], logprobs: Sequence[list[float]]
) -> list[TextChoice]:
    """Return the texts as choices, most likely first; equally likely texts keep their order."""
    sums = [math.fsum(of) for of in logprobs]
    total = math.fsum(math.exp(one - max(sums)) for one in sums)
    found = [
        TextChoice(text, i, list(ids[i]), logprobs[i], sums[i], math.exp(sums[i] - max(sums)) / total)
        for i, text in enumerate(texts)
    ]
    return sorted(found, key=lambda choice: -choice.logprob)


LOGITS = "logits"
# The values that the head computes. The head is run only if one of these values is wanted, because with a large
# vocabulary, the head takes as long as several layers.
OF_HEAD = frozenset({"output_norm", LOGITS})

# Maps the name of each value, without "blk.N.", to its meaning.
MEANINGS = {
    "embed": "the input of the first layer: embeddings of the tokens",
    "per_layer_proj_norm": "the per-layer inputs of all layers, after their norm",
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
    "inp_gate": "the gate of the per-layer input, before its activation",
    "proj": "the per-layer input after its gate and projection",
    "post_norm": "the per-layer input after its norm, as it is added to the hidden state",
    "layer_out": "the hidden state after the layer",
    "output_norm": "the hidden state after the last norm: the input of the head",
    LOGITS: "the logits",
}


class Tap(NamedTuple):
    """A named intermediate value, such as "blk.0.attn_out".

    `shape` is the shape for one token: (D,), (H, E) for H heads of dimension E, or (C, N) for N outputs of each of C
    chosen experts.
    """

    name: str
    shape: tuple[int, ...]
    meaning: str

    def __str__(self) -> str:
        return f"{self.name:<24} ({', '.join(map(str, ('T', *self.shape)))})  {self.meaning}"


def taps(model: Model) -> list[Tap]:
    """Run a pass of one token, and return all its named values in the order of computation.

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
    """Return the names in `known` that match an item of `names`: a name, or a pattern such as "blk.[0-3].attn_out".

    Raises:
        OptionError: a name or pattern matches no known name.
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
    """Return the values with these names, in the order of computation: for each name an array (T, ...) for T tokens.

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
    """Run tokens op by op, in chunks of at most LONGEST_PASS.

    For each chunk and each value in `names` (None means all values), call `note(name, array (chunk length, ...))`.
    """
    if model.is_shared:
        expected, found = "a model that one process runs alone", "one that several processes share"
        raise ModelError(f"hidden states: expected {expected}, found {found}; load it without --shard")
    be, traced, chunk = model.backend, copy.copy(model), ids[:LONGEST_PASS]

    def tap(name: str, x: Array) -> None:
        if names is None or name in names:
            values = be.host(x)
            # A value of the experts has C rows per token, one for each chosen expert.
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
    """Replace the head if its values are not wanted: return the hidden states `x`; nothing reads them."""
    return x
