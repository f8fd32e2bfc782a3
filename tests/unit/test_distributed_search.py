"""Logits that are NaN or infinite in a run on several ranks: the error names the layer and the rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_engine.backends import create_backend
from mlx_engine.distributed.group import Group
from mlx_engine.distributed.leader import FaultSearch
from mlx_engine.distributed.pipeline import stages_of
from mlx_engine.distributed.shard import PipelineShard, Shard, TensorShard
from mlx_engine.engine import Engine, open_source
from mlx_engine.weights.model import FirstFault
from tests.local_ranks import LocalGroup, run_ranks
from tests.unit.test_distributed_pipeline import DATA, planned_of
from tests.unit.test_not_finite import NAN, damaged


def errors_of(path: Path, size: int, backend: str, share: Callable[[Group], Shard]) -> list[Any]:
    """Return the errors of several prompts on ranks in threads."""

    def run(group: Group) -> Any:
        shard = share(group)
        opened = open_source(path, backend, threads=1, shard=shard)
        if group.rank:
            return opened.follow()
        with Engine(opened) as engine:
            found = [of.error for of in engine.generate_batch([[1, 2, 3], [4, 5], [6]], max_tokens=3)]
            shard.close()
        return found

    found: list[Any] = run_ranks(size, run)[0]
    assert len(found) == 3
    return found


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("name", "layer", "rank"), [("blk.0.ffn_up", 0, 0), ("blk.1.attn_q", 1, 1), ("blk.2.ffn_down", 2, 2)]
)
def test_the_rank_and_the_layer_of_the_first_fault_are_named(tmp_path: Path, name: str, layer: int, rank: int):
    path = damaged(tmp_path / "nan.gguf", f"{name}.weight", NAN)

    for error in errors_of(path, 3, "scalar", lambda group: PipelineShard(group, [1, 1, 1])):
        assert (error.first, error.layer) == (name, layer)
        assert f"first in {name}, in layer {layer} (0 to 2), on rank {rank}; `inspect --verify`" in str(error)


def test_a_value_counted_from_the_stage_is_named_by_the_layer_of_the_model():
    planned = planned_of(DATA / "llama-micro")
    model = planned._replace(stage=stages_of([1, 2], 2, planned.config)[1]).build(create_backend("simd")).model
    search = FaultSearch(model, LocalGroup.make(1)[0])
    assert search.end() is None
    search.check("blk.1.layer_out", np.array([1.0, np.inf], np.float32))
    search.check("blk.2.attn_q", np.array([np.nan], np.float32))
    assert search.end() == FirstFault("blk.2.layer_out", 0, 0, 1, 2)
    search.check("blk.2.attn_q", np.array([np.nan], np.float32))
    assert search.end() == FirstFault("blk.2.attn_q", 0, 1, 1, 1)


@pytest.mark.some(1)
@pytest.mark.parametrize("backend", ["scalar", "mlx"])
def test_a_rank_with_a_slice_that_is_not_finite_is_named(tmp_path: Path, backend: str):
    path = damaged(tmp_path / "nan.gguf", "blk.1.attn_q.weight", NAN)  # its first block is in the slice of rank 0

    for error in errors_of(path, 2, backend, TensorShard):
        assert (error.first, error.layer) == ("blk.1.attn_q", 1)
        assert "in layer 1 (0 to 2), on rank 0; `inspect --verify`" in str(error)
