"""Random requests: valid ones of many kinds, ones beyond the limits, wrong ones; and when their clients leave."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SLOTS = 8

# Beginnings that many prompts share.
STORIES = (
    "Once upon a time there was a small fox who lived in a wood near a river. Every day the fox went to the river.",
    "One day a girl named Lily found a big red ball in the park. She wanted to play with it. ",
    "A bear, a cat and a dog were friends. They liked to sit under the old tree and tell stories. ",
)
WORDS = (
    "the",
    "bear",
    "saw",
    "a",
    "little",
    "bird",
    "and",
    "said",
    "hello",
    "to",
    "it",
    "they",
    "were",
    "friends",
    "who",
)

WRONG: tuple[tuple[str, dict[str, Any], int], ...] = (
    (CHAT, {"messages": []}, 400),
    (CHAT, {"messages": [{"role": "nobody", "content": "x"}]}, 400),
    (CHAT, {"messages": "hello"}, 400),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}, 400),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "n": SLOTS + 1}, 400),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "model": "another"}, 404),
    (COMPLETIONS, {"prompt": [-1]}, 400),
    (COMPLETIONS, {"prompt": "x", "top_p": 7}, 400),
    (COMPLETIONS, {"prompt": "x", "no_such_parameter": 1}, 400),
    (COMPLETIONS, {}, 400),
    ("/v1/nothing", {}, 404),
)


@dataclass(frozen=True)
class Leave:
    """When and how a client leaves before the end.

    Attributes:
        after: "part" of the request was sent, so many "seconds" after all of it, or so many "events" of the stream.
        n: how many seconds or events.
        half: close only the sending direction, and read until the server closes the other.
    """

    after: Literal["part", "seconds", "events"]
    n: float
    half: bool


@dataclass(frozen=True)
class Asked:
    """A request of a client.

    Attributes:
        status: the expected status; a valid one may also be refused with 429.
        leave: when the client leaves; None if it stays.
    """

    path: str
    body: dict[str, Any]
    status: int = 200
    leave: Leave | None = None

    @property
    def is_valid(self) -> bool:
        return self.status == 200


class Mix:
    """An endless sequence of requests, the same for each seed. Some are asked again, as real ones are."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._valid: list[tuple[str, dict[str, Any]]] = []

    def next(self) -> Asked:
        rng, kind = self._random, self._random.random()
        if kind < 0.06:
            path, body, status = rng.choice(WRONG)
            return Asked(path, body, status)
        if kind < 0.1:
            return Asked(COMPLETIONS, {"prompt": self._text(600), "max_tokens": 8}, 400)
        if len(self._valid) < 600 or rng.random() < 0.5:
            self._valid.append(self._chat() if rng.random() < 0.5 else self._completion())
        path, body = rng.choice(self._valid[-200:])
        body = {**body, "stream": True} if rng.random() < 0.5 else body
        return Asked(path, body, leave=self._leave(body) if rng.random() < 0.37 else None)

    def _leave(self, body: dict[str, Any]) -> Leave:
        rng = self._random
        after = rng.choice(["part", "seconds", "seconds", "events" if "stream" in body else "seconds"])
        n = rng.randrange(1, 12) if after == "events" else rng.expovariate(4)
        return Leave(after, n, half=rng.random() < 0.3)  # type: ignore[arg-type]

    def _text(self, n_words: int) -> str:
        rng = self._random
        return (rng.choice(STORIES) if rng.random() < 0.6 else "") + " ".join(rng.choices(WORDS, k=n_words))

    def _options(self) -> dict[str, Any]:
        """Return options whose answers repeat: a seed wherever anything is drawn."""
        rng = self._random
        body: dict[str, Any] = {"max_tokens": rng.choice([1, 8, 40, 80, 160, 160]), "seed": rng.getrandbits(32)}
        body["temperature"] = rng.choice([0, 0, 0.7, 1.0])
        optional = {
            "n": rng.choice([2, 3]),
            "stop": rng.choice([" the", [".", "!"], "zebra"]),
            "top_p": 0.9,
            "top_k": 20,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "frequency_penalty": 0.4,
            "presence_penalty": 0.3,
        }
        body |= {name: value for name, value in optional.items() if rng.random() < 0.2}
        return {**body, "ignore_eos": True} if rng.random() < 0.5 else body

    def _chat(self) -> tuple[str, dict[str, Any]]:
        rng, options = self._random, self._options()
        # Several answers must fit into the memory together.
        messages = [{"role": "user", "content": self._text(rng.choice([1, 5, 20, 20 if "n" in options else 60]))}]
        if rng.random() < 0.3:
            messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": self._text(4)}]
        return CHAT, {"messages": messages, **options}

    def _completion(self) -> tuple[str, dict[str, Any]]:
        options = self._options()
        # Several answers must fit into the memory together.
        n_words = self._random.choice([1, 5, 20, 60, 60 if "n" in options else 120])
        return COMPLETIONS, {"prompt": self._text(n_words), **options}
