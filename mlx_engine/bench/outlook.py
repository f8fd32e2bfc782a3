"""Predict whether a model fits this machine's memory, and how fast it would decode, for the command `inspect`.

The predicted rate is the memory bandwidth divided by the bytes read per token.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from mlx_engine.backends import auto, create_backend
from mlx_engine.backends.experts import share_missed
from mlx_engine.bench.origin import cache_bytes
from mlx_engine.bench.roofline import MOST_BYTES, bandwidth_of
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.errors import ContextLengthError
from mlx_engine.loop.memory import Traffic
from mlx_engine.machine.memory import available_memory
from mlx_engine.weights.conversion import Conversion
from mlx_engine.weights.model import plan_model
from mlx_engine.weights.outline import need_of, outlined

# The default context in tokens, unless the model's context is shorter. Most conversations fit into it.
USUAL_CONTEXT = 4096
# Backends whose rate is unknown: their weights are Python objects, so decode is limited by arithmetic, not by memory.
NOT_BOUND = ("scalar",)


@dataclass(frozen=True)
class Outlook:
    """The memory and the expected speed of a model on this machine.

    Attributes:
        weights_bytes: bytes of the weights in memory, in the backend's form, including `experts_held_bytes`.
        left_bytes: bytes of embedding tables that stay in the file, which `weights_bytes` does not include.
        context: tokens of the prompt and the answer together.
        kv_bytes: bytes of keys and values of `context` tokens.
        decode_bytes: bytes that a pass of one token reads when the context is full.
        available_bytes: bytes of memory that are free on this machine.
        experts_bytes: bytes of all experts, in memory or not.
        experts_held_bytes: bytes of the experts in memory.
        experts_read_bytes: bytes of experts that a token is expected to read from the file, if successive tokens share
            as many experts as in Qwen3-30B-A3B.
    """

    backend: str
    weights_bytes: int
    left_bytes: int
    context: int
    kv_bytes: int
    decode_bytes: int
    available_bytes: int
    experts_bytes: int = 0
    experts_held_bytes: int = 0
    experts_read_bytes: int = 0

    @property
    def fits(self) -> bool:
        """Whether weights, keys and values fit into the available memory."""
        return self.weights_bytes + self.kv_bytes <= self.available_bytes

    def rate(self, bandwidth: float | None) -> float | None:
        """Return the tokens/s of decode at a full context, if memory is read at `bandwidth` bytes/s.

        Return None if `bandwidth` is None, if the backend is in `NOT_BOUND`, or if experts are read from the disk,
        whose speed is unknown.
        """
        is_unknown = bandwidth is None or self.backend in NOT_BOUND or self.experts_read_bytes > 0
        return None if bandwidth is None or is_unknown else bandwidth / self.decode_bytes

    def summary(self) -> dict[str, Any]:
        """Return the attributes and `fits`."""
        return {**asdict(self), "fits": self.fits}


def outlook(
    path: Path, backend: str = "auto", context: int | None = None, experts_memory: int | None = None
) -> Outlook:
    """Return the `Outlook` of the model of a file or folder, without loading its weights.

    Args:
        path: a GGUF file or a folder.
        backend: "auto" is the fastest on this machine.
        context: tokens of prompt and answer; None is the model's context, but at most 4,096.
        experts_memory: the most bytes of experts in memory. If None, all experts are in memory, unless they do not
            fit and the backend can read experts from the file; then as many as fit are in memory.

    Raises:
        EngineError: loading the model would raise the same error.
        ContextLengthError: the model's context is shorter than `context`.
    """
    name = auto() if backend == "auto" else backend
    made = create_backend(name)
    checkpoint = open_checkpoint(path)
    found = outlined(plan_model(checkpoint, Conversion()), made)
    longest = int(found.model.config.context_length)
    if context is not None and context > longest:
        message = f"context must be at most {longest:,} tokens, the model's context, not {context:,}"
        raise ContextLengthError(message, option="context", found=context)
    n_tokens = min(longest, USUAL_CONTEXT) if context is None else context
    kv = SimpleNamespace(length=n_tokens)
    part: Any = SimpleNamespace(sequence=SimpleNamespace(kv=kv), n=1)
    traffic = Traffic.of(found.model, found.model.new_pool(1))
    need, available, experts = need_of(found, n_tokens), available_memory(), found.sizes.expert_nbytes
    held = experts
    if experts_memory is not None:
        held = round(experts * found.share_of_experts(made, experts_memory, checkpoint.where))
    elif made.holds_some_experts and found.sizes.has_only_mapped_experts and need.total > available:
        held = min(experts, need.for_experts(available))
    config: Any = found.model.config
    chosen = experts * config.n_experts_used / config.n_experts if experts else 0
    return Outlook(
        backend=name,
        weights_bytes=need.weights - experts + held,
        left_bytes=found.sizes.left_nbytes,
        context=n_tokens,
        kv_bytes=need.kv,
        decode_bytes=round(traffic.nbytes([part])),
        available_bytes=available,
        experts_bytes=experts,
        experts_held_bytes=held,
        experts_read_bytes=round(chosen * share_missed(held / experts)) if experts else 0,
    )


def machine_bandwidth(threads: int) -> float | None:
    """Measure and return the bytes per second that `threads` threads read from memory.

    Return None if the cache sizes are unknown, or if the largest cache is too large to measure memory: at most
    `MOST_BYTES` are read, and the cache could hold more than half of these bytes.
    """
    cache = cache_bytes()
    if cache is None or 2 * cache > MOST_BYTES:
        return None
    nbytes = min(MOST_BYTES, max(1 << 26, 4 * cache))
    words = np.ones(nbytes // 8, np.int64)
    words.flags.writeable = False
    return bandwidth_of([words], threads)
