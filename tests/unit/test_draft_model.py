"""A draft model: which one fits, what it proposes and reads, its memory, and what users see of it."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("numba")

import mlx_engine
from mlx_engine.backends import create_backend
from mlx_engine.engine import open_source
from mlx_engine.errors import NotEnoughMemoryError, OptionError
from mlx_engine.loop.draft import MOST, DraftModel, check_vocabulary
from mlx_engine.loop.request import Sequence
from mlx_engine.loop.scheduler import Scheduler
from mlx_engine.loop.speculation import KINDS, START, PassCosts, Speculation
from mlx_engine.observe import log
from mlx_engine.options import DRAFT, Options
from mlx_engine.weights.outline import Need
from tests.random_models import random_model
from tests.streams import request_of

PROMPT = [(11 * i * i + 5 * i) % 40 for i in range(70)]


@pytest.fixture(scope="module")
def qwen3():
    return random_model("qwen3", "F32", create_backend("parallel", threads=1))


def drafting(of, n_tokens=400):
    return DraftModel(of, of.new_pool(n_tokens, n_sequences=4, page=16), 0.2)


def sequence_of(of, prompt=PROMPT, answer=(), **options):
    request = request_of(prompt, Options.of(**options), max_tokens=30)
    sequence = Sequence.of(request, of.new_pool(200), of.backend)
    for token in answer:
        sequence.output.token_ids.append(token)
        sequence.sampler.ids.append(token)
    return sequence


def chosen(of, n, **options):
    """Return what the model generates."""
    request = request_of(PROMPT, Options.of(**options), max_tokens=n)
    scheduler = Scheduler(of, of.new_pool(200))
    scheduler.submit(request)
    while scheduler.has_work:
        scheduler.step()
    return request.output.token_ids


@pytest.mark.parametrize("options", [{}, {"temperature": 1.2, "seed": 5, "repetition_penalty": 1.2}])
def test_it_proposes_what_it_would_generate(qwen3, options):
    made, answer = drafting(qwen3), chosen(qwen3, 12, **options)
    sequence = sequence_of(qwen3, answer=answer[:3], **options)
    assert made.propose({sequence: 5}, 512) == {sequence: answer[3:8]}
    sequence.output.token_ids += answer[3:5]  # two were right, and another token follows
    sequence.output.token_ids += [answer[5] + 1, 7]
    sequence.sampler.ids.extend(sequence.output.token_ids[3:])
    held = made._held[sequence]
    assert (held.kv.length, held.kv.pending) == (len(PROMPT) + 3, 4)
    made._settle(held, sequence.ids)
    assert (held.kv.length, held.kv.pending) == (len(PROMPT) + 5, 0)
    made.propose({sequence: 1}, 512)
    assert (held.kv.length, held.kv.pending) == (len(PROMPT) + 7, 0)
    made.release(sequence)
    made.prefix.clear()
    assert made.pool.used_pages(0) == 0


def test_a_long_prompt_is_read_in_pieces_and_others_begin_with_it(qwen3):
    made, answer = drafting(qwen3), chosen(qwen3, 4)
    first = sequence_of(qwen3, answer=answer[:1])
    assert made.propose({first: 2}, 40) == {}
    assert made.propose({first: 2}, 40) == {first: answer[1:3]}
    second = sequence_of(qwen3, answer=answer[:1])
    assert made.propose({first: 1, second: 2}, 10)[second] == answer[1:3]
    assert made.prefix.stats.cached_tokens >= len(PROMPT)


def test_sequences_without_memory_get_no_proposals(qwen3):
    made, answer = drafting(qwen3, 90), chosen(qwen3, 3)
    first, second = (sequence_of(qwen3, [*PROMPT[:-1], i], answer[:1]) for i in (1, 2))
    assert list(made.propose({first: 2, second: 2}, 512)) == [first]
    made.release(first)
    assert list(made.propose({second: 2}, 512)) == [second]


def test_a_draft_model_with_a_smaller_context_reads_nothing_beyond_it(qwen3, monkeypatch):
    """It gives its pages back when the sequence becomes longer, and does not read the beginning of a longer one."""
    made, answer = drafting(copy.copy(qwen3)), chosen(qwen3, 4)
    made.model.config = replace(qwen3.config, context_length=len(PROMPT) + 2)
    sequence = sequence_of(qwen3, answer=answer[:1])
    assert made.propose({sequence: 4}, 512) == {sequence: answer[1:3]}  # as many as its context has
    sequence.output.token_ids += answer[1:3]
    monkeypatch.setattr(made.model, "forward", pytest.fail)
    assert made.propose({sequence: 4}, 512) == {}
    assert made.propose({sequence_of(qwen3, [*PROMPT, *PROMPT]): 4}, 40) == {}
    made.prefix.clear()
    assert (made.pool.used_pages(0), made._held) == (0, {})


def test_ids_that_the_draft_model_lacks_end_its_proposals(qwen3):
    made = drafting(qwen3)
    assert made.propose({sequence_of(qwen3, [1, 2, 300]): 2}, 512) == {}
    proposed = Speculation(None, 100, passes=[made])._known([5, 99, 100, 3])
    assert proposed == [5, 99]


@pytest.mark.some(2)
@pytest.mark.parametrize("fault", [MemoryError("planted"), RuntimeError("planted")])
@pytest.mark.parametrize("at", [1, 3])
def test_an_error_of_the_draft_model_ends_its_proposals_and_no_answer(qwen3, monkeypatch, caplog, fault, at):
    """In its first pass, or in a later one, when it has pending tokens."""
    monkeypatch.setattr(log, "_warned", set())
    monkeypatch.setattr(log.LOGGER, "propagate", True)
    monkeypatch.setattr(Speculation, "depths", lambda self, drafter, asking, *_: [3] * len(asking))
    made, calls = drafting(copy.copy(qwen3)), []
    forward = made.model.forward

    def failing(batch):
        calls.append(batch)
        if len(calls) == at:
            raise fault
        return forward(batch)

    made.model.forward = failing
    speculation = Speculation(None, int(qwen3.config.vocab_size), passes=[made])
    scheduler = Scheduler(qwen3, qwen3.new_pool(400, n_sequences=2), slots=2, speculation=speculation)
    requests = [request_of(PROMPT[i:], Options(), max_tokens=12) for i in range(2)]
    for request in requests:
        scheduler.submit(request)
    while scheduler.has_work:
        scheduler.step()
    assert [request.error for request in requests] == [None, None]
    assert requests[0].output.token_ids == chosen(qwen3, 12)
    assert len(calls) == at
    assert caplog.messages == [
        f"warning: the drafter 'draft' has failed ({type(fault).__name__}: planted); it proposes no more tokens"
    ]
    made.prefix.clear()
    assert made.pool.used_pages(0) == 0


def test_the_number_of_tokens_follows_acceptance_and_the_time_of_passes(qwen3):
    made = SimpleNamespace(name=DRAFT, most=MOST, n_hidden=0, share=0.1, costs=PassCosts())
    speculation = Speculation(None, 300, passes=[made])
    for n, seconds in {1: 0.025, 2: 0.0255, 4: 0.033, 8: 0.059, 16: 0.112, 32: 0.204}.items():
        speculation.costs.add(n, seconds)

    def depth(right, wrong, account=8.0, seconds=0.002):
        made.costs = PassCosts()
        made.costs.add(1, seconds)
        sequence = sequence_of(qwen3, answer=[1])
        draft = speculation.look(sequence)
        draft.account, speculation._acceptance = account, draft.acceptance  # no other sequence has proposals
        for is_right in [True] * right + [False] * wrong:
            draft.acceptance.add(KINDS[DRAFT], is_right=is_right)
        return speculation.depths(made, [(sequence, draft)], 1, 1)[0]

    assert 4 <= depth(60, 0) <= MOST
    assert 2 <= depth(40, 20) <= 4
    assert depth(0, 60) == 0
    assert depth(60, 0, account=0.0) <= 3  # what wrong proposals may cost at the start of an answer
    assert depth(60, 0, account=-START) == 0
    assert depth(60, 0, seconds=0.05) == 0  # the draft model is slower than the model


def test_another_vocabulary_is_refused_by_its_first_token():
    def tokenizer(name, *pieces):
        return SimpleNamespace(where=name, pieces=lambda: [piece.encode() for piece in pieces])

    check_vocabulary(tokenizer("a", "x", "y"), tokenizer("b", "x", "y", "", ""))
    with pytest.raises(OptionError, match="token 1 is 'y' in a and 'z' in b; choose a smaller model"):
        check_vocabulary(tokenizer("a", "x", "y"), tokenizer("b", "x", "z"))
    with pytest.raises(OptionError, match="token 2 is 'w' in a and no token in b"):
        check_vocabulary(tokenizer("a", "x", "y", "w"), tokenizer("b", "x", "y"))


def test_a_draft_model_is_given_where_it_is_used():
    with pytest.raises(OptionError, match="draft must be a small model with the same vocabulary"):
        mlx_engine.load("builtin", speculate="draft")
    with pytest.raises(OptionError, match="draft is used only if speculate is 'draft' or 'auto', not 'lookup'"):
        mlx_engine.load("builtin", speculate="lookup", draft="builtin")
    with pytest.raises(OptionError, match="draft needs a model that one process runs alone"):
        open_source("builtin", draft="builtin", speculate="auto", shard=object())


def test_memory_is_checked_for_both_models():
    both = Need(100, 60, 10, 5) + Need(20, 20, 0, 7)
    assert both == Need(120, 80, 10, 7)
    both.check("a model", 57)
    with pytest.raises(NotEnoughMemoryError):
        both.check("a model", 56)


def test_answers_and_receipts_with_a_draft_model(monkeypatch):
    monkeypatch.setattr(Speculation, "depths", lambda self, drafter, asking, *_: [3] * len(asking))
    monkeypatch.setattr(Speculation, "plan", lambda self, chunks, drafts, n: [len(draft.ids) for draft in drafts])
    with mlx_engine.load("builtin", "parallel", threads=1, draft="builtin") as engine:
        assert engine.speculation == (True, "draft", ("draft",))
        plain = engine.generate("Tom had", 30, logprobs=0, ignore_eos=True, speculate="off")
        found = engine.generate("Tom had", 30, logprobs=0, ignore_eos=True)
        assert found.digest == plain.digest
        assert plain.drafters == {}
        assert found.drafters["draft"][1] > 15
        assert len(found.metrics.passes) == 30 - found.n_accepted
        scheduler = engine.scheduler(slots=2, kv_memory=1 << 24)
        (drafter,) = scheduler.speculation.passes
        assert scheduler.pool.nbytes + drafter.pool.nbytes <= 1 << 24
        with pytest.raises(OptionError, match="loaded without"):
            mlx_engine.load("builtin", "parallel", threads=1).generate("a", 1, speculate="draft")
