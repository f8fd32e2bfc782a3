"""Check constraints against a schema suite, with random schemas, or with a real model.

    python -m tests.constraints FOLDER            the clone of JSON-Schema-Test-Suite
    python -m tests.constraints --random 1000     replies of the built-in model to random schemas
    python -m tests.constraints --model FILE      a model that answers twenty prompts with schemas

Every command prints counts, and ends with 1 if anything is wrong: an instance that is accepted and invalid, a keyword
that is not refused, a reply that ended by itself and is invalid.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema

import mlx_engine
from mlx_engine import Constraint
from mlx_engine.engine import Engine, Prompt
from tests.constraints import suite
from tests.constraints.schemas import TWENTY, random_schema


def replies(
    engine: Engine, asked: list[tuple[Prompt, dict[str, Any]]], *, max_tokens: int, **options: Any
) -> Iterator[tuple[dict[str, Any], str, bool]]:
    """Yield a schema, the reply, and whether it ended by itself; a batch of 16 at a time."""
    for first in range(0, len(asked), 16):
        some = asked[first : first + 16]
        constraints = [Constraint.json_schema(schema) for _, schema in some]
        prompts = [prompt for prompt, _ in some]
        made = engine.generate_batch(prompts, max_tokens, constraint=constraints, **options)
        for (_, schema), one in zip(some, made, strict=True):
            yield schema, one.text, one.finish_reason == "stop"


def problem(schema: dict[str, Any], text: str) -> str | None:
    """Return why a reply is invalid, or None."""
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{text!r}: {str(error).splitlines()[0]}: {json.dumps(schema)}"
    return None


def check(found: Iterator[tuple[dict[str, Any], str, bool]], *, shows: bool = False) -> tuple[int, int, list[str]]:
    """Return how many replies there were, how many ended by themselves, and what is wrong with those."""
    n = n_ended = 0
    wrong = []
    for schema, text, has_ended in found:
        n, n_ended = n + 1, n_ended + has_ended
        why = problem(schema, text) if has_ended else None
        if why is not None:
            wrong.append(why)
        if shows:
            print(
                f"{'ended' if has_ended else 'cut  '}  {'WRONG' if why else 'valid' if has_ended else '     '}  {text}"
            )
    return n, n_ended, wrong


def random_schemas(engine: Engine, n: int, seed: int = 0) -> tuple[int, int, list[str]]:
    """Return what came out of n random schemas, at temperature 1."""
    rng = random.Random(seed)
    asked: list[tuple[Prompt, dict[str, Any]]] = [("Once upon a time", random_schema(rng)) for _ in range(n)]
    return check(replies(engine, asked, max_tokens=200, temperature=1.0, seed=seed))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.constraints", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--random", type=int, metavar="N")
    parser.add_argument("--model", type=Path)
    given = parser.parse_args()
    if given.folder is not None:
        engine = mlx_engine.load("builtin")
        return suite.report(suite.run(given.folder, engine.prompts.grammars, engine.tokenizer.encode)) > 0
    if given.random is not None:
        n, n_ended, wrong = random_schemas(mlx_engine.load("builtin"), given.random)
    else:
        engine = mlx_engine.load(given.model or "builtin")
        prompts = [[{"role": "user", "content": f"{text} Answer in JSON."}] for text in TWENTY]
        asked: Any = list(
            zip(prompts if engine.tokenizer.chat_template else list(TWENTY), TWENTY.values(), strict=True)
        )
        n, n_ended, wrong = check(replies(engine, asked, max_tokens=400), shows=True)
        wrong += ["not all replies have ended"] if n_ended < n else []
    print(f"{n} replies, of which {n_ended} ended by themselves; wrong: {len(wrong)}", *wrong, sep="\n")
    return len(wrong) > 0


if __name__ == "__main__":
    sys.exit(main())
