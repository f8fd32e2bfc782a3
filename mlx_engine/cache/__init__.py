"""The KV cache: pages (`pool.py`), states (`states.py`), sequences (`sequence.py`), the prefix cache (`prefix.py`)."""

from mlx_engine.cache.batch import SequenceInput, begin
from mlx_engine.cache.pool import CacheLayer, KVLayer, KVPool
from mlx_engine.cache.prefix import Match, PrefixCache
from mlx_engine.cache.sequence import KVSequence
from mlx_engine.cache.states import StateLayer

__all__ = [
    "CacheLayer",
    "KVLayer",
    "KVPool",
    "KVSequence",
    "Match",
    "PrefixCache",
    "SequenceInput",
    "StateLayer",
    "begin",
]
