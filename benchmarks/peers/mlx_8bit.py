"""Run mlx-lm for the benchmarks, on MLX's default device.

mlx-lm cannot read GGUF files, so the Q8_0 blocks of the file are repacked to MLX's format, without rounding. The type
of the scales determines the type of activations: float16 on a GPU, as in mlx-lm's own folders, and float32 on a CPU,
where 16-bit activations are far slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.nn.layers.quantized import quantize
from mlx_lm.models import qwen3
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from benchmarks.peers.hugging_face import BITS, GROUP, Checkpoint, open_qwen3, repacked
from benchmarks.peers.loop import Answer, Peer, Request


def open_peer(request: Request) -> Peer:
    """Repack the file and load it."""
    return MLX(open_qwen3(Path(request["model"])))


class MLX(Peer):
    """mlx-lm's own model and cache."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.n_vocab = checkpoint.settings["vocab_size"]
        self._model = qwen3.Model(qwen3.ModelArgs.from_dict(checkpoint.settings))
        # MLX is lazy: the random weights quantised here are replaced below before they are computed.
        quantize(self._model, group_size=GROUP, bits=BITS)
        arrays = (part for name, weight in checkpoint.weights for part in repacked(name, weight).items())
        floats = mx.float16 if mx.default_device() == mx.gpu else mx.float32
        made = ((name, mx.array(array)) for name, array in arrays)
        weights = [(name, array if array.dtype == mx.uint32 else array.astype(floats)) for name, array in made]
        self._model.load_weights(weights)
        mx.eval(self._model.parameters())
        self._cache = make_prompt_cache(self._model)

    def facts(self) -> Answer:
        """Return the versions of mlx-lm and MLX, and the device."""
        versions = {name: metadata.version(name) for name in ("mlx-lm", "mlx")}
        return {"versions": versions, "device": str(mx.default_device())}

    def rewind(self, length: int) -> None:
        """Trim the KV cache of every layer."""
        trim_prompt_cache(self._cache, self._cache[0].offset - length)

    def read(self, ids: Sequence[int]) -> int:
        """Read ids; mlx-lm's model computes logits of all tokens, of which the last are used."""
        logits = self._model(mx.array([list(ids)]), cache=self._cache)
        return int(np.argmax(np.asarray(logits[0, -1])))

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Return the logits of all tokens, without a KV cache."""
        return np.asarray(self._model(mx.array([list(ids)]))[0].astype(mx.float32))
