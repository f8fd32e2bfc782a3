"""Key/value caches: what they promise (`base`), and the layouts that keep it."""

from mlx_engine.cache.base import Cache
from mlx_engine.cache.full import FullCache
from mlx_engine.cache.nothing import NoCache

__all__ = ["Cache", "FullCache", "NoCache"]
