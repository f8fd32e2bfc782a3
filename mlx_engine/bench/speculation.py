"""Measure speculative decoding: each text of a file is answered with and without proposed tokens, interleaved.

The file has a JSON object per line, with these keys:

- `prompt`: a text or messages. Or `prompts`: a list of prompts, which are answered at once.
- `copies`, optional: how many times `prompt` is answered at once, by default 1.
- `name`, `max_tokens`, `prediction` (a text that the answer may repeat): optional.
- `right`, optional: a fraction. The answer is first generated without proposals. Then its tokens are proposed: this
  fraction of them unchanged, the others replaced by wrong tokens. This measures the speedup at a given acceptance, also
  with random weights.
- `drafter`, optional: "mtp" or "draft", the only drafter to measure. With `right`, the drafter runs and its time
  counts, but the tokens that `right` describes are proposed in place of the drafter's. Without `drafter` and `right`,
  the text is answered with n-gram lookup, and then with every loaded drafter.

Answers are greedy, ignore end-of-text tokens, and must have the same token ids with and without proposals.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_engine.bench.tables import Row, aligned
from mlx_engine.errors import EngineError, OptionError, listed
from mlx_engine.loop.lookup import LONGEST
from mlx_engine.loop.memory import Traffic
from mlx_engine.loop.request import Sequence as AnswerSequence
from mlx_engine.loop.scheduler import Scheduler
from mlx_engine.loop.speculation import MOST_STATES, PassDrafter, Speculation, fixes_rows
from mlx_engine.options import LOOKUP, Options

if TYPE_CHECKING:
    from mlx_engine.engine import Engine
    from mlx_engine.loop.request import Request

    Answers = Mapping[Request, Sequence[int]]

KEYS = {"name", "prompt", "max_tokens", "prediction", "right", "drafter", "copies", "prompts"}
N_TOKENS = 256
RECORDED = "recorded"


class Recorded:
    """Proposes the tokens of a known answer, with some of them replaced by wrong ones.

    `right` fixes the number of wrong tokens; only their positions are drawn, with `seed`. (When each token was instead
    right with a probability of 80 %, only 76 % of the tokens of one answer were right.)
    """

    def __init__(self, answer: Sequence[int], right: float, seed: int = 0) -> None:
        n_wrong = round(len(answer) * (1 - right))
        wrong = set(random.Random(seed).sample(range(len(answer)), n_wrong))
        self._ids, self._n = [i + (at in wrong) for at, i in enumerate(answer)], 0

    def extend(self, ids: Sequence[int]) -> None:
        """Count new ids of the answer; the next proposal begins after them."""
        self._n += len(ids)

    def propose(self, most: int) -> tuple[Sequence[int], int]:
        """Return at most `most` next ids and, as their match length, the largest of n-gram lookup (LONGEST)."""
        return self.after(self._n, most), LONGEST

    def after(self, n: int, most: int) -> Sequence[int]:
        """Return at most `most` ids after the first n of the answer."""
        return self._ids[n : n + most]


class Recordings:
    """Makes the drafters of requests whose answers are known."""

    def __init__(self, answers: Answers, right: float) -> None:
        self._answers, self._right = answers, right
        self._seeds = {request: seed for seed, request in enumerate(answers)}

    def __call__(self, sequence: AnswerSequence) -> Recorded:
        """Return the drafter of a sequence; the positions of wrong tokens differ between requests."""
        return Recorded(self._answers[sequence.request], self._right, self._seeds[sequence.request])

    def end(self, sequence: AnswerSequence) -> None:
        """Do nothing. Only n-gram lookup keeps the text of an ended sequence for later sequences."""


class RecordedPasses:
    """Runs the passes of a drafter, but proposes tokens of known answers in place of the drafter's tokens."""

    def __init__(self, drafter: PassDrafter, answers: Answers, right: float) -> None:
        self.name, self.most, self.share = drafter.name, drafter.most, drafter.share
        self.costs, self.n_hidden = drafter.costs, drafter.n_hidden
        self._drafter = drafter
        self._recorded = {
            request: Recorded(answer, right, seed) for seed, (request, answer) in enumerate(answers.items())
        }

    def propose(self, wanted: Mapping[AnswerSequence, int], budget: int) -> Mapping[AnswerSequence, Sequence[int]]:
        """Run the drafter; for each sequence, return as many tokens of the known answer as the drafter proposes."""
        found = self._drafter.propose(wanted, budget)
        return {
            one: self._recorded[one.request].after(len(one.output.token_ids), len(ids)) for one, ids in found.items()
        }

    def release(self, sequence: AnswerSequence) -> None:
        """Free the memory that the drafter keeps for a sequence."""
        self._drafter.release(sequence)


def texts_of(file: Path) -> list[Row]:
    """Return the JSON objects in a file. The default of `name` is the number of the line.

    Raises:
        OptionError: a line is not a JSON object with a prompt and known keys, or the file has no text.
    """
    found = []
    for n, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)
        except ValueError:
            text = None
        if not isinstance(text, dict) or len({"prompt", "prompts"} & text.keys()) != 1 or not text.keys() <= KEYS:
            expected = f"a JSON object with either prompt or prompts, and only the keys {', '.join(sorted(KEYS))}"
            raise OptionError(f"{file}, line {n}: expected {expected}", option="--speculate", expected=expected)
        found.append({"name": f"line {n}", **text})
    if not found:
        raise OptionError(f"{file} has no text; write a JSON object per line", option="--speculate")
    return found


def rows(engine: Engine, texts: Sequence[Row], repetitions: int) -> Iterator[Row]:
    """Yield a row per text and drafter: rates with and without proposals, their factor, proposed and accepted tokens.

    Raises:
        EngineError: an answer differs with and without proposals.
        OptionError: a text names a drafter that is not loaded.
    """
    for text in texts:
        for way in _ways(engine, text):
            plain, proposing = [], []
            for repetition in range(repetitions + 1):
                off = _answered(engine, text, None, ())
                on = _answered(engine, text, way, off["ids"])
                if on["ids"] != off["ids"]:
                    depends = f"on {engine.backend.name} the bits of this model's results depend on a pass's length"
                    why = "report this as a bug" if fixes_rows(engine.model) else depends
                    raise EngineError(f"{text['name']}: the answer with proposals differs; {why}")
                if repetition:  # the first repetition compiles kernels, so it does not count
                    plain.append(off)
                    proposing.append(on)
            yield _row(text, way, plain, proposing)


def _ways(engine: Engine, text: Row) -> Sequence[str]:
    """Return the names of the drafters that a text is answered with."""
    named = text.get("drafter")
    if named is not None and named not in engine.drafters:
        message = f"{text['name']}: drafter must be {listed(engine.drafters) or 'left out'}, not {named!r}"
        raise OptionError(message, option="--speculate", expected="a drafter that is loaded", found=named)
    return [named] if named else [RECORDED] if "right" in text else [LOOKUP, *engine.drafters]


def _row(text: Row, way: str, plain: Sequence[Row], proposing: Sequence[Row]) -> Row:
    off, on = (statistics.median(run["seconds"] for run in runs) for runs in (plain, proposing))
    off_cpu, on_cpu = (min(run["cpu_seconds"] for run in runs) for runs in (plain, proposing))
    last, n = proposing[-1], len(plain[-1]["ids"][0]) - 1
    return {
        "text": text["name"],
        "drafter": way if "right" not in text else f"{way}, {text['right']:.0%} right",
        "n_prompt": last["n_prompt"],
        "n_tokens": n + 1,
        "copies": len(prompts_of(text)),
        "off": n / off,
        "on": n / on,
        "factor": off / on,
        "factor_of_cpu_time": off_cpu / on_cpu,
        "proposed": last["proposed"],
        "accepted": last["accepted"],
        "tokens_per_pass": last["tokens_per_pass"],
        "samples": {"off": [run["seconds"] for run in plain], "on": [run["seconds"] for run in proposing]},
    }


def prompts_of(text: Row) -> list[Any]:
    """Return the prompts that are answered at once."""
    return list(text["prompts"]) if "prompts" in text else [text["prompt"]] * text.get("copies", 1)


def _proposing(engine: Engine, text: Row, way: str, answers: Answers) -> Speculation:
    """Return a `Speculation` with the drafter `way`; with `right`, it proposes known answers with some wrong tokens."""
    right, vocabulary = text.get("right", 1.0), int(engine.config.vocab_size)
    if way == RECORDED:
        return Speculation(Recordings(answers, right), vocabulary, usual=(LOOKUP,))
    made = engine.new_speculation([way], slots=len(answers), n_tokens=sum(request.longest for request in answers))
    passes = [RecordedPasses(one, answers, right) for one in made.passes] if "right" in text else made.passes
    return Speculation(made.drafters, vocabulary, passes=passes)


def _answered(engine: Engine, text: Row, way: str | None, known: Sequence[Sequence[int]]) -> Row:
    """Answer the prompts of a text at once; return ids, counts and times.

    Time is measured from when every answer has its first token. `way` is the name of the drafter, or None for no
    proposals; `known` has the ids of the answers without proposals.
    """
    options = Options.of(text.get("max_tokens", N_TOKENS), ignore_eos=True, prediction=text.get("prediction"))
    requests: list[Request] = [engine.request(prompt, options) for prompt in prompts_of(text)]
    n, n_tokens = len(requests), sum(request.longest for request in requests)
    pool = engine.model.new_pool(n_tokens, n_sequences=n, n_proposed=MOST_STATES * n)
    made = None if way is None else _proposing(engine, text, way, dict(zip(requests, known, strict=True)))
    scheduler = Scheduler(engine.model, pool, slots=n, speculation=made, traffic=Traffic.of(engine.model, pool))
    for request in requests:
        scheduler.submit(request)
    while any(not request.output.token_ids for request in requests):
        scheduler.step()
    begun = sum(len(request.output.token_ids) for request in requests)
    started, cpu, n_steps = time.perf_counter(), time.process_time(), 0
    while scheduler.has_work:
        scheduler.step()
        n_steps += 1
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    for request in requests:
        if request.error is not None:
            raise request.error
    n_tokens = sum(len(request.output.token_ids) for request in requests) - begun
    return {
        "ids": [list(request.output.token_ids) for request in requests],
        "n_prompt": max(len(request.prompt_ids) for request in requests),
        "seconds": seconds,
        "cpu_seconds": cpu,
        "proposed": 0 if made is None else made.n_proposed,
        "accepted": 0 if made is None else made.n_accepted,
        "tokens_per_pass": n_tokens / max(1, n_steps) / n,
    }


def markdown(found: Sequence[Row]) -> str:
    """Return the rows as a table."""
    head = ["text", "drafter", "prompt", "tokens", "off, tokens/s", "on, tokens/s", "factor", "accepted", "per pass"]
    body = [
        [
            row["text"] if row["copies"] == 1 else f"{row['text']}, {row['copies']} at once",
            row["drafter"],
            f"{row['n_prompt']:,}",
            f"{row['n_tokens']:,}",
            f"{row['off']:.1f}",
            f"{row['on']:.1f}",
            f"{row['factor']:.2f}",
            f"{row['accepted']:,} of {row['proposed']:,}",
            f"{row['tokens_per_pass']:.2f}",
        ]
        for row in found
    ]
    return aligned([head, *body])
