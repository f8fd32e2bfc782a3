"""Perplexity: the windows of Hugging Face's guide, the comparison with a reference, and reference files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import mlx_engine
from mlx_engine.bench.perplexity import Text, measure
from mlx_engine.commands import app
from mlx_engine.errors import FormatError, OptionError
from mlx_engine.loop.logprobs import digest
from tests.scheduling import MICRO

IDS = [int(i) for i in np.random.default_rng(3).integers(0, 400, 70)]
TEXT = "one two three four five six seven eight nine ten eleven twelve"


@pytest.fixture(scope="module")
def engine() -> Iterator[mlx_engine.Engine]:
    with mlx_engine.load(MICRO, "simd") as found:
        yield found


def of_guide(engine: mlx_engine.Engine, ids: Sequence[int], context: int, stride: int) -> tuple[float, list[float]]:
    """The perplexity by the guide's loop over the logits in float64, and the NLL of each scored token."""
    nlls, total, n_total, before = [], 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + context, len(ids))
        new, part = end - before, list(ids[begin:end])
        x = np.array(engine.logits(part)).astype(np.float64)
        x -= x.max(axis=1, keepdims=True)
        x -= np.log(np.exp(x).sum(axis=1, keepdims=True))
        labels = [-100] * (len(part) - new) + part[len(part) - new :]
        found = [-x[i, label] for i, label in enumerate(labels[1:]) if label != -100]
        if found:
            total, n_total = total + np.mean(found) * (new - 1), n_total + new - 1
        nlls, before = nlls + found, end
        if end == len(ids):
            break
    return math.exp(total / n_total), nlls


@pytest.mark.some(2)
@pytest.mark.parametrize(("context", "stride"), [(200, 100), (32, 16), (32, 32), (24, 7), (2, 1), (69, 69), (5, 2)])
def test_the_windows_are_those_of_the_guide(engine: mlx_engine.Engine, context: int, stride: int):
    found = measure(engine, Text(IDS, context, stride))
    guide, nlls = of_guide(engine, IDS, context, stride)
    summary = found.summary()
    assert [-value for value in found.logprobs] == pytest.approx(nlls, rel=1e-6)
    assert summary["perplexity"] == pytest.approx(math.exp(np.mean(nlls)), rel=1e-6)
    assert summary["perplexity_of_guide"] == pytest.approx(guide, rel=1e-6)
    assert summary["n_scored"] == len(nlls) == len(found.ids)
    assert summary["standard_error"] == pytest.approx(
        summary["perplexity"] * np.std(nlls, ddof=1) / math.sqrt(len(nlls)), rel=1e-6
    )


def test_one_window_has_the_log_probabilities_of_the_prompt(engine: mlx_engine.Engine):
    found = measure(engine, Text(IDS, 200, 100))
    assert found.logprobs == engine.logprobs(IDS).tolist()
    assert found.digest == digest(IDS[1:], found.logprobs)


def test_a_bos_before_each_window_scores_every_token(engine: mlx_engine.Engine):
    found = measure(engine, Text(IDS, 20, 20, bos=9))
    want = [*engine.logprobs(IDS[:20]).tolist()]
    for first in (20, 40, 60):
        want += engine.logprobs([9, *IDS[first : first + 20]]).tolist()
    assert found.logprobs == want


@pytest.mark.parametrize(("n", "context", "stride"), [(1, 20, 10), (70, 20, 21), (70, 20, 0)])
def test_what_cannot_be_scored_is_refused(n: int, context: int, stride: int):
    with pytest.raises(OptionError, match=r"at least 2|from 1 to"):
        Text(IDS[:n], context, stride)


def test_divergence_from_another_model(engine: mlx_engine.Engine, tmp_path: Path):
    text, saved = Text(IDS, 32, 16), tmp_path / "reference"
    with mlx_engine.load(MICRO, "simd", quant="q4_0", quant_min_dim=0) as other:
        found = measure(other, text, reference=engine, save=tmp_path / "other")
        ours, theirs = (np.array(one.logits(IDS[:32])).astype(np.float64) for one in (other, engine))
        by_file = [measure(engine, text, save=saved), measure(other, text, reference=saved)][1]
    p, q = (np.exp(x - x.max(1, keepdims=True)) for x in (theirs, ours))
    p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
    assert found.kl[:31] == pytest.approx((p * np.log(p / q)).sum(1)[:31].tolist(), rel=1e-5, abs=1e-9)
    assert found.same_top[:31] == (p.argmax(1) == q.argmax(1))[:31].tolist()
    assert found.references == by_file.references == measure(engine, text).logprobs
    assert by_file.kl == pytest.approx(found.kl, rel=2e-2, abs=1e-6)
    agreement = found.summary()["reference"]
    assert 0 < agreement["kl"]["mean"] < 1
    assert agreement["kl"]["percentiles"]["50"] == np.median(found.kl)
    assert agreement["top_1_agreement"] == np.mean(found.same_top)
    assert agreement["log_ratio"] == pytest.approx(np.mean(found.references) - np.mean(found.logprobs))
    # A vocabulary of 512 tokens takes 2 bytes each, and 12 for a token.
    assert saved.stat().st_size < 69 * (512 * 2 + 12) + 400


def test_a_model_does_not_diverge_from_itself(engine: mlx_engine.Engine, tmp_path: Path):
    text, saved = Text(IDS, 32, 16), tmp_path / "reference"
    measure(engine, text, save=saved)
    assert max(measure(engine, text, reference=saved).kl) < 1e-8
    assert set(measure(engine, text, reference=engine).kl) == {0.0}


def test_a_file_of_another_run_or_a_damaged_one_is_refused(engine: mlx_engine.Engine, tmp_path: Path):
    saved = tmp_path / "reference"
    measure(engine, Text(IDS, 32, 16), save=saved)
    for text, name in ((Text(IDS, 32, 8), "stride"), (Text(IDS[1:], 32, 16), "ids"), (Text(IDS, 30, 16), "context")):
        with pytest.raises(OptionError, match=f"another {name}"):
            measure(engine, text, reference=saved)
    saved.write_bytes(saved.read_bytes()[:-1])
    with pytest.raises(FormatError, match="bytes of records"):
        measure(engine, Text(IDS, 32, 16), reference=saved)
    saved.write_bytes(saved.read_bytes().replace(b",", b";", 1))
    with pytest.raises(FormatError, match="a header in JSON"):
        measure(engine, Text(IDS, 32, 16), reference=saved)


def test_the_command_prints_a_table_or_json(tmp_path: Path):
    file, saved = tmp_path / "text.txt", tmp_path / "reference"
    file.write_text(TEXT)
    given = ["perplexity", str(file), "-m", str(MICRO), "-b", "simd", "--context", "16", "--stride", "8"]
    result = CliRunner().invoke(app, [*given, "--json", "--save", str(saved)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    with mlx_engine.load(MICRO, "simd") as engine:
        text = Text(engine.prompt_ids(TEXT), 16, 8)
        assert found["digest"] == measure(engine, text).digest
    assert found["n_tokens"] == len(text.ids)
    result = CliRunner().invoke(app, [*given, "--reference", str(saved)])
    assert f"{found['perplexity']:.4f}" in result.stdout
    assert re.search(r"same likeliest token +100.000%", result.stdout)
    assert CliRunner().invoke(app, [*given[:-4], "--context", "100000"]).exit_code == 2
    refused = CliRunner().invoke(app, [*given, "--save", str(file)])
    assert (refused.exit_code, file.read_text()) == (2, TEXT)
