"""A few steps on a tiny model: the loss falls, and a stopped run goes on where it stopped."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the training extra is not installed")

from tools import train as trainer  # noqa: E402
from tools.dataset import rows  # noqa: E402
from tools.qwen3_torch import Config  # noqa: E402
from tools.train_tokenizer import train as train_tokenizer  # noqa: E402


def tiny(*, vocab: int) -> Config:
    return Config(vocab=vocab, hidden=32, layers=1, heads=2, kv_heads=1, head_dim=32, ffn=64, context=96)


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    monkeypatch.setattr(trainer, "Config", tiny)
    monkeypatch.setattr(trainer, "WARM_UP", 5)
    path = tmp_path / "tokenizer.json"
    train_tokenizer(seed=2, count=60, size=300).save(str(path))
    return argparse.Namespace(
        tokenizer=path, out=tmp_path / "checkpoint.pt", seed=1, documents=120, long_share=0.25, short=48,
        steps=30, minutes=math.inf, batch=384, rate=1e-2, spelling=2.0, compile=False,
    )  # fmt: skip


def test_learning_rate_rises_and_falls() -> None:
    rates = [trainer.rate_at(step / 1000, step, 1.0) for step in range(1000)]
    assert rates[0] < 0.01
    assert max(rates) > 0.9
    assert rates.index(max(rates)) == trainer.WARM_UP - 1
    assert 0 < rates[-1] < 0.01


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # of norms in float32, which are one operation less then
def test_training_learns_and_resumes(options: argparse.Namespace) -> None:
    first = trainer.Trainer(options)
    data = trainer.training_rows(options, first.tokenizer, 96)
    held_out = rows(first.tokenizer, 99, 60, 96)[:16]
    before = trainer.perplexity(first.model, held_out)
    first.run(data, held_out)
    after = trainer.perplexity(first.model, held_out)
    assert 200 < before < 400  # a fresh model knows nothing of 300 tokens
    assert after < before / 3
    again = trainer.Trainer(options)
    assert again.step == 30
    assert trainer.perplexity(again.model, held_out) == pytest.approx(after)
    assert again.tokens == 30 * 384
    assert [part.shape[1] for part in data] == [49, 97]
    assert [first.batch(data, progress).shape for progress in (0, 0.74, 0.76)] == [(8, 49), (8, 49), (4, 97)]
