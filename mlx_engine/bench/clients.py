"""Benchmark clients that submit requests to an engine's scheduler (`Scheduled`) or to an HTTP server (`Served`).

Each client runs a closed loop: it submits its next request when its last one has ended. `Load` makes the prompts, and
`figures` computes rates and latencies from the times of a run. `concurrency.py` repeats such runs.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from json import JSONDecodeError, dumps, loads
from typing import Any, Protocol, TypeAlias
from urllib.parse import urlsplit

from mlx_engine.bench.work import Sizes, pass_work
from mlx_engine.cache.pool import PAGE, CacheSize
from mlx_engine.engine import Engine
from mlx_engine.errors import SourceError, require
from mlx_engine.loop.request import Request
from mlx_engine.loop.scheduler import Scheduler, StepOutput
from mlx_engine.observe.profiler import Cost
from mlx_engine.options import Options


class Scheduled:
    """Runs clients on a scheduler.

    Args:
        sizes: sizes of the engine's weights and caches, from which the work of each step is computed.
        slots: the largest number of clients.
        longest: tokens of the longest prompt and its answer.
        prefix_cache: keep prompts and answers for later requests that share a prefix.
        overlap: on a lazy backend, submit each pass before the previous one has ended.
    """

    def __init__(
        self,
        engine: Engine,
        sizes: Sizes,
        *,
        slots: int,
        longest: int,
        prefix_cache: bool = False,
        overlap: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine, self._sizes, self._clock = engine, sizes, clock
        # Reserve memory for `slots` + 1 sequences, because the prefix cache may keep the prompt of an ended request.
        n_tokens = (slots + 1) * (longest + PAGE)
        self._settings = {
            "slots": slots,
            "kv_memory": CacheSize(engine.model.kv_layers, n_tokens).whole,
            "prefix_cache": prefix_cache,
            "overlap": overlap,
            "clock": clock,
        }
        self._scheduler = self._new_scheduler()

    def prompt(self, draws: random.Random, n_tokens: int) -> Prompt:
        """Return random token ids."""
        return draws.choices(range(self._engine.config.vocab_size), k=n_tokens)

    def forget(self) -> None:
        """Drop all cached prefixes, by making a new scheduler."""
        del self._scheduler  # drop its KV pool before the next scheduler allocates one
        self._scheduler = self._new_scheduler()

    def run(self, n_clients: int, prompts: Sequence[Prompt], n_gen: int, *, seconds: float | None = None) -> Run:
        """Run clients in a closed loop over the prompts; after `seconds`, cancel the requests that have not ended.

        Raises:
            ContextLengthError: a prompt and its answer exceed the context.
        """
        options = Options.of(n_gen, ignore_eos=True)
        # Requests are made before the clock starts, because checking prompts is not the scheduler's work.
        queue = deque(self._engine.request(prompt, options) for prompt in prompts)
        clients = _Clients(self._scheduler, self._clock)
        start = self._clock()
        for _ in range(min(n_clients, len(queue))):
            clients.submit(queue.popleft())
        try:
            while self._scheduler.has_work:
                for _ in range(min(clients.step(), len(queue))):
                    clients.submit(queue.popleft())
                if seconds is not None and self._clock() >= start + seconds:
                    break
        finally:
            took = self._clock() - start
            was_cut = clients.cancel() > 0
        return Run(list(clients.timed.values()), took, clients.steps(self._sizes), was_cut or bool(queue))

    def _new_scheduler(self) -> Scheduler:
        return self._engine.scheduler(**self._settings)  # type: ignore[arg-type]


class _Clients:
    """Submits the requests of a run; records their times, and the tokens that each step computes for each request."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._scheduler, self._clock = scheduler, clock
        self._lengths: dict[Request, int] = {}
        self._steps: list[tuple[StepOutput, list[tuple[int, int, int]]]] = []
        self.timed: dict[Request, RequestTimes] = {}

    def submit(self, request: Request) -> None:
        self.timed[request] = RequestTimes(self._clock())
        self._scheduler.submit(request)

    def step(self) -> int:
        """Run a step, record the new tokens, and return how many requests have ended."""
        report = self._scheduler.step()
        now = self._clock()
        self._steps.append((report, [self._part(request, now) for request in report.requests]))
        for request in report.ended:
            if request.error is not None:
                raise request.error
        return len(report.ended)

    def cancel(self) -> int:
        """Cancel all requests that have not ended, and return their number."""
        left = [request for request in self.timed if not request.has_ended]
        for request in left:
            self._scheduler.cancel(request)
        return len(left)

    def steps(self, sizes: Sizes) -> Steps:
        """Return the work of all steps. Call this only after the run, because this takes longer than a step."""
        found = Steps()
        for report, parts in self._steps:
            if report.n_decode + report.n_prefill:
                found.add(report.n_decode, report.n_prefill, pass_work(sizes, parts))
        return found

    def _part(self, request: Request, now: float) -> tuple[int, int, int]:
        """Record new tokens. Return (tokens that the step computed, tokens cached before the step, rows of logits)."""
        timed, n_tokens = self.timed[request], len(request.output.token_ids)
        n_new = n_tokens - timed.n_tokens
        timed.arrivals += [now] * n_new
        timed.n_tokens, timed.n_cached = n_tokens, request.n_cached
        # The newest token of an answer is not in the KV cache yet.
        before = self._lengths.get(request, request.n_cached)
        self._lengths[request] = length = request.n_prefilled + max(n_tokens - 1, 0)
        return length - before, before, n_new


# Timeout of connecting to the server and of each read, in seconds.
PATIENCE = 300.0
# Sets of parameters that not every server accepts. `_accepted` tries them in this order, the empty set last.
EXTRAS: tuple[dict[str, Any], ...] = (
    {"ignore_eos": True, "stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True}},
    {},
)
# Words that are one token each, including a space before the word, in most vocabularies.
WORDS = ("the", "of", "and", "to", "in", "is", "it", "for", "on", "with", "as", "by", "at", "from", "that", "this")


class Served:
    """Runs clients over HTTP.

    Attributes:
        url: the address of the API, such as http://127.0.0.1:8080/v1.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Connect to a server. Without `model`, take the server's first model.

        Raises:
            OptionError: the address has no host.
            SourceError: the server does not answer, or has no model.
        """
        parts = urlsplit(url if "://" in url else f"http://{url}")
        sound = parts.scheme in ("http", "https") and bool(parts.hostname)
        message = f"--url: {url!r} is no address, such as http://127.0.0.1:8080"
        require(sound, option="--url", expected="an address", found=url, message=message)
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._clock = clock
        self.model = self._first_model() if model is None else model
        self._extras = self._accepted()

    def prompt(self, draws: random.Random, n_tokens: int) -> Prompt:
        """Return random words of about one token each, because the server's token ids are unknown."""
        return "".join(f" {word}" for word in draws.choices(WORDS, k=n_tokens))

    def forget(self) -> None:
        """Do nothing, because the API cannot empty a prefix cache. Each run draws new prompts anyway."""

    def run(self, n_clients: int, prompts: Sequence[Prompt], n_gen: int, *, seconds: float | None = None) -> Run:
        """Run clients in a closed loop over the prompts; after `seconds`, cancel the requests that have not ended.

        Raises:
            SourceError: the server refuses a request, or fails.
        """
        queue, found = deque(prompts), list[RequestTimes]()
        start = self._clock()
        deadline = None if seconds is None else start + seconds
        with ThreadPoolExecutor(n_clients) as pool:
            clients = [pool.submit(self._client, queue, n_gen, deadline, found) for _ in range(n_clients)]
            cuts = [client.result() for client in clients]
        return Run(found, self._clock() - start, was_cut=any(cuts))

    def _client(self, queue: deque[Prompt], n_gen: int, deadline: float | None, found: list[RequestTimes]) -> bool:
        """Send requests until there are no more prompts; return whether the deadline ended a request."""
        connection = self._connection()
        try:
            while True:
                try:
                    prompt = queue.popleft()
                except IndexError:
                    return False
                found.append(timed := RequestTimes(self._clock()))
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

    def _record(self, timed: RequestTimes, event: dict[str, Any]) -> None:
        """Record when a piece of text arrives. If the event has the usage, record its numbers of tokens."""
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
        return SourceError(f"{self.url}: no OpenAI-compatible server answers ({found}); check that it runs")


class RefusedError(SourceError):
    """The server refused a request; `status` is the HTTP status of the reply."""

    def __init__(self, text: str, status: int) -> None:
        self.status = status
        super().__init__(text)


# Maps the name of each figure to its value, or to None if the run has no value for it.
Figures = dict[str, float | None]


@dataclass
class RequestTimes:
    """The times of one request, in seconds of the client's clock.

    Attributes:
        arrivals: when each token arrived; over HTTP, when each piece of text arrived.
        n_tokens: number of generated tokens.
        n_cached: number of tokens of the prompt that were taken from a prefix cache; None if unknown.
    """

    submitted: float
    arrivals: list[float] = field(default_factory=list)
    n_tokens: int = 0
    n_cached: int | None = None

    @property
    def first(self) -> float | None:
        """Seconds from submission to the first token; None if no token has arrived."""
        return self.arrivals[0] - self.submitted if self.arrivals else None

    @property
    def rate(self) -> float | None:
        """Generated tokens per second from submission to the last token; None if no token has arrived."""
        return self.n_tokens / (self.arrivals[-1] - self.submitted) if self.arrivals else None


@dataclass
class Steps:
    """The steps of a scheduler in a run.

    Attributes:
        n: number of steps.
        n_rows: number of tokens (rows of the batches) of prompts and answers that the steps computed.
        n_decoding: number of steps that computed tokens of answers.
        n_decoded: number of tokens of answers that the steps computed.
        flops: floating-point operations of the steps.
        nbytes: bytes of weights, keys and values that the steps read from memory.
    """

    n: int = 0
    n_rows: int = 0
    n_decoding: int = 0
    n_decoded: int = 0
    flops: float = 0.0
    nbytes: float = 0.0

    def add(self, n_decode: int, n_prefill: int, work: Cost) -> None:
        """Add a step."""
        self.n += 1
        self.n_rows += n_decode + n_prefill
        self.n_decoding += n_decode > 0
        self.n_decoded += n_decode
        self.flops += work.flops
        self.nbytes += work.nbytes


@dataclass
class Run:
    """A run of clients.

    Attributes:
        seconds: the time from the first submission to the end of the run.
        steps: the steps of the scheduler; None over HTTP.
        was_cut: whether a time limit ended the run.
    """

    requests: Sequence[RequestTimes]
    seconds: float
    steps: Steps | None = None
    was_cut: bool = False

    @property
    def n_tokens(self) -> int:
        """Generated tokens."""
        return sum(request.n_tokens for request in self.requests)


def figures(run: Run, limits: dict[str, float] | None = None) -> Figures:
    """Return the figures of a run; `limits` are the machine's limits from `Limits.take`, or None if unknown."""
    first = [request.first for request in run.requests if request.first is not None]
    rates = [request.rate for request in run.requests if request.rate is not None]
    gaps = [b - a for request in run.requests for a, b in itertools.pairwise(request.arrivals)]
    found: Figures = {"total_ts": run.n_tokens / run.seconds, "request_ts": quantile(rates, 0.5)}
    for name, seconds in (("ttft", first), ("gap", gaps)):
        for suffix, q in (("ms", 0.5), ("p99_ms", 0.99)):
            value = quantile(seconds, q)
            found[f"{name}_{suffix}"] = None if value is None else value * 1e3
    if run.steps is not None and run.steps.n:
        found |= shares(run, run.steps, limits)
    return found


def shares(run: Run, steps: Steps, limits: dict[str, float] | None) -> Figures:
    """Return a run's tokens per step, GB/s and GFLOP/s; with `limits`, also the limits and the figures that need them.

    `read_share` is GB/s divided by the memory bandwidth, `peak_share` GFLOP/s divided by the peak. `memory_limit_ts` is
    the tokens per second of a run that only reads the weights, keys and values, at the memory bandwidth.
    `arithmetic_limit_ts` is the tokens per second of a run that only does the arithmetic, at the peak.
    """
    found: Figures = {
        "n_steps": steps.n,
        "rows_per_step": steps.n_rows / steps.n,
        "decode_rows_per_step": steps.n_decoded / steps.n_decoding if steps.n_decoding else None,
        "gbs": steps.nbytes / run.seconds / 1e9,
        "gflops": steps.flops / run.seconds / 1e9,
    }
    if limits is None:
        return found
    read, peak = limits["read_gbs"] * 1e9, limits["peak_gflops"] * 1e9
    return found | limits | {
        "read_share": steps.nbytes / run.seconds / read,
        "peak_share": steps.flops / run.seconds / peak,
        "memory_limit_ts": run.n_tokens * read / steps.nbytes,
        "arithmetic_limit_ts": run.n_tokens * peak / steps.flops,
    }  # fmt: skip


def quantile(values: Sequence[float], q: float) -> float | None:
    """Return the median if q is 0.5, else the smallest value v such that at least a share q of all values is <= v."""
    if not values:
        return None
    if q == 0.5:
        return statistics.median(values)
    return sorted(values)[math.ceil(q * len(values)) - 1]


def medians(rounds: Sequence[Figures]) -> Figures:
    """Return the median of each figure over rounds."""
    found: Figures = {}
    for name in dict.fromkeys(name for one in rounds for name in one):
        values = [value for one in rounds if (value := one.get(name)) is not None]
        found[name] = statistics.median(values) if values else None
    return found


# Token ids, or text for a server whose vocabulary is unknown.
Prompt: TypeAlias = "list[int] | str"


class Target(Protocol):
    """A system that runs clients: a scheduler or a server."""

    def prompt(self, draws: random.Random, n_tokens: int) -> Prompt:
        """Return a random prompt; prompts can be concatenated."""

    def run(self, n_clients: int, prompts: Sequence[Prompt], n_gen: int, *, seconds: float | None = None) -> Run:
        """Run clients in a closed loop over the prompts; after `seconds`, cancel the requests that have not ended."""

    def forget(self) -> None:
        """Drop all cached prefixes, where that is possible."""


@dataclass(frozen=True)
class Load:
    """The requests of each client.

    Attributes:
        n_prompt: tokens of each prompt, without the shared prefix.
        n_gen: tokens of each answer.
        requests: requests of each client.
        shared_prefix: tokens of the prefix that all prompts of a run share; 0 for none.
    """

    n_prompt: int = 128
    n_gen: int = 64
    requests: int = 2
    shared_prefix: int = 0
    seed: int = 0

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its answer."""
        return self.shared_prefix + self.n_prompt + self.n_gen

    @property
    def name(self) -> str:
        """The name of the load, in the style of llama-bench."""
        return f"pp{self.n_prompt}+tg{self.n_gen}" + (f" @ shared {self.shared_prefix}" if self.shared_prefix else "")

    @property
    def numbers(self) -> dict[str, Any]:
        """The load as fields of a row of results."""
        return {
            "test": self.name,
            "n_prompt": self.n_prompt,
            "n_gen": self.n_gen,
            "requests_per_client": self.requests,
            "shared_prefix": self.shared_prefix,
            "seed": self.seed,
        }

    def draws(self, number: int, n_clients: int) -> random.Random:
        """Return the random generator for the prompts of a run. `number` is the number of the round."""
        return random.Random(f"{self.seed} {number} {n_clients}")

    def prompts(self, target: Target, draws: random.Random, n_clients: int) -> list[Prompt]:
        """Return the prompts of a run, without the shared prefix."""
        return [target.prompt(draws, self.n_prompt) for _ in range(n_clients * self.requests)]
