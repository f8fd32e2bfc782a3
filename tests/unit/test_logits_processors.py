"""Logits processors and samplers of the user: where they apply, in every way to run, and what happens if they fail."""

import traceback

import numpy as np
import pytest

import mlx_engine
from mlx_engine import Constraint
from mlx_engine.errors import OptionError, ProcessorError
from mlx_engine.options import Options

PROMPT = "Once upon a time"


@pytest.fixture(scope="module", params=["simd", "mlx"])
def engine(request):
    with mlx_engine.load("builtin", backend=request.param) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def simd():
    with mlx_engine.load("builtin", backend="simd") as loaded:
        yield loaded


def unchanged(ids, logits):
    return logits


def second_best(ids, logits):
    logits[int(np.argmax(logits))] = -np.inf
    return logits


def exact(generation):
    return generation.token_ids, [(token.token_id, token.logprob) for token in generation.logprobs]


@pytest.mark.each_value
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.9, "seed": 2, "top_p": 0.9, "repetition_penalty": 1.2, "logit_bias": {5: 3.0}}],
    ids=["greedy", "sampled"],
)
def test_a_processor_that_changes_nothing_changes_no_bit(engine, options):
    expected = engine.generate(PROMPT, 12, ignore_eos=True, logprobs=0, **options)
    found = engine.generate(PROMPT, 12, ignore_eos=True, logprobs=0, processors=unchanged, **options)
    assert exact(found) == exact(expected)
    assert (found.processors, expected.processors) == (("unchanged",), ())
    assert found.digest == expected.digest


@pytest.mark.some(1)
def test_it_is_called_once_for_each_token_with_all_ids_and_the_logits(engine):
    calls = []

    def seen(ids, logits):
        calls.append((ids, logits.copy()))
        return logits

    found = engine.generate(PROMPT, 8, processors=[seen], logprobs=0)
    prompt = engine.prompt_ids(PROMPT)
    assert [ids for ids, _ in calls] == [[*prompt, *found.token_ids[:n]] for n in range(8)]
    expected = np.asarray(engine.logits([*prompt, *found.token_ids]))[len(prompt) - 1 : -1]
    assert all(logits.dtype == np.float32 and logits.flags.writeable for _, logits in calls)
    np.testing.assert_allclose([logits for _, logits in calls], expected, rtol=1e-4, atol=1e-4)
    ended = engine.generate(PROMPT, -1, processors=[seen])  # until an end-of-text token
    assert ended.finish_reason == "stop"
    assert len(calls) == 8 + len(ended.token_ids)


def test_processors_apply_in_their_order_before_the_options_and_probabilities_stay_the_models(simd):
    plain = simd.generate(PROMPT, 1, logprobs=2)
    (best, _), (second, logprob) = plain.logprobs[0].top
    found = simd.generate(PROMPT, 1, processors=[second_best], logprobs=2)
    assert (found.token_ids, found.logprobs[0].logprob) == ([second], logprob)
    assert found.logprobs[0].top == plain.logprobs[0].top
    third = simd.generate(PROMPT, 1, processors=[second_best, second_best]).token_ids
    assert third[0] not in (best, second)
    biased = simd.generate(PROMPT, 1, processors=[second_best], logit_bias={best: 100})
    assert biased.token_ids == [second]  # the bias comes later, and cannot undo the ban
    assert simd.generate(PROMPT, 1, processors=[second_best], logit_bias={second: -100}).token_ids == third


@pytest.mark.some(1)
def test_a_sampler_chooses_the_tokens(engine):
    rng_of = np.random.default_rng

    def draw(ids, logits):
        p = np.exp(logits.astype(np.float64) - logits.max())
        return rng_of(len(ids)).choice(len(p), p=p / p.sum())

    found = engine.generate(PROMPT, 6, sampler=draw, ignore_eos=True, logprobs=0)
    assert found.processors[0].endswith("draw")
    ids = engine.prompt_ids(PROMPT)
    for token in found.token_ids:
        assert token == draw(ids, np.asarray(engine.logits(ids))[-1])
        ids.append(token)
    greedy = engine.generate(PROMPT, 6, sampler=lambda ids, logits: np.argmax(logits), ignore_eos=True)
    assert greedy.token_ids == engine.generate(PROMPT, 6, ignore_eos=True).token_ids


@pytest.mark.some(1)
def test_each_prompt_of_a_batch_has_its_own_and_the_text_that_it_has_alone(engine):
    prompts, each = [PROMPT, "The little dog", PROMPT, "A"], [[second_best], None, [unchanged, second_best], []]
    options = {"temperature": 0.7, "seed": [1, 2, 3, 4], "logprobs": 0, "ignore_eos": True}
    found = engine.generate_batch(prompts, 9, processors=each, **options)
    alone = [
        engine.generate(prompt, 9, processors=of, **{**options, "seed": seed})
        for prompt, of, seed in zip(prompts, each, options["seed"], strict=True)
    ]
    assert [one.token_ids for one in found] == [one.token_ids for one in alone]
    if engine.backend.name == "simd":
        assert [exact(one) for one in found] == [exact(one) for one in alone]
    assert [one.processors for one in found] == [("second_best",), (), ("unchanged", "second_best"), ()]
    for_all = engine.generate_batch(prompts[:2], 3, processors=[unchanged, second_best])
    assert [one.processors for one in for_all] == [("unchanged", "second_best")] * 2


RUN = {"temperature": 1.0, "seed": 5, "processors": [second_best], "ignore_eos": True}


@pytest.mark.slow
def test_parallel_samples_and_preemption_do_not_matter(simd):
    requests = [
        simd.request(prompt, Options.of(70, **RUN), n=n) for prompt, n in ((PROMPT, 2), ("The", 1), ([7] * 9, 1))
    ]
    scheduler = simd.scheduler(slots=4, kv_memory=6 << 18)
    for request in requests:
        scheduler.submit(request)
    while scheduler.has_work:
        scheduler.step()
    assert sum(request.n_preemptions for request in requests) > 0
    for request in requests:
        assert request.output.token_ids == simd.generate(request.prompt_ids, 70, **RUN).token_ids
    assert requests[0].outputs[1].token_ids != requests[0].output.token_ids


def test_without_a_kv_cache_it_is_the_same(simd):
    found = simd.generate(PROMPT, 6, kv=False, **RUN)
    assert found.token_ids == simd.generate(PROMPT, 6, **RUN).token_ids


class Faulty:
    """Fails at the third token."""

    def __call__(self, ids, logits):
        if len(ids) >= 7:
            raise KeyError("at the third token")
        return logits


@pytest.mark.some(1)
def test_a_processor_that_fails_ends_its_run_alone(engine):
    lengths = []

    def counted(ids, logits):
        lengths.append(len(ids))
        return logits

    prompts = [PROMPT, [1, 2, 3, 4], "The"]
    good, bad, other = engine.generate_batch(prompts, 9, processors=[counted, [Faulty()], None])
    first = len(engine.prompt_ids(PROMPT))
    assert lengths == list(range(first, first + 9))  # no pass was repeated
    assert (bad.finish_reason, len(bad.token_ids)) == ("error", 3)
    assert str(bad.error) == "processors[0] (Faulty) failed after 7 tokens: KeyError: 'at the third token'"
    shown = "".join(traceback.format_exception(bad.error.__cause__))
    assert 'raise KeyError("at the third token")' in shown
    assert "runner.py" not in shown
    for found, prompt in ((good, PROMPT), (other, "The")):
        assert found.token_ids == engine.generate(prompt, 9).token_ids
    pieces = []
    with pytest.raises(ProcessorError, match=r"processors\[1\] \(Faulty\) failed") as caught:
        pieces.extend(engine.stream([1, 2, 3, 4], 9, processors=[unchanged, Faulty()]))
    assert isinstance(caught.value.__cause__, KeyError)
    assert len(pieces) == 3


WRONG = {
    "None": lambda ids, logits: None,
    "another shape": lambda ids, logits: logits[:5],
    "no numbers": lambda ids, logits: ["a"] * len(logits),
    "NaN": lambda ids, logits: logits * np.nan,
    "infinity": lambda ids, logits: logits + np.float32(np.inf),
    "nothing left": lambda ids, logits: np.full_like(logits, -np.inf),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_what_a_processor_returns_is_checked(simd, wrong):
    with pytest.raises(ProcessorError, match=r"processors\[0\] \(<lambda>\) after 4 tokens: expected logits of shape"):
        simd.generate(PROMPT, 2, processors=wrong)


@pytest.mark.parametrize("chosen", [-1, 2048, 1.5, None, "a", [1, 2]])
def test_what_a_sampler_returns_is_checked(simd, chosen):
    with pytest.raises(
        ProcessorError, match=r"sampler \(.*<lambda>\) after 4 tokens: expected a token id from 0 to 2047"
    ):
        simd.generate(PROMPT, 2, sampler=lambda ids, logits: chosen)


def test_a_constraint_holds_after_processors_and_for_a_sampler(simd):
    constraint = Constraint.choice(["dog", "cat"])
    assert simd.generate(PROMPT, 9, constraint=constraint, processors=[second_best]).text in ("dog", "cat")
    greedy = simd.generate(PROMPT, 9, constraint=constraint).text
    assert simd.generate(PROMPT, 9, constraint=constraint, sampler=lambda ids, x: int(np.argmax(x))).text == greedy

    def only_the_first(ids, logits):
        logits[1:] = -np.inf
        return logits

    with pytest.raises(ProcessorError, match="a finite logit of at least one token that the constraint allows"):
        simd.generate(PROMPT, 9, constraint=constraint, processors=only_the_first)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"processors": 3}, r"processors\[0\]"),
        ({"processors": [len, "a"]}, r"processors\[1\]"),
        ({"sampler": 1}, "sampler"),
    ],
)
def test_what_is_no_function_is_refused(given, name):
    with pytest.raises(OptionError, match=rf"{name} must be a function of \(ids, logits\), not "):
        Options.of(**given)


def test_names_of_other_libraries_are_hints(simd):
    with pytest.raises(TypeError, match="has no option 'logits_processor'; the option is processors"):
        simd.generate(PROMPT, logits_processor=[unchanged])
