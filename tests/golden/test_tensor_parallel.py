"""Models whose tensors are shared by several ranks: the logits of one process, and the same bits for every batch.

Ranks are threads. All of them run the same passes, as processes do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

pytest.importorskip("numba")


from mlx_engine.backends import create_backend
from mlx_engine.backends.base import Backend
from mlx_engine.backends.cpu.backend import CompiledProgram
from mlx_engine.cache import SequenceInput
from mlx_engine.checkpoint.model_files import Checkpoint, open_checkpoint
from mlx_engine.distributed.group import Group
from mlx_engine.distributed.tensor import sliced
from mlx_engine.errors import NotShardableError
from mlx_engine.loop.forward import forward
from mlx_engine.loop.metrics import Metrics
from mlx_engine.loop.sampler import Sampler
from mlx_engine.options import Sampling
from mlx_engine.weights.conversion import Conversion
from mlx_engine.weights.model import Model, plan_model
from tests.contract.check import EMULATED, named
from tests.decoding import decode
from tests.golden.goldens import DATA, LATENT, MIXERS, SAMPLED, Golden, check_close, relative_errors, variant
from tests.golden.test_same_bits import cut
from tests.local_ranks import run_ranks
from tests.random_models import SETTINGS, random_checkpoint

T = TypeVar("T")

MICRO = sorted({path.name for path in DATA.glob("*-micro")} - {f"{name}-micro" for name in (*LATENT, *MIXERS)})
# Those that the default tests run on four ranks: copies of KV heads and experts, biases of sums, four KV heads, copies
# of normed KV heads.
OFTEN = {"gemma4moe-micro", "gpt2-micro", "llama-micro", "olmo3-micro"}
# Those whose layers are cut as others' are: by default only one with a parallel block, and one with two norms.
RARELY = set(SAMPLED) - {"cohere2", "glm4"}
TWO_HEADS = {
    f"{name}-micro" for name in ("cohere2", "exaone4", "mellum", "nanochat", "olmoe", "qwen3_next", "starcoder2")
}
SLOW = pytest.mark.slow
# Of the logits of one process, relative in the Frobenius norm. One process is as far from float64.
TOLERANCE = 1e-6


@cache
def checkpoint(name: str) -> Checkpoint:
    return open_checkpoint(DATA / name / "hf")


def golden(name: str) -> Golden:
    return Golden(name, DATA / name / "hf", DATA / name / "golden.npz")


def on_ranks(of: Checkpoint, backend: Callable[[], Backend], size: int, run: Callable[[Model], T]) -> list[T]:
    """Return what `run` returns for the model of each rank; one rank has the whole model."""
    planned = plan_model(of, Conversion())
    if size == 1:
        return [run(planned.build(backend()).model)]

    def one(group: Group) -> T:
        own = sliced(planned, group.rank, group.size)
        made = backend()
        made.group = group
        return run(own.build(made).model)

    return run_ranks(size, one)


def parallel() -> Backend:
    return create_backend("parallel", threads=1)


def logits(ids: list[int], chunk: int = 1000, **options: Any) -> Callable[[Model], np.ndarray]:
    def run(model: Model) -> np.ndarray:
        kv = model.new_kv(len(ids), **options)
        with model.backend.session():
            parts = [forward(model, SequenceInput(ids[at : at + chunk], kv, None)) for at in range(0, len(ids), chunk)]
            return np.concatenate([np.array(model.backend.host(part)) for part in parts])

    return run


def same_on_all(found: list[np.ndarray]) -> np.ndarray:
    for of_rank in found[1:]:
        np.testing.assert_array_equal(of_rank, found[0])
    return found[0]


def error(want: np.ndarray, found: np.ndarray) -> float:
    return float(np.sqrt(np.mean(relative_errors(want, found) ** 2)))


def test_latent_attention_is_cut_by_layers_only():
    with pytest.raises(NotShardableError, match="pipeline"):
        sliced(plan_model(checkpoint("deepseek3-micro"), Conversion()), 0, 2)


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("name", "size"),
    [
        *(pytest.param(name, 2, marks=[SLOW] * (name.removesuffix("-micro") in RARELY)) for name in MICRO),
        *((name, 4) for name in sorted(OFTEN)),
        *(pytest.param(name, 4, marks=SLOW) for name in MICRO if name not in OFTEN | TWO_HEADS),
    ],
)
def test_logits_and_greedy_ids_of_the_goldens(name: str, size: int):
    of, case = checkpoint(name), golden(name)
    prompt, expected = case.prompt(0), case.greedy(0)

    def run(model: Model) -> tuple[np.ndarray, list[int]]:
        assert isinstance(model.program, CompiledProgram)
        be, kv = model.backend, model.new_kv(len(prompt) + len(expected))
        ids = decode(model, prompt, kv, Sampler(be, Sampling(), prompt), Metrics())
        return logits(prompt)(model), [next(ids) for _ in expected]

    ((one, _),), found = on_ranks(of, parallel, 1, run), on_ranks(of, parallel, size, run)
    assert all(greedy == expected for _, greedy in found)
    whole = same_on_all([of_rank for of_rank, _ in found])
    check_close(case.logits(0), whole)
    assert error(one, whole) <= TOLERANCE
    assert error(case.logits(0), whole) <= TOLERANCE


WIDE = {"attention__key_length": 128, "attention__value_length": 128}
MODELS = {
    **{name: (name, "F32", {}) for name in ("lfm2", "qwen2moe", "qwen35moe")},
    "four key heads": ("qwen35", "F32", {"ssm__group_count": 4, "ssm__time_step_rank": 8}),
    "K-quants": ("qwen3", "Q4_K", WIDE),
    "experts of K-quants": ("qwen3moe", "Q4_K", {**WIDE, "expert_feed_forward_length": 512}),
    "uneven": ("llama", "Q8_0", {"feed_forward_length": 32 * 15}),
    "three KV heads": ("qwen2", "F32", {"attention__head_count": 8, "attention__head_count_kv": 8}),
    "copies of normed KV heads": ("olmo2", "F32", {"attention__head_count": 8}),
}


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, 2) for name in MODELS),
        ("three KV heads", 3),
        ("copies of normed KV heads", 4),
        *(pytest.param(name, 4, marks=SLOW) for name in ("lfm2", "qwen2moe", "four key heads")),
    ],
)
def test_logits_of_random_models(name: str, size: int):
    architecture, type_name, changes = MODELS[name]
    of = random_checkpoint(architecture, type_name, **changes)
    ids = [int(token) for token in np.random.default_rng(1).integers(0, 300, 50)]
    (one,) = on_ranks(of, parallel, 1, logits(ids))
    assert error(one, same_on_all(on_ranks(of, parallel, size, logits(ids)))) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    ["gemma4", "olmo2", "qwen35", pytest.param("lfm2", marks=SLOW), pytest.param("qwen2moe", marks=SLOW)],
)
def test_the_same_bits_for_every_chunk_page_and_batch(architecture: str):
    """Three ranks in one order: MLX's own sum would have an order that depends on the place in the message."""
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32}
    if SETTINGS[architecture][0] == "gguf":
        heads = {"attention__head_count": 6, "attention__head_count_kv": 3, "embedding_length": 384}
    if architecture == "qwen35":
        heads |= {"ssm__group_count": 3, "ssm__time_step_rank": 6, "ssm__inner_size": 384}
    of = random_checkpoint(architecture, "F32", **heads)
    texts = [[int(token) for token in np.random.default_rng(i).integers(0, 300, 30)] for i in range(3)]

    def run(model: Model) -> list[np.ndarray]:
        whole = [logits(text)(model) for text in texts]
        for chunk in (1, 2, 7, 11):
            np.testing.assert_array_equal(logits(texts[0], chunk, page=5)(model), whole[0])
        pool = model.new_pool(90, n_sequences=3, page=7)
        sequences, edges = [pool.sequence() for _ in texts], [0, *np.cumsum(cut(30, 9))]
        with model.backend.session():
            for first, last in itertools.pairwise(edges):
                parts = [SequenceInput(text[first:last], kv, None) for text, kv in zip(texts, sequences, strict=True)]
                rows = np.array(model.backend.host(forward(model, *parts)))
                want = np.concatenate([logits_of[first:last] for logits_of in whole])
                np.testing.assert_array_equal(rows, want)
        return whole

    for found in zip(*on_ranks(of, parallel, 3, run), strict=True):
        same_on_all(list(found))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "architecture",
    [
        "llama",
        *(pytest.param(name, marks=SLOW) for name in ("gemma4", "gpt-oss", "lfm2", "olmo2", "qwen2moe", "qwen35")),
    ],
)
def test_op_by_op_and_on_mlx(architecture: str):
    of = random_checkpoint(architecture, "Q8_0")
    ids = [int(token) for token in np.random.default_rng(1).integers(0, 300, 20)]
    for backend in (lambda: create_backend("simd", jit=False), lambda: create_backend("mlx")):
        (one,) = on_ranks(of, backend, 1, logits(ids))
        assert error(one, same_on_all(on_ranks(of, backend, 2, logits(ids)))) <= 2 * TOLERANCE


def test_on_the_definition_of_the_operations():
    of, case = open_checkpoint(DATA / "qwen3-gqa"), variant("gqa")
    ids = case.prompt(0)[:6]
    found = same_on_all(on_ranks(of, lambda: create_backend("scalar"), 2, logits(ids)))
    check_close(case.logits(0)[:6], found)


@pytest.mark.slow
@pytest.mark.parametrize("name", MICRO)
def test_goldens_on_mlx(name: str):
    of, case = checkpoint(name), golden(name)
    (one,) = on_ranks(of, lambda: create_backend("mlx"), 1, logits(case.prompt(0)))
    found = same_on_all(on_ranks(of, lambda: create_backend("mlx"), 2, logits(case.prompt(0))))
    check_close(case.logits(0), found)
    assert error(one, found) <= TOLERANCE
    assert error(case.logits(0), found) <= TOLERANCE


@pytest.mark.slow
def test_emulated_metal():
    path, case = DATA / "qwen3-micro" / "model-q8_0.gguf", golden("qwen3-micro")
    of, ids = open_checkpoint(Path(path)), case.prompt(0)
    with named(EMULATED) as (plain, settings):
        found = same_on_all(on_ranks(of, lambda: create_backend(plain, **settings), 2, logits(ids)))
        one_by_one = on_ranks(of, lambda: create_backend(plain, **settings), 2, logits(ids, chunk=1))
    (want,) = on_ranks(of, parallel, 1, logits(ids))
    assert error(want, found) <= 2e-5
    np.testing.assert_array_equal(same_on_all(one_by_one), found)
