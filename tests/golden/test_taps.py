"""All intermediate values (taps) of a forward pass against transformers: finds the first wrong operation."""

import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from mlx_engine.backends.observed import tapped
from mlx_engine.cache import SequenceInput
from mlx_engine.loop.forward import forward
from tests.contract.check import EMULATED
from tests.golden.goldens import BACKENDS, DATA, VARIANTS, Golden, engine, first_divergence, variant

# The checkpoints of `make_tap_goldens.py`.
ARCHITECTURES = ("gemma2", "gemma3", "gpt2", "llama", "mistral", "qwen2")
# Chunkings of the prompt; None is one pass without a KV cache.
CUTS = {"one-pass": None, "token-by-token": 1, "chunks-of-3": 3}
SLOW = ("scalar", EMULATED)


def taps_of(golden: Golden, backend: str, chunk: int | None) -> dict[str, np.ndarray]:
    """Return the taps under the golden file's names."""
    return tapped_values(golden.checkpoint, golden.prompt(0), backend, chunk)


def tapped_values(checkpoint: Path, ids: list[int], backend: str, chunk: int | None) -> dict[str, np.ndarray]:
    """Return all taps, joined along the tokens for several passes."""
    model = copy.copy(engine(checkpoint, backend).model)
    passes: list[dict[str, np.ndarray]] = []

    def keep(name: str, x: object) -> None:
        assert name not in passes[-1], f"{name} was computed twice"
        passes[-1][name] = model.backend.host(x).copy()

    model.run_on(tapped(model.backend, keep))
    kv = model.scratch_kv(len(ids)) if chunk is None else model.new_kv(len(ids))
    for piece in pieces(ids, chunk or len(ids)):
        passes.append({})
        logits = forward(model, SequenceInput(piece, kv, wanted=None))
        passes[-1]["logits"] = model.backend.host(logits)
    return {name: np.concatenate([values[name] for values in passes]) for name in passes[0]}


def pieces(ids: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (ids[start : start + size] for start in range(0, len(ids), size))


def cells(names: Sequence[str]) -> pytest.MarkDecorator:
    """All backends, files and cuts; the slow backends cut the first file only."""
    params = [
        pytest.param(
            backend, name, chunk, id=f"{backend}-{name}-{label}",
            marks=[pytest.mark.slow] * (backend in SLOW and name != names[0] and chunk is not None),
        )
        for backend in BACKENDS
        for name in names
        for label, chunk in CUTS.items()
    ]  # fmt: skip
    return pytest.mark.parametrize(("backend", "name", "chunk"), params)


@pytest.mark.some(2)
@cells(VARIANTS)
def test_no_value_diverges(backend: str, name: str, chunk: int | None):
    golden = variant(name)
    found = taps_of(golden, backend, chunk)
    assert set(found) == set(golden.taps())
    assert first_divergence(golden.taps(), found) is None


@pytest.mark.some(2)
@cells(ARCHITECTURES)
def test_no_value_of_another_architecture_diverges(backend: str, name: str, chunk: int | None):
    """The names of the taps are also equal."""
    folder = DATA / f"{name}-micro"
    with np.load(folder / "taps.npz") as arrays, np.load(folder / "golden.npz") as golden:
        expected = dict(arrays)
        ids = golden["prompt1"].tolist()[: len(expected["embed"])]
    found = tapped_values(folder / "hf", ids, backend, chunk)
    assert set(found) == {*expected, "logits"}
    assert first_divergence(expected, found) is None


@pytest.mark.parametrize("name", VARIANTS)
def test_a_layer_has_sixteen_names(name: str):
    """A golden file without taps would agree with any result."""
    golden = variant(name)
    assert len(golden.taps()) == 3 + 16 * engine(golden.checkpoint, "simd").config.n_layers


LIES = {
    "one value": lambda x: nudged(x, 1e-4),
    "not a number": lambda x: nudged(x, np.nan),
    "infinite": lambda x: nudged(x, np.inf),
    "shape": lambda x: x[..., None],
    "half a row less": lambda x: x[:, : x.shape[1] // 2],
    "all a little": lambda x: x * np.float32(1 + 2e-5),
    "zero": np.zeros_like,
    "the last token is the one before": lambda x: np.concatenate((x[:-1], x[-2:-1])),
}


def nudged(x: np.ndarray, by: float) -> np.ndarray:
    """Change one element, the smallest, by a share of the root mean square."""
    x = x.copy()
    x.flat[np.abs(x).argmin()] += by * np.sqrt(np.mean(x**2))
    return x


@pytest.mark.parametrize("lie", LIES)
def test_each_wrong_value_is_named(lie: str):
    """If a value and all values computed from it are wrong, the report names this value."""
    expected = variant("mqa").taps()
    names = list(expected)
    for at, name in enumerate(names):
        found = {**expected, **{later: LIES[lie](expected[later]) for later in names[at:]}}
        report = first_divergence(expected, found)
        assert report is not None
        assert report.startswith(name + ": ")


def test_a_missing_value_is_named():
    expected = variant("mqa").taps()
    found = {name: values for name, values in expected.items() if name != "blk.0.attn_v"}
    assert first_divergence(expected, found) == "blk.0.attn_v: missing"


def test_equal_values_do_not_diverge():
    expected = variant("mqa").taps()
    same = {name: values.copy() for name, values in expected.items()}
    assert first_divergence(expected, same) is None


@pytest.mark.parametrize("name", VARIANTS)
def test_each_golden_says_what_made_it(name: str):
    record = json.loads((DATA / f"qwen3-{name}" / "golden.json").read_text())
    assert record["command"] == f"python tests/golden/make_goldens.py {name}"
    assert {"tool", "versions", "seed", "date"} <= set(record)
