"""Rank 0 leads a run whose tensors several ranks share: the others follow its passes, pools and copies of pages."""

from __future__ import annotations

import numpy as np
import pytest

from mlx_engine.backends import create_backend
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.distributed.group import Group
from mlx_engine.distributed.local import run_ranks
from mlx_engine.distributed.tensor import sliced
from mlx_engine.distributed.tensor_run import TensorParallel, follow_tensor
from mlx_engine.models import Model, Planned, plan_model
from mlx_engine.models.conversion import Conversion
from tests.golden.goldens import DATA
from tests.golden.test_tensor_parallel import TOLERANCE, WIDER, error
from tests.unit.test_distributed_pipeline import logits_of

NAMES = ("gemma3-micro", "gemma4e-micro", "lfm2-micro", "qwen3_5-micro", "qwen2moe-micro")


def planned_of(name: str) -> Planned:
    return plan_model(open_checkpoint(DATA / name / "hf"), Conversion())


def built(planned: Planned, backend: str, group: Group) -> Model:
    made = create_backend(backend, threads=1)
    made.group = group
    return sliced(planned, group.rank, group.size).build(made).model


@pytest.mark.parametrize("backend", ["parallel", "mlx"])
@pytest.mark.parametrize("name", NAMES)
def test_followers_run_every_pass_of_rank_0(name: str, backend: str):
    planned = planned_of(name)

    def run(group: Group) -> np.ndarray | None:
        model = built(planned, backend, group)
        if group.rank:
            return follow_tensor(model, group)
        leader = TensorParallel(model, group)
        found = logits_of(leader)
        leader.end()
        return found

    whole = logits_of(planned.build(create_backend(backend, threads=1)).model)
    (found, _) = run_ranks(2, run)
    assert found is not None
    assert error(whole, found) <= WIDER.get(name, TOLERANCE) * (1 if backend == "parallel" else 2)
