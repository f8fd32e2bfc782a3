"""Events and profiles: what they say, and that nobody who does not ask gets any."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

import mlx_engine
from mlx_engine.backends import create_backend
from mlx_engine.backends.base import Backend
from mlx_engine.backends.observed import profiled
from mlx_engine.backends.primitives import OPERATIONS
from mlx_engine.engine import configure_log
from mlx_engine.errors import OptionError
from mlx_engine.observe import log
from mlx_engine.observe.profiler import Cost, Profiler
from mlx_engine.quant import BY_NAME
from mlx_engine.quant.weight import Weight

MODEL = Path(__file__).parents[1] / "data" / "qwen3-micro" / "model-q8_0.gguf"


@pytest.fixture(autouse=True)
def silence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(log.VARIABLE, raising=False)
    yield
    log.configure("off")
    log.LOGGER.setLevel(logging.NOTSET)
    log.LOGGER.propagate = True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_own_times_add_up_to_the_whole():
    clock = Clock()
    profiler = Profiler(clock)
    with profiler.span("norm_project", 3) as block:
        clock.now += 1.0
        with profiler.span("linear") as inner:
            clock.now += 4.0
        with profiler.unnoticed():
            profiler.record(inner, Cost(8e9, 2e9))
            clock.now += 100.0
        clock.now += 2.0
    profiler.record(block, Cost())
    assert (inner.own, block.own) == (4.0, 3.0)
    assert profiler.layers[3].seconds == 7.0
    assert profiler.ops["linear"].calls == 1
    lines = profiler.table().splitlines()
    assert lines[1].split() == ["linear", "1", "4000.000", "57.1%", "2.00", "0.50"]
    assert lines[3].split() == ["all", "2", "7000.000"]


def test_a_pass_is_told_in_four_parts():
    clock = Clock()
    profiler = Profiler(clock)

    def spend(op: str, seconds: float) -> None:
        with profiler.span(op):
            clock.now += seconds

    spend("embed", 0.001)
    spend("attention", 0.02)
    with profiler.span("norm_head"):
        spend("rms_norm", 0.003)
        spend("linear", 0.004)
    parts = profiler.end_pass()
    assert parts == pytest.approx({"embedding": 1.0, "layers": 20.0, "norm": 3.0, "projection": 4.0})
    assert set(profiler.end_pass().values()) == {0.0}


def test_every_operation_of_the_seam_is_timed():
    """What only calls another operation is not: its time is that operation's."""
    be = create_backend("simd", jit=False)
    twin = profiled(be, Profiler())
    timed = {name for name in vars(type(twin)) if not name.startswith("_")} - {"compile"}
    assert timed == {name for kind, names in OPERATIONS.items() for name in names if kind != "dispatch"}


@pytest.mark.some(2)
@pytest.mark.parametrize("name", ["scalar", "simd", "parallel", "mlx"])
def test_a_profiled_backend_computes_the_same(name: str):
    plain = mlx_engine.load(MODEL, name)
    want = np.asarray(plain.logits([3, 1, 4]))
    configure_log("debug")
    watched = mlx_engine.load(MODEL, name)
    assert watched.backend.profiler is not None
    assert watched.backend.name == name
    np.testing.assert_array_equal(np.asarray(watched.logits([3, 1, 4])), want)
    table = watched.backend.profiler.table()
    products = "linear" if name == "scalar" else "norm_project"
    assert {products, "attention", "layer 2"} <= {line[:16].strip() for line in table.splitlines()}


def test_work_is_counted_from_shapes():
    profiler = Profiler()
    be = profiled(create_backend("simd", jit=False), profiler)
    from mlx_engine.backends.parameters import Linear

    be.linear(np.ones((3, 64), np.float32), Linear("blk.5.attn_q", np.ones((10, 64), np.float32)))
    total = profiler.ops["linear"]
    assert total.flops == 2 * 3 * 64 * 10
    assert total.nbytes == 4 * (3 * 64 + 10 * 64 + 3 * 10)
    assert profiler.layers[5].calls == 1


def test_work_of_products_of_heads():
    """Each head has a matrix of its own, and all are read."""
    from mlx_engine.backends.experts import ExpertLinear
    from mlx_engine.backends.parameters import Linear

    profiler = Profiler()
    be = profiled(create_backend("simd", jit=False), profiler)
    matrices = be.stack([Linear("one", np.ones((10, 64), np.float32))] * 4)
    of = ExpertLinear("blk.5.attn_k_b", matrices, (10, 64), 4 * 4 * 10 * 64, 4)
    be.head_linear(np.ones((3, 4, 64), np.float32), of)
    totals = [profiler.ops[name] for name in ("head_linear", "linear")]  # here the first consists of the others
    assert sum(total.flops for total in totals) == 2 * 3 * 4 * 64 * 10
    assert sum(total.nbytes for total in totals) == 4 * (3 * 4 * 64 + 4 * 10 * 64 + 3 * 4 * 10)


def test_work_of_a_fused_block_is_that_of_its_products():
    from mlx_engine.backends.parameters import Linear, RMSNorm

    profiler = Profiler()
    be = profiled(create_backend("parallel"), profiler)
    one = np.ones((16, 64), np.float32)
    linears = [Linear("blk.2.attn_q", weight(be, one)), Linear("blk.2.attn_k", weight(be, one))]
    norm = RMSNorm("blk.2.attn_norm", np.ones(64, np.float32), 1e-6)
    be.norm_project(np.ones((3, 64), np.float32), norm, linears)
    assert set(profiler.ops) == {"norm_project"}
    total = profiler.ops["norm_project"]
    assert total.flops == 2 * 3 * 64 * 32
    assert total.nbytes == 4 * (3 * 64 + 64 + 32 * 64 + 3 * 32)
    assert profiler.layers[2].calls == 1


def weight(be: Backend, values: np.ndarray):
    return be.prepare(Weight.pack("w", values, BY_NAME["F32"]))


def events(caplog: pytest.LogCaptureFixture, name: str) -> list[dict[str, object]]:
    return [record.fields for record in caplog.records if record.getMessage() == name]


def test_one_event_for_each_token(caplog: pytest.LogCaptureFixture):
    engine = mlx_engine.load(MODEL)
    with caplog.at_level(logging.INFO, logger="mlx_engine"):
        generation = engine.generate([1, 2, 3], max_tokens=4, ignore_eos=True)
    tokens = events(caplog, "token")
    assert [token["id"] for token in tokens] == generation.token_ids
    assert [token["step"] for token in tokens] == [1, 2, 3, 4]
    assert [token["phase"] for token in tokens] == ["prefill", "decode", "decode", "decode"]
    assert "".join(str(token["text"]) for token in tokens) == generation.text
    row = np.asarray(engine.logits([1, 2, 3]))[-1].astype(np.float64)
    p = np.exp(row - row.max())
    assert tokens[0]["probability"] == pytest.approx(p.max() / p.sum(), rel=1e-4)


def test_an_event_at_the_end_token(caplog: pytest.LogCaptureFixture):
    engine = mlx_engine.load(MODEL)
    last = engine.generate([1, 2, 3], max_tokens=1, ignore_eos=True).token_ids[0]
    from mlx_engine.options import Options
    from tests.streams import stream_of

    stream = stream_of(engine.model, [1, 2, 3], Options(), max_tokens=5, text=engine.tokenizer.stream(), end_ids=[last])
    with caplog.at_level(logging.INFO, logger="mlx_engine"):
        assert list(stream) == []
    assert events(caplog, "end") == [{"step": 1, "id": last}]


def test_silent_by_default(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]):
    mlx_engine.load(MODEL).generate([1, 2, 3], max_tokens=2)
    assert [record for record in caplog.records if record.levelno < logging.WARNING] == []
    assert capfd.readouterr() == ("", "")


def test_the_environment_asks_for_events(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setenv(log.VARIABLE, "debug")
    mlx_engine.load(MODEL).generate([1, 2, 3], max_tokens=2, ignore_eos=True)
    lines = capfd.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["pass", "token", "pass", "token"]
    fields = dict(field.split("=") for field in lines[0].split()[1:])
    parts = sum(float(fields[name]) for name in ("embedding", "layers", "norm", "projection"))
    assert 0 < parts <= float(fields["total_ms"])


def test_trace_tells_every_operation(capfd: pytest.CaptureFixture[str]):
    configure_log("trace")
    mlx_engine.load(MODEL, jit=False).generate([1, 2, 3], max_tokens=1)
    operations = [line for line in capfd.readouterr().err.splitlines() if line.startswith("operation ")]
    assert any("op=linear layer=0 shapes='3x64 128x64'" in line for line in operations)
    assert all("ms=" in line and "gflops=" in line and "gbs=" in line for line in operations)


def test_an_unknown_level_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(OptionError, match="no level 'loud'; choose off, info, debug or trace"):
        configure_log("loud")
    monkeypatch.setenv(log.VARIABLE, "chatty")
    with pytest.raises(OptionError, match="MLX_ENGINE_LOG"):
        mlx_engine.load(MODEL)
