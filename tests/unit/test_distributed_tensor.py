"""Rank 0 leads a run whose tensors several ranks share: the others follow its passes, pools and copies of pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pytest

import mlx_engine
from mlx_engine.backends import create_backend
from mlx_engine.backends.parameters import Array
from mlx_engine.backends.sampling import largest, packed, unpacked
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.distributed.group import Group
from mlx_engine.distributed.shard import TensorShard
from mlx_engine.distributed.tensor import TensorParallel, follow_tensor, sliced
from mlx_engine.engine import Engine, open_source
from mlx_engine.errors import DistributedError
from mlx_engine.loop.sampler import Sampler
from mlx_engine.loop.stream import Generation
from mlx_engine.options import Sampling
from mlx_engine.weights.conversion import Conversion
from mlx_engine.weights.model import Model, Planned, plan_model
from tests.golden.goldens import DATA
from tests.golden.test_tensor_parallel import TOLERANCE, error
from tests.local_ranks import LocalGroup, run_ranks
from tests.ranks import run as run_processes
from tests.unit.test_distributed_pipeline import logits_of

T = TypeVar("T")

NAMES = ("gemma3-micro", "gemma4e-micro", "lfm2-micro", "qwen3_5-micro", "qwen2moe-micro")


def planned_of(name: str) -> Planned:
    return plan_model(open_checkpoint(DATA / name / "hf"), Conversion())


def built(planned: Planned, backend: str, group: Group) -> Model:
    made = create_backend(backend, threads=1)
    made.group = group
    return sliced(planned, group.rank, group.size).build(made).model


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("name", "backend"), [*((name, "parallel") for name in NAMES), ("gemma3-micro", "mlx"), ("qwen3_5-micro", "mlx")]
)
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
    assert error(whole, found) <= TOLERANCE * (1 if backend == "parallel" else 2)


def note_exchanges(group: Group, shapes: list[tuple[int, ...]]) -> None:
    """Have a group note the shape of each array that it gathers."""
    gather = group.gather

    def noting(array: Any) -> Any:
        shapes.append(array.shape)
        return gather(array)

    group.gather = noting  # type: ignore[method-assign]


def led(size: int, run: Callable[[Engine], T]) -> tuple[T, list[tuple[int, ...]]]:
    """Return what `run` returns for the engine of rank 0, and the shapes of its exchanges from then on."""
    shapes: list[tuple[int, ...]] = []

    def on_rank(group: Group) -> T | None:
        opened = open_source("builtin", "parallel", threads=1, shard=TensorShard(group))
        if group.rank:
            opened.follow()
            return None
        engine = Engine(opened)
        note_exchanges(group, shapes)
        found = run(engine)
        opened.shard.close()
        return found

    found = run_ranks(size, on_rank)[0]
    assert found is not None
    return found, shapes


PROMPT = "One day, a little fox"


@pytest.mark.some(1)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "top_k": 7, "top_p": 0.9, "min_p": 0.01, "seed": 3}])
def test_the_choice_needs_few_logits(size: int, options: dict[str, Any]):
    def run(engine: Engine) -> list[int]:
        return engine.generate(PROMPT, max_tokens=12, **options).token_ids

    with mlx_engine.load("builtin", "parallel", threads=1) as engine:
        expected, share = run(engine), engine.config.vocab_size // size
    found, shapes = led(size, run)
    assert found == expected
    assert max(shape[-1] for shape in shapes) < share
    assert (1, 2, options.get("top_k", 1)) in shapes


@pytest.mark.some(1)
@pytest.mark.parametrize("options", [{"logprobs": 2}, {"temperature": 0.9, "seed": 3}, {"repetition_penalty": 1.3}])
def test_other_choices_need_all_logits(options: dict[str, Any]):
    def run(engine: Engine) -> Generation:
        return engine.generate(PROMPT, max_tokens=6, **options)

    with mlx_engine.load("builtin", "parallel", threads=1) as engine:
        expected, share = run(engine), -(-engine.config.vocab_size // 2)
    found, shapes = led(2, run)
    assert found.token_ids == expected.token_ids
    assert (1, share) in shapes
    for mine, other in zip(found.logprobs or [], expected.logprobs or [], strict=True):
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert [token for token, _ in mine.top] == [token for token, _ in other.top]


def test_one_answer_of_a_pass_may_need_all_logits():
    def run(engine: Engine) -> list[Generation]:
        return engine.generate_batch([PROMPT, PROMPT[:9]], max_tokens=5, logprobs=[None, 0])

    with mlx_engine.load("builtin", "parallel", threads=1) as engine:
        expected = run(engine)
    found, _ = led(2, run)
    assert [of.token_ids for of in found] == [of.token_ids for of in expected]
    assert len(found[1].logprobs or []) == 5


def test_no_pass_follows_one_that_was_interrupted(monkeypatch: pytest.MonkeyPatch):
    """The other ranks would read the next message as the data that they wait for."""
    (group,) = LocalGroup.make(1)
    model = built(planned_of("gemma3-micro"), "simd", group)
    leader = TensorParallel(model, group)
    monkeypatch.setattr(type(model), "forward", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        logits_of(leader)
    monkeypatch.undo()
    with pytest.raises(DistributedError, match="rank 0: a forward pass was interrupted"):
        logits_of(leader)


def test_logprobs_of_few_logits_are_refused():
    backend = create_backend("simd")
    pick = Sampler(backend, Sampling(), [1], logprobs=False)
    pick.settle(pick.add(3, cast(Array, np.zeros((1, 8), dtype=np.float32)), whole=False))
    with pytest.raises(ValueError, match="expected all logits, found only the largest ones"):
        pick.logprobs()


@pytest.mark.parametrize("k", [1, 3, 9])
def test_the_largest_logits_of_all_ranks(k: int):
    """Equal logits, ranks with fewer columns than k, values at the end of float32, rows that are not finite."""
    rng = np.random.default_rng(k)
    rows = rng.integers(-3, 3, (6, 22)).astype(np.float32)
    rows[1], rows[2, 4], rows[3] = 1e37 * rows[1], np.inf, 0
    parts = [packed(rows[:, first : first + 8], k) for first in (0, 8, 16)]
    found = unpacked(np.stack(parts), 22)
    assert np.isnan(found[2]).all()
    for r in (0, 1, 3, 4, 5):
        np.testing.assert_array_equal(largest(found[r], k), largest(rows[r], k))
        np.testing.assert_array_equal(np.sort(found[r])[-k:], np.sort(rows[r])[-k:])


@pytest.mark.slow
def test_ranks_as_processes(tmp_path: Path):
    """Over MLX's ring. Rank 0 prints the text of one process, and the other rank nothing."""
    options = ["-m", "builtin", "-b", "parallel", "--threads", "1", "-n", "12", "--shard", "tensor", PROMPT]
    (code, out, err), *others = run_processes(tmp_path, 2, ["cli.py", "generate", *options])
    with mlx_engine.load("builtin", "parallel", threads=1) as engine:
        expected = engine.generate(PROMPT, max_tokens=12).text
    assert code == 0, err
    assert out.strip() == PROMPT + expected
    assert "tensor parallelism on 2 ranks" in err
    assert [(code, out) for code, out, _ in others] == [(0, "")]
