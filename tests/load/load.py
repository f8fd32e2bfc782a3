"""Many clients at once: nothing hangs, nothing leaks, and every complete answer is the one that it is alone."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence

from tests.load import alone
from tests.load.client import Result, ask
from tests.load.mix import SLOTS, Asked, Mix
from tests.load.process import ServerProcess, Vitals

# Pages for 832 tokens: eight answers want about 1,300, so that pages run out and answers are preempted.
ARGUMENTS = ("--slots", str(SLOTS), "--queue", "64", "--kv-memory", "8MB", "--grace", "5")
# The longest time of one request, from its connection on: the queue of 64 is answered in less than a tenth of it.
SECONDS = 60.0
N_WAVES = 4
RETRIES = 20

# The event loop's pool has at most 40 threads, which it starts when as many prompts are encoded at once.
POOL_THREADS = 40
# Connections of the measurement itself that the server has not closed yet.
PROBE_FDS = 2

# Texts and ids of 1,024 earlier prompts are kept for the next turns of conversations: 3 KiB each. The rest is for
# arenas of the allocator, whose number depends on how many threads have run at once.
RSS_TOLERANCE = 12 << 20

Pair = tuple[Asked, Result]


def load(n_requests: int, n_clients: int, rate: float | None, seed: int) -> list[str]:
    """Send requests in waves, and return what was not as it must be."""
    mix, pairs, vitals = Mix(seed), list[Pair](), list[Vitals]()
    with ServerProcess(*ARGUMENTS) as server:
        first, start = server.settled(), time.monotonic()
        print("before        ", shown(first))
        for _ in range(N_WAVES):
            asked = [mix.next() for _ in range(n_requests // N_WAVES)]
            pairs += asyncio.run(
                clients(server.address, asked, n_clients) if rate is None else arrivals(server.address, asked, rate)
            )
            vitals.append(server.settled())
            print(f"after {len(pairs):5,}   ", shown(vitals[-1]))
        seconds, metrics = time.monotonic() - start, server.metrics()
        code = server.end()
    summarize(pairs, seconds, metrics)
    violations = [*wrong_results(pairs), *leaks(vitals)]
    violations += [f"log: {line}" for line in server.lines]
    violations += [f"exit code {code}, expected 0"] if code else []
    return violations + wrong_answers(pairs)


async def clients(address: tuple[str, int], asked: Sequence[Asked], n: int) -> list[Pair]:
    """Send requests from n clients, each one after the other."""
    left, pairs = iter(asked), list[Pair]()

    async def client() -> None:
        for one in left:
            pairs.append((one, await patient(address, one)))

    await asyncio.gather(*(client() for _ in range(n)))
    return pairs


async def arrivals(address: tuple[str, int], asked: Sequence[Asked], rate: float) -> list[Pair]:
    """Send requests at random moments, so many per second, whether or not those before have ended."""
    rng, tasks = random.Random(0), []
    for one in asked:
        tasks.append(asyncio.ensure_future(ask(address, one, SECONDS)))
        await asyncio.sleep(rng.expovariate(rate))
    return list(zip(asked, await asyncio.gather(*tasks), strict=True))


async def patient(address: tuple[str, int], asked: Asked) -> Result:
    """Ask, and ask again when the server says so."""
    for _ in range(RETRIES):
        result = await ask(address, asked, SECONDS)
        if result.status != 429 or result.retry_after < 1:
            break
        await asyncio.sleep(result.retry_after)
    return result


def shown(vitals: Vitals) -> str:
    return (
        f"{vitals.rss / 2**20:7.1f} MiB resident, {vitals.threads} threads, {vitals.fds} descriptors, "
        f"{vitals.pages} pages, {vitals.running} running, {vitals.waiting} waiting"
    )


def summarize(pairs: Sequence[Pair], seconds: float, metrics: dict[str, float]) -> None:
    statuses = Counter("left" if result.has_left else str(result.status) for _, result in pairs)
    n_complete = sum(bool(result.digests) for _, result in pairs)
    print(f"{len(pairs):,} requests in {seconds:.0f} s: {dict(sorted(statuses.items()))}, {n_complete:,} answered")
    names = (
        "generation_tokens_total", "prompt_tokens_total", "prefix_cache_hits_total", "num_preemptions_total",
        "request_cancelled_total", 'http_errors_total{status="429"}', "engine_steps_total",
    )  # fmt: skip
    print("metrics:", ", ".join(f"{name} {metrics.get(name, 0):,.0f}" for name in names))


def wrong_results(pairs: Sequence[Pair]) -> list[str]:
    """Return the requests that failed or whose status is not the expected one."""
    found = []
    for asked, result in pairs:
        what = f"{asked.path} {str(asked.body)[:200]} {asked.leave}"
        if result.failure:
            found.append(f"{result.failure}: {what}")
        elif not result.has_left and result.status not in {asked.status, 429 if asked.is_valid else asked.status}:
            found.append(f"status {result.status}, expected {asked.status}: {what}")
    return found


def leaks(vitals: Sequence[Vitals]) -> list[str]:
    """Return what grows from the first quarter of the requests to the last, and what is held when none runs."""
    first, last = vitals[0], vitals[-1]
    found = [f"not idle: {shown(one)}" for one in vitals if not one.is_idle]
    if last.fds > first.fds + PROBE_FDS:
        found.append(f"file descriptors: {first.fds}, then {last.fds}")
    if last.threads > first.threads + POOL_THREADS:
        found.append(f"threads: {first.threads}, then {last.threads}")
    if last.rss > first.rss + RSS_TOLERANCE:
        found.append(f"resident memory: {first.rss:,} bytes, then {last.rss:,}")
    return found


def wrong_answers(pairs: Sequence[Pair]) -> list[str]:
    """Return the complete answers that differ from those that the requests get alone."""
    complete = [(asked, result) for asked, result in pairs if result.digests]
    start = time.monotonic()
    found = [str(asked.body) for asked, result in complete if alone.digests(asked.body) != result.digests]
    n_answers, seconds = sum(len(result.digests) for _, result in complete), time.monotonic() - start
    print(f"{n_answers:,} answers compared with those alone in {seconds:.0f} s: {len(found)} differ")
    return [f"another answer than alone: {body[:300]}" for body in found]
