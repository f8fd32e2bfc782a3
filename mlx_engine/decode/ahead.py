"""The loop of a lazy backend: a forward pass is begun before anybody has seen the token that it reads.

The device then never waits for the host, which builds the next pass while this one runs. A pass that is under way is
committed when its token is asked for: where the text ends one token earlier, or nobody asks for more, it is rolled
back, and the sequence is what it is on any other backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mlx_engine.backends.batch import Batch
from mlx_engine.backends.parameters import Array
from mlx_engine.cache import KVSequence, New, begin
from mlx_engine.decode.metrics import Metrics
from mlx_engine.decode.sampler import Choice, Sampler
from mlx_engine.decode.step import forward
from mlx_engine.errors import CacheFullError
from mlx_engine.models import Model


@dataclass(frozen=True, eq=False)
class _Begun:
    """A choice that has been begun, and the pass before it, if that is to be committed."""

    choice: Choice
    batch: Batch | None = None


def decode_ahead(
    model: Model, read: Callable[[], Array], kv: KVSequence, pick: Sampler, metrics: Metrics
) -> Iterator[int]:
    """Yield token ids without end, of which `read`, the prefill, gives the first.

    Raises:
        CacheFullError: there is no room for the next token. No pass is begun that there is no room for.
    """
    begun: _Begun | None = None
    try:
        while True:
            with model.backend.session():
                resumed = metrics.clock()
                now = begun or _Begun(_choose(model, read(), pick))
                begun = _begin_next(model, now.choice, kv, pick)
                asked = metrics.clock()
                token = pick.settle(now.choice)
                if now.batch is not None:
                    now.batch.commit()
                metrics.record_interval(resumed, asked)
            yield token
            read = _reader(model, token, kv)
    finally:
        kv.roll_back(kv.pending)


def _reader(model: Model, token: int, kv: KVSequence) -> Callable[[], Array]:
    return lambda: forward(model, New([token], kv))


def _choose(model: Model, logits: Array, pick: Sampler) -> Choice:
    (token,) = model.backend.choose(logits, [pick.draw()])
    model.backend.begin(token)
    return pick.add(token, logits)


def _begin_next(model: Model, chosen: Choice, kv: KVSequence, pick: Sampler) -> _Begun | None:
    """Begin the pass that reads what was chosen; return None where there is no room for it."""
    try:
        batch = begin([New([chosen.token], kv)])
    except CacheFullError:
        return None
    return _Begun(_choose(model, model.forward(batch), pick), batch)
