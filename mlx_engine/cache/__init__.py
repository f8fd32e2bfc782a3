"""Key/value caches: what they promise (`base`), and the layouts that keep it."""

from mlx_engine.cache.base import Cache
from mlx_engine.cache.full import FullCache
from mlx_engine.cache.mixed import MixedCache
from mlx_engine.cache.nothing import NoCache
from mlx_engine.cache.sliding import SlidingCache

__all__ = ["Cache", "FullCache", "MixedCache", "NoCache", "SlidingCache"]
