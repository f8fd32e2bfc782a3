"""Measure the cost of a constraint per token: steps of a batch with a constraint compared with steps without.

    python -m benchmarks.constraints [--vocab FILE.gguf] [--logprobs] [--temp T] [--backend NAME]

The model has the shape of Qwen3 0.6B, random weights, and a made-up vocabulary of tokens of at most three bytes.
`--vocab` names a file with a real vocabulary, not larger than the model's. Rounds with and without a constraint are
interleaved; a round decodes a batch of answers, and the median time of its steps counts. `--logprobs` also computes the
log-probability of every token, as the server does, and with a constraint the total probability of the allowed tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import mlx_engine
from mlx_engine import Constraint
from mlx_engine.engine import Engine
from mlx_engine.loop.constraint import Grammars
from mlx_engine.options import Options

PROMPT = list(range(100, 132))
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 8, "maxLength": 80},
        "kind": {"enum": ["person", "company", "animal"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "minLength": 3, "maxLength": 40}, "minItems": 2},
    },
    "required": ["name", "kind", "age", "tags"],
    "additionalProperties": False,
}
# Objects without an end, so that every answer has all its tokens.
ENDLESS = Constraint.grammar(f"start: one one*\none: %json {json.dumps(PERSON)}")


def round_of(
    engine: Engine, constraint: Constraint | None, *, slots: int, n_tokens: int, logprobs: bool, temperature: float
) -> float:
    """Return the median seconds of a step that decodes a token of each of `slots` answers."""
    scheduler = engine.scheduler(slots=slots, prefix_cache=False)
    for i in range(slots):
        about = {"constraint": constraint} if constraint else {"ignore_eos": True}
        options = Options.of(n_tokens, temperature=temperature, seed=i, logprobs=0 if logprobs else None, **about)
        scheduler.submit(engine.request([token + i for token in PROMPT], options))
    seconds = []
    while scheduler.has_work:
        start = time.perf_counter()
        done = scheduler.step()
        if done.n_decode == slots:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> None:
    """Run rounds of both kinds, and print the median step of each and their ratio."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.constraints", description=__doc__)
    parser.add_argument("--vocab")
    parser.add_argument("--logprobs", action="store_true")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--model", default="shape:qwen3-0.6b")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--temp", type=float, default=0.0)
    given = parser.parse_args()
    engine = mlx_engine.load(given.model, given.backend, speculate="off")
    if given.vocab is not None:
        tokenizer = mlx_engine.load_tokenizer(given.vocab).padded(engine.config.vocab_size)
        engine.prompts._grammars = Grammars(tokenizer, engine.config.vocab_size)
    kinds = {"free": None, "constrained": ENDLESS}
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(given.rounds + 1):
        for name in list(kinds)[:: 1 if number % 2 else -1]:
            how = {"slots": given.slots, "n_tokens": given.tokens, "temperature": given.temp}
            seconds = round_of(engine, kinds[name], logprobs=given.logprobs, **how)
            if number:  # the first round of each compiles
                found[name].append(seconds)
    medians = {name: statistics.median(values) for name, values in found.items()}
    ratio = statistics.median(b / a for a, b in zip(found["free"], found["constrained"], strict=True))
    print(f"{engine.backend.name}, {given.slots} answers, {given.rounds} rounds of each:")
    for name, value in medians.items():
        least, most = min(found[name]) * 1e3, max(found[name]) * 1e3
        print(f"  {name:12} {value * 1e3:8.2f} ms per step, from {least:.2f} to {most:.2f}")
    print(f"  constrained / free: {ratio:.3f}")


if __name__ == "__main__":
    main()
