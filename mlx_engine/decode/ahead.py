"""The decode loop of a lazy backend: a forward pass is submitted before the host knows the token that it reads.

The host builds the next pass while the device runs the current one, so the device does not wait for the host. A
submitted pass is committed when the caller asks for its token. If the text ends before that, the pass is rolled back,
so that the KV cache has the same tokens as on any other backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mlx_engine.backends.batch import Batch
from mlx_engine.backends.parameters import Array
from mlx_engine.cache import KVSequence, New, begin
from mlx_engine.decode.metrics import Metrics
from mlx_engine.decode.sampler import Choice, Sampler
from mlx_engine.decode.step import forward_logits, wanted_logits
from mlx_engine.errors import CacheFullError
from mlx_engine.models import Model


@dataclass(frozen=True, eq=False)
class _Begun:
    """A submitted choice of a token, and the batch of the pass before it, unless that is already committed."""

    choice: Choice
    batch: Batch | None = None


def decode_ahead(
    model: Model, read: Callable[[], Array], kv: KVSequence, pick: Sampler, metrics: Metrics
) -> Iterator[int]:
    """Yield token ids without end; `read` runs the prefill and returns the logits for the first.

    Raises:
        CacheFullError: the KV cache is full when the next token is asked for.
    """
    begun: _Begun | None = None
    # Submitted and not committed; the oldest comes first.
    pending: list[Batch] = []
    try:
        while True:
            with model.backend.session():
                resumed = metrics.clock()
                now = begun or _Begun(_choose(model, read(), pick))
                begun = _begin_next(model, now.choice, kv, pick, pending)
                asked = metrics.clock()
                token = pick.settle(now.choice)
                if now.batch is not None:
                    pending.remove(now.batch)
                    now.batch.commit()
                metrics.record_interval(resumed, asked)
            yield token
            read = _reader(model, token, kv)
    finally:
        for batch in reversed(pending):
            batch.roll_back()


def _reader(model: Model, token: int, kv: KVSequence) -> Callable[[], Array]:
    return lambda: forward_logits(model, New([token], kv))


def _choose(model: Model, logits: Array, pick: Sampler) -> Choice:
    (token,) = model.backend.choose(logits, [pick.draw()])
    model.backend.begin(token)
    return pick.add(token, logits)


def _begin_next(model: Model, chosen: Choice, kv: KVSequence, pick: Sampler, pending: list[Batch]) -> _Begun | None:
    """Submit the pass that reads the chosen token, and append it to `pending`; return None if the KV cache is full."""
    try:
        batch = begin([New([chosen.token], kv)])
    except CacheFullError:
        return None
    pending.append(batch)
    return _Begun(_choose(model, wanted_logits(model.forward(batch)), pick), batch)
