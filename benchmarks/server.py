"""Measure the server with `shape:qwen3-0.6b`: the time to start, the memory when idle, and latencies under load.

    python -m benchmarks.server              appends to benchmarks/results/server.jsonl, every sample kept

The start is timed from the creation of a process to the first status 200 of /health, several times; compiled kernels
and the model file exist already. The last of these processes is then used to measure its memory, the latency of /health
while 8 answers are generated, and the gaps between the tokens of a running answer: alone, and while a prompt of 2,000
tokens is read.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks.log import FOLDER, Log, Row

ROOT = Path(__file__).parents[1]
RESULTS = FOLDER / "server.jsonl"
MODEL = "shape:qwen3-0.6b"

N_STARTS, N_ANSWERS, N_PROMPT = 5, 8, 2000
# Token ids of prompts. Any ids can be used, because the weights are random. All prompts differ, so nothing is cached.
PROMPT_IDS = range(1000, 9000)


def main() -> None:
    """Measure, print and keep a row."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.server", description=__doc__)
    parser.add_argument("--model", default=MODEL, help="the served model")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    given = parser.parse_args()
    log = Log("server", RESULTS)
    for line in lines(log.append({"model_name": given.model, **measure(given.model, given.tokens)})):
        print(line)


class Process:
    """A server in a process of its own.

    Attributes:
        seconds: from its creation to the first 200 of /health.
    """

    def __init__(self, model: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        options = ["-m", model, "--port", str(self.port), "--slots", str(N_ANSWERS), "--kv-memory", "2GiB"]
        start = time.perf_counter()
        self.popen = subprocess.Popen(
            [sys.executable, "cli.py", "serve", *options], cwd=ROOT, stderr=subprocess.DEVNULL
        )
        while not self.is_healthy():
            if self.popen.poll() is not None:
                raise SystemExit(f"serve -m {model} ended with {self.popen.returncode}; run it to see why")
            time.sleep(0.005)
        self.seconds = time.perf_counter() - start

    def is_healthy(self) -> bool:
        """Return whether /health is 200."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except ConnectionRefusedError:
            return False
        finally:
            connection.close()

    def times(self, prompt: list[int], max_tokens: int) -> Iterator[float]:
        """Yield the time of arrival of each token of a streamed answer, in seconds of `time.perf_counter`."""
        # With log-probabilities, a stream has an event for each token, even if it completes no character.
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "logprobs": 0}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        text, headers = json.dumps({**body, "ignore_eos": True, "seed": 1}), {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", text, headers)
        with closing(connection), connection.getresponse() as reply:
            if reply.status != 200:
                raise SystemExit(f"the server refused a request: {reply.read().decode()}")
            for line in reply:
                if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["logprobs"]:
                    yield time.perf_counter()

    def end(self) -> None:
        """End the process."""
        self.popen.terminate()
        self.popen.wait()


def measure(model: str, n_tokens: int) -> Row:
    """Return all samples of one run."""
    starts = []
    for i in range(N_STARTS + 1):  # the first one writes the model file and compiles, where that is needed
        process = Process(model)
        starts.append(process.seconds)
        if i < N_STARTS:
            process.end()
    try:
        time.sleep(1)
        resident, mapped = memory(process.popen.pid)
        list(process.times(prompt(0, 16), 4))
        alone = gaps(process, n_tokens, n_prompt=0)
        row = {"gaps_alone_s": alone, "gaps_beside_prompt_s": gaps(process, n_tokens, n_prompt=N_PROMPT)}
        return {
            "starts_s": starts[1:], "resident_bytes": resident, "mapped_bytes": mapped,
            "health_s": health(process, n_tokens), **row,
        }  # fmt: skip
    finally:
        process.end()


def memory(pid: int) -> tuple[int, int]:
    """Return the resident memory of a process in bytes, and how much of it is mapped files that others can share."""
    info = psutil.Process(pid).memory_info()
    return info.rss, getattr(info, "shared", 0)


def prompt(number: int, n: int) -> list[int]:
    """Return n token ids; each `number` gives different ids."""
    return [PROMPT_IDS[(number * 997 + 31 * i) % len(PROMPT_IDS)] for i in range(n)]


def health(process: Process, n_tokens: int) -> list[float]:
    """Return latencies of sequential requests of /health in seconds, while 8 answers are generated."""
    found: list[float] = []
    with ThreadPoolExecutor(N_ANSWERS) as clients:
        answers = [clients.submit(list, process.times(prompt(i, 16), n_tokens)) for i in range(1, 1 + N_ANSWERS)]
        while not any(answer.done() for answer in answers):
            start = time.perf_counter()
            process.is_healthy()
            found.append(time.perf_counter() - start)
            time.sleep(0.01)
    return found


def gaps(process: Process, n_tokens: int, *, n_prompt: int) -> list[float]:
    """Return the seconds between the tokens of an answer.

    If `n_prompt` is not 0, a prompt of that many tokens is read meanwhile, and only the gaps until its answer of one
    token has arrived are returned.
    """
    with ThreadPoolExecutor(1) as clients:
        stream = process.times(prompt(50 + n_prompt, 16), 4_000 if n_prompt else n_tokens)
        arrivals = [next(stream)]
        other = clients.submit(list, process.times(prompt(99, n_prompt), 1)) if n_prompt else None
        for arrival in stream:
            arrivals.append(arrival)
            if other is not None and other.done():
                break
    return [after - before for before, after in pairwise(arrivals)]


def high(samples: list[float]) -> float:
    """Return the 99th percentile."""
    return sorted(samples)[min(len(samples) - 1, int(len(samples) * 0.99))]


def lines(row: Row) -> list[str]:
    """Return the measured figures as text."""
    found = [
        f"start to /health 200: {statistics.median(row['starts_s']):.2f} s",
        f"idle: {row['resident_bytes'] / 1e6:,.0f} MB resident, {row['mapped_bytes'] / 1e6:,.0f} MB of it mapped files",
    ]
    names = {
        "health_s": f"/health while {N_ANSWERS} answers are generated",
        "gaps_alone_s": "gap between tokens, alone",
        "gaps_beside_prompt_s": f"gap between tokens while {N_PROMPT:,} tokens of a prompt are read",
    }
    for key, name in names.items():
        of = [seconds * 1e3 for seconds in row[key]]
        found.append(f"{name}: median {statistics.median(of):.1f} ms, p99 {high(of):.1f} ms, {len(of)} samples")
    return found


if __name__ == "__main__":
    main()
