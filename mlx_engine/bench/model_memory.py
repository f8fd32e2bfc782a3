"""The memory of a model's matrices as int64 words, for kernels that only read it."""

from __future__ import annotations

import numpy as np

from mlx_engine.backends.cpu.descriptors import Matrix
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.engine import Engine
from mlx_engine.schedule.traffic import linears

# Arrays with fewer bytes than this in all are concatenated: a call per array would take as long as reading it.
SMALL = 64 << 20


def matrices(engine: Engine, checkpoint: Checkpoint) -> list[np.ndarray]:
    """Return the matrices that a pass reads, each once; the file's bytes if NumPy cannot view the backend's arrays."""
    found: dict[int, np.ndarray] = {}
    for value in vars(engine.model).values():
        for linear in linears(value):
            weight = linear.weight
            memory = weight.data if isinstance(weight, Matrix) else weight
            if isinstance(memory, np.ndarray) and memory.flags.c_contiguous:
                found[memory.ctypes.data] = memory
    return list(found.values()) or [checkpoint.weight(name).data for name in checkpoint.shapes]


def in_words(array: np.ndarray) -> np.ndarray:
    """View the memory of an array as int64, without unaligned bytes at its ends."""
    raw = array.reshape(-1).view(np.uint8)
    first = min(-raw.ctypes.data % 8, raw.size)
    words = raw[first : first + (raw.size - first) // 8 * 8].view(np.int64)
    # All read-only: the kernel would be compiled a second time for writable arrays.
    words.flags.writeable = False
    return words


def side_by_side(words: list[np.ndarray]) -> list[np.ndarray]:
    """Return the arrays, concatenated into one copy if they are small: they fit into the cache in both cases."""
    return [in_words(np.concatenate(words))] if sum(w.nbytes for w in words) < SMALL else words
