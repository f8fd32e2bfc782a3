"""Pipelines of ranks in threads: the bits of one process, for every architecture, backend and number of ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mlx_engine.backends import create_backend
from mlx_engine.cache import New
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.decode.step import forward, forward_logits
from mlx_engine.distributed.group import Group
from mlx_engine.distributed.local import run_ranks
from mlx_engine.distributed.pipeline import Pipeline, follow
from mlx_engine.models import Planned, plan_model
from mlx_engine.models.conversion import Conversion
from mlx_engine.models.stage import Stage
from tests.contract.check import EMULATED, named

DATA = Path(__file__).parents[1] / "data"
MICRO = sorted(path.parent for path in DATA.glob("*-micro/hf"))
IDS = [3, 14, 15, 9, 2, 6, 5, 3, 5, 8, 9, 7]


def planned_of(folder: Path) -> Planned:
    return plan_model(open_checkpoint(folder / "hf"), Conversion())


def logits_of(model) -> np.ndarray:
    """Run a prompt in two chunks, two more tokens, and a second sequence beside them; return all logits."""
    be, found = model.backend, []
    with be.session():
        pool = model.new_pool(64, n_sequences=2, page=4)
        one, two = pool.sequence(), pool.sequence()
        for news in (
            [New(IDS[:5], one, 0)],
            [New(IDS[5:], one), New(IDS[:3], two, None)],
            [New([4], one), New([1], two)],
            [New([7, 8], two)],
        ):
            logits = forward(model, *news)
            found += [] if logits is None else [np.array(be.host(logits))]
        found.append(np.array(be.host(forward_logits(model, New(IDS, model.scratch_kv(len(IDS)), None)))))
    return np.concatenate(found)


def piped(folder: Path, backend: str, ends: list[int]) -> np.ndarray:
    """Return the logits of a pipeline whose ranks end after these layers."""

    def run(group: Group):
        planned = planned_of(folder)
        stage = Stage(([0, *ends])[group.rank], ends[group.rank], ends[-1])
        model = planned._replace(stage=stage).build(create_backend(name, **settings)).model
        if group.rank:
            return follow(model, group)
        pipeline = Pipeline(model, group)
        found = logits_of(pipeline)
        pipeline.end()
        return found

    with named(backend) as (name, settings):
        return run_ranks(len(ends), run)[0]


@pytest.mark.parametrize("backend", ["parallel", "simd", "mlx", EMULATED])
@pytest.mark.parametrize("folder", MICRO, ids=lambda folder: folder.name)
def test_bits_are_those_of_one_process(folder: Path, backend: str):
    planned = planned_of(folder)
    with named(backend) as (name, settings):
        whole = logits_of(planned.build(create_backend(name, **settings)).model)
    n = planned.config.n_layers
    cuts = [1, n] if not getattr(planned.config, "n_shared", 0) else [planned.config.first_shared - 2, n]
    assert np.array_equal(piped(folder, backend, cuts), whole)
