"""Experts that do not fit into memory: a thread reads them from the file while other weights are multiplied.

Experts are views of the mapped file, and the system drops some of their pages when memory is full. A page fault reads a
few pages and stops the pass meanwhile. So before a mixture's products its kernel writes two notes to a pipe: the
experts that its router has chosen, and a guess, the experts that the router of the next layer chooses for the same
hidden states. The thread asks the system to read those that are not in memory. The kernel never waits for the thread.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from mmap import MADV_RANDOM, MADV_WILLNEED, PAGESIZE

import numpy as np

from mlx_engine.backends.cpu.descriptors import ExpertBlock
from mlx_engine.kernels.cpu.build import layout
from mlx_engine.machine.memory import is_mapped

# Bytes that the system is asked for at a time: it reads fewer than asked beyond a limit of the disk.
PIECE = 1 << 19
_NOTE_BYTES = 8 * layout.NOTE_WIDTH


class ExpertReader:
    """The thread, and the mixtures whose experts it reads."""

    def __init__(self) -> None:
        self._system = ctypes.CDLL(None)  # keeps the address of `write` valid
        self._write = ctypes.cast(self._system.write, ctypes.c_void_p).value or 0
        self._system.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._system.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        source, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        self._notes: list[np.ndarray] = []
        # By mixture and expert, the addresses of its matrices, and their bytes.
        self._mixtures: list[list[list[tuple[int, int]]]] = []
        self._last: ExpertBlock | None = None
        thread = threading.Thread(
            target=_read, args=(source, self._mixtures, self._system), name="mlx_engine-experts", daemon=True
        )
        thread.start()
        self.close = weakref.finalize(self, os.close, self._pipe)  # ends the thread

    def add(self, block: ExpertBlock) -> None:
        """Read the experts of a mixture, whose layer follows that of the mixture before."""
        experts = [_matrices(block, expert) for expert in range(block.n_experts)]
        if not any(experts) or block.n_experts > layout.MOST_NOTED:
            return
        for at, nbytes in (matrix for expert in experts for matrix in expert):
            # A page fault would read what lies around the page, up to megabytes, in part of other experts.
            self._system.madvise(at, nbytes, MADV_RANDOM)
        note, words = np.zeros(layout.NOTE_WIDTH, dtype=np.int64), block.descriptor
        note[0] = len(self._mixtures)
        self._notes.append(note)
        self._mixtures.append(experts)
        words[layout.EX_WRITE], words[layout.EX_PIPE] = self._write, self._pipe
        words[layout.EX_NOTE] = note.ctypes.data
        before, self._last = self._last, block
        if before is not None and (before.n_experts, before.n_used, before.width) == (
            block.n_experts, block.n_used, block.width,
        ):  # fmt: skip
            before.descriptor[layout.EX_NEXT] = block.address


def _matrices(block: ExpertBlock, expert: int) -> list[tuple[int, int]]:
    """Return the addresses and bytes of the mapped matrices of an expert, from the first byte of a memory page on."""
    found = []
    for linear in (linear for of in block.blocks[expert] for linear in of.linears):
        data: np.ndarray = linear.weight.data
        if is_mapped(data):
            first = data.ctypes.data // PAGESIZE * PAGESIZE
            found.append((first, data.ctypes.data + data.nbytes - first))
    return found


def _read(source: int, mixtures: list[list[list[tuple[int, int]]]], system: ctypes.CDLL) -> None:
    """Read the noted experts until the pipe is closed. The system reads only the pages that are not in memory."""
    while notes := os.read(source, _NOTE_BYTES * 16):
        # Earlier notes are of layers that have been computed meanwhile.
        for number, *bits in np.frombuffer(notes, np.int64).reshape(-1, layout.NOTE_WIDTH)[-2:]:
            experts = np.unpackbits(np.array(bits).view(np.uint8), bitorder="little").nonzero()[0]
            for at, nbytes in (matrix for expert in experts for matrix in mixtures[number][expert]):
                _read_matrix(at, nbytes, system)
    os.close(source)


def _read_matrix(at: int, nbytes: int, system: ctypes.CDLL) -> None:
    are_in_memory = np.empty(-(-nbytes // PAGESIZE), np.uint8)
    system.mincore(at, nbytes, are_in_memory.ctypes.data)
    if not are_in_memory.all():
        for first in range(0, nbytes, PIECE):
            if not are_in_memory[first // PAGESIZE : (first + PIECE) // PAGESIZE].all():
                system.madvise(at + first, min(PIECE, nbytes - first), MADV_WILLNEED)
