"""Gemma 4 against transformers: inputs for each layer, shared keys and values, heads of two dims."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlx_engine
from mlx_engine.backends.base import OpByOp
from mlx_engine.backends.cpu.backend import CompiledProgram
from mlx_engine.cache import KVLayer, SequenceInput
from mlx_engine.convert.requantize import requantize
from mlx_engine.loop.forward import forward
from mlx_engine.weights.conversion import Conversion
from tests.contract.check import EMULATED
from tests.golden.goldens import BACKENDS, DATA, Golden, check_close, engine, greedy, in_chunks
from tests.golden.test_dense import with_tokenizer

NAMES = ("gemma4", "gemma4e", "gemma4moe")


def folder(name: str) -> Path:
    return DATA / f"{name}-micro" / "hf"


def golden(name: str) -> Golden:
    return Golden(name, folder(name), DATA / f"{name}-micro" / "golden.npz")


@pytest.mark.some(2)
@pytest.mark.parametrize("backend", [*BACKENDS, "simd --no-jit"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_ids(name: str, backend: str):
    of, is_slow = golden(name), backend in ("scalar", EMULATED)
    for i in (1,) if is_slow else (0, 1):
        check_close(of.logits(i), np.asarray(engine(of.checkpoint, backend).logits(of.prompt(i))))
    if not is_slow:
        assert greedy(of, 0, backend, kv=True) == of.greedy(0)
        assert greedy(of, 1, backend, kv=True) == of.greedy(1)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_gguf_files_have_the_same_model(name: str, tmp_path: Path):
    """GGUF has arrays for sizes that differ between layers, and divisors for pairs that are not rotated."""
    source, values = with_tokenizer(folder(name), tmp_path / "hf"), DATA / f"{name}-micro" / "golden.npz"
    for type_, suffix, backends in (("f32", "", ("simd",)), ("q8_0", "_q8", ("simd", "mlx"))):
        path = tmp_path / f"{type_}.gguf"
        requantize(source, path, Conversion(type_))
        of = Golden(name, path, values, suffix)
        for backend in backends:
            check_close(of.logits(1), np.asarray(engine(path, backend).logits(of.prompt(1))))
        assert greedy(of, 1, "simd", kv=True) == of.greedy(1)


@pytest.mark.some(1)
@pytest.mark.parametrize("name", NAMES)
def test_bits_do_not_depend_on_chunks_and_pages(name: str):
    of = golden(name)
    ids, at_once = of.prompt(1), np.asarray(engine(of.checkpoint, "simd").logits(of.prompt(1)))
    for chunk, page in ((1, 64), (7, 5), (16, 16)):
        np.testing.assert_array_equal(in_chunks(of.checkpoint, "simd", ids, chunk, page=page), at_once)


@pytest.mark.parametrize("name", NAMES)
def test_layers_run_as_a_compiled_program_with_the_bits_of_single_operations(name: str):
    ids, loaded = golden(name).prompt(1), mlx_engine.load(folder(name), "simd")
    assert isinstance(loaded.model.program, CompiledProgram)
    at_once = np.asarray(loaded.logits(ids))
    model: Any = loaded.model
    model.program = OpByOp(model.backend, model.definition)
    np.testing.assert_array_equal(np.asarray(loaded.logits(ids)), at_once)


@pytest.mark.parametrize("backend", ["simd", "simd --no-jit"])
@pytest.mark.parametrize("name", NAMES)
def test_a_chunk_without_wanted_tokens_leaves_all_that_the_next_one_reads(name: str, backend: str):
    """Layers that share keys and values are skipped in such a chunk."""
    of = engine(folder(name), backend)
    model, ids = of.model, golden(name).prompt(1)
    kv = model.new_kv(len(ids), page=16)
    with model.backend.session():
        assert forward(model, SequenceInput(ids[:20], kv, wanted=0)) is None
        found = model.backend.host(forward(model, SequenceInput(ids[20:], kv, wanted=3)))
    check_close(np.asarray(of.logits(ids))[-3:], found)


def test_layers_that_share_keys_and_values_have_no_pages():
    """Four of six layers have their own; heads of global layers are wider."""
    layers = engine(folder("gemma4e"), "simd").model.kv_layers
    assert layers == 2 * [KVLayer(1, 16, 8), KVLayer(1, 32)]
    assert engine(folder("gemma4"), "simd").model.kv_layers == [*2 * [KVLayer(2, 16, 8)], KVLayer(1, 32)]
