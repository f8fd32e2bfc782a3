"""Experts that do not fit into memory: what the kernels note, and what is read from the file."""

import ctypes
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from mlx_engine.kernels.cpu.build import layout

from mlx_engine.backends import create_backend
from mlx_engine.backends.cpu import experts_ahead
from mlx_engine.backends.cpu.backend import CompiledBackend
from mlx_engine.backends.observed import observed
from mlx_engine.cache import SequenceInput
from mlx_engine.loop.forward import forward_logits
from mlx_engine.machine.memory import read_around, tells_pages
from tests.random_models import random_model

IDS = [3, 141, 59, 26]


def bits(note):
    return set(np.unpackbits(note[layout.NOTE_BITS :].view(np.uint8), bitorder="little").nonzero()[0].tolist())


def test_kernels_note_the_chosen_experts_and_change_no_bit(monkeypatch):
    backend = create_backend("parallel", threads=2)
    if not isinstance(backend, CompiledBackend):
        pytest.skip("no compiled kernels")
    model = random_model("qwen3moe", "Q8_0", backend)

    def run():
        with backend.session():
            return np.array(backend.host(forward_logits(model, SequenceInput(IDS, model.new_kv(8), wanted=None))))

    expected, notes, ended = run(), [], threading.Event()

    def collect(source, *_):
        while found := os.read(source, 1 << 12):
            notes.extend(np.frombuffer(found, np.int64).reshape(-1, layout.NOTE_WIDTH))
        ended.set()

    monkeypatch.setattr(experts_ahead, "_read", collect)
    monkeypatch.setattr(experts_ahead, "is_mapped", lambda array: True)
    backend.stream_experts()
    assert np.array_equal(run(), expected)
    routers = {}
    tapped = observed(backend, lambda name, x: routers.setdefault(name, np.array(x)) if "gate_inp" in name else None)
    model.run_on(tapped)
    run()
    backend.close()
    assert ended.wait(10)
    first, guess, second = notes[:3]
    assert [note[: layout.NOTE_BITS].tolist() for note in (first, guess, second)] == [[0, 0], [1, 1], [1, 0]]
    for note, logits in zip((first, second), routers.values(), strict=True):
        assert bits(note) == set(np.argsort(-logits, axis=1)[:, :2].reshape(-1).tolist())
    assert len(bits(guess)) >= 2


class System:
    """The system's functions. The fourth memory page of each matrix is missing, but not of the matrix at 65536."""

    def __init__(self):
        self.read, self.used = [], []

    def mincore(self, at, nbytes, answer):
        pages = np.ctypeslib.as_array((ctypes.c_uint8 * -(-nbytes // 4096)).from_address(answer))
        pages[:], pages[3:4] = 1, at == 65536

    def madvise(self, at, nbytes, advice):
        (self.used if advice == experts_ahead.MADV_POPULATE_READ else self.read).append((at, nbytes))


def test_what_is_missing_of_the_newest_notes_is_read(monkeypatch):
    monkeypatch.setattr(experts_ahead, "PIECE", 8192)
    monkeypatch.setattr(experts_ahead, "PAGESIZE", 4096)
    system, (source, pipe) = System(), os.pipe()
    notes = np.zeros((3, layout.NOTE_WIDTH), np.int64)
    notes[:, 0], notes[:, layout.NOTE_BITS] = (0, 1, 0), (0b1, 0b100, 0b11)
    os.write(pipe, notes.tobytes())
    os.close(pipe)
    quiet = SimpleNamespace(register=lambda *_: None, poll=lambda _: [])  # the end of a pipe is news, too
    monkeypatch.setattr(experts_ahead.select, "poll", lambda: quiet)
    mixtures = [[[(65536, 15000)], [(4096, 15000), (131072, 100)], []], [[], [], [(262144, 30000)]]]
    experts_ahead._read(source, mixtures, {0}, set(), system)
    assert system.read == [(262144 + 8192, 8192), (4096 + 8192, 15000 - 8192)]
    assert system.used == [(65536, 15000), (131072, 100)]


def test_all_of_a_file_whose_pages_are_hidden_is_asked_for_and_a_note_ends_the_thread(monkeypatch):
    monkeypatch.setattr(experts_ahead, "PAGESIZE", 4096)
    monkeypatch.setattr(experts_ahead, "PIECE", 8192)
    system, (source, pipe) = System(), os.pipe()
    note = np.zeros(layout.NOTE_WIDTH, np.int64)
    note[layout.NOTE_BITS] = 1
    os.write(pipe, note.tobytes())
    kept = os.dup(pipe)  # as in a forked process
    experts_ahead._end(pipe, os.getpid())
    experts_ahead._read(source, [[[(65536, 9000)]]], set(), {0}, system)
    assert system.read == [(65536, 8192), (65536 + 8192, 9000 - 8192)]
    os.close(kept)


def test_pages_of_own_files_are_told(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/maps").write_text(f"1000-3000 r--s 00000000 fe:11 12 {tmp_path / 'a model'}\n")
    assert not tells_pages(0x2000, tmp_path)  # the file is missing
    (tmp_path / "a model").write_text("")
    assert tells_pages(0x2000, tmp_path)
    assert not tells_pages(0x4000, tmp_path)


def test_what_a_page_fault_reads_is_found(tmp_path):
    def of(maps, **files):
        for name, text in {"proc/self/maps": maps, **files}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return read_around(0x2000, tmp_path)

    line = "1000-3000 r--s 00000000 {} 12 /model.gguf\n"
    bdi, disk = "sys/class/bdi/254:17/read_ahead_kb", "sys/dev/block/259:0/queue/read_ahead_kb"
    assert of("0-1000 r--p 0 00:00 0\n" + line.format("fe:11"), **{bdi: "128\n"}) == 128 << 10
    assert of(line.format("103:00"), **{disk: "8192\n"}) == 8 << 20
    assert of(line.format("00:2a")) == of("damaged\n") == of("") == 0
