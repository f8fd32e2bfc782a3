"""An answer does not depend on where its prefix is from: digests with prefixes of memory, of files, and cold are equal.

    python -m tests.golden.test_prefix_disk
    python -m tests.golden.test_prefix_disk --backends metal --requests 42 --longest 40

runs 1,000 requests of each of all models, backends and types of keys and values, of which the tests run a part. The
second command runs 1,008 requests in all on emulated metal, where a request takes a second.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")

from mlx_engine.backends import create_backend
from mlx_engine.backends.base import Backend
from mlx_engine.backends.metal.backend import MetalBackend
from mlx_engine.cache.disk import DiskPrefixes, PrefixFolder, backend_identity
from mlx_engine.cache.prefix import PrefixCache
from mlx_engine.loop.logprobs import digest
from mlx_engine.loop.request import Request
from mlx_engine.loop.scheduler import Scheduler
from mlx_engine.options import Options
from mlx_engine.weights.model import Model
from tests.random_models import VOCAB, random_model
from tests.streams import request_of

# No window; windows; a window in every layer; states; windows and layers with other heads.
ARCHITECTURES = ("qwen3", "gemma3", "mistral", "qwen35", "lfm2", "gemma4")
TYPES = ("f32", "f16", "bf16", "q8_0")
PAGE = 16
OPTIONS = Options.of(logprobs=0, temperature=1.2, seed=7)


@cache
def model(architecture: str, backend: str, kv_type: str) -> Model:
    be: Backend
    if backend == "metal":
        be = MetalBackend("emulator")
        be.kv_type = kv_type
    else:
        be = create_backend(backend, threads=2, kv_type=kv_type)
    return random_model(architecture, "Q8_0", be)


def prompts(seed: int, n: int, most: int = 150) -> list[list[int]]:
    """Return n prompts of a few beginnings, which are cut at random and continue in random ways."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, VOCAB, (3, most))
    found = []
    for _ in range(n):
        start = starts[rng.integers(len(starts))][: rng.integers(1, most)]
        found.append([*start.tolist(), *rng.integers(0, VOCAB, rng.integers(1, 20)).tolist()])
    return found


def opened(of: Model, path: Path, max_nbytes: int = 1 << 30) -> PrefixFolder:
    folder = PrefixFolder(path, max_nbytes, "model", lambda _: backend_identity(of.backend))
    assert folder.wait()
    return folder


def answers(
    of: Model, asked: Sequence[Sequence[int]], folder: PrefixFolder | None = None, *, prefix: bool = True,
    whole: bool = True, n_tokens: int = 2000,
) -> tuple[list[str], list[Request]]:  # fmt: skip
    """Return the digests of answers to prompts, two at a time, and the requests."""
    pool = of.new_pool(n_tokens, n_sequences=2, page=PAGE, longest_pass=64)
    disk = None if folder is None else DiskPrefixes(pool, folder)
    cached = PrefixCache(pool, whole_pages=whole, disk=disk) if prefix else None
    scheduler = Scheduler(of, pool, slots=2, prefix=cached, budget=50, shared_budget=30)
    requests = [request_of(list(ids), OPTIONS, max_tokens=1 + len(ids) % 7) for ids in asked]
    for request in requests:
        scheduler.submit(request)
    while scheduler.has_work:
        scheduler.step()
    if folder is not None:
        folder.flush()
    for request in requests:
        if request.error is not None:
            raise request.error
    found = [digest(r.output.token_ids, [t.logprob for t in r.output.logprobs or ()]) for r in requests]
    return found, requests


def check(architecture: str, backend: str, kv_type: str, seed: int, n: int, path: Path, *, most: int = 150) -> int:
    """Compare digests, and return the number of tokens that came from files."""
    of, asked = model(architecture, backend, kv_type), prompts(seed, n, most)
    cold, _ = answers(of, asked, prefix=False)
    assert len(set(cold)) > n // 2
    from_disk = 0
    for round_, (whole, n_tokens) in enumerate(itertools.product((True, False), (2000, 2 * most + 100))):
        folder = opened(of, path)
        found, requests = answers(of, asked, folder, whole=whole, n_tokens=n_tokens)
        assert found == cold, (round_, [i for i, (a, b) in enumerate(zip(found, cold, strict=True)) if a != b])
        from_disk += sum(request.n_from_disk for request in requests)
        assert folder.stats.damaged == 0
        assert not round_ or requests[-1].n_from_disk + folder.stats.tokens > 0
        folder.close()
    return from_disk


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("architecture", "backend", "kv_type"),
    [
        ("qwen3", "parallel", "f32"), ("gemma3", "simd", "q8_0"), ("mistral", "simd", "bf16"),
        ("qwen35", "parallel", "f16"), ("lfm2", "simd", "q8_0"), ("gemma4", "parallel", "f32"),
    ],
)  # fmt: skip
def test_answers_are_the_same_from_memory_from_files_and_cold(
    architecture: str, backend: str, kv_type: str, tmp_path: Path
):
    assert check(architecture, backend, kv_type, 1, 8, tmp_path) > 100


@pytest.mark.parametrize(("architecture", "n"), [("qwen3", 4 * PAGE - 1), ("gemma3", 4 * PAGE - 1), ("lfm2", 3 * PAGE)])
def test_of_a_prompt_of_whole_pages_the_last_token_alone_is_computed(architecture: str, n: int, tmp_path: Path):
    """But a model with states needs the states after the page before."""
    of, prompt = model(architecture, "simd", "q8_0"), list(range(4 * PAGE))
    cold, _ = answers(of, [prompt], prefix=False)
    for whole in (True, False):
        folder = opened(of, tmp_path)
        found, requests = answers(of, [prompt] * 3, folder, whole=whole)
        assert found == cold * 3
        assert requests[-1].n_cached == n
        folder.close()
    assert requests[0].n_from_disk == n


@pytest.mark.slow
@pytest.mark.parametrize("kv_type", TYPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_answers_of_all_types(architecture: str, kv_type: str, tmp_path: Path):
    check(architecture, "parallel", kv_type, 2, 40, tmp_path)


@pytest.mark.slow
def test_answers_on_emulated_metal(tmp_path: Path):
    assert check("qwen3", "metal", "f32", 3, 4, tmp_path, most=40) > 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.golden.test_prefix_disk")
    parser.add_argument("--architectures", nargs="+", default=ARCHITECTURES)
    parser.add_argument("--backends", nargs="+", default=("simd", "parallel"))
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--longest", type=int, default=150, help="most tokens that prompts may have in common")
    options = parser.parse_args()
    for architecture, backend, kv_type in itertools.product(options.architectures, options.backends, TYPES):
        with tempfile.TemporaryDirectory() as path:
            n = check(architecture, backend, kv_type, 5, options.requests, Path(path), most=options.longest)
        print(
            f"{architecture:8} {backend:8} {kv_type:5} {options.requests:,} requests: equal, {n:,} tokens from files",
            flush=True,
        )


if __name__ == "__main__":
    main()
