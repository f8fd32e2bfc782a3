"""The split of a pipeline, and the memory that ranks have for weights, keys and values."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np
import pytest

from mlx_engine.backends import create_backend
from mlx_engine.backends.parameters import Linear
from mlx_engine.cache.pool import pool_nbytes
from mlx_engine.distributed import leader, pipeline
from mlx_engine.distributed.group import Group
from mlx_engine.distributed.leader import FreeMemory, least_capacity
from mlx_engine.distributed.pipeline import Machine, best_split, latest_cut, layer_bytes, machines_of, parsed, stages_of
from mlx_engine.distributed.plan import held, model_parts
from mlx_engine.distributed.shard import PipelineShard
from mlx_engine.engine import Engine, open_source
from mlx_engine.errors import NotEnoughMemoryError, OptionError
from mlx_engine.loop.memory import pool_for
from mlx_engine.quant.types import Q8_0
from mlx_engine.quant.weight import Weight
from mlx_engine.weights.outline import outlined
from tests.local_ranks import run_ranks
from tests.unit.test_distributed_pipeline import DATA, planned_of

PLENTY = 1 << 40
EQUAL = [Machine(1e9, PLENTY)] * 2


def test_the_slowest_rank_is_as_fast_as_can_be():
    anywhere = range(1, 8)
    assert best_split([10] * 8, 0, EQUAL, anywhere) == [4, 4]
    assert best_split([10] * 8, 40, EQUAL, anywhere) == [6, 2]  # the head takes time
    assert best_split([10] * 8, 0, [Machine(1e9, PLENTY), Machine(3e9, PLENTY)], anywhere) == [2, 6]
    assert best_split([10] * 8, 0, [Machine(1e9, PLENTY), Machine(1.1e9, PLENTY)], anywhere) == [4, 4]
    assert best_split([30, 10, 10, 10], 0, [EQUAL[0]] * 3, range(1, 4)) in ([1, 1, 2], [1, 2, 1])
    assert best_split([10] * 8, 0, [EQUAL[0], Machine(1e9, 25)], anywhere) == [6, 2]
    assert best_split([10] * 8, 5, [EQUAL[0], Machine(1e9, 24)], anywhere) == [7, 1]  # and memory
    assert best_split([10] * 8, 0, EQUAL, [1, 2]) == [2, 6]


def test_ranks_of_one_computer_are_equal():
    found = machines_of([("a", 1e9, 100), ("b", 2e9, 50), ("a", 3e9, 90)])
    assert found == [Machine(2e9, 50), Machine(2e9, 50), Machine(2e9, 45)]


def test_a_split_that_is_not_possible_is_refused():
    with pytest.raises(NotEnoughMemoryError, match="--split: expected"):
        best_split([1 << 30] * 8, 0, [Machine(1e9, 3 << 30)] * 2, range(1, 8))
    with pytest.raises(OptionError, match="at most 2 ranks, not for 3"):
        best_split([10] * 8, 0, [EQUAL[0]] * 3, [1])
    for text in ("", "20,", "20;8", "0,28", "-1,3"):
        with pytest.raises(OptionError, match="such as 20,8"):
            parsed(text)
    assert parsed("20,8") == (20, 8)
    config = planned_of(DATA / "llama-micro").config
    with pytest.raises(OptionError, match="1,1,1 must be 2 numbers, one for each rank, that add up to 3 layers"):
        stages_of([1, 1, 1], 2, config)
    with pytest.raises(OptionError, match=r"2,2 must be 2 numbers, .* add up to 3 layers"):
        stages_of([2, 2], 2, config)
    assert latest_cut(config) == 3


@pytest.mark.parametrize("name", ["llama-micro", "gemma4e-micro"])
def test_bytes_are_those_of_the_weights_and_of_keys_and_values(name: str):
    planned, backend = planned_of(DATA / name), create_backend("parallel", threads=1)
    outline = outlined(planned, backend)
    parts, kept = model_parts(outline), outline.model.kv_layers
    (empty, head), (filled, same_head) = (layer_bytes(parts, n) for n in (64, 128))
    assert head == same_head > 0
    assert sum(empty) - pool_nbytes(kept, 64) == sum(held([part]) for part in parts.layers)
    assert sum(filled) - sum(empty) == pool_nbytes(kept, 128) - pool_nbytes(kept, 64) > 0


def test_the_matrix_of_the_speed_test_is_not_kept(monkeypatch):
    monkeypatch.setattr(pipeline, "SECONDS", 0.0)
    backend = create_backend("parallel", threads=1)
    prepare, found = backend.prepare, list[weakref.ref[np.ndarray]]()

    def prepared(weight: Weight) -> Any:
        matrix = prepare(weight)
        found.append(weakref.ref(matrix.data))
        return matrix

    monkeypatch.setattr(backend, "prepare", prepared)
    assert pipeline.measured_speed(backend) > 0
    assert [data() for data in found] == [None]


def test_nothing_is_kept_of_a_discarded_matrix_that_would_be_read_ahead():
    backend = create_backend("parallel", threads=1)
    linear = Linear("x", backend.prepare(Weight.pack("x", np.ones((32, 64)), Q8_0)))
    with backend.session():
        backend.linear(backend.array(np.ones((1, 64), dtype=np.float32)), linear)
    data = weakref.ref(linear.weight.data)
    backend.discard(linear)
    del linear
    assert data() is None


def test_the_rank_with_the_least_memory_limits_keys_and_values():
    one, two = FreeMemory("a", 1000, 10), FreeMemory("b", 1000, 30)
    assert least_capacity([one, two], 40) == (1000 * 40 // 30, 1)
    assert least_capacity([one, two._replace(free=9000)], 40) == (4000, 0)
    assert least_capacity([one, two._replace(computer="a")], 40) == (500 * 40 // 30, 1)  # one memory for both
    assert least_capacity([one._replace(kv=0), two], 30) == (1000, 1)
    assert least_capacity([one, two], 10) == (1000 * 10 // 30, 1)


def test_a_pool_fits_into_the_memory_of_every_rank(monkeypatch: pytest.MonkeyPatch):
    free = threading.local()
    monkeypatch.setattr(leader, "available_memory", lambda: free.bytes)
    monkeypatch.setattr(leader, "this_computer", lambda: free.name)

    def run(group: Group) -> tuple[int, int] | None:
        free.bytes, free.name = (1 << 30, 6 << 20)[group.rank], str(group.rank)
        shard = PipelineShard(group, [1, 2])
        opened = open_source(DATA / "llama-micro" / "hf", "scalar", shard=shard)
        if group.rank:
            opened.follow()
            return None
        with Engine(opened) as engine:
            found = engine.model.kv_capacity()
            pool = pool_for(engine.model, 64)
            assert pool.nbytes <= found[0] // 2
            with pytest.raises(OptionError, match="but rank 1 has free memory for only"):
                pool_for(engine.model, 64, found[0] + 1)
            shard.close()
        return found

    assert run_ranks(2, run)[0] == (9 << 20, 1)  # two of three layers are on rank 1
