"""A sweep: its cells, the rungs that are skipped with a reason, and the profile of a pass."""

from pathlib import Path

import pytest

import mlx_engine
from mlx_engine import backends
from mlx_engine.backends import Entry
from mlx_engine.backends.numpy.simd import SimdBackend
from mlx_engine.bench import cells, roofline, sweep
from mlx_engine.bench.samples import Result
from mlx_engine.bench.samples import Test as Cell
from mlx_engine.bench.sweep import Plan
from mlx_engine.errors import BackendUnavailableError, OptionError
from mlx_engine.weights.conversion import F32_LAYERS

MICRO = Path(__file__).parents[1] / "data" / "qwen3-micro" / "model-q8_0.gguf"
SHORT = {"prompts": [4], "n_gen": 2, "repetitions": 1, "passes": 0}


def swept(model=MICRO, **options):
    return list(sweep.sweep(str(model), Plan(**SHORT | options)))


def names_of(rows):
    return [(row["rung"], row["weights"], row["test"]) for row in rows]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The machine's own limits are not what is tested here."""
    monkeypatch.setattr(roofline, "SECONDS", 1e-4)


@pytest.fixture
def absent(monkeypatch):
    """No backend but plain `simd` is there."""
    for name in ("scalar", "parallel", "mlx", "metal", "cuda"):
        monkeypatch.setitem(backends._ENTRIES, name, Entry("nowhere", pytest.fail, needs=lambda: "it needs the moon"))
    monkeypatch.setitem(backends._ENTRIES, "simd", Entry("plain", lambda settings: SimdBackend()))


# ---- the plan ----


@pytest.mark.parametrize(
    ("context", "names"),
    [
        (40_960, ["pp128", "pp512", "tg64"]),
        (1024, ["pp128", "pp512", "tg64"]),
        (512, ["pp16", "pp64", "pp256", "tg64"]),
        (100, ["pp16", "pp64", "tg64"]),
        (32, ["pp16", "tg32"]),
    ],
)
def test_prompts_suit_the_models_context(context, names):
    assert [test.name for test in Plan().tests(context)] == names


def test_prompts_may_be_given():
    assert [test.name for test in Plan(prompts=[7, 0, 9], n_gen=3).tests(9)] == ["pp7", "pp9", "tg3"]
    assert [test.name for test in Plan(prompts=[7], n_gen=0).tests(9)] == ["pp7"]


@pytest.mark.parametrize("plan", [Plan(prompts=[10]), Plan(prompts=[1], n_gen=10), Plan(prompts=[0], n_gen=0)])
def test_what_does_not_fit_or_is_nothing_is_refused(plan):
    with pytest.raises(OptionError):
        plan.tests(9)


def test_backends_choose_rungs():
    assert [rung.title for rung in Plan(backends=["parallel", "scalar"]).rungs()] == [
        "scalar, no cache",
        "scalar",
        "parallel",
    ]
    with pytest.raises(BackendUnavailableError, match="no backend has this name"):
        Plan(backends=["quick"]).rungs()


# ---- the rows ----


@pytest.mark.slow
@pytest.mark.usefixtures("absent")
def test_every_rung_has_its_rows_in_the_order_of_the_ladder():
    rows = swept(passes=3)
    assert [(row["rung"], row["unavailable"]) for row in rows if row["test"] == "pp4"] == [
        ("scalar, no cache", "it needs the moon"),
        ("scalar", "it needs the moon"),
        ("simd, NumPy", None),
        ("simd, compiled", None),
        ("parallel", "it needs the moon"),
        ("mlx", "it needs the moon"),
        ("metal", "it needs the moon"),
        ("cuda", "it needs the moon"),
    ]
    long = [row for row in rows if row["test"] == "tg3"]
    assert [row["kv"] for row in long] == [True, False]
    assert long[1]["rung"] == long[0]["rung"] + ", no cache"
    assert [[len(run) for run in row["passes_s"]] for row in long] == [[3], [3]]


@pytest.mark.slow
def test_weights_are_tried_in_float32_and_as_they_are_stored():
    pytest.importorskip("numba")
    rows = swept(backends=["simd"])
    assert names_of(rows) == [
        ("simd, NumPy", "F32", "pp4"),
        ("simd, NumPy", "F32", "tg2"),
        ("simd, compiled", "F32", "pp4"),
        ("simd, compiled", "F32", "tg2"),
        ("simd, compiled", "Q8_0", "pp4"),
        ("simd, compiled", "Q8_0", "tg2"),
    ]
    assert [row["quant"] for row in rows[::2]] == ["keep", "f32", "keep"]
    assert rows[2]["weight_bytes"] / rows[4]["weight_bytes"] == pytest.approx(4 * 32 / 34)
    assert all(row["components"]["ms"] > 0 for row in rows)


def test_a_model_without_quantized_weights_is_measured_once():
    rows = swept(MICRO.with_name("model-f32.gguf"), backends=["simd"])
    assert [(row["rung"], row["weights"]) for row in rows[::2]] == [("simd, NumPy", "F32"), ("simd, compiled", "F32")]


def test_a_conversion_that_was_asked_for_is_the_only_one():
    rows = swept(backends=["simd"], quant=F32_LAYERS)
    assert {row["quant"] for row in rows} == {"f32"}
    assert len(rows) == 4


@pytest.mark.slow
def test_the_machine_is_measured_beside_every_cell():
    for row in swept(backends=["simd"]):
        assert row["read_gbs"] > 0
        assert row["peak_gflops"] > 0
        assert row["read_share"] == pytest.approx(row["gbs"] / row["read_gbs"])
        assert row["peak_share"] == pytest.approx(row["gflops"] / row["peak_gflops"])


@pytest.mark.slow
def test_what_comes_next_is_announced():
    told = []
    list(sweep.sweep(str(MICRO), Plan(**SHORT, backends=["scalar"], budget=0.0), lambda *what: told.append(what)))
    assert told == []  # nothing fits a budget of nothing
    list(sweep.sweep(str(MICRO), Plan(**SHORT, backends=["metal", "simd"]), lambda *what: told.append(what)))
    assert told[0] == (0, 4, "simd, NumPy keep pp4")


# ---- what is not tried ----


def test_a_rung_that_would_not_get_through_a_token_is_not_tried(monkeypatch):
    monkeypatch.setattr(sweep, "seconds_per_weight", lambda backend: 1.0)
    monkeypatch.setattr(sweep, "load", lambda *args, **options: pytest.fail("loaded"))
    rows = swept(backends=["scalar"], budget=9.0)
    assert len(rows) == 4
    assert all("a token would take about" in row["unavailable"] for row in rows)
    assert all(row["unavailable"].endswith("a test has 9 s") for row in rows)


@pytest.mark.slow
def test_a_rung_whose_weights_do_not_fit_is_not_tried(monkeypatch):
    needed = swept(backends=["simd"], prompts=[0])[0]["weight_bytes"]
    monkeypatch.setattr(sweep, "memory_bytes", lambda: int(needed / sweep.MEMORY) - 1)
    rows = swept(backends=["scalar", "simd"], prompts=[0])
    assert {row["rung"]: row["unavailable"] is None for row in rows if row["quant"] == "keep"} == {
        "scalar, no cache": False,
        "scalar": False,
        "simd, NumPy": False,
        "simd, compiled": True,
    }
    assert "its weights would take" in rows[0]["unavailable"]


@pytest.mark.slow
def test_where_memory_cannot_be_asked_for_every_rung_is_tried(monkeypatch):
    monkeypatch.setattr(sweep, "memory_bytes", lambda: None)
    assert not any(row["unavailable"] for row in swept(backends=["simd"]))


def test_a_backends_pace_is_that_of_its_products():
    made = [backends.create_backend(name) for name in ("scalar", "simd")]
    slow, fast = (min(sweep.seconds_per_weight(backend) for _ in range(20)) for backend in made)
    assert 1e-10 < slow < 1e-5
    assert fast < slow


# ---- profiled passes ----


@pytest.mark.some(2)
@pytest.mark.parametrize(("test", "n_tokens"), [(Cell(5), 5), (Cell(0, 3), 1), (Cell(0, 3, 6), 1), (Cell(5, 0, 6), 5)])
def test_one_pass_is_taken_apart(test, n_tokens):
    engine = mlx_engine.load(MICRO, "simd", jit=False)
    found = cells.components(engine, test, 3)
    n_layers, layer = engine.config.n_layers, 7
    assert found["ops"]["linear"]["calls"] == n_layers * layer + 1
    assert found["ops"]["attention"]["calls"] == n_layers
    assert found["ops"]["argmax"]["calls"] == 1
    head = engine.config.vocab_size * engine.config.hidden_size
    in_layers = found["ops"]["linear"]["flops"] - 2 * head
    one = cells.components(engine, Cell(1), 1)["ops"]["linear"]["flops"] - 2 * head
    # Of the last layer the last token alone needs what comes behind keys and values.
    cfg = engine.config
    behind = 2 * cfg.hidden_size * (cfg.n_heads * cfg.head_dim + 3 * cfg.intermediate_size)
    assert in_layers == n_tokens * one - (n_tokens - 1) * behind
    assert found["ms"] == pytest.approx(sum(op["ms"] for op in found["ops"].values()))
    assert set(found["parts"]) == {"embedding", "layers", "head"}
    assert all(ms > 0 for ms in found["parts"].values())
    assert 0.5 * found["ms"] < sum(found["parts"].values()) <= 1.5 * found["ms"]


def test_the_engine_is_left_as_it_was():
    engine = mlx_engine.load(MICRO, "simd", jit=False)
    backend = engine.backend
    cells.components(engine, Cell(2), 1)
    assert engine.backend is backend
    assert backend.profiler is None


def test_the_pass_of_median_length_is_kept(monkeypatch):
    lengths = iter([5.0, 1.0, 3.0])
    monkeypatch.setattr(cells, "_profiled", lambda engine, test, seed: {"ms": next(lengths)})
    assert cells.components(None, Cell(2), 3) == {"ms": 3.0}


def test_a_test_that_does_both_is_not_taken_apart():
    assert cells.components(None, Cell(2, 2), 3) is None
    assert cells.components(None, Cell(2), 0) is None


@pytest.mark.parametrize(
    ("result", "n"),
    [
        (Result(Cell(8), [2.0, 2.0, 9.0]), 2),
        (Result(Cell(8), [0.1]), cells.PROFILED),
        (Result(Cell(8), [7.0]), 0),
        (Result(Cell(8), [1.0], estimated="from a pass of 4 tokens"), 0),
        (Result(Cell(0, 4), [8.0], [[2.0, 2.0]], "from 2 of 4 passes"), 2),
    ],
)
def test_passes_are_taken_apart_as_often_as_there_is_time(result, n):
    assert cells.affordable(result, 5.0) == n
