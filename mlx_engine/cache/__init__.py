"""The KV cache: pages, recurrent states, sequences, and the prefix cache (`prefix.py`) with its files (`disk.py`)."""

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
