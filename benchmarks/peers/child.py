"""The main loop of an engine's process: it reads a request per line of JSON and writes a reply per line.

    {"do": "open", "model": path, "context": n, ...}    the result of `Peer.facts`, or {"absent": why}
    {"do": "fill", "n": n}                              {}
    {"do": "run", "n_prompt": p, "n_gen": g, "n_depth": d, "threads": t, "budget": s}
                                                        {"seconds": s, "passes": [...], "estimated": why or null}
    {"do": "cache"}                                     {"tokens": n, "kv_bytes": b, "state_bytes": b}
    {"do": "read_rates"}                                {"in_order": [bytes per second, ...], "fastest": [...]}
    {"do": "decode", "n_sequences": n, "n_steps": s}    {"seconds": [...]}, of a `BatchPeer`
    {"do": "limits"}                                    {"read_gbs": ..., "peak_gflops": ...}, of a `BatchPeer`
    {"do": "logits", "prompts": [ids, ...], "out": path}    {}, and an .npz with an array (T, V) per prompt

`python -m benchmarks.peers.child MODULE` serves the engine of `benchmarks.peers.MODULE`, which has an `open_peer`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from typing import TextIO

from benchmarks.peers.loop import Answer, BatchPeer, Peer, Request, decode, fill, run


def serve(module: str, lines: Iterable[str], out: TextIO) -> None:
    """Reply to all lines. The first opens the engine; if its package is not installed, reply "absent" and return."""

    def say(reply: Answer) -> None:
        print(json.dumps(reply), file=out, flush=True)

    requests: Iterator[Request] = map(json.loads, lines)
    first = next(requests)
    try:
        peer: Peer | BatchPeer = importlib.import_module(f"benchmarks.peers.{module}").open_peer(first)
    except ImportError as error:
        say({"absent": str(error)})
        return
    say(peer.facts())
    for request in requests:
        say(answer_batch(peer, request) if isinstance(peer, BatchPeer) else answer(peer, request))


def answer(peer: Peer, request: Request) -> Answer:
    """Execute one request and return the reply."""
    if request["do"] == "run":
        return run(peer, request)
    if request["do"] == "fill":
        fill(peer, request["n"])
        return {}
    if request["do"] == "cache":
        return peer.cache()
    if request["do"] == "read_rates":
        return dict(peer.read_rates())
    if request["do"] == "logits":
        # Not at the top: without the engine, NumPy may be missing, too, and `serve` must then reply "absent".
        import numpy as np

        np.savez(request["out"], *(peer.logits(ids) for ids in request["prompts"]))
        return {}
    raise ValueError(f"expected run, fill, cache, read_rates or logits, found {request['do']!r}")


def answer_batch(peer: BatchPeer, request: Request) -> Answer:
    """Execute one request to an engine with several sequences and return the reply."""
    if request["do"] == "decode":
        return decode(peer, request)
    if request["do"] == "limits":
        return dict(peer.limits())
    raise ValueError(f"expected decode or limits, found {request['do']!r}")


if __name__ == "__main__":
    # Only replies may go to stdout, so what libraries print to stdout is redirected to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.argv[1], sys.stdin, answers)
