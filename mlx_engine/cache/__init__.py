"""The KV cache: a pool of pages (`pool.py`), and the page tables of sequences (`sequence.py`)."""

from mlx_engine.cache.batch import New, begin
from mlx_engine.cache.pool import KVLayer, KVPool
from mlx_engine.cache.sequence import KVSequence

__all__ = ["KVLayer", "KVPool", "KVSequence", "New", "begin"]
