"""Read experts that do not fit into memory from the file, in a thread, while the kernels multiply other weights.

Experts are views of the mapped file, and the operating system drops some of their memory pages when memory is full. A
page fault would read only a few pages, and the pass would wait for them. So before the products of a mixture of
experts, its kernel writes two notes (short messages) to a pipe. The first has the experts that its router has chosen.
The second is a guess of the experts of the next layer: those that the next layer's router chooses for the hidden states
of this layer. The thread asks the operating system to read the noted experts that are not in memory. The kernel never
waits for the thread.
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

# A page fault also reads the bytes around the page, on most systems 128 KiB. If a system reads more bytes than this, in
# part of other experts, it is told to read only single pages at faults of experts (MADV_RANDOM).
MOST_AROUND = 1 << 19
# With MADV_RANDOM, Linux does not notice which pages are used, and would drop pages in the order in which they were
# read. This advice, for which Python has no name, marks pages that are in memory as used.
MADV_POPULATE_READ = 22
# The number of bytes of one request to read. A disk has a limit, above which the system reads fewer bytes than asked.
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
        # For each mixture and each of its experts, the addresses and the sizes in bytes of its matrices.
        self._mixtures: list[list[list[tuple[int, int]]]] = []
        # The numbers of the mixtures whose pages the thread marks as used (MADV_POPULATE_READ).
        self._marked = set[int]()
        # The numbers of the mixtures whose file belongs to another user, so that the system does not say which of their
        # pages are in memory; and the number of bytes that a page fault reads.
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
        """Read the experts of a mixture ahead from now on. Call this for the mixtures in the order of their layers."""
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
    """Return the address and the number of bytes of each mapped matrix of an expert.

    An address is rounded down to the beginning of a memory page.
    """
    found = []
    for linear in (linear for of in block.blocks[expert] for linear in of.linears):
        data: np.ndarray = linear.weight.data
        if is_mapped(data):
            first = data.ctypes.data // PAGESIZE * PAGESIZE
            found.append((first, data.ctypes.data + data.nbytes - first))
    return found


def _end(pipe: int, process: int) -> None:
    """Tell the thread to end, and close the pipe. In a forked process, which has no such thread, only close the pipe.

    Closing the pipe would not be enough if a forked process keeps it open, so a note tells the thread to end.
    """
    if os.getpid() == process:
        with contextlib.suppress(BlockingIOError):  # the pipe is full: the thread reads it, and ends as it is closed
            os.write(pipe, np.full(layout.NOTE_WIDTH, -1, np.int64).tobytes())
    os.close(pipe)


def _read(
    source: int, mixtures: list[list[list[tuple[int, int]]]], marked: set[int], hidden: set[int], system: ctypes.CDLL
) -> None:
    """Run the thread: ask the system to read the noted experts, until `_end` is called.

    Args:
        source: the end of the pipe from which notes are read.
        mixtures: for each mixture and expert, the addresses and sizes of its matrices.
        marked: the mixtures whose pages are marked as used if they are in memory.
        hidden: the mixtures all of whose pages are requested, because it is unknown which of them are in memory.
        system: the C library.
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
        # Only the last two notes matter: the layers of earlier notes have been computed meanwhile.
        for number, is_guess, *bits in np.frombuffer(notes, np.int64).reshape(-1, layout.NOTE_WIDTH)[-2:]:
            if number < 0:
                return
            experts = np.unpackbits(np.array(bits).view(np.uint8), bitorder="little").nonzero()[0]
            complete = []
            for at, nbytes in (matrix for expert in experts for matrix in mixtures[number][expert]):
                if is_guess and news.poll(0):  # a newer note, which may have the actual choices
                    break
                if not _read_missing(at, nbytes, system, is_hidden=number in hidden):
                    complete.append((at, nbytes))
            for at, nbytes in complete if number in marked and not is_guess else ():
                if news.poll(0):
                    break
                system.madvise(at, nbytes, MADV_POPULATE_READ)


def _read_missing(at: int, nbytes: int, system: ctypes.CDLL, *, is_hidden: bool) -> bool:
    """Ask the system to read those pieces of a matrix that are not in memory; return whether any may be missing."""
    are_in_memory = np.zeros(-(-nbytes // PAGESIZE), np.uint8)
    if not is_hidden:
        system.mincore(at, nbytes, are_in_memory.ctypes.data)
    if are_in_memory.all():
        return False
    for first in range(0, nbytes, PIECE):
        if not are_in_memory[first // PAGESIZE : (first + PIECE) // PAGESIZE].all():
            system.madvise(at + first, min(PIECE, nbytes - first), MADV_WILLNEED)
    return True
