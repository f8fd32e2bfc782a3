"""The end of the conversation that an engine's own process holds: a line of JSON comes in, a line of JSON goes out.

    {"do": "open", "model": path, "context": n, ...}    what `Peer.facts` tells, or {"absent": why}
    {"do": "fill", "n": n}                              {}
    {"do": "run", "n_prompt": p, "n_gen": g, "n_depth": d, "threads": t, "budget": s}
                                                        {"seconds": s, "passes": [...], "estimated": why or null}
    {"do": "read_rates"}                                {"in_order": [bytes per second, ...], "fastest": [...]}
    {"do": "logits", "prompts": [ids, ...], "out": path}    {}, and an .npz with an array (T, V) per prompt

`python -m benchmarks.peers.child MODULE` answers for `benchmarks.peers.MODULE`, which must have `open_peer(request)`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from typing import TextIO

from benchmarks.peers.loop import Answer, Peer, Request, fill, run


def serve(module: str, lines: Iterable[str], out: TextIO) -> None:
    """Answer line by line until there are no more; the first line opens the engine, if it is here."""

    def say(reply: Answer) -> None:
        print(json.dumps(reply), file=out, flush=True)

    requests: Iterator[Request] = map(json.loads, lines)
    first = next(requests)
    try:
        peer: Peer = importlib.import_module(f"benchmarks.peers.{module}").open_peer(first)
    except ImportError as error:
        say({"absent": str(error)})
        return
    say(peer.facts())
    for request in requests:
        say(answer(peer, request))


def answer(peer: Peer, request: Request) -> Answer:
    """Do what one line asks."""
    if request["do"] == "run":
        return run(peer, request)
    if request["do"] == "fill":
        fill(peer, request["n"])
        return {}
    if request["do"] == "read_rates":
        return dict(peer.read_rates())
    if request["do"] == "logits":
        # Every engine has NumPy; this module shall need nothing before one is opened.
        import numpy as np

        np.savez(request["out"], *(peer.logits(ids) for ids in request["prompts"]))
        return {}
    raise ValueError(f"expected run, fill, read_rates or logits, found {request['do']!r}")


if __name__ == "__main__":
    # What the libraries print must not come between the answers: from here on it goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.argv[1], sys.stdin, answers)
