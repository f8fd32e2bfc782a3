"""Keys and values of the tokens read so far: pages of memory (`pool.py`), and the sequences that hold them."""

from mlx_engine.cache.batch import New, begin
from mlx_engine.cache.pool import KVLayer, KVPool
from mlx_engine.cache.sequence import KVSequence

__all__ = ["KVLayer", "KVPool", "KVSequence", "New", "begin"]
