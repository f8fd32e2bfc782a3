"""Measure the error of each engine's logits, on the same file and ids, relative to logits computed in float64."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.peers.contests import ENGINES, MEASURED, OURS
from benchmarks.peers.process import ROOT, PeerError, Process

# A small Qwen3 with random weights. Its exact logits were computed by transformers in float64 with the stored weights.
FOLDER = ROOT / "tests" / "data" / "qwen3-micro"
MODEL = FOLDER / "model-q8_0.gguf"
CONTEXT = 256


@dataclass
class Error:
    """An engine's relative errors in the Frobenius norm, of all prompts together and of each prompt."""

    engine: str
    together: float | None = None
    each: list[float] = field(default_factory=list)
    absent: str | None = None


def exact_logits() -> tuple[list[list[int]], list[np.ndarray]]:
    """Return the prompts, and exact logits (T, V) of each."""
    with np.load(FOLDER / "golden.npz") as arrays:
        names = [key for key in arrays if key.startswith("prompt")]
        prompts = [[int(token) for token in arrays[name]] for name in names]
        return prompts, [arrays[f"logits{name.removeprefix('prompt')}_q8"] for name in names]


def errors(interpreters: Mapping[str, str], backend: str) -> list[Error]:
    """Return the errors of every engine; an absent engine has the reason."""
    prompts, exact = exact_logits()
    return [error_of(name, interpreters[name], backend, prompts, exact) for name in MEASURED]


def error_of(
    name: str, python: str, backend: str, prompts: Sequence[Sequence[int]], exact: Sequence[np.ndarray]
) -> Error:
    """Return the errors of one engine, which runs in its own process."""
    opening = {"backend": backend} if name == OURS else {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "logits.npz"
        try:
            with Process(ENGINES[name].module, python, model=str(MODEL), context=CONTEXT, **opening) as process:
                process.ask("logits", prompts=prompts, out=str(out))
        except PeerError as error:
            return Error(name, absent=str(error))
        with np.load(out) as arrays:
            found = list(arrays.values())
    each = [relative(have, want) for have, want in zip(found, exact, strict=True)]
    return Error(name, relative(np.concatenate(found), np.concatenate(exact)), each)


def relative(found: np.ndarray, exact: np.ndarray) -> float:
    """Return the Frobenius norm of the error, divided by the Frobenius norm of the exact logits."""
    wanted = exact.astype(np.float64)
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
