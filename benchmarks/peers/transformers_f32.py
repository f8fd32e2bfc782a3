"""Run transformers for the benchmarks, on PyTorch in eager mode, with the file's weights expanded to float32."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.peers.hugging_face import Checkpoint, open_qwen3
from benchmarks.peers.loop import Answer, Peer, Request


def open_peer(request: Request) -> Peer:
    """Load a folder, or expand the GGUF file of a Qwen3."""
    path = Path(request["model"])
    return Transformers(_from_folder(path) if path.is_dir() else from_qwen3(open_qwen3(path)))


def _from_folder(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def from_qwen3(checkpoint: Checkpoint) -> Any:
    """Return transformers' model with the checkpoint's weights in float32."""
    settings = dict(checkpoint.settings)
    rope = {"rope_type": "default", "rope_theta": settings.pop("rope_theta")}
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**settings, rope_parameters=rope)).to(torch.float32)
    weights = {name: torch.from_numpy(weight.dequantize()) for name, weight in checkpoint.weights}
    # A tied head has no weights in the file: it shares those of the embedding table.
    found = model.load_state_dict(weights, strict=False)
    if found.unexpected_keys or set(found.missing_keys) - {"lm_head.weight"}:
        raise RuntimeError(f"transformers: expected the same tensors, found {found}")
    model.tie_weights()
    return model


class Transformers(Peer):
    """transformers' model and KV cache."""

    def __init__(self, model: Any) -> None:
        self._model = model.eval()
        self.n_vocab = model.config.vocab_size
        self._cache = transformers.DynamicCache(config=model.config)

    def facts(self) -> Answer:
        """Return the versions of transformers and PyTorch."""
        return {"versions": {name: metadata.version(name) for name in ("transformers", "torch")}}

    def use_threads(self, n: int | None) -> None:
        """Set the number of threads; without a number PyTorch uses all cores."""
        if n is not None:
            torch.set_num_threads(n)

    def rewind(self, length: int) -> None:
        """Crop the KV cache of every layer."""
        if (found := self._cache.get_seq_length()) > length:
            self._cache.crop(length - found)  # a negative number: tokens to drop

    def read(self, ids: Sequence[int]) -> int:
        """Read ids; only the last token's logits are computed, as in transformers' `generate`."""
        with torch.inference_mode():
            out = self._model(torch.tensor([list(ids)]), past_key_values=self._cache, logits_to_keep=1)
        return int(out.logits[0, -1].argmax())

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Return the logits of all tokens, without a KV cache."""
        with torch.inference_mode():
            return np.asarray(self._model(torch.tensor([list(ids)]), use_cache=False).logits[0])
