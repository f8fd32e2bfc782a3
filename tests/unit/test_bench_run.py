"""All cells of a benchmark, and what a row says besides its samples."""

import datetime
import hashlib
import json
import math
from pathlib import Path

import pytest

import mlx_engine
from mlx_engine import backends
from mlx_engine.backends import Entry
from mlx_engine.bench import origin, roofline, run
from mlx_engine.bench.samples import Test as Cell
from mlx_engine.engine import open_source
from mlx_engine.errors import BackendUnavailableError, OptionError, SourceError
from mlx_engine.weights.conversion import Conversion

DATA = Path(__file__).parents[1] / "data"
MICRO = DATA / "qwen3-micro" / "model-q8_0.gguf"
pytestmark = pytest.mark.usefixtures("many_cores")
SHORT, ONE = Cell(4), Cell(0, 1)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The machine's own limits are not what is tested here."""
    monkeypatch.setattr(roofline, "SECONDS", 1e-4)


@pytest.fixture
def absent(monkeypatch):
    """A rung that no machine has."""
    monkeypatch.setitem(backends._ENTRIES, "absent", Entry("nowhere", pytest.fail, needs=lambda: "it needs the moon"))


@pytest.fixture
def loads(monkeypatch):
    """The names of the backends for which the model was loaded."""
    names = []

    def opened(path, backend, *args, **options):
        names.append(backend)
        return open_source(path, backend, *args, **options)

    monkeypatch.setattr(run, "open_source", opened)
    return names


def rows(names=("simd",), tests=(SHORT,), model=MICRO, **options):
    return list(run.rows(str(model), names, tests, repetitions=1, **options))


# ---- which rows there are ----


@pytest.mark.slow
def test_a_row_for_each_backend_and_test_in_the_order_asked_for():
    found = rows(["scalar", "simd"], [SHORT, ONE])
    assert [(row["backend"], row["test"]) for row in found] == [
        ("scalar", "pp4"),
        ("scalar", "tg1"),
        ("simd", "pp4"),
        ("simd", "tg1"),
    ]


def test_with_and_without_a_cache():
    assert [(row["kv"], row["test"]) for row in rows(tests=[SHORT, ONE], kv=(True, False))] == [
        (True, "pp4"),
        (True, "tg1"),
        (False, "pp4"),
        (False, "tg1"),
    ]


@pytest.mark.slow
def test_a_model_is_loaded_once_for_each_backend(loads):
    rows(["scalar", "simd"], [SHORT, ONE], kv=(True, False))
    assert loads == ["scalar", "simd"]


def test_rows_come_as_they_are_measured(loads):
    found = run.rows(str(MICRO), ["simd", "scalar"], [SHORT], repetitions=1)
    assert next(found)["backend"] == "simd"
    assert loads == ["simd"]


def test_a_row_of_auto_names_the_backend_that_computed():
    (row,) = rows(["auto"])
    assert row["backend"] == backends.auto()
    assert row["unavailable"] is None


def test_a_row_has_its_samples():
    (row,) = run.rows(str(MICRO), ["simd"], [Cell(4, 3)], repetitions=2)
    assert len(row["samples_ts"]) == len(row["samples_s"]) == len(row["passes_s"]) == 2
    assert [len(passes) for passes in row["passes_s"]] == [3, 3]
    assert row["load_s"] > 0
    assert row["device"] == "cpu"


# ---- what cannot run ----


@pytest.mark.usefixtures("absent")
def test_an_absent_rung_is_listed_with_its_reason_and_nothing_stands_in_for_it(loads):
    found = rows(["absent", "simd", "absent"], [SHORT, ONE])
    assert [row["backend"] for row in found] == ["absent"] * 2 + ["simd"] * 2 + ["absent"] * 2
    assert [row["unavailable"] for row in found] == ["it needs the moon"] * 2 + [None] * 2 + ["it needs the moon"] * 2
    assert [row["test"] for row in found] == ["pp4", "tg1"] * 3
    assert not any(key.endswith(("_ts", "_s")) for row in found[:2] + found[4:] for key in row)
    assert loads == ["simd"]


@pytest.mark.parametrize("names", [["quick"], ["simd", "quick"]])
def test_an_unknown_rung_is_refused_before_anything_is_loaded(names, loads, monkeypatch):
    monkeypatch.setattr(run, "open_model", lambda *args: pytest.fail("opened"))
    with pytest.raises(BackendUnavailableError, match="no backend has this name") as caught:
        rows(names, model="no such model")
    assert caught.value.name == "quick"
    assert loads == []


def test_a_model_that_does_not_exist_is_told():
    with pytest.raises(SourceError, match=r"nowhere\.gguf"):
        rows(model="nowhere.gguf")


def test_a_test_beyond_the_context_is_told():
    context = mlx_engine.load(MICRO, "simd").config.context_length
    with pytest.raises(OptionError, match=f"the model's context has {context:,}"):
        rows(tests=[Cell(context + 1)])


def test_a_test_beyond_the_context_is_told_before_any_other_is_measured(monkeypatch):
    monkeypatch.setattr(run, "measure", lambda *args, **kwargs: pytest.fail("measured"))
    with pytest.raises(OptionError):
        rows(tests=[SHORT, Cell(10**6)])


# ---- what a row says ----


def test_a_row_says_when_where_and_with_what(monkeypatch):
    monkeypatch.setattr(origin, "commit", lambda: "0123456789ab+")
    before = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
    (row,) = rows()
    assert row["schema"] == origin.SCHEMA == 1
    assert before <= datetime.datetime.fromisoformat(row["time"]) <= datetime.datetime.now(datetime.timezone.utc)
    assert row["commit"] == "0123456789ab+"
    assert row["machine"] == origin.machine()
    assert row["versions"] == origin.versions()


def test_a_row_says_which_model():
    checkpoint = mlx_engine.open_gguf(MICRO)
    (row,) = rows()
    assert row["model_name"] == checkpoint.metadata["general.name"]
    assert row["model_sha256"] == hashlib.sha256(MICRO.read_bytes()).hexdigest()
    assert row["model_n_params"] == sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
    # Most of the file is weights, and the weights are in the file.
    assert row["model_n_params"] < row["model_size"] < MICRO.stat().st_size


def test_the_size_is_that_of_the_stored_values():
    (half,), (whole,) = (rows(model=MICRO.with_name(f"model-{kind}.gguf")) for kind in ("f16", "f32"))
    assert half["model_n_params"] == whole["model_n_params"]
    assert whole["model_size"] == 4 * whole["model_n_params"]
    assert half["model_size"] < 0.55 * whole["model_size"]


def test_a_folder_is_measured_too():
    folder = DATA / "qwen3-wide"
    (row,) = rows(model=folder)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) == 2
    assert row["model_sha256"] == hashlib.sha256(b"".join(shard.read_bytes() for shard in shards)).hexdigest()
    assert row["model_name"] == "qwen3"


@pytest.mark.usefixtures("absent")
def test_a_row_of_an_absent_rung_says_the_same_about_machine_and_model():
    absent, present = rows(["absent", "simd"])
    same = ["schema", "time", "commit", "machine", "versions", "model_name", "model_size", "model_n_params"]
    assert [absent[key] for key in same] == [present[key] for key in same]
    assert absent["model_sha256"] == present["model_sha256"]


def test_a_row_says_which_options():
    (row,) = rows(quant=Conversion("q4_0"), threads=3, kv=(False,), jit=False)
    assert (row["quant"], row["kv"], row["jit"]) == ("q4_0", False, False)


@pytest.mark.parametrize(("name", "jit", "told"), [("simd", False, None), ("simd", True, None), ("parallel", False, 3)])
def test_threads_are_told_of_backends_that_have_them(name, jit, told):
    (row,) = rows([name], threads=3, jit=jit)
    assert row["threads"] == told


def test_a_row_says_what_a_token_needs_and_how_fast_it_was_there():
    (row,) = rows(tests=[Cell(0, 4)], jit=False)
    weights = row["weight_bytes"] / 4  # plain NumPy expands all of them
    assert row["weights"] == "F32"
    assert row["bytes_per_token"] > row["weight_bytes"]
    assert row["flops_per_token"] > 2 * weights
    assert row["gbs"] == pytest.approx(row["bytes_per_token"] * row["median_ts"] / 1e9)
    assert row["gflops"] == pytest.approx(row["flops_per_token"] * row["median_ts"] / 1e9)
    assert row["read_share"] == pytest.approx(row["gbs"] / row["read_gbs"])
    assert row["peak_share"] == pytest.approx(row["gflops"] / row["peak_gflops"])


def test_another_devices_limits_are_not_those_of_the_processor(monkeypatch):
    from mlx_engine.backends.numpy.simd import SimdBackend

    monkeypatch.setattr(SimdBackend, "device", "moon")
    (row,) = rows(jit=False)
    assert row["gbs"] > 0
    assert not {"read_gbs", "read_share", "peak_gflops", "peak_share"} & row.keys()


def test_components_are_there_if_asked_for_and_for_what_has_a_cache():
    (without,) = rows()
    assert "components" not in without
    uncached, cached = rows(kv=(False, True), profile=True)
    assert "components" not in uncached
    assert cached["components"]["ms"] > 0


@pytest.mark.parametrize("level", ["off", "debug"])
def test_a_row_says_whether_the_log_watched(level):
    mlx_engine.engine.configure_log(level)
    (row,) = rows(jit=False)
    assert row["watched"] == (level == "debug")


def test_the_options_reach_the_model(monkeypatch):
    seen = []

    def opened(path, backend, *, quant, threads, jit, **options):
        seen.append((backend, quant, threads, jit))
        return open_source(path, backend, quant, threads, jit=jit, **options)

    monkeypatch.setattr(run, "open_source", opened)
    rows(quant=Conversion("q4_0"), threads=3)
    rows(jit=False)
    assert seen == [("simd", "q4_0", 3, True), ("simd", "keep", None, False)]


def test_the_options_reach_the_cell(monkeypatch):
    seen = []
    measure = run.measure

    def spy(engine, test, *, kv, overlap, repetitions, budget, **rest):
        seen.append((engine.backend.name, test, kv, overlap, repetitions, budget))
        return measure(engine, test, kv=kv, overlap=overlap, repetitions=repetitions, budget=budget, **rest)

    monkeypatch.setattr(run, "measure", spy)
    rows(tests=[SHORT, ONE], kv=(False, True), budget=50.0, overlap=False)
    assert seen == [("simd", test, kv, False, 1, 50.0) for kv in (False, True) for test in (SHORT, ONE)]


def test_the_budget_reaches_the_cell():
    (row,) = rows(tests=[Cell(0, 50)], budget=0.0)
    assert row["estimated"] == "from 1 of 50 passes"


@pytest.mark.usefixtures("absent")
def test_rows_are_json():
    found = rows(["absent", "simd"], [SHORT, ONE])
    assert json.loads(json.dumps(found, allow_nan=False)) == found
