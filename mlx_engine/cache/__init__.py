"""The KV cache: pages (`pool.py`), the page tables of sequences (`sequence.py`), and the prefix cache (`prefix.py`)."""

from mlx_engine.cache.batch import New, begin
from mlx_engine.cache.pool import KVLayer, KVPool
from mlx_engine.cache.prefix import Match, PrefixCache
from mlx_engine.cache.sequence import KVSequence

__all__ = ["KVLayer", "KVPool", "KVSequence", "Match", "New", "PrefixCache", "begin"]
