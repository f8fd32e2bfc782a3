"""Compare the rates that `plan` expects with measured ones: ranks on this machine, over simulated links.

    python -m benchmarks.planned [--shard tensor] [--layers 8] [--ranks 2,4] [--links 1e9:0.0001,1e10:0.005]

Each rank has one thread and is pinned to a core; if there are more ranks than cores, ranks share cores. The inputs of
the plan are measured first. A single process gives a host's memory bandwidth and arithmetic rate. A process on each
core shows how much processes slow each other. Two ranks, over loopback and over a relay without delay, give the time
that the software needs per message. The plan computes all other values. Times are the shortest of several passes,
because other programs on the cores disturb some of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.links import LINKS, links_of
from benchmarks.relay import ranks, urgent
from mlx_engine.backends import create_backend
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.checkpoint.shapes import Qwen3Shape
from mlx_engine.distributed.plan import (
    Asked,
    Host,
    Link,
    ModelParts,
    Pass,
    ShardKind,
    Timing,
    Work,
    model_parts,
    pipeline,
    tensor,
)
from mlx_engine.distributed.tensor import sliced
from mlx_engine.machine.memory import usable_cores
from mlx_engine.weights.conversion import Conversion
from mlx_engine.weights.model import plan_model
from mlx_engine.weights.outline import outlined

BACKEND, MEMORY = "parallel", 1 << 40
# The tokens of a prompt, the number of prompts, and the number of generated tokens. Passes are short, so that other
# programs do not disturb all of them. The first pass of each kind is not counted.
PROMPT, PROMPTS, TOKENS = 8, 40, 120
# How often the inputs of the plan are measured: one process, and two ranks over loopback and over a relay.
REPEATS = 3
# A link that takes no time: bits per second, and seconds.
NO_DELAY = (1e12, 0.0)
# Seconds that processes get to load the model; then all of them begin at the same time.
LOADING = 4.0


class Times(NamedTuple):
    """The shortest times in seconds.

    Attributes:
        token: of a token of a single request.
        prompt: of a prompt.
        turn: of one token for each of several requests, as many as there are ranks.
    """

    token: float
    prompt: float
    turn: float


def shape(n_layers: int) -> Qwen3Shape:
    """Return a model with layers of Qwen3 0.6B, and a smaller vocabulary."""
    return Qwen3Shape(n_layers, 1024, 3072, 16, 8, 128, 16_384, 4096, 1e6)


class Setup(NamedTuple):
    """A model's file, and how ranks share the model.

    Attributes:
        path: the file.
        shard: the value of `--shard`.
        n_layers: the number of the model's layers.
    """

    path: Path
    shard: ShardKind
    n_layers: int

    def split(self, n: int) -> list[int]:
        """Return the number of layers of each of n ranks. The last rank, with the head, has no more than others."""
        return [self.n_layers // n + (i < self.n_layers % n) for i in range(n)]


def passes(kind: ShardKind, n: int) -> int:
    """Return the number of passes in which n requests advance by one token: one per request in a pipeline, else one."""
    return n if kind == "pipeline" else 1


def worker(path: str, kind: ShardKind, split: Sequence[int], at: float) -> Times | None:
    """Run as a rank, or as a single process that begins at a given time. Return the times on rank 0."""
    from mlx_engine.cache import SequenceInput
    from mlx_engine.distributed.shard import join
    from mlx_engine.engine import Engine, open_source
    from mlx_engine.loop.forward import forward
    from mlx_engine.options import Options

    pinned()
    shard = join(kind, split if kind == "pipeline" else None) if len(split) > 1 else None
    opened = open_source(path, BACKEND, threads=1, shard=shard)
    if shard is not None and not shard.is_leader:
        urgent()
        opened.follow()
        shard.close()
        return None
    engine = Engine(opened)
    urgent()
    time.sleep(max(0.0, at - time.time()))
    model, ids, seconds = engine.model, list(range(PROMPT)), dict[int, list[float]]()
    with model.backend.session():
        kv = model.new_kv(PROMPTS * PROMPT + TOKENS + 1)
        for n, count in ((PROMPT, PROMPTS), (1, TOKENS)):
            for _ in range(count):
                start = time.perf_counter()
                logits = forward(model, SequenceInput(ids[:n], kv))
                model.backend.wait([] if logits is None else logits)
                seconds.setdefault(n, []).append(time.perf_counter() - start)
                if n > 1:
                    kv.truncate(0)
        kv.close()
    scheduler = engine.scheduler(slots=len(split), kv_memory=1 << 28, prefix_cache=False)
    for i in range(len(split)):
        scheduler.submit(engine.request(ids[i : i + PROMPT], Options.of(TOKENS, ignore_eos=True)))
    ends = []
    while scheduler.has_work:
        scheduler.step()
        ends.append(time.perf_counter())
    # Leave out the first steps, which read prompts, and the last ones, which run fewer requests.
    ends = ends[len(split) * 4 : -len(split) * 4]
    turns = [late - early for early, late in zip(ends, ends[passes(kind, len(split)) :], strict=False)]
    engine.close()
    if shard is not None:
        shard.close()
    return Times(min(seconds[1][1:]), min(seconds[PROMPT][1:]), min(turns))


def pinned() -> None:
    """Run this process on one core: ranks are assigned to cores round-robin."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ.get("MLX_RANK", "0")) % len(cores)]})


def measure(of: Setup, n: int, link: tuple[float, float] | None = None) -> Times:
    """Return the measured times of n ranks, over a link or over loopback."""
    split = ",".join(map(str, of.split(n)))
    command = ["-m", "benchmarks.planned", "--worker", str(of.path), "--shard", of.shard, "--split", split]
    with ranks(command, n, link) as started:
        out, errors = started[0].communicate(timeout=600)
    if started[0].returncode:
        raise RuntimeError(errors)
    return Times(*json.loads(out.splitlines()[-1]))


def best(of: Setup, n: int, link: tuple[float, float] | None = None) -> Times:
    """Return the shortest times of several measurements over a link, or over loopback."""
    each = [measure(of, n, link) for _ in range(REPEATS)]
    return Times(*map(min, zip(*each, strict=True)))


def together(of: Setup, alone: Times) -> float:
    """Return the factor by which a token takes longer while every core computes one, because the cores share memory."""
    command = ["-m", "benchmarks.planned", "--worker", str(of.path), "--split", str(of.n_layers)]
    command += ["--at", str(time.time() + LOADING)]
    with ranks(command, usable_cores()) as started:
        found = [Times(*json.loads(each.communicate(timeout=600)[0].splitlines()[-1])) for each in started]
    return max(1.0, max(each.token for each in found) / alone.token)


def timing(of: Setup, host: Host, n: int, link: Link) -> Timing:
    """Return the plan of n ranks on one machine."""
    hosts = [replace(host, cores=usable_cores(), ranks=n)] * n
    asked = Asked(PROMPT + TOKENS // 2, n, PROMPT)
    model = parts_of(of.path)
    if of.shard == "pipeline":
        return Timing(model, pipeline(model, hosts, asked, of.split(n)), link, of.shard)
    return Timing(model, tensor([parts_of(of.path, rank, n) for rank in range(n)], hosts, asked), link, of.shard)


def expected(plan: Timing) -> Times:
    """Return the times that the plan expects."""
    n, context = len(plan.ranks), PROMPT + TOKENS // 2
    n_parts = passes(plan.shard, n)
    # With several requests, a scheduler runs the passes and needs only the largest logit (best=1). The other passes are
    # run directly, and return all logits.
    turn = replace(plan, best=1).turn(Pass(n // n_parts, 1, context), n_parts)
    return Times(plan.alone(Pass(1, 1, context)), plan.alone(Pass(1, PROMPT, 0)), turn)


def overhead_of(of: Setup, host: Host, link: tuple[float, float] | None) -> float:
    """Return the seconds of the software per message, from a token on two ranks over a link without delay.

    The plan then matches this token by construction.
    """
    plan = timing(of, host, 2, Link(*NO_DELAY))
    more = best(of, 2, link).token - expected(plan).token
    return max(0.0, more / plan.messages(Pass(1, 1, PROMPT)).n)


def host_of(folder: Path, kind: ShardKind, n_layers: int) -> Host:
    """Return the host, measured with a model of half of the layers.

    A pass of the whole model on one core is so long that other programs always disturb it. The passes of ranks are
    shorter.
    """
    of = Setup(folder / "half.gguf", kind, n_layers // 2)
    shape(of.n_layers).write(of.path, "planned")
    alone = best(of, 1)
    return replace(calibrated(parts_of(of.path), alone), together=together(of, alone))


def calibrated(model: ModelParts, alone: Times) -> Host:
    """Return the host with which a plan for one process predicts the measured times of token and prompt exactly."""
    parts = (model.tables, *model.layers, model.head)
    passed = Pass(1, 1, PROMPT + TOKENS // 2), Pass(1, PROMPT, 0)
    works = [sum((part.work(of) for part in parts), Work(0, 0)) for of in passed]
    # In `plan.Host.seconds`, time**2 = (bytes / bandwidth)**2 + (operations / arithmetic rate)**2. The token and the
    # prompt give two linear equations for the two unknown squares.
    squares = [[work.nbytes**2, work.flops**2] for work in works]
    solved = np.linalg.solve(squares, [alone.token**2, alone.prompt**2])
    if min(solved) <= 0:
        found = f"{alone.token * 1e3:.2f} ms for a token, {alone.prompt * 1e3:.2f} ms for a prompt of {PROMPT}"
        raise RuntimeError(f"expected a token that is bound by memory, found {found}; repeat on a quiet machine")
    bandwidth, compute = solved**-0.5
    return Host(MEMORY, float(bandwidth), float(compute))


@cache
def parts_of(path: Path, rank: int = 0, n: int = 1) -> ModelParts:
    """Return the parts of the model of a file, or of a rank's slices of it."""
    planned = plan_model(open_checkpoint(path), Conversion())
    return model_parts(outlined(planned if n == 1 else sliced(planned, rank, n), create_backend(BACKEND)))


def row(n: int, link: tuple[float, float] | None, plan: Times, found: Times) -> str:
    """Return a row of the table: expected and measured tokens/s of one request, of prompts, of several requests."""
    name = "loopback" if link is None else f"{link[0] / 1e9:g} Gbit/s, {link[1] * 1e3:g} ms"
    cells = [f"{n}", name]
    for tokens, of_plan, of_run in zip((1, PROMPT, n), plan, found, strict=True):
        cells += [f"{tokens / of_plan:,.1f}", f"{tokens / of_run:,.1f}", f"{of_plan / of_run:.2f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table; with --worker be a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard", choices=("pipeline", "tensor"), default="pipeline", help="how ranks share the model")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks")
    parser.add_argument("--links", type=links_of, default=list(LINKS), help="RATE:LATENCY, bits per second and seconds")
    parser.add_argument("--worker", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("--split", default="1", help=argparse.SUPPRESS)
    parser.add_argument("--at", type=float, default=0.0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        found = worker(given.worker, given.shard, [int(n) for n in given.split.split(",")], given.at)
        print(json.dumps(found) if found else "")
        return
    with tempfile.TemporaryDirectory() as folder:
        of = Setup(Path(folder) / "model.gguf", given.shard, given.layers)
        shape(given.layers).write(of.path, "planned")
        host = host_of(Path(folder), given.shard, given.layers)
        rates = f"{host.bandwidth / 1e9:.1f} GB/s, {host.compute / 1e9:.0f} GFLOP/s"
        slower = f"a token takes {host.together:.2f} times as long while every core computes one"
        print(f"a host: {rates}; {os.cpu_count()} cores; {slower}")
        direct, relayed = overhead_of(of, host, None), overhead_of(of, host, NO_DELAY)
        print(f"software per message: {direct * 1e3:.2f} ms, {relayed * 1e3:.2f} ms with a relay\n")
        heads = [f"{what} {which}" for what in ("token", "prompt", "several") for which in ("plan", "run", "ratio")]
        print(f"| ranks | link | {' | '.join(heads)} |\n|---:|---|{'---:|' * len(heads)}")
        for n, link in itertools.product(map(int, given.ranks.split(",")), (None, *given.links)):
            rate, latency = link or NO_DELAY
            along = Link(rate, latency, direct if link is None else relayed)
            plan = expected(timing(of, host, n, along))
            print(row(n, link, plan, measure(of, n, link)), flush=True)


if __name__ == "__main__":
    main()
