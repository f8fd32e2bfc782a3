"""Some experts in memory on the compiled CPU backends: the same bits, no expert replaced while it is used, errors."""

import errno
import os
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from mlx_engine.kernels.cpu.build import layout

import mlx_engine
import mlx_engine.engine as engine_module
from mlx_engine.backends import create_backend
from mlx_engine.backends.cpu import expert_cache
from mlx_engine.backends.cpu.backend import CompiledBackend
from mlx_engine.backends.cpu.descriptors import address
from mlx_engine.backends.experts import Residents
from mlx_engine.cache import SequenceInput
from mlx_engine.checkpoint.shapes import SHAPES
from mlx_engine.errors import ModelError, SourceError
from mlx_engine.loop.forward import forward_logits
from mlx_engine.machine import memory
from mlx_engine.machine.memory import MappedRange
from mlx_engine.weights.conversion import Conversion
from mlx_engine.weights.model import open_model, plan_model
from mlx_engine.weights.outline import need_of, outlined
from tests.random_models import random_checkpoint

N_EXPERTS, N_USED = 16, 3
# 40 tokens choose all experts, and are more than the compiled program runs at once; 20 choose more than a few slots.
PROMPT = [(7 * i) % 600 for i in range(61)]


def written(folder, expert_size=32):
    """Return the path of a tiny model."""
    shape = replace(
        SHAPES["qwen3-30b-a3b"], n_layers=3, hidden_size=64, n_heads=2, n_kv_heads=1, head_dim=32, vocab_size=640,
        n_experts=N_EXPERTS, n_experts_used=N_USED, expert_size=expert_size,
    )  # fmt: skip
    shape.write(folder / "model.gguf", "tiny")
    return folder / "model.gguf"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return written(tmp_path_factory.mktemp("experts"))


def build(path, share, activations="f32"):
    """Return a model of which a share of the experts is in memory, and its backend."""
    backend = create_backend("parallel", threads=2, activations=activations)
    if not isinstance(backend, CompiledBackend):
        pytest.skip("no compiled kernels")
    return plan_model(open_model(path, ()), Conversion())._replace(held_share=share).build(backend).model, backend


def logits(model, backend):
    """Return logits of a prompt in two chunks, of single tokens, and of a batch."""
    with backend.session():
        pool = model.new_pool(256)
        kv, other = pool.sequence(), pool.sequence()
        found = [forward_logits(model, SequenceInput(ids, kv, wanted=None)) for ids in (PROMPT[:40], PROMPT[40:60])]
        found += [forward_logits(model, SequenceInput([token], kv)) for token in (3, 141, 59, 26, 535)]
        found.append(forward_logits(model, SequenceInput([60], kv), SequenceInput(PROMPT[:3], other)))
        return np.concatenate([backend.host(rows) for rows in found])


@pytest.fixture(scope="module")
def expected(path):
    return logits(*build(path, 1.0))


@pytest.mark.parametrize("n_slots", [1, 3, 15])
def test_few_experts_in_memory_have_the_bits_of_all(path, expected, n_slots):
    model, backend = build(path, (n_slots + 0.01) / N_EXPERTS)
    for _ in range(2):
        assert np.array_equal(logits(model, backend), expected)
    for mixture in backend.expert_cache._reader._mixtures:
        held = mixture.residents.slots[mixture.residents.slots >= 0]
        # A slot of whole memory pages has more bytes than these tiny experts.
        assert len(set(held)) == len(held) == mixture.memory.shape[0] <= n_slots
        assert not mixture.is_used.any()
    backend.close()


@pytest.mark.slow
def test_few_experts_in_memory_have_the_bits_of_all_in_fixed_point(path):
    assert np.array_equal(logits(*build(path, 0.5, "i16")), logits(*build(path, 1.0, "i16")))


def test_an_expert_that_a_pass_holds_stays(path):
    model, backend = build(path, 0.5)
    logits(model, backend)
    mixture = backend.expert_cache._reader._mixtures[0]
    expert = int(np.flatnonzero(mixture.in_memory)[0])
    mixture.is_used[expert] = layout.USE_HELD
    backend.library.mark_expert(address(mixture.state), N_EXPERTS, expert, 0)
    assert mixture.in_memory[expert]
    mixture.is_used[expert] = layout.USE_WANTED
    backend.library.mark_expert(address(mixture.state), N_EXPERTS, expert, 0)
    assert not mixture.in_memory[expert]
    backend.close()


def test_a_guess_after_a_prompt_replaces_no_other_guess(path):
    model, backend = build(path, 0.5)
    with backend.session():
        forward_logits(model, SequenceInput(PROMPT, model.scratch_kv(len(PROMPT))))
    reader = backend.expert_cache._reader
    mixture = reader._mixtures[1]
    assert mixture.has_many
    assert reader._current is not mixture
    missing = int(np.flatnonzero(mixture.residents.slots < 0)[0])
    assert reader._slot(mixture, missing, mixture.residents.slots >= 0) is None
    assert reader._slot(mixture, missing, np.zeros(N_EXPERTS, bool)) is not None
    backend.close()


def test_the_experts_of_a_long_prompt_leave_those_that_are_used_most(path):
    model, backend = build(path, 0.75)
    with backend.session():
        for token in range(30):
            forward_logits(model, SequenceInput([token], model.scratch_kv(1)))
        reader = backend.expert_cache._reader
        before = [set(np.flatnonzero(mixture.in_memory)) for mixture in reader._mixtures]
        n_slots, at = reader._mixtures[0].residents.n_slots, reader.n_bytes_read
        forward_logits(model, SequenceInput(PROMPT, model.scratch_kv(len(PROMPT))))
    for mixture, held in zip(reader._mixtures, before, strict=True):
        assert len(held - set(np.flatnonzero(mixture.in_memory))) <= expert_cache.PASSAGES
    # All that were missing are read once, and those that were in the two slots once more.
    most = 3 * (N_EXPERTS - n_slots + expert_cache.PASSAGES) * reader._mixtures[0].starts[-1]
    assert reader.n_bytes_read - at <= most
    backend.close()


@pytest.mark.parametrize(
    ("preadv", "message"),
    [
        (lambda *_: 0, "model.gguf: ends before byte [0-9,]+, the end of an expert"),
        (lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")), "cannot be read .Input/output"),
    ],
)
def test_an_expert_that_cannot_be_read_ends_the_pass_and_the_next_one_reads(
    path, expected, monkeypatch, preadv, message
):
    model, backend = build(path, 0.5)
    monkeypatch.setattr(expert_cache.os, "preadv", preadv)
    for n_tokens in (2, 40):
        with pytest.raises(SourceError, match=message), backend.session():
            forward_logits(model, SequenceInput(PROMPT[:n_tokens], model.scratch_kv(n_tokens)))
    monkeypatch.undo()
    assert np.array_equal(logits(model, backend), expected)
    backend.close()
    assert not any(thread.name == "mlx_engine-experts" for thread in threading.enumerate())


@pytest.mark.parametrize("n_left", [1000, 2 * 4096 + 1000])
def test_a_file_that_is_cut_off_within_a_memory_page_is_an_error(path, n_left):
    model, backend = build(path, 0.5)
    with backend.session():
        forward_logits(model, SequenceInput([0], model.scratch_kv(1)))
    reader, about = backend.expert_cache._reader, path.stat()
    cut = MappedRange(path, about, about.st_size - n_left, 4 * 4096)
    with pytest.raises(SourceError, match="ends before byte"):
        reader._read(cut, expert_cache._slots(1, cut.span)[0])
    backend.close()


def test_any_error_of_the_thread_ends_the_pass(path, monkeypatch):
    model, backend = build(path, 0.5)
    monkeypatch.setattr(expert_cache._Reader, "_read", lambda *_: 1 // 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), backend.session():
            forward_logits(model, SequenceInput(PROMPT[:2], model.scratch_kv(2)))
    backend.close()


def test_memory_for_experts_that_are_not_read_yet_is_not_available(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_PROMISED", weakref.WeakSet())
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 30))
    most = memory.available_memory()
    model, backend = build(written(tmp_path, expert_size=256), 0.99)
    with backend.session():
        forward_logits(model, SequenceInput([0], model.scratch_kv(1)))
        nbytes = sum(mixture.memory.nbytes for mixture in backend.expert_cache._reader._mixtures)
        assert 0 < most - memory.available_memory() < nbytes
        for first in range(0, 640, 20):
            forward_logits(model, SequenceInput(list(range(first, first + 20)), model.scratch_kv(20)))
    assert memory.available_memory() == most
    backend.close()


def test_experts_of_which_some_are_expanded_are_not_bounded_unasked():
    planned = plan_model(random_checkpoint("qwen3moe", "Q8_0"), Conversion())
    mixed = plan_model(random_checkpoint("qwen3moe", "Q8_0"), Conversion(layers={"ffn_down_exps": "f32"}))
    backend = create_backend("parallel", threads=2)
    assert [outlined(of, backend).sizes.has_only_mapped_experts for of in (planned, mixed)] == [True, False]


def test_file_descriptors_are_closed_where_direct_reads_are_refused(path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EINVAL, "Invalid argument")

    n = len(list(Path("/dev/fd").iterdir()))
    monkeypatch.setattr(expert_cache.os, "preadv", refuse)
    os.close(expert_cache._open_uncached(path))
    assert len(list(Path("/dev/fd").iterdir())) == n


def test_a_file_that_is_deleted_later_is_read(path, expected, tmp_path):
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(path.read_bytes())
    model, backend = build(copy, 0.5)
    with backend.session():
        forward_logits(model, SequenceInput([0], model.scratch_kv(1)))
    copy.unlink()
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(logits(model, backend), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert np.array_equal(logits(model, backend), expected)
    backend.close()


def test_a_file_that_has_been_replaced_is_an_error(path, tmp_path):
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(path.read_bytes())
    backend = create_backend("parallel", threads=2)
    if not isinstance(backend, CompiledBackend):
        pytest.skip("no compiled kernels")
    planned = plan_model(open_model(copy, ()), Conversion())._replace(held_share=0.5)
    copy.unlink()
    copy.write_bytes(path.read_bytes())
    for _ in range(2):
        with pytest.raises(SourceError, match="has been replaced or changed since the model was loaded"):
            planned.build(backend)
    backend.close()


def test_file_systems_without_direct_reads_are_read(path, expected, monkeypatch):
    monkeypatch.delattr(expert_cache.os, "O_DIRECT", raising=False)
    model, backend = build(path, 0.5)
    assert np.array_equal(logits(model, backend), expected)
    backend.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_reads_experts_itself(path, expected):
    model, backend = build(path, 0.5)
    assert np.array_equal(logits(model, backend), expected)
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(logits(model, backend), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert np.array_equal(logits(model, backend), expected)
    backend.close()


def test_experts_that_are_expanded_cannot_be_streamed(path):
    backend = create_backend("parallel", threads=2)
    planned = plan_model(open_model(path, ()), Conversion("f32"))._replace(held_share=0.5)
    with pytest.raises(ModelError, match="experts that the backend multiplies as the file stores them"):
        planned.build(backend)


def test_experts_chosen_least_often_are_replaced():
    residents = Residents(5, 2)
    assert residents.free_slot() == 0
    residents.slots[[1, 3]] = 0, 1
    assert residents.free_slot() is None
    residents.count(np.array([0, 2, 0, 1, 0]))
    assert residents.coldest(np.zeros(5, bool)) == 3
    assert residents.coldest(np.arange(5) == 3) == 1
    assert residents.coldest(np.ones(5, bool)) is None
    for _ in range(60):  # old choices weigh less
        residents.count(np.zeros(5))
    residents.count(np.array([0, 0, 0, 1, 0]))
    assert residents.coldest_slots(2) == [0, 1]
    assert residents.coldest(np.zeros(5, bool)) == 1


def test_the_bound_is_an_option_of_the_cpu(path):
    with mlx_engine.load(path, "parallel") as all_of, mlx_engine.load(path, "parallel", experts_memory=150_000) as half:
        assert np.array_equal(half.logits(PROMPT), all_of.logits(PROMPT))
        assert half._about == all_of._about


def test_a_server_keeps_memory_for_keys_and_values(path, monkeypatch):
    monkeypatch.setattr(engine_module, "FEW_PARAMETERS", 0)
    shares = []
    for spare in (0, 60_000):
        opened = engine_module.open_source(path, "parallel", threads=2)
        if not opened.made.holds_some_experts:
            pytest.skip("no compiled kernels")
        need = need_of(outlined(opened.planned, opened.made))
        monkeypatch.setattr(engine_module, "available_memory", lambda need=need: need.total - need.experts // 3)
        opened.check_memory(spare=spare)
        shares.append(opened.planned.held_share)
    # Nine tenths of two thirds.
    assert shares == [pytest.approx(share, abs=1e-4) for share in (0.6, 0.6 - 0.9 * 60_000 / need.experts)]
