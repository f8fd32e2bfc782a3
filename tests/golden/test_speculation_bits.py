"""An answer does not depend on proposed tokens: ids, log-probabilities and text, to the bit.

Each request is answered alone and without proposals. Then it is answered with others, with chunks, little memory and
prefix hits, while a drafter proposes tokens: the right ones, wrong ones, random ones, ids that no vocabulary has, or
what a lookup finds. The default tests run 50 requests; those marked slow run 2,000, on every architecture and backend.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence as Ids
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("numba")

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import mlx_engine
from mlx_engine import Constraint
from mlx_engine.backends import create_backend
from mlx_engine.backends.metal.backend import MetalBackend
from mlx_engine.cache.prefix import PrefixCache
from mlx_engine.cache.states import SequenceState
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.distributed.group import Group
from mlx_engine.distributed.pipeline import Pipeline, follow, stages_of
from mlx_engine.distributed.tensor import TensorParallel, follow_tensor, sliced
from mlx_engine.engine import Engine
from mlx_engine.loop.draft import DraftModel
from mlx_engine.loop.logprobs import digest
from mlx_engine.loop.lookup import Lookups
from mlx_engine.loop.request import Request, Sequence
from mlx_engine.loop.sampler import Sampler
from mlx_engine.loop.scheduler import Scheduler
from mlx_engine.loop.speculation import PassCosts, Speculation
from mlx_engine.options import Options
from mlx_engine.weights.conversion import Conversion
from mlx_engine.weights.model import Model, plan_model
from tests.golden.goldens import DATA
from tests.local_ranks import run_ranks
from tests.random_models import SETTINGS, VOCAB, random_model
from tests.streams import request_of

KINDS = (
    {},
    {"temperature": 1.3, "top_k": 50, "seed": 11},
    {"temperature": 0.4, "repetition_penalty": 1.4, "frequency_penalty": 0.7, "presence_penalty": 0.5, "seed": 4},
    {"repetition_penalty": 1.3, "logit_bias": {17: 3.0}},
)
DRAFTERS = ("right", "nearly right", "wrong", "random", "outside", "lookup", "draft")
# Layers with windows, of states, with experts, and plain ones.
FEW = ("qwen3", "gemma3", "qwen35", "lfm2", "gpt-oss")
STEM = [(7 * i * i + 3 * i) % 40 for i in range(90)]


@cache
def model(architecture: str, backend: str = "parallel") -> Model:
    made = MetalBackend("emulator") if backend == "metal" else create_backend(backend, threads=1)
    return random_model(architecture, "Q8_0", made)


class Asked:
    """A request that can be made several times, and what it is answered alone."""

    def __init__(self, of: Model, prompt: Ids[int], kind: int, n_tokens: int, n: int, ends: int) -> None:
        self.prompt, self.n_tokens, self.n = prompt, n_tokens, n
        given = {"logprobs": None if ends % 5 == 4 else 2, **KINDS[kind]}
        self.options, self.end_ids = Options.of(**given), ()
        free = self.answered(of)
        ids = free.outputs[0].token_ids
        at = min(ends % 7 + 1, len(ids) - 1)
        if ends % 3 == 1:  # stops at two characters of the answer
            stop = "".join(chr(0x4E00 + i) for i in ids[at - 1 : at + 1])
            self.options = Options.of(stop=stop, **given)
        elif ends % 3 == 2:
            self.end_ids = (ids[at],)
        self.continued = [output.token_ids for output in free.outputs]
        self.want = found(self.answered(of))

    def request(self) -> Request:
        return request_of(self.prompt, self.options, max_tokens=self.n_tokens, n=self.n, end_ids=self.end_ids)

    def answered(self, of: Model) -> Request:
        request = self.request()
        run(Scheduler(of, of.new_pool(request.longest * self.n, n_sequences=self.n), slots=self.n), [request])
        return request


def found(request: Request) -> list[tuple[object, ...]]:
    if request.error is not None:
        raise request.error
    return [
        (out.token_ids, out.text, out.finish_reason, out.stop, out.logprobs and digest(out.token_ids, [
            of.logprob for of in out.logprobs
        ]))
        for out in request.outputs
    ]  # fmt: skip


def run(scheduler: Scheduler, requests: Ids[Request], apart: int = 0) -> None:
    for request in requests:
        scheduler.submit(request)
        for _ in range(apart):
            scheduler.step()
    for _ in range(4000):
        if not scheduler.has_work:
            return
        scheduler.step()
    raise AssertionError("still at work after 4,000 steps")


class Scripted:
    """Proposes what follows in the answer that is known, or something else."""

    def __init__(self, kind: str, answer: Ids[int], seed: int) -> None:
        self.kind, self.answer, self.n, self.random = kind, answer, 0, np.random.default_rng(seed)

    def extend(self, ids: Ids[int]) -> None:
        self.n += len(ids)

    def propose(self, most: int) -> tuple[Ids[int], int]:
        right = [*self.answer[self.n :], *[0] * most][:most]
        if self.kind == "wrong":
            return [(i + 1) % VOCAB for i in right], 20
        if self.kind == "random":
            return self.random.integers(0, VOCAB, most).tolist(), 20
        if self.kind == "outside":
            return [*right[:2], *([-1], [VOCAB], [1 << 40])[self.n % 3], *right[2:]], 20
        if self.kind == "nearly right":
            return [i if self.random.random() < 0.8 else (i + 1) % VOCAB for i in right], 20
        return right, 20


class Known(PassCosts):
    """No pass without proposals has to be measured first."""

    def lacks(self, n_rows: int) -> bool:
        return False


class Hostile(Speculation):
    """Proposes any number of tokens, whatever was right before."""

    def __init__(self, drafters, seed: int, vocab: int, passes: Ids[DraftModel] = ()) -> None:
        super().__init__(drafters, vocab, passes=passes)
        self.costs = Known()
        self.random = np.random.default_rng(seed)

    def depths(self, drafter, asking, n_sequences, n_rows):
        most = [min(drafter.most, self._most_of(sequence)) for sequence, _ in asking]
        return [int(self.random.integers(0, n + 1)) for n in most]

    def plan(self, chunks, drafts, n_rows):
        return [int(self.random.integers(0, len(draft.ids) + 1)) for draft in drafts]


class Scripts:
    """The drafters of some requests."""

    def __init__(self, kind: str, asked: Ids[Asked], requests: Ids[Request], seed: int) -> None:
        self.kind, self.asked, self.requests, self.seed = kind, asked, requests, seed

    def __call__(self, sequence: Sequence) -> Scripted:
        of = self.asked[self.requests.index(sequence.request)]
        return Scripted(self.kind, of.continued[sequence.index], self.seed)

    def end(self, sequence: Sequence) -> None:
        """Nothing is kept."""


@cache
def draft_model(of: Model, architecture: str) -> Model:
    """Return a draft model: the model itself, or another one whose cache is of another kind."""
    if architecture == "same":
        return copy.copy(of)
    return random_model(architecture, "Q8_0", of.backend)


def drafts(of: Model, seed: int, slots: int) -> Hostile:
    """Return what proposes the tokens of a draft model with a pool that may be too small."""
    names = ("same", "lfm2", "gemma3", "qwen3") if of.config.vocab_size == VOCAB else ("same",)
    model, page = draft_model(of, names[seed % len(names)]), (4, 16)[seed % 2]
    pool = model.new_pool(40 + 90 * (seed % 5), n_sequences=slots, page=page, n_proposed=seed % 20)
    made = DraftModel(model, pool, 0.1)
    return Hostile(Lookups() if seed % 3 == 0 else None, seed, of.config.vocab_size, [made])


def speculation(kind: str, asked: Ids[Asked], requests: Ids[Request], seed: int, vocab: int = VOCAB) -> Speculation:
    made = Lookups(keeps_others=seed % 2 == 0) if kind == "lookup" else Scripts(kind, asked, requests, seed)
    return Hostile(made, seed, vocab)


ASKED = st.tuples(
    st.integers(0, 90), st.lists(st.integers(0, 39), min_size=1, max_size=12), st.integers(0, len(KINDS) - 1),
    st.integers(2, 20), st.sampled_from([1, 1, 2, 3]), st.integers(0, 20),
)  # fmt: skip


def compare(
    of: Model, cases: Ids[tuple], drafter: str, page: int, budget: int, memory: int, seed: int, passes=None
) -> Speculation:
    """Compare answers with and without proposals, of `passes` if given; pages and slots are free afterwards."""
    asked = [Asked(of, (*STEM[:cut], *tail), *rest) for cut, tail, *rest in cases]
    requests = [one.request() for one in asked]
    longest = max(request.longest * len(request.outputs) for request in requests)
    slots = max(3, len(cases) - seed % 3)
    if drafter in ("draft", "mtp"):
        made = (passes or drafts)(of, seed, slots)
    else:
        made = speculation(drafter, asked, requests, seed, of.config.vocab_size)
    pool = of.new_pool(longest + memory, n_sequences=slots, page=page, n_proposed=seed % 20)
    prefix = PrefixCache(pool, whole_pages=seed % 4 == 0) if seed % 2 else None
    scheduler = Scheduler(of, pool, slots=slots, prefix=prefix, budget=budget, speculation=made)
    run(scheduler, requests, apart=seed % 5)
    assert [found(request) for request in requests] == [one.want for one in asked]
    if prefix is not None:
        prefix.clear()
    assert [pool.free_pages(group) for group in range(len(pool.windows))] == list(pool.n_pages)
    assert pool.states.n_free == max(0, pool.states.n_slots - 1)
    for one in made.passes:
        if drafter == "draft":
            one.prefix.clear()
        assert [one.pool.free_pages(group) for group in range(len(one.pool.windows))] == list(one.pool.n_pages)
        assert one.pool.states.n_free == max(0, one.pool.states.n_slots - 1)
    return made


def settled(n: int) -> settings:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=n, deadline=None, suppress_health_check=checks, phases=(Phase.generate,))


@settled(20)
@given(
    architecture=st.sampled_from(FEW), cases=st.lists(ASKED, min_size=1, max_size=4), drafter=st.sampled_from(DRAFTERS),
    page=st.sampled_from([4, 16, 64]), budget=st.sampled_from([5, 40, 512]), memory=st.integers(0, 200),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_an_answer_has_the_same_bits_with_proposed_tokens(architecture, cases, drafter, page, budget, memory, seed):
    compare(model(architecture), cases, drafter, page, budget, memory, seed)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["simd", "parallel"])
@pytest.mark.parametrize("architecture", SETTINGS)
@settled(15)
@given(
    cases=st.lists(ASKED, min_size=1, max_size=16), drafter=st.sampled_from(DRAFTERS),
    page=st.sampled_from([4, 16, 64]), budget=st.sampled_from([5, 40, 512]), memory=st.integers(0, 200),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_many_answers_have_the_same_bits(architecture, backend, cases, drafter, page, budget, memory, seed):
    compare(model(architecture, backend), cases, drafter, page, budget, memory, seed)


CASES = [(30, [5, 6], 2, 16, 1, 0), (50, [1], 0, 16, 2, 0), (9, [2, 3, 4], 3, 16, 1, 1)]


@pytest.mark.parametrize("architecture", ["qwen3", "qwen35"])
def test_right_proposals_make_fewer_passes(architecture):
    made = compare(model(architecture), CASES, "right", 16, 512, 200, 23)
    assert made.n_accepted > 20
    assert made.n_accepted > 0.8 * made.n_proposed


@pytest.mark.some(1)
@pytest.mark.parametrize("architecture", ["qwen35", "gemma3"])
def test_a_draft_model_with_the_same_weights_is_right(architecture):
    """Also at a temperature: the draft model draws with the random numbers of the answer."""
    made = compare(model(architecture), CASES, "draft", 16, 512, 200, 4)
    assert made.n_accepted > 20
    assert made.n_accepted > 0.8 * made.n_proposed


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "qwen35", "granitehybrid"])
def test_a_lazy_backend_has_the_same_bits(architecture, drafter):
    """`metal`, emulated: the device may be one pass ahead."""
    compare(model(architecture, "metal"), CASES, drafter, 16, 512, 200, 22)


STORY = "Once upon a time there was a little girl who had a red ball and a big dog, and "
SCHEMA = Constraint.json_schema(
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},
     "required": ["name", "age"], "additionalProperties": False}
)  # fmt: skip
WARM = {"temperature": 1.1, "top_k": 90, "presence_penalty": 0.4}
CALLS: list[tuple[int, ...]] = []


def noted(ids, logits):
    CALLS.append(tuple(ids))
    logits[ids[-1]] -= 1
    return logits


def never(ids, logits):
    if len(ids) > 24:
        raise RuntimeError("no")
    return logits


WAYS: list[tuple[str, int, dict]] = [
    (STORY, 1, {"constraint": SCHEMA, "logprobs": 0}),
    (STORY, 1, {"constraint": SCHEMA}),
    ("Tom", 2, {"constraint": SCHEMA, "seed": 3, "logprobs": 0, **WARM}),
    ("Lily", 1, {"constraint": Constraint.regex("[0-9]{2,9}( [a-z]+){0,3}"), "logprobs": 0}),
    (STORY, 2, {"processors": noted, "seed": 5, "logprobs": 0, **WARM}),
    (STORY, 1, {"processors": never}),
]


@cache
def builtin() -> Engine:
    return mlx_engine.load("builtin", "parallel", threads=1)


@pytest.mark.some(1)
@pytest.mark.parametrize("drafter", ["nearly right", "wrong"])
def test_masks_and_processors_see_accepted_tokens_alone(drafter):
    """They are called as without proposals: as often, with the same ids; and they fail at the same token."""
    engine = builtin()

    def answers(seed: int | None) -> tuple[list[object], list[tuple[int, ...]]]:
        CALLS.clear()
        requests = [engine.request(prompt, Options.of(20, **given), n=n) for prompt, n, given in WAYS]
        made = None
        if seed is not None:
            made = Hostile(Scripts(drafter, KNOWN, requests, seed), seed, engine.config.vocab_size)
        pool = engine.model.new_pool(900, n_sequences=8)
        run(Scheduler(engine.model, pool, slots=8, speculation=made), requests)
        assert [str(request.error) for request in requests if request.error] == [
            "processors[0] (never) failed after 25 tokens: RuntimeError: no"
        ]
        found = [(out.token_ids, out.text, out.finish_reason, out.logprobs) for r in requests for out in r.outputs]
        for request in requests if made is None else ():
            KNOWN.append(SimpleNamespace(continued=[out.token_ids for out in request.outputs]))
        assert made is None or made.n_proposed > 50
        return found, sorted(CALLS)

    KNOWN: list[SimpleNamespace] = []
    expected = answers(None)
    assert all(answers(seed) == expected for seed in (1, 2))


RANKS = [
    pytest.param(name, size, is_tensor, marks=[] if (name, size) == ("lfm2-micro", 2) else [pytest.mark.slow])
    for name in ("lfm2-micro", "gemma3-micro", "qwen3_5-micro")
    for size, is_tensor in ((2, False), (3, False), (2, True), (4, True))
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "is_tensor"), RANKS)
def test_ranks_have_the_same_bits(name, size, is_tensor):
    """The proposals travel in the message of a pass."""
    planned = plan_model(open_checkpoint(DATA / name / "hf"), Conversion())
    size = size if is_tensor else min(size, planned.config.n_layers)

    def leads(of: Model) -> None:
        for drafter, seed in (("right", 22), ("nearly right", 23), ("wrong", 14), ("lookup", 9)):
            made = compare(of, CASES, drafter, 16, 40, 200, seed)
            assert made.n_proposed > 0
        of.end()

    def run(group: Group) -> None:
        backend = create_backend("parallel", threads=1)
        if is_tensor:
            backend.group = group
            own = sliced(planned, group.rank, group.size).build(backend).model
            return follow_tensor(own, group) if group.rank else leads(TensorParallel(own, group))
        counts = [1] * (size - 1) + [planned.config.n_layers - size + 1]
        own = planned._replace(stage=stages_of(counts, size, planned.config)[group.rank]).build(backend).model
        return follow(own, group) if group.rank else leads(Pipeline(own, group))

    run_ranks(size, run)


# ---- planted bugs are found ----


def accepts_one_too_many(patch):
    original = Scheduler._accept_chunk

    def accept(self, chunk, token):
        chunk.proposed = [token, *chunk.proposed[1:]]
        original(self, chunk, token)

    patch.setattr(Scheduler, "_accept_chunk", accept)


def keeps_the_last_state(patch):
    original = SequenceState.roll_back

    def roll_back(self, length):
        if self._pending and self._pending[0].length <= length < self._pending[-1].length:
            at = length - self._pending[0].length
            self._pending[at], self._pending[-1] = (
                self._pending[at]._replace(slot=self._pending[-1].slot),
                self._pending[-1]._replace(slot=self._pending[at].slot),
            )
        original(self, length)

    patch.setattr(SequenceState, "roll_back", roll_back)


def penalises_a_rejected_token(patch):
    original = Sampler.draw

    def draw(self):
        drawn = original(self)
        return type(drawn)(drawn.sampling, [*drawn.recent, 1, 2, 3], drawn.u, drawn.n_prompt, drawn.mask)

    patch.setattr(Sampler, "draw", draw)


@pytest.mark.some(1)
@pytest.mark.parametrize("bug", [accepts_one_too_many, keeps_the_last_state, penalises_a_rejected_token])
def test_planted_bugs_are_found(monkeypatch, bug):
    of = model("qwen35")
    compare(of, CASES, "wrong", 16, 512, 200, 23)
    asked = [Asked(of, (*STEM[:cut], *tail), *rest) for cut, tail, *rest in CASES]
    bug(monkeypatch)
    requests = [one.request() for one in asked]
    pool = of.new_pool(600, n_sequences=4, page=16, n_proposed=16)
    made = speculation("wrong", asked, requests, 23)
    run(Scheduler(of, pool, slots=4, speculation=made), requests)
    assert [found(request) for request in requests] != [one.want for one in asked]
