"""The golden files: their checkpoints, their contents, and comparison with tolerances."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from mlx_engine.cache import SequenceInput
from mlx_engine.engine import Engine
from mlx_engine.loop.forward import forward
from mlx_engine.loop.sampler import Sampler
from mlx_engine.options import Sampling
from tests.contract.check import BACKENDS as KNOWN
from tests.contract.check import EMULATED, load
from tests.decoding import decode, greedy_ids

DATA = Path(__file__).parents[1] / "data"
VARIANTS = ("mha", "wide", "mqa", "gqa")
# Architectures that share their code with others: by default a sample of their cells runs, and `-m slow` runs all.
SAMPLED = (
    "jais2",
    "deepseekmoe", "llama4", "minicpm3", "mistral4", "youtu",
    "afmoe", "dots1", "exaonemoe", "solaropen",
    "deepseek2lite", "deepseek3", "glm4moelite", "ernie4_5moe", "granitemoe", "hunyuanmoe", "lfm2moe", "qwen3_next",
    "falconh1", "mamba2", "granite4h", "nemotronh", "nemotron3",
    "glm4moe", "minimaxm2", "olmoe",
    "arcee",
    "cohere2", "ernie4_5", "exaone4", "glm4", "hunyuan", "llamabias", "nanochat", "seed_oss", "starcoder2",
    "bigcode", "cohere", "exaone", "gemma", "glm", "gptneox", "helium", "internlm2", "internlm3", "lille", "mellum",
    "mimo", "minicpm", "nemotron", "olmo", "phi", "stablelm", "telechat3",
    "cwm", "vaultgemma",
)  # fmt: skip
# With Mamba2 mixers, which --shard tensor does not cut.
MIXERS = ("falconh1", "granite4h", "mamba2", "nemotron3", "nemotronh")
# With latent attention: mlx-lm's folders and several ranks by --shard tensor do not have it.
LATENT = ("deepseek2lite", "deepseek3", "glm4moelite", "minicpm3", "mistral4", "youtu")
BACKENDS = ("simd", "parallel", "mlx", *(name for name in KNOWN if name == EMULATED), "scalar")

# Bounds on the root mean square error and on a single error, relative to the root mean square of the expected values.
# The first bound alone would allow one of n logits an error sqrt(n) times as large if all others were exact.
TOLERANCE = 1e-5
TOLERANCE_OF_ONE = 2e-5


@dataclass(frozen=True)
class Golden:
    """A checkpoint and the results of another program for it; `suffix` selects the weights."""

    name: str
    checkpoint: Path
    file: Path
    suffix: str = ""

    def __str__(self) -> str:
        return self.name

    def prompts(self) -> int:
        """Return the number of prompts."""
        return sum(key.startswith("prompt") for key in _arrays(self.file))

    def prompt(self, i: int) -> list[int]:
        """Ids."""
        return [int(token) for token in _arrays(self.file)[f"prompt{i}"]]

    def logits(self, i: int) -> np.ndarray:
        """Return the logits at every position of prompt i, (T, V)."""
        return _arrays(self.file)[f"logits{i}{self.suffix}"]

    def greedy(self, i: int) -> list[int]:
        """Return the greedy ids after prompt i."""
        return [int(token) for token in _arrays(self.file)[f"greedy{i}{self.suffix}"]]

    def taps(self) -> dict[str, np.ndarray]:
        """Return all taps of the pass over prompt 0 in order, with the logits last."""
        named = {k.removeprefix("taps/"): x for k, x in _arrays(self.file).items() if k.startswith("taps/")}
        return named | {"logits": self.logits(0)}


def variant(name: str) -> Golden:
    """Return a golden file of `make_goldens.py`."""
    folder = DATA / f"qwen3-{name}"
    return Golden(name, folder, folder / "golden.npz")


def all_goldens() -> Iterator[Golden]:
    """Return all checkpoints with golden logits."""
    yield from map(variant, VARIANTS)
    mqa, micro = DATA / "qwen3-mqa", DATA / "qwen3-micro"
    yield Golden("mqa-q8_0", mqa / "model-q8_0.gguf", mqa / "golden.npz", "_q8")
    yield Golden("micro-hf", micro / "hf", micro / "golden.npz")
    yield Golden("micro-f32", micro / "model-f32.gguf", micro / "golden.npz")
    yield Golden("micro-q8_0", micro / "model-q8_0.gguf", micro / "golden.npz", "_q8")


GOLDENS = tuple(all_goldens())


@lru_cache(32)
def engine(checkpoint: Path, backend: str) -> Engine:
    """Load an engine, once for neighbouring tests: an engine has no state between runs."""
    return load(backend, checkpoint)


def in_chunks(checkpoint: Path, backend: str, ids: list[int], chunk: int, **options: Any) -> np.ndarray:
    """Compute logits (T, V) of a prompt in chunks; the options are those of the KV pool."""
    model = engine(checkpoint, backend).model
    kv = model.new_kv(len(ids), **{"longest_pass": chunk, **options})
    with model.backend.session():
        pieces = [SequenceInput(ids[at : at + chunk], kv, wanted=None) for at in range(0, len(ids), chunk)]
        return np.concatenate([model.backend.host(forward(model, piece)) for piece in pieces])


def greedy(golden: Golden, i: int, backend: str, *, kv: bool) -> list[int]:
    """Run the scheduler on ids: the small checkpoints have no tokenizer."""
    model = engine(golden.checkpoint, backend).model
    return greedy_ids(model, golden.prompt(i), len(golden.greedy(i)), kv=kv)


def logits_and_greedy(golden: Golden, i: int, backend: str, n: int | None = None) -> tuple[np.ndarray, list[int]]:
    """Return the logits (T, V) of prompt i and the first n greedy ids after it, computed without reading it twice.

    If n is None, there are as many ids as in the golden file.
    """
    model, prompt = engine(golden.checkpoint, backend).model, golden.prompt(i)
    n = len(golden.greedy(i)) if n is None else n
    kv = model.new_kv(len(prompt) + n - 1)
    with model.backend.session():
        logits = model.backend.host(forward(model, SequenceInput(prompt, kv, wanted=None)))
    first = int(logits[-1].argmax())
    sampler = Sampler(model.backend, Sampling(), [*prompt, first])
    return logits, [first, *islice(decode(model, [first], kv, sampler), n - 1)]


def check_close(
    expected: np.ndarray, found: np.ndarray, each: float = TOLERANCE_OF_ONE, all_: float = TOLERANCE
) -> None:
    """Fail with a description if two arrays differ by more than rounding."""
    wrong = disagreement(expected, found, each, all_)
    assert wrong is None, wrong


def disagreement(
    expected: np.ndarray, found: np.ndarray, each: float = TOLERANCE_OF_ONE, all_: float = TOLERANCE
) -> str | None:
    """Describe how two arrays differ by more than rounding; None if they do not."""
    if found.shape != expected.shape:
        return f"expected shape {expected.shape}, found {found.shape}"
    if not np.isfinite(found).all():
        return f"{np.count_nonzero(~np.isfinite(found))} of {found.size} values are not finite"
    errors = relative_errors(expected, found)
    together, worst = np.sqrt(np.mean(errors**2)), errors.max()
    if together <= all_ and worst <= each:
        return None
    at = tuple(int(i) for i in np.unravel_index(errors.argmax(), errors.shape))
    return f"relative error {together:.1e}, the largest {worst:.1e} at {at}; allowed are {all_:.0e} and {each:.0e}"


def relative_errors(expected: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Return the error of each value relative to the root mean square of the expected values.

    The root mean square of these is the relative error in the Frobenius norm.
    """
    size = np.sqrt(np.mean(np.square(expected, dtype=np.float64)))
    return np.abs(found.astype(np.float64) - expected) / size


def first_divergence(expected: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> str | None:
    """Describe the first missing or wrong value in the order of `expected`; None if all agree."""
    for name, values in expected.items():
        wrong = disagreement(values, found[name]) if name in found else "missing"
        if wrong is not None:
            return f"{name}: {wrong}"
    return None


@cache
def _arrays(file: Path) -> dict[str, np.ndarray]:
    with np.load(file) as arrays:
        return dict(arrays)
