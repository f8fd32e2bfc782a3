"""Experts that do not fit into memory: a thread reads them from the file while other weights are multiplied.

Experts are views of the mapped file, and the system drops some of their pages when memory is full. A page fault reads a
few pages and stops the pass meanwhile. So before a mixture's products its kernel writes two notes to a pipe: the
experts that its router has chosen, and a guess, the experts that the router of the next layer chooses for the same
hidden states. The thread asks the system to read those that are not in memory. The kernel never waits for the thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import threading
import weakref
from mmap import MADV_RANDOM, MADV_WILLNEED, PAGESIZE

import numpy as np

from mlx_engine.backends.cpu.descriptors import ExpertBlock
from mlx_engine.kernels.cpu.build import layout
from mlx_engine.machine.memory import is_mapped, read_around, tells_pages

# A page fault reads what lies around the page, on most systems 128 KiB. If it would read more than this, in part of
# other experts, faults of experts read single pages.
MOST_AROUND = 1 << 19
# Linux does not notice that such pages are used, and would drop them in the order in which they were read. This advice,
# for which Python has no name, marks pages that are in memory as used.
MADV_POPULATE_READ = 22
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
        # Those of them whose pages are marked as used; and the bytes that a page fault reads.
        self._marked = set[int]()
        # And those whose file is another user's, so that the system does not tell which of their pages are in memory.
        self._hidden = set[int]()
        self._around: int | None = None
        self._last: ExpertBlock | None = None
        thread = threading.Thread(
            target=_read,
            args=(source, self._mixtures, self._marked, self._hidden, self._system),
            name="mlx_engine-experts",
            daemon=True,
        )
        thread.start()
        self.close = weakref.finalize(self, _end, self._pipe, os.getpid())

    def add(self, block: ExpertBlock) -> None:
        """Read the experts of a mixture, whose layer follows that of the mixture before."""
        experts = [_matrices(block, expert) for expert in range(block.n_experts)]
        if not any(experts) or block.n_experts > layout.MOST_NOTED:
            return
        matrices = [matrix for expert in experts for matrix in expert]
        if self._around is None:
            self._around = read_around(matrices[0][0])
        if not tells_pages(matrices[0][0]):
            self._hidden.add(len(self._mixtures))
        elif self._around > MOST_AROUND:
            self._marked.add(len(self._mixtures))
            for at, nbytes in matrices:
                self._system.madvise(at, nbytes, MADV_RANDOM)
        note, words = np.zeros(layout.NOTE_WIDTH, dtype=np.int64), block.descriptor
        note[layout.NOTE_NUMBER] = len(self._mixtures)
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


def _end(pipe: int, process: int) -> None:
    """End the thread, also if a forked process keeps the pipe open; in a forked process, close its copy alone."""
    if os.getpid() == process:
        with contextlib.suppress(BlockingIOError):  # a full pipe: the thread ends when it has read it
            os.write(pipe, np.full(layout.NOTE_WIDTH, -1, np.int64).tobytes())
    os.close(pipe)


def _read(
    source: int, mixtures: list[list[list[tuple[int, int]]]], marked: set[int], hidden: set[int], system: ctypes.CDLL
) -> None:
    """Read the noted experts until `_end`; mark those of `marked` mixtures that are in memory as used.

    All pages of `hidden` mixtures are asked for.
    """
    try:
        _read_notes(source, mixtures, marked, hidden, system)
    finally:
        os.close(source)


def _read_notes(
    source: int, mixtures: list[list[list[tuple[int, int]]]], marked: set[int], hidden: set[int], system: ctypes.CDLL
) -> None:
    news = select.poll()  # `select.select` takes no descriptor above 1023
    news.register(source, select.POLLIN)
    while notes := os.read(source, _NOTE_BYTES * 16):
        # Earlier notes are of layers that have been computed meanwhile.
        for number, is_guess, *bits in np.frombuffer(notes, np.int64).reshape(-1, layout.NOTE_WIDTH)[-2:]:
            if number < 0:
                return
            experts = np.unpackbits(np.array(bits).view(np.uint8), bitorder="little").nonzero()[0]
            complete = []
            for at, nbytes in (matrix for expert in experts for matrix in mixtures[number][expert]):
                if is_guess and news.poll(0):  # such as the choices
                    break
                if not _read_missing(at, nbytes, system, is_hidden=number in hidden):
                    complete.append((at, nbytes))
            for at, nbytes in complete if number in marked and not is_guess else ():
                if news.poll(0):
                    break
                system.madvise(at, nbytes, MADV_POPULATE_READ)


def _read_missing(at: int, nbytes: int, system: ctypes.CDLL, *, is_hidden: bool) -> bool:
    """Let the system read the pieces of a matrix that are not in memory; return whether there may be any."""
    are_in_memory = np.zeros(-(-nbytes // PAGESIZE), np.uint8)
    if not is_hidden:
        system.mincore(at, nbytes, are_in_memory.ctypes.data)
    if are_in_memory.all():
        return False
    for first in range(0, nbytes, PIECE):
        if not are_in_memory[first // PAGESIZE : (first + PIECE) // PAGESIZE].all():
            system.madvise(at + first, min(PIECE, nbytes - first), MADV_WILLNEED)
    return True
