"""How many bytes a cache takes: arithmetic on a model's sizes, so that it can be said before there is one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlx_engine.cache.sliding import STEP, slots_for

BYTES_PER_FLOAT = 4


@dataclass(frozen=True)
class CacheSize:
    """A cache of float32 keys and values for up to `n_tokens` tokens.

    Attributes:
        n_local: how many of the layers see no more than a `window` of the latest tokens.
        chunk: tokens of the longest pass.
    """

    n_layers: int
    n_kv_heads: int
    head_dim: int
    n_tokens: int
    n_local: int = 0
    window: int = 0
    chunk: int = STEP

    @classmethod
    def of(cls, config: Any, n_tokens: int, chunk: int) -> CacheSize:
        """That of a model of these sizes."""
        local = getattr(config, "is_local", ())
        return cls(
            config.n_layers,
            config.n_kv_heads,
            config.head_dim,
            n_tokens,
            n_local=sum(local),
            window=config.window if local else 0,
            chunk=max(STEP, min(chunk, n_tokens)),
        )

    @property
    def whole(self) -> int:
        """Bytes if every layer remembered every token."""
        return self.n_layers * self._layer(self.n_tokens)

    @property
    def held(self) -> int:
        """Bytes that are held once the last token has been read: local layers keep their window."""
        local = self._layer(slots_for(self.n_tokens, self.window, self.chunk)) if self.n_local else 0
        return (self.n_layers - self.n_local) * self._layer(self.n_tokens) + self.n_local * local

    def _layer(self, slots: int) -> int:
        return 2 * self.n_kv_heads * slots * self.head_dim * BYTES_PER_FLOAT
