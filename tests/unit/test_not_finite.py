"""Logits that are NaN or infinite: each way to run a model ends with an error that names the first layer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import mlx_engine
from mlx_engine.backends.base import Program
from mlx_engine.backends.numpy.scalar import ScalarBackend
from mlx_engine.backends.numpy.simd import SimdBackend
from mlx_engine.bench import cells, samples
from mlx_engine.checkpoint import open_gguf, write_gguf
from mlx_engine.commands import app
from mlx_engine.errors import NotFiniteError
from mlx_engine.loop.forward import not_finite
from mlx_engine.loop.scheduler import Scheduler
from mlx_engine.loop.stream import Stream
from tests.scheduling import MICRO, alone, ids, options, requests, run, scheduler_of

# A token that no prompt of `PROMPTS` has.
BAD = 77
NAN, INF = 0x7E00, 0x7C00
Ways = dict[str, Callable[[mlx_engine.Engine], object]]


def damaged(path: Path, name: str, bits: int) -> Path:
    """Write the micro model with the scale of the first Q8_0 block of one matrix replaced by these float16 bits."""
    with open_gguf(MICRO) as file:
        weights = {each: file.weight(each) for each in file.tensors}
        data = weights[name].data.copy()
        data[:2] = np.array([bits], "<u2").view(np.uint8)
        weights[name] = type(weights[name])(name, weights[name].shape, weights[name].type, data)
        write_gguf(path, file.typed_metadata(), weights.values())
    return path


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return damaged(tmp_path_factory.mktemp("broken") / "nan.gguf", "blk.1.attn_q.weight", NAN)


def drained_batch(engine: mlx_engine.Engine) -> None:
    (found,) = engine.generate_batch([[1, 2, 3]], 4)
    assert (found.finish_reason, found.token_ids) == ("error", [])
    assert found.error is not None
    raise found.error


WAYS: Ways = {
    "generate": lambda engine: engine.generate([1, 2, 3], 4),
    "sampled": lambda engine: engine.generate([1, 2, 3], 4, temperature=0.7, top_k=3, min_p=0.1, logprobs=2),
    "penalised": lambda engine: engine.generate([1, 2, 3], 4, repetition_penalty=1.2, logit_bias={3: 5.0}),
    "without a cache": lambda engine: engine.generate([1, 2, 3], 4, kv=False),
    "stream": lambda engine: list(engine.stream([1, 2, 3], 4)),
    "batch": drained_batch,
    "logits": lambda engine: engine.logits([1, 2, 3]),
    "bench": lambda engine: cells.measure(engine, samples.Test(n_prompt=3, n_gen=2), repetitions=1),
    "bench at depth": lambda engine: cells.measure(engine, samples.Test(n_gen=2, depth=2), repetitions=1),
}


# `parallel` runs the compiled program of `simd`.
@pytest.fixture(scope="module", params=["simd", pytest.param("parallel", marks=pytest.mark.slow), "mlx", "scalar"])
def failing(request: pytest.FixtureRequest, broken: Path) -> mlx_engine.Engine:
    return mlx_engine.load(broken, request.param)


@pytest.mark.some(2)
@pytest.mark.parametrize("way", WAYS)
def test_the_error_names_the_first_layer_and_the_matrix(failing: mlx_engine.Engine, way: str):
    with pytest.raises(NotFiniteError) as caught:
        WAYS[way](failing)
    error = caught.value
    assert (error.first, error.layer) == ("blk.1.attn_q", 1)
    assert error.found.startswith("NaN (")
    assert "first in blk.1.attn_q, in layer 1 (0 to 2); `inspect --verify`" in str(error)


def test_an_infinite_scale_is_named_too(tmp_path: Path):
    engine = mlx_engine.load(damaged(tmp_path / "inf.gguf", "blk.2.ffn_up.weight", INF), "parallel")
    with pytest.raises(NotFiniteError, match=r"found NaN \(1 of \d+ values\), first in blk.2.ffn_up") as caught:
        engine.generate([1, 2, 3], 4)
    assert caught.value.n_tokens == 3


# ---- one of several ----


def faulty_embedding(engine: mlx_engine.Engine, bad: int = BAD) -> Callable[..., object]:
    """Return an embedding that is NaN for one token."""
    embed, be = engine.model.embed, engine.backend

    def faulty(tokens, positions):
        values = be.host(embed(tokens, positions)).copy()
        known = [int(np.asarray(be.host(i))) if hasattr(i, "item") else i for i in tokens]
        values[[i for i, token in enumerate(known) if token == bad]] = np.nan
        return be.array(values)

    return faulty


@pytest.fixture(params=["simd", "parallel", "mlx"])
def odd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> mlx_engine.Engine:
    """Return an engine whose embedding of BAD is NaN; its softmax keeps this from the other tokens."""
    engine = mlx_engine.load(MICRO, request.param)
    monkeypatch.setattr(engine.model, "embed", faulty_embedding(engine))
    return engine


@pytest.mark.some(1)
def test_others_of_a_batch_go_on_unchanged(odd: mlx_engine.Engine):
    want, good = alone(odd), requests(odd)
    bad, scheduler = odd.request([5, BAD, 9], options()), scheduler_of(odd)
    for request in (*good[:2], bad, *good[2:]):
        scheduler.submit(request)
    ended = [request for report in run(scheduler) for request in report.ended]
    assert sorted(request.number for request in ended) == sorted(request.number for request in (*good, bad))
    assert ids(good) == want
    assert isinstance(bad.error, NotFiniteError)
    assert (bad.error.first, bad.error.layer, bad.error.n_tokens) == ("embed", None, 3)
    assert bad.output.token_ids == []


def test_a_batch_has_an_answer_with_an_error(odd: mlx_engine.Engine):
    good, bad, other = odd.generate_batch([[1, 2], [BAD], [3]], 5, ignore_eos=True)
    assert isinstance(bad.error, NotFiniteError)
    assert bad.finish_reason == "error"
    assert [one.error for one in (good, other)] == [None, None]
    assert [one.token_ids for one in (good, other)] == [
        odd.generate(prompt, 5, ignore_eos=True).token_ids for prompt in ([1, 2], [3])
    ]


def test_tokens_before_the_fault_are_kept(odd: mlx_engine.Engine):
    """The fault appears while an answer is generated; on a lazy backend another pass has been submitted by then."""
    stream = odd.stream([1, 2, 3], 9, ignore_eos=True, logit_bias={BAD: 100.0})
    with pytest.raises(NotFiniteError) as caught:
        list(stream)
    assert stream.generation.token_ids == [BAD]
    assert (caught.value.n_tokens, caught.value.first) == (4, "embed")
    assert len(odd.generate([1, 2, 3], 9, ignore_eos=True).token_ids) == 9


def test_all_answers_to_a_failed_prompt_end(odd: mlx_engine.Engine):
    request = odd.request([4, BAD], options(1), n=3)
    scheduler = scheduler_of(odd)
    scheduler.submit(request)
    run(scheduler)
    assert isinstance(request.error, NotFiniteError)
    assert not scheduler.running


def test_the_prefix_cache_keeps_nothing_of_a_failed_prompt(odd: mlx_engine.Engine):
    scheduler: Scheduler = odd.scheduler(slots=2)
    bad = [*range(1, 60), BAD]
    for _ in range(2):
        stream = Stream(scheduler, odd.request(bad, options()))
        with pytest.raises(NotFiniteError):
            list(stream)
        assert stream.generation.n_cached == 0


@pytest.mark.slow
def test_a_long_prompt_is_searched_in_parts(odd: mlx_engine.Engine):
    """The token is in the second pass of the search, or in the first one, which has no logits."""
    error = not_finite(odd.model, [*[1] * 520, BAD], np.full(3, np.nan))
    assert (error.first, error.n_tokens) == ("embed", 521)
    assert error.found.startswith("NaN (64 of ")
    assert not_finite(odd.model, [BAD, *[1] * 520], np.full(3, np.nan)).first == "embed"
    whole = not_finite(odd.model, [1] * 520, np.array([np.inf, -np.inf, np.nan, 1]))
    assert (whole.first, whole.found) == (None, "NaN and infinity (3 of 4 values)")


# ---- the check ----


@pytest.mark.parametrize("backend", [SimdBackend(), ScalarBackend()], ids=lambda be: be.name)
def test_a_sum_that_overflows_is_no_fault(backend: SimdBackend | ScalarBackend):
    rows = [[3e38, 3e38, 3e38], [1, -np.inf, 2], [1, 2, 3], [np.inf, -np.inf, 0], [0, np.nan, 0]]
    logits = backend.array(np.array(rows, np.float32))
    assert list(backend.bad_rows(logits, backend.row_sums(logits))) == [1, 3, 4]


class Broken(Program):
    """A program that gives NaN whatever its layers compute."""

    def __init__(self, whole: Program) -> None:
        self._whole = whole

    def run(self, x, batch):
        return self._whole.run(x, batch) * np.float32("nan")


def test_a_fault_that_no_operation_has_is_the_backends(monkeypatch: pytest.MonkeyPatch):
    engine = mlx_engine.load(MICRO, "simd")
    monkeypatch.setattr(engine.model, "program", Broken(engine.model.program))
    with pytest.raises(
        NotFiniteError, match="every value was finite when the tokens were run again; report this"
    ) as caught:
        engine.generate([1, 2], 3)
    assert (caught.value.first, caught.value.layer) == (None, None)


def test_the_error_does_not_depend_on_the_search(broken: Path, monkeypatch: pytest.MonkeyPatch):
    engine = mlx_engine.load(broken, "simd")

    def full(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("mlx_engine.loop.forward.forward", full)
    with pytest.raises(NotFiniteError, match=r"found NaN .* failed \(MemoryError\); `inspect"):
        engine.generate([1, 2], 3)


# ---- commands ----


def test_generate_ends_with_the_error(broken: Path):
    found = CliRunner().invoke(app, ["generate", "-q", "-m", str(broken), "-b", "simd", "hello"])
    assert (found.exit_code, found.stdout.strip()) == (1, "")
    assert "error: logits after" in found.stderr
    assert "in layer 1" in found.stderr


def test_a_batch_goes_on_with_its_other_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine = mlx_engine.load(MICRO, "simd")
    bad = engine.prompt_ids("zq")[0]
    assert bad not in [i for text in ("hello", "a") for i in engine.generate(text, 4, ignore_eos=True).prompt_ids]
    monkeypatch.setattr(engine.model, "embed", faulty_embedding(engine, bad))
    monkeypatch.setattr("mlx_engine.engine.Engine", lambda *_: engine)
    file = tmp_path / "prompts"
    file.write_text("hello\nzq\na\n")
    base = ["generate", "-m", str(MICRO), "--batch-file", str(file), "-b", "simd", "-n", "4", "--ignore-eos"]
    found = CliRunner().invoke(app, [*base, "--json"])
    rows = [json.loads(line) for line in found.stdout.splitlines()]
    assert found.exit_code == 1
    assert [row["finish_reason"] for row in rows] == ["length", "error", "length"]
    assert "logits after" in rows[1]["error"]
    assert "error" not in rows[0]
    text = CliRunner().invoke(app, [*base, "-q"])
    assert text.exit_code == 1
    assert "[2] error: logits after" in text.stderr
    assert "[3] a" in text.stdout
