"""Pipelines of ranks in threads: the bits of one process, for every architecture, backend and number of ranks."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import mlx_engine
from mlx_engine.backends import create_backend
from mlx_engine.cache import SequenceInput
from mlx_engine.cache.prefix import PrefixCache
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.checkpoint.sources import resolve
from mlx_engine.distributed.group import Group
from mlx_engine.distributed.pipeline import Pipeline, follow, latest_cut, stages_of
from mlx_engine.distributed.shard import PipelineShard
from mlx_engine.engine import Engine, RequestBuilder, open_source
from mlx_engine.errors import DistributedError, ModelError, NotFiniteError, OptionError
from mlx_engine.loop.forward import forward, forward_logits
from mlx_engine.loop.scheduler import Scheduler
from mlx_engine.options import Options
from mlx_engine.quant.types import F32
from mlx_engine.quant.weight import Weight
from mlx_engine.weights.conversion import Conversion
from mlx_engine.weights.model import Planned, plan_model
from mlx_engine.weights.stage import Stage
from tests.contract.check import EMULATED, named
from tests.golden.goldens import SAMPLED
from tests.local_ranks import LocalGroup, run_ranks

DATA = Path(__file__).parents[1] / "data"
# Those whose stages are as others': by default only a parallel block, and dense layers before sparse ones.
RARELY = {f"{name}-micro" for name in SAMPLED} - {"cohere2-micro", "glm4moe-micro"}
MICRO = sorted(path.parent for path in DATA.glob("*-micro/hf"))
IDS = [3, 14, 15, 9, 2, 6, 5, 3, 5, 8, 9, 7]


@pytest.fixture(autouse=True)
def _tokenizer(monkeypatch):
    """Give every model the tokenizer of the builtin one: most small models have none."""
    made = mlx_engine.load_tokenizer(resolve("builtin"))
    monkeypatch.setattr(RequestBuilder, "_build_tokenizer", lambda *_: made)


def planned_of(folder: Path) -> Planned:
    return plan_model(open_checkpoint(folder / "hf"), Conversion())


def logits_of(model) -> np.ndarray:
    """Run a prompt in two chunks, two more tokens, and a second sequence beside them; return all logits."""
    be, found = model.backend, []
    with be.session():
        pool = model.new_pool(64, n_sequences=2, page=4)
        one, two = pool.sequence(), pool.sequence()
        for news in (
            [SequenceInput(IDS[:5], one, 0)],
            [SequenceInput(IDS[5:], one), SequenceInput(IDS[:3], two, None)],
            [SequenceInput([4], one), SequenceInput([1], two)],
            [SequenceInput([7, 8], two)],
        ):
            logits = forward(model, *news)
            found += [] if logits is None else [np.array(be.host(logits))]
        found.append(np.array(be.host(forward_logits(model, SequenceInput(IDS, model.scratch_kv(len(IDS)), None)))))
    return np.concatenate(found)


def piped(folder: Path, backend: str, counts: list[int]) -> np.ndarray:
    """Return the logits of a pipeline whose ranks have so many layers."""

    def run(group: Group):
        planned = planned_of(folder)
        stage = stages_of(counts, group.size, planned.config)[group.rank]
        model = planned._replace(stage=stage).build(create_backend(name, **settings)).model
        if group.rank:
            return follow(model, group)
        pipeline = Pipeline(model, group)
        found = logits_of(pipeline)
        pipeline.end()
        return found

    with named(backend) as (name, settings):
        return run_ranks(len(counts), run)[0]


def counts_of(folder: Path, size: int) -> list[int]:
    """Return the layers of as many ranks as there can be, at most `size`: one each, and the last has the others."""
    config = planned_of(folder).config
    size = min(size, config.n_layers, latest_cut(config) + 1)
    return [1] * (size - 1) + [config.n_layers - size + 1]


def test_the_table_of_a_rank_without_the_head_stays_in_the_file():
    def table(size: int) -> Any:
        planned = planned_of(DATA / "llama-micro")
        stage = stages_of(counts_of(DATA / "llama-micro", size), size, planned.config)[0]
        model: Any = planned._replace(stage=stage).build(create_backend("mlx")).model
        return model.token_embd

    assert isinstance(table(2), Weight)
    assert not isinstance(table(1), Weight)


def marked(backend: str, folder: Path, size: int):
    """Mark all but the fastest cases as slow: most architectures run on one backend, some run on others."""
    is_often = folder.name not in RARELY
    is_fast = (backend, size) == ("parallel", 4) or (folder.name in ("llama-micro", "lfm2-micro") and size == 2)
    marks = [] if is_fast and is_often and backend != EMULATED else [pytest.mark.slow]
    return pytest.param(folder, backend, size, marks=marks, id=f"{folder.name}-{backend}-{size}")


CASES = [
    marked(backend, folder, size)
    for backend in ("parallel", "simd", "mlx", EMULATED)
    for folder in MICRO
    for size in ((1, 2, 3, 4) if backend != EMULATED else (2,))
]


@pytest.mark.some(3)
@pytest.mark.parametrize(("folder", "backend", "size"), CASES)
def test_bits_are_those_of_one_process(folder: Path, backend: str, size: int):
    with named(backend) as (name, settings):
        whole = logits_of(planned_of(folder).build(create_backend(name, **settings)).model)
    assert np.array_equal(piped(folder, backend, counts_of(folder, size)), whole)


def test_layers_that_share_keys_and_values_stay_together():
    config = planned_of(DATA / "gemma4e-micro").config
    owner = latest_cut(config)
    assert 0 < owner < config.first_shared
    with pytest.raises(OptionError, match=f"layers {owner} to 5 must be on one rank, because some of them share"):
        stages_of([owner + 1, 5 - owner], 2, config)
    assert [stage.first for stage in stages_of([owner, 6 - owner], 2, config)] == [0, owner]


def tensors_read(planned: Planned, stage: Stage | None) -> set[str]:
    """Return the stored tensors that are read to build a stage, or the whole model."""
    names: set[str] = set()

    def weight(name: str) -> Weight:
        names.add(name)
        return planned.checkpoint.weight(name)

    checkpoint = replace(planned.checkpoint, weight=weight)
    planned._replace(checkpoint=checkpoint, stage=stage).build(create_backend("parallel", threads=1))
    return names


@pytest.mark.some(9)
@pytest.mark.parametrize("folder", MICRO, ids=lambda folder: folder.name)
def test_a_rank_reads_its_own_tensors_alone(folder: Path):
    planned = planned_of(folder)
    first, last = (tensors_read(planned, stage) for stage in stages_of(counts_of(folder, 2), 2, planned.config))
    assert first | last == tensors_read(planned, None)
    is_tied = "output.weight" not in planned.tensors
    assert first & last == ({planned.tensors["token_embd.weight"].stored("hf").name} if is_tied else set())
    layers = [
        {int(of[1]) for of in (re.search(r"\.?(?:h|layers)\.(\d+)\.", name) for name in names) if of}
        for names in (first, last)
    ]
    cut = counts_of(folder, 2)[0]
    assert layers == [set(range(cut)), set(range(cut, planned.config.n_layers))]


def shared_engine(source: Path, counts: list[int], use: Callable[[Engine], Any], **options: Any) -> Any:
    """Return what `use` returns on rank 0 for an engine that ranks share."""

    def run(group: Group) -> Any:
        shard = PipelineShard(group, counts)
        opened = open_source(source, "parallel", threads=1, shard=shard, **options)
        if group.rank:
            return opened.follow()
        with Engine(opened) as engine:
            found = use(engine)
            shard.close()
        return found

    return run_ranks(len(counts), run)[0]


PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [2, 2], [9, 8, 7], [3, 1, 4, 1, 5]]


def generated(engine: Engine) -> list[list[int]]:
    limits = [12, 3, 9, 15, 1, 7]
    greedy = engine.generate_batch(PROMPTS, max_tokens=limits, ignore_eos=True, logprobs=2)
    drawn = engine.generate_batch(PROMPTS, max_tokens=8, temperature=1.5, seed=[1, 2, 3, 4, 5, 6], ignore_eos=True)
    alone = engine.generate(PROMPTS[0], max_tokens=5, kv=False, ignore_eos=True)
    numbers = [[of.logprob for of in run.logprobs or ()] for run in greedy]
    return [*(run.token_ids for run in (*greedy, *drawn, alone)), *numbers]


@pytest.mark.some(1)
@pytest.mark.parametrize("counts", [[1, 2], [1, 1, 1]])
def test_several_sequences_get_the_tokens_of_one_process(counts: list[int]):
    source = DATA / "llama-micro" / "hf"
    with mlx_engine.load(source, "parallel", threads=1) as whole:
        expected = generated(whole)
    assert shared_engine(source, counts, generated) == expected


def served(engine: Engine) -> list[list[int]]:
    """Run requests through a scheduler with a prefix cache and too few pages; one leaves, and one has two answers."""
    model, options = engine.model, Options.of(20, ignore_eos=True, temperature=1.0, seed=7)
    pool = model.new_pool(64, n_sequences=4, page=8)
    scheduler = Scheduler(model, pool, slots=4, prefix=PrefixCache(pool), budget=4, shared_budget=3)
    prompts = [[*range(1, 20)], [*range(1, 12)], [7, 7, 7], [*range(1, 17)]]
    requests = [engine.request(prompt, options, n=2 if i == 1 else 1) for i, prompt in enumerate(prompts)]
    left = engine.request([5, 5, 5], options)
    for request in (*requests[:2], left, *requests[2:]):
        scheduler.submit(request)
    for _ in range(9):
        scheduler.step()
    scheduler.cancel(left)
    while scheduler.has_work:
        scheduler.step()
    assert [request.error for request in requests] == [None] * 4
    return [output.token_ids for request in requests for output in request.outputs]


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["llama-micro", "gemma3-micro", "qwen3_5-micro"])
def test_a_scheduler_with_forks_prefixes_and_few_pages_gives_the_same_tokens(folder: str):
    source = DATA / folder / "hf"
    with mlx_engine.load(source, "parallel", threads=1) as whole:
        expected = served(whole)
    assert shared_engine(source, counts_of(source.parent, 3), served) == expected


def test_as_many_passes_as_ranks_are_under_way():
    def begun(engine: Engine) -> list[int]:
        scheduler = engine.scheduler(slots=8, prefix_cache=False)
        for _ in range(8):
            scheduler.submit(engine.request([1], Options.of(6, ignore_eos=True)))
        flights = []
        for _ in range(9):
            scheduler.step()
            flights.append(sorted(len(submitted.chunks) for submitted in scheduler._runner._flight))
        return flights

    flights = shared_engine(DATA / "llama-micro" / "hf", [1, 2], begun)
    # After a step one of the two passes is settled; each has half of the sequences.
    assert flights[2:] == [[4]] * 7


def test_others_keep_their_tokens_when_one_leaves_a_pass_under_way():
    prompts = [[3, 1], [4, 1], [5, 9], [2, 6], [5, 3], [5, 8]]

    def without(engine: Engine) -> list[list[int]]:
        scheduler = engine.scheduler(slots=6, prefix_cache=False)
        requests = [engine.request(prompt, Options.of(12, ignore_eos=True)) for prompt in prompts]
        for request in requests:
            scheduler.submit(request)
        for _ in range(7):
            scheduler.step()
        under_way = [chunk.sequence.request for submitted in scheduler._runner._flight for chunk in submitted.chunks]
        assert len(under_way) == 3
        scheduler.cancel(under_way[0])
        while scheduler.has_work:
            scheduler.step()
        return [request.output.token_ids for request in requests if request is not under_way[0]]

    def alone(engine: Engine) -> list[list[int]]:
        return [engine.generate(prompt, max_tokens=12, ignore_eos=True).token_ids for prompt in prompts]

    source = DATA / "llama-micro" / "hf"
    with mlx_engine.load(source, "parallel", threads=1) as whole:
        expected = alone(whole)
    found = shared_engine(source, [1, 2], without)
    assert len(found) == 5
    assert all(ids in expected for ids in found)
    assert len({tuple(ids) for ids in found}) > 2


def test_a_rank_with_other_files_is_refused():
    def run(group: Group) -> None:
        source = DATA / ("llama-micro" if group.rank != 1 else "qwen3-micro") / "hf"
        open_source(source, "parallel", threads=1, shard=PipelineShard(group, [1, 1, 1]))

    with pytest.raises(DistributedError, match="rank 1: differs from rank 0 in files"):
        run_ranks(3, run)


def test_logits_that_are_not_finite_fail_their_request_alone():
    def run(engine: Engine) -> list[Any]:
        engine.model._model.token_embd = Weight.pack(
            "token_embd.weight", np.full((engine.config.vocab_size, engine.config.hidden_size), np.nan), F32
        )
        return [type(of.error) for of in engine.generate_batch([[1, 2], [3]], max_tokens=2)]

    assert shared_engine(DATA / "llama-micro" / "hf", [1, 2], run) == [NotFiniteError] * 2


def test_embeddings_are_refused_and_answers_go_on():
    """Logits are what the last rank sends: they are no hidden states."""

    def run(engine: Engine) -> list[Any]:
        with pytest.raises(ModelError, match="embeddings: expected a model in one process, found ranks"):
            engine.embed([[1, 2, 3]])
        return generated(engine)

    source = DATA / "llama-micro" / "hf"
    with mlx_engine.load(source, "parallel", threads=1) as whole:
        expected = generated(whole)
    assert shared_engine(source, [1, 2], run) == expected


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("options", "width"),
    [
        ({}, 2 * 1),
        ({"temperature": 1.3, "top_k": 5, "seed": [1, 2, 3, 4, 5, 6]}, 2 * 5),
        ({"temperature": 1.3, "top_k": [5, 3, 2, 9, 1, 4], "top_p": 0.9, "seed": 7}, 2 * 9),
        ({"temperature": 1.3, "seed": 7}, None),
        ({"logprobs": 2}, None),
        ({"repetition_penalty": 1.2}, None),
        ({"temperature": 1.3, "top_k": 10_000, "seed": 7}, None),
    ],
    ids=["greedy", "top-k", "several", "all", "logprobs", "penalty", "top-k of all"],
)
def test_the_largest_logits_alone_travel_if_they_suffice(options: dict[str, Any], width: int | None):
    source, widths = DATA / "llama-micro" / "hf", set[int]()

    def tokens(engine: Engine) -> list[list[int]]:
        made = engine.generate_batch(PROMPTS, max_tokens=8, ignore_eos=True, **options)
        return [of.token_ids for of in made]

    def run(engine: Engine) -> list[list[int]]:
        receive = engine.model._group.receive

        def noted(shape: Sequence[int], *of: Any) -> Any:
            widths.add(int(np.prod(shape[1:])))
            return receive(shape, *of)

        with mock.patch.object(engine.model._group, "receive", noted):
            return tokens(engine)

    with mlx_engine.load(source, "parallel", threads=1) as whole:
        expected, vocab_size = tokens(whole), whole.config.vocab_size
    assert shared_engine(source, [1, 2], run) == expected
    assert max(widths) == (vocab_size if width is None else width)


def test_after_an_interrupted_pass_no_other_begins():
    planned = planned_of(DATA / "llama-micro")
    stage = stages_of([1, 2], 2, planned.config)[0]
    model = planned._replace(stage=stage).build(create_backend("parallel", threads=1)).model
    pipeline = Pipeline(model, LocalGroup.make(2)[0])
    full = mock.patch.object(pipeline._runner, "run", side_effect=MemoryError("full"))
    with full, pytest.raises(DistributedError, match="rank 0: a forward pass ended with MemoryError: full; start"):
        forward(pipeline, SequenceInput([1], pipeline.scratch_kv(1)))
    with pytest.raises(DistributedError, match="rank 0: a forward pass was interrupted; start all ranks again"):
        forward(pipeline, SequenceInput([1], pipeline.scratch_kv(1)))


def test_a_pass_that_fails_on_rank_0_is_no_fault_of_a_request():
    def run(engine: Engine) -> bool:
        scheduler = engine.scheduler(slots=2)
        for _ in range(2):
            scheduler.submit(engine.request([1, 2], Options.of(4)))
        with (
            mock.patch.object(engine.model._runner, "run", side_effect=MemoryError("full")),
            pytest.raises(DistributedError, match="rank 0: a forward pass "),
        ):
            scheduler.step()
        return scheduler.is_sound

    assert not shared_engine(DATA / "llama-micro" / "hf", [3], run)


def test_pools_that_are_gone_are_dropped_by_the_ranks():
    def run(engine: Engine) -> int:
        for _ in range(4):
            engine.generate([1, 2], max_tokens=2, ignore_eos=True)
        gc.collect()
        engine.generate([1], max_tokens=1)
        return len(engine.model._runner._pools._pools)

    assert shared_engine(DATA / "llama-micro" / "hf", [1, 2], run) <= 2
