"""Whole models of stored types on emulated `metal`: a Q4_K_M mix and a folder of affine 4 bits decode as they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from kernels import emulator
from kernels.launch import counted
from mlx_engine.backends.metal.weights import SplitMatrix
from mlx_engine.bench.dispatches import dispatches
from mlx_engine.cache import SequenceInput
from mlx_engine.loop.forward import forward
from mlx_engine.loop.memory import linears
from mlx_engine.loop.metrics import Metrics
from mlx_engine.loop.sampler import Sampler
from mlx_engine.options import Sampling
from tests.contract.check import EMULATED
from tests.decoding import decode
from tests.golden.goldens import check_close, engine, in_chunks
from tests.golden.test_table import for_mlx, mixed

pytestmark = pytest.mark.skipif(emulator.unavailable() is not None, reason=str(emulator.unavailable()))

IDS = [5, 9, 1, 2, 44]
TYPES = {"Q4_K_M": {"Q4_K", "Q6_K"}, "mlx-4bit": {"AFFINE4_G32_F32"}}
Files = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Return a function that writes a file with stored types, and the same in float32."""
    made, make = tmp_path_factory.mktemp("types"), {"Q4_K_M": mixed, "mlx-4bit": for_mlx}
    return cache(lambda column: make[column]("llama", made))


def greedy(path: Path, backend: str, n: int) -> list[int]:
    model = engine(path, backend).model
    pick = Sampler(model.backend, Sampling(), IDS)
    return list(islice(decode(model, IDS, model.new_kv(len(IDS) + n - 1), pick, Metrics()), n))


@pytest.mark.slow
@pytest.mark.parametrize("column", TYPES)
def test_a_model_decodes_as_it_is_stored(files: Files, column: str) -> None:
    stored, expanded = files(column)
    model = engine(stored, EMULATED).model
    weights = [linear.weight for linear in linears(model.layers)]
    assert all(isinstance(weight, SplitMatrix) for weight in [*weights, model.token_embd])
    assert {weight.matrix.layout.name for weight in weights} == TYPES[column]
    found = in_chunks(stored, EMULATED, IDS, len(IDS))
    check_close(np.asarray(engine(expanded, "simd --no-jit").logits(IDS)), found, 4e-5, 2e-5)
    np.testing.assert_array_equal(in_chunks(stored, EMULATED, IDS, 1), found)
    assert greedy(stored, EMULATED, 4) == greedy(expanded, "simd --no-jit", 4)


@pytest.mark.some(1)
@pytest.mark.parametrize("column", TYPES)
def test_a_layer_takes_seven_dispatches_also_of_several_types(files: Files, column: str) -> None:
    found = engine(files(column)[0], EMULATED)
    n = found.config.n_layers
    assert sum(dispatches(found).layer.values()) == 7
    with found.backend.session(), counted() as launches:
        forward(found.model, SequenceInput([3], found.model.new_kv(4)))
    assert launches == {
        "embed_rows": 1, "norm_qkv": n, "head_norm_rope": n, "attention": n, "project_add": 2 * n, "norm_gate_up": n,
        "norm_project": 1,
    }  # fmt: skip
    assert found.backend.kernels.refused == {}
