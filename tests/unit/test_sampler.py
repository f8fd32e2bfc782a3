"""The sampler: what one choice hands to the next."""

import random

import numpy as np
import pytest

from mlx_engine.backends.base import Backend
from mlx_engine.backends.numpy.simd import FEW, SimdBackend
from mlx_engine.backends.sampling import Draw, masked
from mlx_engine.loop.logprobs import token_logprobs
from mlx_engine.loop.sampler import Sampler, random_number
from mlx_engine.options import Sampling

LOGITS = np.array([[0.5, 2.0, 1.9, -1.0]], dtype=np.float32)


class Spy:
    """A backend that writes down how it is asked."""

    def __init__(self):
        self.asked = []

    choose = Backend.choose

    def argmax(self, logits):
        self.asked.append("argmax")
        return "token 2"

    def sample(self, logits, draw):
        self.asked.append((list(draw.recent), draw.u))
        return f"token {len(self.asked)}"

    def token_id(self, token):
        return int(token.removeprefix("token "))


def test_greedy_is_the_backends_argmax():
    spy = Spy()
    assert Sampler(spy, Sampling(), [7])(LOGITS) == 2
    assert spy.asked == ["argmax"]


def test_greedy_with_a_penalty_is_not_a_plain_argmax():
    sampler = Sampler(SimdBackend(), Sampling(repetition_penalty=2.0), [])
    assert [sampler(LOGITS) for _ in range(3)] == [1, 2, 1]


def test_the_prompt_counts_as_seen():
    assert Sampler(SimdBackend(), Sampling(repetition_penalty=2.0), [1])(LOGITS) == 2


def test_every_chosen_token_is_remembered_behind_the_prompt():
    spy = Spy()
    prompt = [7, 8]
    sampler = Sampler(spy, Sampling(temperature=1.0), prompt)
    for _ in range(3):
        sampler(LOGITS)
    assert [recent for recent, _ in spy.asked] == [[7, 8], [7, 8, 1], [7, 8, 1, 2]]
    assert prompt == [7, 8]


@pytest.mark.parametrize("prompt", [[], [7] * 20])
def test_the_draws_are_those_of_the_seed_and_the_position(prompt):
    """A text that is interrupted, and goes on with what was written as a prompt, draws the same numbers."""
    spy = Spy()
    sampler = Sampler(spy, Sampling(temperature=1.0, seed=5), prompt)
    for _ in range(30):
        sampler(LOGITS)
    assert [u for _, u in spy.asked] == [random_number(5, len(prompt) + i) for i in range(30)]


def test_a_draw_may_be_asked_for_before_the_token_before_it_is_settled():
    sampler = Sampler(Spy(), Sampling(temperature=1.0, seed=5), [7])
    choices = [sampler.add(f"token {i}", LOGITS) for i in range(3)]
    assert sampler.draw().u == random_number(5, 4)
    assert [sampler.settle(choice) for choice in choices] == [0, 1, 2]
    assert sampler.draw().recent == [7, 0, 1, 2]
    assert sampler.draw().n_prompt == 1


def test_only_generated_tokens_count_for_presence_and_frequency():
    sampler = Sampler(SimdBackend(), Sampling(presence_penalty=0.5, frequency_penalty=1.0), [1, 1, 1])
    assert [sampler(LOGITS) for _ in range(5)] == [1, 2, 0, 1, 2]


def test_the_log_probabilities_are_those_of_the_token_s_row():
    sampler, rows = Sampler(SimdBackend(), Sampling(), [7]), np.concatenate([LOGITS, -LOGITS])
    sampler.settle(sampler.add(3, rows, 1))
    assert sampler.logprobs(4) == token_logprobs(SimdBackend(), -LOGITS[0], 3, 4)


# ---- several choices of one prompt ----


def test_choice_0_draws_what_a_single_choice_draws_and_every_other_its_own():
    def drawn(choice):
        spy = Spy()
        sampler = Sampler(spy, Sampling(temperature=1.0, seed=5), [7], choice=choice)
        for _ in range(20):
            sampler(LOGITS)
        return [u for _, u in spy.asked]

    assert drawn(0) == [random_number(5, 1 + i) for i in range(20)]
    assert drawn(3) == [random_number(5, 1 + i, 3) for i in range(20)]
    assert len({u for choice in range(8) for u in drawn(choice)}) == 8 * 20


def test_a_fork_is_a_sampler_of_another_choice():
    first = Sampler(SimdBackend(), Sampling(temperature=3.0, seed=9, presence_penalty=1.0), [7])
    fork, made = (
        first.fork(2),
        Sampler(SimdBackend(), Sampling(temperature=3.0, seed=9, presence_penalty=1.0), [7], choice=2),
    )
    texts = [[sampler(LOGITS) for _ in range(40)] for sampler in (first, fork, made)]
    assert texts[1] == texts[2] != texts[0]
    assert len(first.draw().recent) == len(fork.draw().recent) == 41


def test_a_fork_without_a_seed_has_the_same_random_one():
    first = Sampler(SimdBackend(), Sampling(temperature=1.0), [7])
    assert first.fork(0).draw().u == first.draw().u
    assert first.fork(1).draw().u == first.fork(1).draw().u != first.draw().u


def test_a_sampler_that_has_chosen_cannot_be_forked():
    sampler = Sampler(SimdBackend(), Sampling(), [7])
    sampler(LOGITS)
    with pytest.raises(ValueError, match="has not chosen a token, found one with 1"):
        sampler.fork(1)


def test_random_numbers_of_all_choices_are_uniform():
    drawn = [
        random_number(seed, position, choice) for seed in range(10) for position in range(40) for choice in range(10)
    ]
    counts = np.bincount((np.array(drawn) * 10).astype(int), minlength=10)
    assert len(set(drawn)) == 4000
    # Each count is binomial(4000, 0.1): 400 with a standard deviation of 19.
    assert np.abs(counts - 400).max() < 5 * 19


@pytest.mark.parametrize("seed", [0, 1, 2**70])
def test_the_same_seed_chooses_the_same(seed):
    def run():
        sampler = Sampler(SimdBackend(), Sampling(temperature=3.0, seed=seed), [])
        return [sampler(LOGITS) for _ in range(60)]

    assert run() == run()


def test_without_a_seed_runs_differ():
    def run():
        spy = Spy()
        Sampler(spy, Sampling(temperature=1.0), [])(LOGITS)
        return spy.asked[0][1]

    assert run() != run()


def test_it_takes_no_draw_from_the_global_generator():
    before = random.getstate()
    Sampler(SimdBackend(), Sampling(temperature=1.0), [])(LOGITS)
    assert random.getstate() == before


def test_a_temperature_of_nearly_nothing_is_greedy():
    """What is chosen would mostly be the same: how it is chosen is not."""
    assert Sampling(0.0).is_greedy
    assert Sampling(9e-8).is_greedy
    assert not Sampling(1e-7).is_greedy


@pytest.mark.parametrize("n_allowed", [1, 20, FEW, 9999])
def test_the_largest_allowed_logit_is_that_of_masked_logits(n_allowed: int):
    """Of few allowed tokens by their ids, of many by one comparison, or by a masked copy if that one is forbidden."""
    draws = np.random.default_rng(n_allowed)
    row = draws.integers(0, 2000, 10_000).astype(np.float32)  # with equal logits
    mask = np.zeros(10_000, dtype=np.bool_)
    mask[draws.choice(10_000, n_allowed, replace=False)] = True
    for of_top in (True, False):
        mask[np.flatnonzero(row == row.max())] = of_top
        if mask.any():
            draw = Draw(Sampling(), (), 0.0, mask=mask)
            assert SimdBackend().sample(row[None], draw) == int(np.argmax(masked(row, mask)))
