"""Clients of an OpenAI-compatible server: each is a thread with a connection of its own, and reads a stream."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from json import JSONDecodeError, dumps, loads
from typing import Any
from urllib.parse import urlsplit

from mlx_engine.bench.concurrency.figures import Run, Timed
from mlx_engine.bench.concurrency.load import Prompt
from mlx_engine.errors import SourceError, require

# Seconds without a byte from the server after which it counts as dead.
PATIENCE = 300.0
# Parameters that not every server accepts, from the most useful set to none.
EXTRAS: tuple[dict[str, Any], ...] = (
    {"ignore_eos": True, "stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True}},
    {},
)
# Words that most vocabularies have as one token, with the space before them.
WORDS = ("the", "of", "and", "to", "in", "is", "it", "for", "on", "with", "as", "by", "at", "from", "that", "this")


class Served:
    """Runs clients over HTTP.

    Attributes:
        url: the address of the API, such as http://127.0.0.1:8080/v1.
        model: the name of the model.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Connect to a server. Without `model`, take the first of its models.

        Raises:
            OptionError: the address has no host.
            SourceError: the server does not answer, or has no model.
        """
        parts = urlsplit(url if "://" in url else f"http://{url}")
        sound = parts.scheme in ("http", "https") and bool(parts.hostname)
        require(sound, option="--url", expected="an address such as http://127.0.0.1:8080", found=url)
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._clock = clock
        self.model = self._first_model() if model is None else model
        self._extras = self._accepted()

    def prompt(self, draws: random.Random, n_tokens: int) -> Prompt:
        """Return random words, each about one token: the vocabulary of the server is unknown."""
        return "".join(f" {word}" for word in draws.choices(WORDS, k=n_tokens))

    def forget(self) -> None:
        """Do nothing: no request of the API empties a prefix cache, and all prompts are new to the server."""

    def run(self, n_clients: int, prompts: Sequence[Prompt], n_gen: int, *, seconds: float | None = None) -> Run:
        """Run clients in a closed loop over the prompts; with `seconds`, cancel what has not ended by then.

        Raises:
            SourceError: the server refuses a request, or fails.
        """
        queue, found = deque(prompts), list[Timed]()
        start = self._clock()
        deadline = None if seconds is None else start + seconds
        with ThreadPoolExecutor(n_clients) as pool:
            clients = [pool.submit(self._client, queue, n_gen, deadline, found) for _ in range(n_clients)]
            cuts = [client.result() for client in clients]
        return Run(found, self._clock() - start, was_cut=any(cuts))

    def _client(self, queue: deque[Prompt], n_gen: int, deadline: float | None, found: list[Timed]) -> bool:
        """Send requests until there are no more; return whether the deadline ended one."""
        connection = self._connection()
        try:
            while True:
                try:
                    prompt = queue.popleft()
                except IndexError:
                    return False
                found.append(timed := Timed(self._clock()))
                for event in self._events(connection, prompt, n_gen, self._extras):
                    self._record(timed, event)
                    if deadline is not None and self._clock() >= deadline:
                        queue.clear()
                        return True
        except BaseException:
            queue.clear()  # ends the other clients
            raise
        finally:
            connection.close()

    def _record(self, timed: Timed, event: dict[str, Any]) -> None:
        """Record a piece of text, or the number of tokens at the end of the stream."""
        if any(choice.get("text") for choice in event.get("choices") or ()):
            timed.arrivals.append(self._clock())
            timed.n_tokens += 1
        usage = event.get("usage")
        if usage:
            timed.n_tokens = usage["completion_tokens"]
            timed.n_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")

    def _events(
        self, connection: HTTPConnection, prompt: Prompt, n_gen: int, extras: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Request a completion and yield the events of its stream."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": n_gen, "temperature": 0, "stream": True, **extras}
        try:
            reply = self._answer(connection, "POST", "/completions", dumps(body))
            for line in reply:
                if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                    event = loads(line[5:])
                    if "error" in event:
                        raise self._error(f"the error {event['error']}")
                    yield event
        except (HTTPException, OSError, JSONDecodeError) as error:
            raise error if isinstance(error, SourceError) else self._error(repr(error)) from error

    def _answer(self, connection: HTTPConnection, method: str, path: str, body: str | None = None) -> HTTPResponse:
        connection.request(method, urlsplit(self.url).path + path, body, self._headers)
        reply = connection.getresponse()
        if reply.status != 200:
            text = reply.read().decode(errors="replace")[:500]
            raise RefusedError(f"{self.url}{path}: expected status 200, found {reply.status}: {text}", reply.status)
        return reply

    def _connection(self) -> HTTPConnection:
        parts = urlsplit(self.url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        return kind(str(parts.hostname), parts.port, timeout=PATIENCE)

    def _first_model(self) -> str:
        connection = self._connection()
        try:
            return str(loads(self._answer(connection, "GET", "/models").read())["data"][0]["id"])
        except (HTTPException, OSError, ValueError, LookupError, TypeError) as error:
            raise error if isinstance(error, SourceError) else self._error(repr(error)) from error
        finally:
            connection.close()

    def _accepted(self) -> dict[str, Any]:
        """Return the largest set of extra parameters that the server accepts."""
        for extras in EXTRAS:
            connection = self._connection()
            try:
                for _ in self._events(connection, " the", 1, extras):
                    pass
                return extras
            except RefusedError as refusal:
                if refusal.status not in (400, 422) or not extras:
                    raise
            finally:
                connection.close()
        raise AssertionError("the last set is empty, and its refusal is raised")

    def _error(self, found: str) -> SourceError:
        return SourceError(f"{self.url}: expected an OpenAI-compatible server, found {found}; check that it runs")


class RefusedError(SourceError):
    """The server refused a request.

    Attributes:
        status: the status of its answer.
    """

    def __init__(self, text: str, status: int) -> None:
        self.status = status
        super().__init__(text)
