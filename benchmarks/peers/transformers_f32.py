"""transformers on PyTorch, eager, float32: what most people start from. The weights are the file's, expanded."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.peers.loop import Answer, Peer, Request
from mlx_engine.bench.hugging_face import Checkpoint, open_qwen3


def open_peer(request: Request) -> Peer:
    """Read a folder, or expand the file of a Qwen3."""
    path = Path(request["model"])
    return Transformers(_from_folder(path) if path.is_dir() else _from_qwen3(open_qwen3(path)))


def _from_folder(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def _from_qwen3(checkpoint: Checkpoint) -> Any:
    settings = dict(checkpoint.settings)
    rope = {"rope_type": "default", "rope_theta": settings.pop("rope_theta")}
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**settings, rope_parameters=rope)).to(torch.float32)
    weights = {name: torch.from_numpy(weight.dequantize()) for name, weight in checkpoint.weights}
    # A tied head has no weights of its own, and takes the table's.
    found = model.load_state_dict(weights, strict=False)
    if found.unexpected_keys or set(found.missing_keys) - {"lm_head.weight"}:
        raise RuntimeError(f"transformers: expected the same tensors, found {found}")
    model.tie_weights()
    return model


class Transformers(Peer):
    """transformers' own model and cache."""

    def __init__(self, model: Any) -> None:
        self._model = model.eval()
        self.n_vocab = model.config.vocab_size
        self._cache = transformers.DynamicCache(config=model.config)

    def facts(self) -> Answer:
        """Both versions."""
        return {"versions": {name: metadata.version(name) for name in ("transformers", "torch")}}

    def use_threads(self, n: int | None) -> None:
        """PyTorch takes all cores by itself."""
        if n is not None:
            torch.set_num_threads(n)

    def rewind(self, length: int) -> None:
        """Crop every layer."""
        if (found := self._cache.get_seq_length()) > length:
            self._cache.crop(length - found)  # how many less

    def read(self, ids: Sequence[int]) -> int:
        """Logits of the last token only, as `generate` asks for them."""
        with torch.inference_mode():
            out = self._model(torch.tensor([list(ids)]), past_key_values=self._cache, logits_to_keep=1)
        return int(out.logits[0, -1].argmax())

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Without a cache."""
        with torch.inference_mode():
            return np.asarray(self._model(torch.tensor([list(ids)]), use_cache=False).logits[0])
