"""Cases of choosing tokens: argmax, sampling, a choice per row."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.backends.sampling import Draw
from mlx_engine.options import Sampling
from tests.contract.case import OpCase, Run, normal


def argmax(row: list[float]) -> Run:
    return lambda be, rng: be.token_id(be.argmax(be.array(np.array([row], dtype=np.float32))))


def sample(sampling: Sampling, u: float, recent: tuple[int, ...] = (), n_prompt: int = 0) -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        return be.token_id(be.sample(be.array(normal(rng, 1, 40, scale=2.0)), Draw(sampling, recent, u, n_prompt)))

    return run


def sample_masked(sampling: Sampling, u: float, allowed: tuple[int, ...]) -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        mask = np.isin(np.arange(40), allowed)
        draw = Draw(sampling, (1, 2, 30, 31, 2), u, 2, mask)
        return be.token_id(be.choose(be.array(normal(rng, 1, 40, scale=2.0)), [draw])[0])

    return run


def choose(*draws: Draw) -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        tokens = be.choose(be.array(normal(rng, len(draws), 40, scale=2.0)), draws)
        return tuple(be.token_id(token) for token in tokens)

    return run


GREEDY = Draw(Sampling(), [], 0.0)

CASES = [
    OpCase("argmax", "typical", argmax([0.5, 3.0, -1.0])),
    OpCase("argmax", "tie-takes-the-lowest", argmax([1.0, 7.0, 7.0, 7.0])),
    OpCase("argmax", "all-negative", argmax([-5.0, -2.0, -9.0])),
    OpCase("sample", "plain", sample(Sampling(temperature=1.0), 0.37)),
    OpCase("sample", "first", sample(Sampling(temperature=1.5), 0.0)),
    OpCase("sample", "last", sample(Sampling(temperature=1.5), 1 - 2**-53)),
    OpCase("sample", "top-k", sample(Sampling(temperature=2.0, top_k=3), 0.99)),
    OpCase("sample", "top-p", sample(Sampling(temperature=1.0, top_p=0.5), 0.99)),
    OpCase("sample", "top-p-of-0", sample(Sampling(temperature=1.0, top_p=0), 0.99)),
    OpCase("sample", "min-p", sample(Sampling(temperature=1.0, min_p=0.3), 0.99)),
    OpCase("sample", "penalty", sample(Sampling(temperature=1.0, repetition_penalty=5.0), 0.8, (1, 2, 30, 31, 32))),
    OpCase("sample", "greedy-with-penalty", sample(Sampling(repetition_penalty=1e6), 0.5, tuple(range(0, 40, 2)))),
    OpCase("sample", "cold", sample(Sampling(temperature=1e-9), 0.5)),
    OpCase("sample", "bias", sample(Sampling(temperature=1.0, logit_bias={3: 5.0, 7: -100, 39: 2.5}), 0.8)),
    OpCase("sample", "greedy-with-bias", sample(Sampling(logit_bias={17: 100}), 0.5)),
    OpCase("sample", "generated-penalties",
           sample(Sampling(temperature=1.0, presence_penalty=1.5, frequency_penalty=-0.7), 0.6, (1, 2, 30, 2, 2), 2)),
    OpCase("sample", "greedy-with-frequency", sample(Sampling(frequency_penalty=2), 0.5, (*range(0, 40, 2), 1) * 3, 5)),
    OpCase("choose", "greedy-masked", sample_masked(Sampling(), 0.5, (3, 17, 18, 39))),
    OpCase("choose", "greedy-masked-to-one", sample_masked(Sampling(), 0.5, (11,))),
    OpCase("choose", "masked", sample_masked(Sampling(temperature=1.0), 0.7, (0, 5, 6, 7, 38))),
    OpCase("choose", "last-masked", sample_masked(Sampling(temperature=3.0), 1 - 2**-53, (2, 9))),
    OpCase("choose", "masked-with-all", sample_masked(
        Sampling(1.0, top_k=30, top_p=0.9, min_p=0.01, repetition_penalty=1.3, presence_penalty=1, logit_bias={4: 99}),
        0.6, (2, 3, 30, 31))),
    OpCase("choose", "one", choose(GREEDY)),
    OpCase("choose", "each-its-own", choose(GREEDY, Draw(Sampling(1.0), [], 0.7), Draw(Sampling(2.0, 3), [], 0.1),
           Draw(Sampling(repetition_penalty=1e6), list(range(0, 40, 2)), 0.0), GREEDY,
           Draw(Sampling(presence_penalty=2), list(range(40)), 0.0, 20), Draw(Sampling(logit_bias={4: 100}), [], 0.0))),
]  # fmt: skip
