"""Keep a bounded number of experts in memory. A thread reads missing experts in place of those chosen least often.

A mixture is the experts of a layer; a slot is memory for one expert. For each mixture, the kernels and the thread share
a state (`STATE_ROWS` in `kernels/cpu/build/layout.py`). Before its products, a kernel marks the chosen experts in this
state, and writes a note (a number) to a pipe. If the pass has few tokens (at most `PROGRAM_TOKENS`), the kernel also
marks, as guessed, the experts that the router of the next mixture would choose for the same hidden states. The thread
reads the chosen experts first, and then the guessed ones. In a pass of few tokens, a kernel multiplies each chosen
expert as soon as it is in memory, and waits only if all chosen experts that it has not multiplied yet are missing.

A held expert is not replaced. A pass of few tokens holds every chosen expert until it has been multiplied. A pass of
many tokens holds only the expert that is being multiplied. Such a pass uses nearly all experts of each mixture, in
ascending order. If no slot of a mixture is free, its missing experts are read into the two slots of the experts that
were chosen least often, so that the other experts stay in memory.

Reads bypass the system's page cache, which would keep a second copy. The thread reads one whole matrix at a time. This
reaches the peak rate of the disk, because the system splits such a read into many requests.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import select
import threading
import weakref
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from mlx_engine.backends.cpu.descriptors import ExpertBlock, address
from mlx_engine.backends.experts import Residents
from mlx_engine.backends.parameters import Linear
from mlx_engine.errors import ModelError, SourceError
from mlx_engine.kernels.cpu.build import layout
from mlx_engine.kernels.cpu.build.library import Library
from mlx_engine.machine.memory import MappedRange, Promised, mapped_range

# The number of slots for missing experts in a pass of many tokens.
PASSAGES = 2


class HeldExperts(tuple[Linear, ...]):
    """One linear layer (gate, up or down) of all experts of a mixture, as views of a mapped file.

    `ExpertCache` keeps copies of at most `n_slots` experts in memory.
    """

    n_slots: int

    @property
    def nbytes(self) -> int:
        return sum(linear.weight.nbytes for linear in self)


class ExpertCache:
    """The mixtures that have only some of their experts in memory, and the thread that reads missing experts."""

    def __init__(self, library: Library) -> None:
        self._library, self._blocks = library, list[tuple[ExpertBlock, int]]()
        self._start()

    def add(self, block: ExpertBlock, n_slots: int) -> None:
        """Add a mixture, with as many slots as fit into the bytes of `n_slots` experts, but at least one slot.

        A slot has whole memory pages for each matrix, so it can be larger than an expert. Mixtures are added in
        the order of their layers.

        Raises:
            ModelError: the experts are expanded on load instead of multiplied as the file stores them, or the file
                stores them in several types.
            SourceError: the file cannot be opened, or has been replaced.
        """
        self._reader.add(block, n_slots)
        self._blocks.append((block, n_slots))

    def renew(self) -> None:
        """Prepare a pass. If the read of a guessed expert failed after the last `check`, discard the error.

        In a forked process, instead start a new thread, and begin without experts in memory.
        """
        if self._process == os.getpid():
            self._reader.take_error()
        else:
            self.close.detach()
            self._reader.close_pipes()
            self._start(self._reader.files)

    def check(self) -> None:
        """After a call of the kernels, raise the error of a failed read, if any. The next pass tries again."""
        error = self._reader.take_error()
        if error is not None:
            raise error.with_traceback(None)

    @property
    def n_bytes_read(self) -> int:
        return self._reader.n_bytes_read

    def _start(self, files: Mapping[str, int] = MappingProxyType({})) -> None:
        self._process = os.getpid()
        self._reader = _Reader(self._library, files)
        for block, n_slots in self._blocks:
            self._reader.add(block, n_slots)
        thread = threading.Thread(target=self._reader.run, name="mlx_engine-experts", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _end, self._reader, thread, self._process)


def _end(reader: _Reader, thread: threading.Thread, process: int) -> None:
    """End the thread. Do nothing in a forked process, because only its parent has the thread."""
    if os.getpid() == process:
        reader.end()
        if thread is not threading.current_thread():  # this thread itself may collect the cache as garbage
            thread.join()


class _Mixture:
    """The experts of a mixture.

    Attributes:
        state: the words that kernels and the thread share. The arrays `in_memory`, `is_used`, `n_chosen` and
            `is_guessed`, with an element per expert, are views of these words.
        following: the next mixture if the kernel of this mixture guesses its experts, else None.
        has_many: whether the last pass that used this mixture had many tokens.
        passages: the slots for missing experts in the current pass of many tokens; [] until one is needed.
    """

    following: _Mixture | None = None
    has_many = False

    def __init__(self, block: ExpertBlock, n_slots: int) -> None:
        n, self.block = block.n_experts, block
        self.state = np.zeros(layout.STATE_ROWS + 4 * n, np.int64)
        self.in_memory, self.is_used, self.n_chosen, self.is_guessed = self.state[layout.STATE_ROWS :].reshape(4, n)
        self._n_counted = self.n_chosen.copy()
        self.passages = list[int]()
        # For each expert, a list with a pair per matrix: its words in the descriptor, and its range of the file.
        self.matrices = [_matrices(block, e) for e in range(n)]
        spans = np.array([[range_.span for _, range_ in of] for of in self.matrices])
        nbytes = {tuple(range_.nbytes for _, range_ in of) for of in self.matrices}
        if len(nbytes) > 1:
            hint = "load the model without experts_memory"
            raise ModelError(f"the experts of a layer are stored in several types; {hint}")
        # The byte at which each matrix begins in a slot, and the size of a slot.
        self.starts = [0, *np.cumsum(spans.max(axis=0)).tolist()]
        n_slots = min(n, max(1, n_slots * sum(nbytes.pop()) // self.starts[-1]))
        self.residents = Residents(n, n_slots)
        self.memory = _slots(n_slots, self.starts[-1])
        self.promised = Promised(self.memory.nbytes)

    def begin(self, *, has_many: bool) -> None:
        """Begin the work for a pass: count its chosen experts, and set `has_many`."""
        n_chosen = self.n_chosen.copy()
        self.residents.count(n_chosen - self._n_counted)
        self._n_counted, self.has_many, self.passages = n_chosen, has_many, []


def _slots(n: int, nbytes: int) -> np.ndarray:
    """Return memory (n, nbytes) that forked processes do not inherit.

    On Linux before 6.5, the data of a direct read may be lost if a forked process shares the memory (`man 2 open`).
    """
    try:
        memory = mmap.mmap(-1, n * nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(str(error)) from error
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        with contextlib.suppress(AttributeError, OSError):
            memory.madvise(getattr(mmap, advice))
    return np.frombuffer(memory, np.uint8).reshape(n, nbytes)


def _matrices(block: ExpertBlock, expert: int) -> list[tuple[np.ndarray, MappedRange]]:
    found = []
    for of in block.blocks[expert]:
        for words, linear in zip(of.table(), of.linears, strict=True):
            range_ = mapped_range(linear.weight.data)
            if range_ is None:
                raise ModelError(
                    f"{linear.name}: experts_memory needs experts that the backend multiplies as the file stores them; "
                    "convert the model to a GGUF file of a type that has a kernel, such as q8_0 or q4_K_M"
                )
            found.append((words, range_))
    return found


class _Reader:
    """The data and the functions of the thread that reads experts.

    Attributes:
        error: the reason why reading has failed, or None. After an error, no expert is read until `take_error`.
        files: the file descriptors of the model's files, by path.
    """

    def __init__(self, library: Library, files: Mapping[str, int]) -> None:
        self.error: Exception | None = None
        self._failing = threading.Lock()
        self.n_bytes_read, self.files = 0, dict(files)
        self._library, self._mixtures = library, list[_Mixture]()
        # Kernels write notes to the first pipe. The thread writes a byte to the second pipe to wake a waiting kernel.
        (self._notes, self._pipe), (self._answers, self._answer) = os.pipe(), os.pipe()
        os.set_blocking(self._answer, False)
        self._system = ctypes.CDLL(None)  # keeps the addresses of its functions valid
        self._news = select.poll()  # which takes descriptors above 1023, unlike `select.select`
        self._news.register(self._notes, select.POLLIN)
        self._current: _Mixture | None = None
        self._has_guess = self._is_ended = False

    def add(self, block: ExpertBlock, n_slots: int) -> None:
        """Add a mixture. From now on, kernels multiply its experts only after this thread has read them."""
        made, before = _Mixture(block, n_slots), self._mixtures[-1] if self._mixtures else None
        for _, range_ in (each for of in made.matrices for each in of):
            self._open(range_)  # now, because the file may be replaced or deleted later
        functions = (ctypes.cast(getattr(self._system, name), ctypes.c_void_p).value or 0 for name in ("write", "read"))
        made.state[[layout.STATE_WRITE, layout.STATE_READ]] = list(functions)
        made.state[[layout.STATE_NUMBER, layout.STATE_PIPE]] = len(self._mixtures), self._pipe
        made.state[layout.STATE_ANSWERS] = self._answers
        block.descriptor[layout.EX_STATE], block.descriptor[layout.EX_NEXT] = address(made.state), 0
        self._mixtures.append(made)
        made.state[layout.STATE_FAILED] = self.error is not None
        if before is not None and before.block.guesses(block):
            before.block.descriptor[layout.EX_NEXT], before.following = block.address, made

    def end(self) -> None:
        """Make the thread end; do not wait for it."""
        os.write(self._pipe, np.int64(-1).tobytes())

    def close_pipes(self) -> None:
        for file in (self._notes, self._pipe, self._answers, self._answer):
            os.close(file)

    def run(self) -> None:
        """Read experts until `end`."""
        while not self._is_ended:
            if self.error is not None:
                self._wake()
            try:
                if self.error is not None or self._news.poll(0) or (job := self._job()) is None:
                    self._take_notes()
                else:
                    self._load(*job)
            except Exception as error:  # also if it is a bug, because kernels would otherwise wait forever
                with self._failing:
                    self.error = error
                    for mixture in self._mixtures:
                        mixture.state[layout.STATE_FAILED] = 1
        self.close_pipes()
        for file in self.files.values():
            os.close(file)

    def take_error(self) -> Exception | None:
        """Return and clear `error`, and unmark the failed pass's chosen experts. Call this while no kernel runs."""
        with self._failing:
            error = self.error
            if error is not None:
                for mixture in self._mixtures:
                    mixture.state[layout.STATE_FAILED], mixture.is_used[:] = 0, 0
                self._has_guess, self.error = False, None
        return error

    def _take_notes(self) -> None:
        """Read and process the notes of kernels; if there are no notes, wait for one."""
        for note in np.frombuffer(os.read(self._notes, 1 << 12), np.int64).tolist():
            if note < 0:
                self._is_ended = True
                return
            number, kind = divmod(note, layout.NOTE_KINDS)
            if kind in (layout.NOTE_FEW, layout.NOTE_MANY):
                self._current, self._has_guess = self._mixtures[number], False
                self._current.begin(has_many=kind == layout.NOTE_MANY)
            elif kind == layout.NOTE_GUESS:
                self._has_guess = True

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so the kernel wakes anyway
            os.write(self._answer, b"1")

    def _job(self) -> tuple[_Mixture, int, int] | None:
        """Return (mixture, expert to read next, slot for this expert); None if no expert can be read now."""
        if self._current is None:
            return None
        for expert in np.flatnonzero((self._current.is_used != 0) & (self._current.in_memory == 0))[:1].tolist():
            slot = self._slot(self._current, expert, self._current.is_used != 0)
            return None if slot is None else (self._current, expert, slot)
        following = self._current.following
        if self._has_guess and following is not None:
            for expert in np.flatnonzero((following.is_guessed != 0) & (following.in_memory == 0))[:1].tolist():
                slot = self._slot(following, expert, (following.is_guessed | following.is_used) != 0)
                return None if slot is None else (following, expert, slot)
        return None

    def _slot(self, mixture: _Mixture, expert: int, kept: np.ndarray) -> int | None:
        """Return a slot for `expert`: a free slot, else the slot of an expert that is dropped now, else None.

        In a pass of few tokens, experts in the mask `kept` are not dropped. In a pass of many tokens, only experts in
        the slots `mixture.passages` are dropped.
        """
        residents = mixture.residents
        if (free := residents.free_slot()) is not None:
            return free
        # If `mixture` is the one after the current mixture, `expert` was guessed, so the pass has few tokens.
        # `mixture.has_many` is ignored then, because it was set in an earlier pass.
        if not mixture.has_many or mixture is not self._current:
            while (coldest := residents.coldest(kept)) is not None:
                slot = int(residents.slots[coldest])
                if self._drop(mixture, coldest):
                    return slot
                kept[coldest] = True
            return None
        if not mixture.passages:
            mixture.passages = residents.coldest_slots(PASSAGES)
        held = np.flatnonzero(np.isin(residents.slots, mixture.passages)).tolist()
        # Drop an expert that the pass does not need any more, else the one with the largest index: the kernel uses
        # experts in ascending order, so it needs this one last.
        for of in sorted(held, key=lambda of: (mixture.is_used[of] != 0, -of)):
            slot = int(residents.slots[of])
            if (of > expert or not mixture.is_used[of]) and self._drop(mixture, of):
                return slot
        return None

    def _drop(self, mixture: _Mixture, expert: int) -> bool:
        """Drop an expert from memory unless the pass holds it; return whether the expert was dropped."""
        self._library.mark_expert(address(mixture.state), len(mixture.in_memory), expert, 0)
        if mixture.in_memory[expert]:
            self._wake()  # `mark_expert` marked it absent for a moment, so a kernel may be waiting for it
            return False
        mixture.residents.slots[expert] = -1
        return True

    def _load(self, mixture: _Mixture, expert: int, slot: int) -> None:
        """Read an expert into a slot. Stop before any of its matrices if it is not needed, or the thread must end."""
        memory, added = mixture.memory[slot], []
        for start, (words, range_) in zip(mixture.starts, mixture.matrices[expert], strict=False):
            while self._news.poll(0) and not self._is_ended:
                self._take_notes()
            is_wanted = mixture.is_used[expert] if mixture is self._current else self._is_next(mixture)
            if self._is_ended or not is_wanted:
                return
            self._read(range_, memory[start : start + range_.span])
            added.append((words, address(memory) + start + range_.first % mmap.PAGESIZE))
        for words, at in added:
            words[layout.WEIGHTS] = at
        mixture.residents.slots[expert] = slot
        held = int((mixture.residents.slots >= 0).sum()) * mixture.starts[-1]
        mixture.promised.nbytes = min(mixture.promised.nbytes, mixture.memory.nbytes - held)
        self._library.mark_expert(address(mixture.state), len(mixture.in_memory), expert, 1)
        self._wake()

    def _is_next(self, mixture: _Mixture) -> bool:
        return self._current is not None and self._current.following is mixture

    def _read(self, range_: MappedRange, memory: np.ndarray) -> None:
        """Read all memory pages of a range of a file; raise SourceError if a read fails or the file is too short."""
        file, first, done = self.files[str(range_.path)], range_.first // mmap.PAGESIZE * mmap.PAGESIZE, 0
        needed = range_.first % mmap.PAGESIZE + range_.nbytes
        while done < needed:
            try:
                n = os.preadv(file, [memory[done:].data], first + done)
            except OSError as error:
                raise SourceError(f"{range_.path}: an expert cannot be read ({error.strerror})") from error
            if n < mmap.PAGESIZE and done + n < needed:  # the end of the file
                what = f"ends before byte {range_.first + range_.nbytes:,}, the end of an expert; restore the file"
                raise SourceError(f"{range_.path}: {what}")
            # A direct read must begin at the start of a disk block, so the next read begins at the start of a page.
            done = done + n if done + n >= needed else (done + n) // mmap.PAGESIZE * mmap.PAGESIZE
        self.n_bytes_read += done

    def _open(self, range_: MappedRange) -> None:
        """Open the file of a range unless it is open; raise SourceError if opening fails or the file was replaced."""
        path = str(range_.path)
        if path in self.files:
            return
        try:
            file = _open_uncached(path)
        except OSError as error:
            raise SourceError(f"{path}: experts cannot be read ({error.strerror})") from error
        if not range_.is_of(os.fstat(file)):
            os.close(file)
            raise SourceError(f"{path}: has been replaced or changed since the model was loaded; load it again")
        self.files[path] = file


def _open_uncached(path: str) -> int:
    """Open a file. Its reads bypass the page cache if the file system supports this."""
    if hasattr(os, "O_DIRECT"):
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDONLY | os.O_DIRECT)
            page = np.empty(2 * mmap.PAGESIZE, np.uint8)
            first = -address(page) % mmap.PAGESIZE
            try:
                os.preadv(file, [page[first : first + mmap.PAGESIZE].data], 0)
            except OSError:  # some file systems refuse here
                os.close(file)
                raise
            return file
    file = os.open(path, os.O_RDONLY)
    if hasattr(fcntl, "F_NOCACHE"):  # macOS
        fcntl.fcntl(file, fcntl.F_NOCACHE, 1)
    return file
