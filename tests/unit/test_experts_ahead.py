"""Experts that do not fit into memory: what the kernels note, and what is read from the file."""

import ctypes
import os
import threading

import numpy as np
import pytest
from mlx_engine.kernels.cpu.build import layout

from mlx_engine.backends import create_backend
from mlx_engine.backends.cpu import experts_ahead
from mlx_engine.backends.cpu.backend import CompiledBackend
from mlx_engine.backends.taps import observed
from mlx_engine.cache import SequenceInput
from mlx_engine.loop.forward import forward_logits
from tests.random_models import random_model

IDS = [3, 141, 59, 26]


def bits(note):
    return set(np.unpackbits(note[1:].view(np.uint8), bitorder="little").nonzero()[0].tolist())


def test_kernels_note_the_chosen_experts_and_change_no_bit(monkeypatch):
    backend = create_backend("parallel", threads=2)
    if not isinstance(backend, CompiledBackend):
        pytest.skip("no compiled kernels")
    model = random_model("qwen3moe", "Q8_0", backend)

    def run():
        with backend.session():
            return np.array(backend.host(forward_logits(model, SequenceInput(IDS, model.new_kv(8), wanted=None))))

    expected, notes, ended = run(), [], threading.Event()

    def collect(source, pieces, system):
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
    assert [note[0] for note in (first, guess, second)] == [0, 1, 1]
    for note, logits in zip((first, second), routers.values(), strict=True):
        assert bits(note) == set(np.argsort(-logits, axis=1)[:, :2].reshape(-1).tolist())
    assert len(bits(guess)) >= 2


class System:
    """The system's functions. The fourth memory page of each matrix is missing, but for the matrix at 65536."""

    def __init__(self):
        self.read = []

    def mincore(self, at, nbytes, answer):
        pages = np.ctypeslib.as_array((ctypes.c_uint8 * -(-nbytes // 4096)).from_address(answer))
        pages[:], pages[3:4] = 1, at == 65536

    def madvise(self, at, nbytes, advice):
        self.read.append((at, nbytes))


def test_what_is_missing_of_the_newest_notes_is_read(monkeypatch):
    monkeypatch.setattr(experts_ahead, "PIECE", 8192)
    monkeypatch.setattr(experts_ahead, "PAGESIZE", 4096)
    system, (source, pipe) = System(), os.pipe()
    notes = np.zeros((3, layout.NOTE_WIDTH), np.int64)
    notes[:, 0], notes[:, 1] = (0, 1, 0), (0b1, 0b100, 0b11)
    os.write(pipe, notes.tobytes())
    os.close(pipe)
    mixtures = [[[(65536, 15000)], [(4096, 15000), (131072, 100)], []], [[], [], [(262144, 30000)]]]
    experts_ahead._read(source, mixtures, system)
    assert system.read == [(262144 + 8192, 8192), (4096 + 8192, 15000 - 8192)]
