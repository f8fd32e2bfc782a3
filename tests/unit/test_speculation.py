"""How many tokens are proposed, for which models, and what users and clients see of it."""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import count
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import mlx_engine
from mlx_engine.bench import speculation as bench
from mlx_engine.cache.pool import KVLayer
from mlx_engine.commands import app
from mlx_engine.errors import EngineError, OptionError
from mlx_engine.loop.lookup import Lookups
from mlx_engine.loop.speculation import FEWEST_PARAMETERS, PLAIN_EACH, START, PassCosts, Speculation, use_of
from mlx_engine.options import Options

REPEATED = "One two three four five six. " * 6


class Always:
    """A drafter that proposes one token again and again, with strong evidence."""

    def __init__(self, token):
        self.token = token

    def extend(self, ids):
        pass

    def propose(self, most):
        return [self.token] * most, 32


class Drafters:
    def __init__(self, token):
        self.token = token

    def __call__(self, sequence):
        return Always(self.token)

    def end(self, sequence):
        pass


def chunk_of(n_sequences=1):
    request = SimpleNamespace(prompt_ids=[1], n_proposed=0, n_accepted=0, drafters={}, options=Options())
    output = SimpleNamespace(token_ids=[5], max_tokens=100_000)
    sequence = SimpleNamespace(draft=None, output=output, request=request)
    return SimpleNamespace(sequence=sequence, n=1, samplers=(1,), n_read=0, proposed=(), drafter="lookup")


def costs_of(by_rows):
    costs = PassCosts()
    for n, seconds in by_rows.items():
        costs.add(n, seconds)
    for _ in range(30):
        for n, seconds in by_rows.items():
            costs.add(n, seconds)
    return costs


# Seconds of a pass by rows, as a 0.6B model on one core has them.
COSTS = {1: 0.025, 2: 0.0255, 4: 0.033, 8: 0.059, 16: 0.112, 32: 0.204}


def simulated(token, n_tokens, n=1, drafters=None, costs=COSTS):
    """Run answers in which token 5 always follows; return their tokens per second over those without proposals."""
    made, chunks = Speculation(drafters or Drafters(token), 100), [chunk_of() for _ in range(n)]
    made.costs = costs_of(costs)
    seconds = 0.0
    while len(chunks[0].sequence.output.token_ids) < n_tokens:
        drafts = [made.look(chunk.sequence) for chunk in chunks]
        numbers = made.plan(chunks, drafts, n)
        seconds += made.costs(n + sum(numbers))
        for chunk, draft, k in zip(chunks, drafts, numbers, strict=True):
            n_right = next((i for i, one in enumerate(draft.ids[:k]) if one != 5), k)
            chunk.sequence.output.token_ids += [5] * (1 + n_right)
            if k:
                draft.under_way = n, n, sum(numbers)
                chunk.proposed, chunk.n = draft.ids[:k], 1 + n_right
                made.learn(chunk)
    n_made = sum(len(chunk.sequence.output.token_ids) for chunk in chunks) / n
    return n_made * made.costs(n) / seconds, made


def test_wrong_proposals_cost_less_than_a_hundredth():
    for n in (1, 4, 8):
        factor, made = simulated(9, 200, n)
        assert made.n_proposed >= (n == 1)
        assert factor > 0.99


def test_after_a_loss_right_first_tokens_allow_proposals_and_a_wrong_one_fewer():
    made, chunk = Speculation(Drafters(5), 100), chunk_of()
    made.costs, numbers = costs_of(COSTS), []
    made.look(chunk.sequence).account = -START
    for token in (5, 5, 5, 6, 6):
        chunk.sequence.output.token_ids.append(token)
        numbers += made.plan([chunk], [made.look(chunk.sequence)], 1)
    assert 0 < numbers[0] < numbers[2] > numbers[3] > numbers[4] == 0


def test_right_proposals_give_nearly_what_passes_allow():
    factor, made = simulated(5, 400)
    assert made.n_accepted == made.n_proposed > 200
    assert factor > 2.8  # 16 tokens in the time of 4.5


def test_a_full_batch_drafts_less_than_a_single_request():
    alone = simulated(5, 200)[1]
    together = simulated(5, 200, 8)[1]
    each = [made.n_proposed / max(1, made.n_drafts) for made in (alone, together)]
    assert each[0] > 2 * each[1] > 0


def test_eight_answers_of_which_nine_of_ten_proposals_are_right_gain():
    # With these seeds, some sequences begin with wrong proposals.
    seeds, wide = count(32), {1: 0.044, 4: 0.07, 8: 0.121, 9: 0.137, 10: 0.163, 16: 0.201, 24: 0.269, 32: 0.343}
    factor, _ = simulated(5, 250, 8, lambda _: bench.Recorded([5] * 400, 0.9, next(seeds)), wide)
    assert factor > 1.18


def test_a_disturbed_pass_changes_the_costs_little():
    costs = costs_of(COSTS)
    before = costs(4)
    costs.add(4, 10.0)
    for _ in range(20):
        costs.add(1, COSTS[1])
    assert before <= costs(4) < 1.15 * before
    assert costs(2) <= costs(4) <= costs(8) <= costs(100)
    assert costs.lines()[0].startswith("milliseconds of a pass by rows: 1: 25.00, 2: 25.50, ")


def test_the_first_pass_with_a_number_of_rows_may_have_compiled_kernels():
    costs = costs_of({1: 0.01})
    costs.add(4, 30.0)
    assert costs(4) < 0.03


def test_gains_are_relative_to_a_measured_pass_without_proposals():
    made, planned = Speculation(Drafters(5), 100), []
    prompt = SimpleNamespace(n=16, samplers=(), sequence=SimpleNamespace(output=SimpleNamespace(token_ids=[])))

    def plan(*_):
        planned.append(made.costs(1))
        raise InterruptedError

    def propose(*others):
        with suppress(InterruptedError):
            made.propose([chunk_of(), *others], lambda _: True, 0)
        return len(planned)

    made.plan = plan
    made.costs.add(4, 0.1)
    assert propose() == 0  # the time of one row would be guessed from that of four
    assert propose(prompt) == 1  # the time of a pass that also reads a prompt is always guessed
    planned.clear()
    made.costs.add(1, 0.05)
    assert propose() == 1
    made._n_since = PLAIN_EACH
    assert propose() == 1
    assert propose() == 2


def test_where_tokens_are_proposed():
    def model(name="parallel", *, fixes_bits=True, lazy=False, is_shared=False, head_dim=64):
        backend = SimpleNamespace(name=name, fixes_bits=fixes_bits, lazy=lazy)
        return SimpleNamespace(backend=backend, is_shared=is_shared, kv_layers=[KVLayer(1, head_dim)])

    large = FEWEST_PARAMETERS
    assert use_of(model(), "auto", large) == (True, "lookup", ("lookup",))
    assert use_of(model(), "auto", large, ["draft"]).names == ("lookup", "draft")
    assert use_of(model(), "auto", large - 1, ["draft"]) == (True, "draft", ("draft",))
    assert use_of(model(), "auto", large - 1).why.startswith("off: this model's passes are too short")
    assert "on mlx the bits" in use_of(model("mlx", fixes_bits=False, lazy=True), "auto", large).why
    assert use_of(model("metal", lazy=True), "auto", large).is_on
    assert "a token may differ" in use_of(model("mlx", fixes_bits=False), "auto", 1, ["draft"]).why
    assert "on ranks has not been measured" in use_of(model(is_shared=True), "auto", large).why
    assert "a token may differ" in use_of(model("mlx", fixes_bits=False), "lookup", 1).why
    assert "a token may differ" in use_of(model(head_dim=24), "lookup", 1).why
    assert use_of(model(), "lookup", 1) == (True, "lookup", ("lookup",))
    assert not use_of(model(), "off", large).is_on
    with pytest.raises(OptionError, match="speculate must be off, lookup, draft, mtp or auto, not 'on'"):
        mlx_engine.load("builtin", speculate="on")


@pytest.fixture
def usual_costs(monkeypatch):
    """Plans that do not depend on the time that passes take here."""
    monkeypatch.setattr(PassCosts, "add", lambda *_: None)


@pytest.fixture(scope="module")
def engine():
    with mlx_engine.load("builtin", "parallel", threads=1, speculate="lookup") as loaded:
        yield loaded


def test_python_has_the_same_answer_in_fewer_passes(engine, usual_costs):
    with mlx_engine.load("builtin", "parallel", threads=1) as plain:
        expected = plain.generate(REPEATED, 60, logprobs=0, ignore_eos=True)
        predicted = plain.generate("Tom had", 60, logprobs=0, ignore_eos=True)
    found = engine.generate(REPEATED, 60, logprobs=0, ignore_eos=True)
    assert found.digest == expected.digest
    assert found.n_accepted > 0
    assert len(found.metrics.passes) == 60 - found.n_accepted
    assert (expected.n_proposed, expected.n_accepted) == (0, 0)
    again = engine.generate("Tom had", 60, logprobs=0, ignore_eos=True, prediction=predicted.text)
    assert again.digest == predicted.digest
    assert again.n_accepted > 20


def test_a_scheduler_looks_in_other_sequences_unless_it_keeps_them_apart(engine, usual_costs):
    def accepted(**how):
        scheduler, found = engine.scheduler(slots=1, kv_memory=1 << 22, **how), []
        for _ in range(2):
            request = engine.request("Tom had", mlx_engine.options.Options.of(60, ignore_eos=True))
            scheduler.submit(request)
            while scheduler.has_work:
                scheduler.step()
            found.append(request.n_accepted)
        return found

    first, second = accepted()
    assert second > first + 20
    first, second = accepted(whole_pages=True)
    assert second <= first + 2


def test_the_command_reports_what_was_proposed(usual_costs):
    line = ["generate", REPEATED, "-n", "60", "-b", "parallel", "--ignore-eos", "--speculate", "lookup"]
    found = CliRunner().invoke(app, [*line, "--json"], catch_exceptions=False)
    counts = json.loads(found.stdout)["speculation"]
    assert counts["drafter"] == "lookup"
    assert counts["proposed"] >= counts["accepted"] > 0
    shown = CliRunner().invoke(app, [*line, "-v"], catch_exceptions=False).stderr
    assert "Speculation: lookup" in shown
    assert "tokens proposed in" in shown


@pytest.mark.slow
def test_texts_of_a_benchmark(tmp_path, engine, usual_costs):
    from mlx_engine.bench.speculation import markdown, rows, texts_of

    file = tmp_path / "texts.jsonl"
    file.write_text(json.dumps({"prompt": "Tom", "max_tokens": 40, "right": 0.8}) + "\n\n")
    (row,) = rows(engine, texts_of(file), 1)
    assert row["accepted"] > 10
    assert row["tokens_per_pass"] > 1.3
    assert "recorded, 80% right" in markdown([row])
    file.write_text(json.dumps({"prompts": ["Tom", "Lily had a"], "max_tokens": 40, "right": 0.8}))
    (both,) = rows(engine, texts_of(file), 1)  # each has the proposals of its own answer
    assert both["accepted"] > 20
    assert both["accepted"] > 0.4 * both["proposed"]
    assert "line 1, 2 at once" in markdown([both])
    for wrong in ('{"prompt": "Tom", "right": 1, "more": 2}', '{"prompt": "Tom", "prompts": ["Tom"]}', "{}"):
        file.write_text(wrong)
        with pytest.raises(OptionError, match=r"line 1: .* with either prompt or prompts, and only the keys cop"):
            texts_of(file)


def test_a_recorded_answer_has_the_stated_share_of_right_tokens():
    answer = list(range(0, 512, 2))
    first, second = (bench.Recorded(answer, 0.8, seed).after(0, 256) for seed in (0, 1))
    for proposed in (first, second):
        assert sum(one == right for one, right in zip(proposed, answer, strict=True)) == 205
    assert first != second


def test_a_benchmark_calls_another_answer_a_bug_only_where_bits_are_fixed(engine, monkeypatch):
    monkeypatch.setattr(bench, "_answered", lambda engine, text, way, answer: {"ids": [way is None]})
    text = {"name": "line 1", "prompt": "Tom"}
    with pytest.raises(EngineError, match="differs; report this as a bug"):
        list(bench.rows(engine, [text], 1))
    monkeypatch.setattr(bench, "fixes_rows", lambda model: False)
    with pytest.raises(EngineError, match="differs; on parallel the bits of this model's results depend"):
        list(bench.rows(engine, [text], 1))


def test_lookups_of_answers_to_one_request_share_the_prompt():
    class Request(SimpleNamespace):
        __hash__ = object.__hash__

    made, request = Lookups(), Request(prompt_ids=[1, 2, 3], predicted_ids=[], n_cached=0)
    one, two = made(SimpleNamespace(request=request)), made(SimpleNamespace(request=request))
    assert one._prompt is two._prompt
