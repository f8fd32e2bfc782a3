"""The KV cache: pages (`pool.py`), recurrent states (`states.py`), sequences (`sequence.py`), and the prefix cache.

`prefix.py` has the prefix cache in memory, and `disk.py` its files.
"""

from mlx_engine.cache.pool import CacheLayer, KVLayer, KVPool
from mlx_engine.cache.prefix import PrefixCache
from mlx_engine.cache.sequence import KVSequence, SequenceInput, begin
from mlx_engine.cache.states import StateLayer

__all__ = [
    "CacheLayer",
    "KVLayer",
    "KVPool",
    "KVSequence",
    "PrefixCache",
    "SequenceInput",
    "StateLayer",
    "begin",
]
