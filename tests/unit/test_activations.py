"""The type of activations: what is refused, what each type is made of, and where results name it."""

import json
import shlex
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from typer.testing import CliRunner

import mlx_engine
from mlx_engine.backends import ACTIVATIONS, EXACT, VARIABLE, activations_of, backend_names, create_backend
from mlx_engine.backends.mlx import weights
from mlx_engine.bench import roofline
from mlx_engine.bench.run import engines
from mlx_engine.bench.sweep import Plan, sweep
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.commands import app
from mlx_engine.distributed.group import Group
from mlx_engine.distributed.pipeline import Pipeline, follow, stages_of
from mlx_engine.distributed.shard import PipelineShard
from mlx_engine.engine import open_source
from mlx_engine.errors import DistributedError, OptionError
from mlx_engine.quant import BY_NAME
from mlx_engine.quant.weight import Weight
from mlx_engine.serve.reply_types import Activations
from mlx_engine.weights.conversion import Conversion
from mlx_engine.weights.model import plan_model
from tests.local_ranks import run_ranks
from tests.serve.served import served
from tests.unit.test_distributed_pipeline import logits_of

MICRO = Path(__file__).parents[1] / "data" / "qwen3-micro" / "model-q8_0.gguf"
FLOATS = MICRO.parents[1] / "llama-micro" / "hf"
IDS = [5, 9, 300, 17, 2, 44, 8]
POSSIBLE = {"scalar": ("f32",), "simd": ("f32", "i16"), "parallel": ("f32", "i16")}
ON_MLX = ("f32", "f16", "bf16")
# A backend of each kind with rounded activations.
BOTH = pytest.mark.parametrize(("backend", "activations"), [("mlx", "bf16"), ("simd", "i16")])


def cli(command: str, *rest: str) -> Any:
    result = CliRunner().invoke(app, [*shlex.split(command), *rest])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


# ---- what is possible ----


def test_what_each_backend_has():
    found = {name: activations_of(name) for name in backend_names()}
    assert found == POSSIBLE | dict.fromkeys(("mlx", "metal", "cuda"), ON_MLX)
    assert activations_of("auto") in found.values()


@pytest.mark.parametrize(
    ("backend", "activations", "message"),
    [
        ("scalar", "i16", "activations i16 needs the backend simd or parallel; scalar has f32"),
        ("mlx", "i16", "activations i16 needs the backend simd or parallel; mlx has f32, f16 or bf16"),
        ("simd", "f16", "activations f16 needs the backend mlx, metal or cuda; simd has f32 or i16"),
        ("parallel", "bf16", "activations bf16 needs the backend mlx, metal or cuda; parallel has f32 or i16"),
        ("mlx", "i8", "activations must be f32, i16, f16 or bf16, not 'i8'"),
    ],
)
def test_what_is_not_possible_is_one_sentence_that_names_what_is(backend: str, activations: str, message: str):
    for make in (
        create_backend,
        lambda name, activations: mlx_engine.load("nowhere.gguf", name, activations=activations),
    ):
        with pytest.raises(OptionError) as error:
            make(backend, activations=activations)
        assert str(error.value) == message
    result = cli(f"generate -m nowhere.gguf -b {backend} --activations {activations} hello")
    assert (result.exit_code, result.stderr) == (2, f"error: --{message}\n")


def test_numpy_has_no_fixed_point():
    with pytest.raises(OptionError, match=r"activations i16 needs compiled kernels; --no-jit .* which only has f32"):
        create_backend("simd", jit=False, activations="i16")


def test_metal_does_not_have_fixed_point_either():
    with mock.patch.dict("os.environ", {VARIABLE: "emulate"}), pytest.raises(OptionError, match="metal has f32, f16"):
        create_backend("metal", activations="i16")


def test_metal_with_rounded_activations_multiplies_a_few_rows_as_mlx():
    with mock.patch.dict("os.environ", {VARIABLE: "emulate"}):
        found = mlx_engine.load(MICRO, "metal", activations="bf16")
    assert (found.backend.name, found.backend.activations) == ("metal", "bf16")
    expected = mlx_engine.load(MICRO, "mlx", activations="bf16").logits(IDS)
    assert mx.array_equal(found.logits(IDS), expected).item()


def test_every_command_that_loads_a_model_has_the_option():
    for command in ("generate", "chat", "serve", "bench", "report", "perplexity", "plan"):
        assert "--activations" in cli(f"{command} --help-all").stdout, command


# ---- weights of float16 and bfloat16 ----


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_K"])
@pytest.mark.parametrize("activations", ["f16", "bf16"])
def test_quants_stay_and_scales_are_rounded(name: str, activations: str):
    values = np.random.default_rng(0).standard_normal((8, 256)).astype(np.float32)
    weight = Weight.pack("w", values, BY_NAME[name])
    be: Any = create_backend("mlx", activations=activations)
    matrix = be.prepare(weight)
    assert {matrix.scales.dtype, matrix.biases.dtype} == {{"f16": mx.float16, "bf16": mx.bfloat16}[activations]}
    rows, stored = np.asarray(matrix.rows(mx.arange(8))), weight.dequantize()
    error = np.linalg.norm(rows - stored) / np.linalg.norm(stored)
    is_exact = activations == "f16" and name != "Q4_K"  # a scale in the file is float16 itself
    assert error == 0 if is_exact else 0 < error < 2 * {"f16": 2.0**-11, "bf16": 2.0**-8}[activations]
    assert matrix.nbytes < values.nbytes / 2


@pytest.mark.parametrize(("activations", "most"), [("f16", 4e-3), ("bf16", 3e-2)])
def test_on_a_gpu_the_product_is_that_of_mlx_in_the_type(
    activations: str, most: float, monkeypatch: pytest.MonkeyPatch
):
    """On the CPU, MLX's own product sums in the type, with a larger error."""
    rng = np.random.default_rng(0)
    weight = Weight.pack("w", rng.standard_normal((64, 512)).astype(np.float32), BY_NAME["Q4_0"])
    be: Any = create_backend("mlx", activations=activations)
    matrix, x = be.prepare(weight), be.as_activations(rng.standard_normal((3, 512)).astype(np.float32))
    here = be.host(matrix.multiply(x))
    monkeypatch.setattr(weights, "kind", lambda: "metal")
    assert weights.summed_in_float32(x, matrix.scales, matrix.biases)[0] is x
    there = be.host(matrix.multiply(x))
    assert 0 < np.linalg.norm(there - here) / np.linalg.norm(here) < most


def test_a_matrix_whose_biases_are_too_large_for_float16_is_dequantised():
    weight = Weight.pack("w", np.full((1, 32), 6.546e4, np.float32), BY_NAME["Q8_0"])
    be: Any = create_backend("mlx", activations="f16")
    assert be.host(be.prepare(weight)).tolist() == weight.dequantize().astype(np.float16).tolist()
    bfloat16: Any = create_backend("mlx", activations="bf16").prepare(weight)
    assert isinstance(bfloat16, weights.GroupMatrix)


# ---- several ranks ----


@BOTH
def test_ranks_with_other_activations_are_refused(backend: str, activations: str):
    def run(group: Group) -> None:
        ours = ("f32", activations)[group.rank]
        open_source(MICRO, backend, activations=ours, shard=PipelineShard(group, (1, 1), None))

    with pytest.raises(
        DistributedError, match=f"rank 1: differs from rank 0 in activations: '{activations}', and rank 0 has 'f32'"
    ):
        run_ranks(2, run)


@BOTH
def test_a_pipeline_has_the_bits_of_one_process(backend: str, activations: str):
    planned = plan_model(open_checkpoint(FLOATS), Conversion("q8_0", 0))

    def built(stage: Any = None) -> Any:
        return planned._replace(stage=stage).build(create_backend(backend, activations=activations)).model

    def run(group: Group) -> Any:
        model = built(stages_of([2, 1], 2, planned.config)[group.rank])
        if group.rank:
            return follow(model, group)
        pipeline = Pipeline(model, group)
        found, nbytes = logits_of(pipeline), pipeline.new_pool(64).nbytes
        pipeline.end()
        return found, nbytes

    whole = built()
    found, nbytes = run_ranks(2, run)[0]
    assert np.array_equal(found, logits_of(whole))
    assert nbytes == whole.new_pool(64).nbytes


# ---- where the type is named ----


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own limits are not what is tested here."""
    monkeypatch.setattr(roofline, "SECONDS", 1e-4)


@BOTH
def test_generate_names_rounded_activations_and_no_others(backend: str, activations: str):
    given = f"generate -m builtin -b {backend} -n 1"
    said = [cli(f"{given} --activations {name} -v Once").stderr for name in (activations, "f32")]
    assert f"backend {backend} (cpu), activations {activations}, ended by length" in said[0]
    assert f"on {backend} (cpu), activations {activations}" in said[0]
    assert "activations" not in said[1]
    found = json.loads(cli(f"{given} --activations {activations} --json Once").stdout)
    expected = {"requested": backend, "used": backend, "device": "cpu", "activations": activations}
    expected["kv_type"] = activations if backend == "mlx" else "f32"
    assert found["backend"] == expected


def test_generate_names_the_type_of_keys_and_values():
    assert "x bf16 x 2)" in cli("generate -m builtin -b mlx -n 1 --activations bf16 -v Once").stderr


@pytest.mark.usefixtures("quick")
@BOTH
def test_rows_of_bench_have_the_type_and_those_without_it_a_reason(backend: str, activations: str):
    without, having = ("simd", "mlx, metal or cuda") if backend == "mlx" else ("mlx", "simd or parallel")
    found = list(engines(str(MICRO), [backend, without], lambda opened: None, activations=activations))
    assert [row["activations"] for row, _, _ in found] == [activations] * 2
    assert str(found[1][1]).startswith(f"activations {activations} needs the backend {having}; {without} has f32")
    bench: Any = found[0][2]
    assert bench.about()["weights"] == "Q8_0"


@pytest.mark.usefixtures("quick")
def test_keys_and_values_of_bench_have_half_the_bytes():
    rounded, exact = (
        next(engines(str(MICRO), ["mlx"], lambda opened: None, activations=name))[2] for name in ("bf16", "f32")
    )
    assert rounded is not None
    assert exact is not None
    assert 2 * rounded.sizes.cached == exact.sizes.cached
    assert rounded.sizes.nbytes < exact.sizes.nbytes


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@BOTH
def test_a_sweep_has_the_rungs_with_the_type(backend: str, activations: str):
    plan = Plan([4], 0, repetitions=1, passes=0, backends=["mlx", "simd"], activations=activations)
    rows = list(sweep(str(MICRO), plan))
    assert {row["activations"] for row in rows} == {activations}
    ran = {row["backend"]: row["weights"] for row in rows if not row["unavailable"]}
    assert ran.keys() == {backend}
    assert all(f"activations {EXACT}" in row["unavailable"] or "needs the backend" in row["unavailable"]
               for row in rows if row["backend"] not in ran)  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@BOTH
def test_a_report_names_the_type_and_the_command_that_repeats_it(backend: str, activations: str, tmp_path: Path):
    sizes = f"-m {MICRO} -p 4 -n 1 -r 1 --out {tmp_path}"
    page = cli(f"report {sizes} -b {backend} --activations {activations}").stdout
    found = json.loads((tmp_path / "report.json").read_text())
    assert f"backend {backend} on cpu, activations {activations}; weights" in page
    assert (found["backend"]["activations"], found["settings"]["activations"]) == (activations, activations)
    assert f"--activations {activations}" in found["command"]


@pytest.mark.some(1)
@BOTH
def test_perplexity_compares_the_type_with_float32(backend: str, activations: str, tmp_path: Path):
    file, saved = tmp_path / "text.txt", tmp_path / "reference.bin"
    file.write_text("Once upon a time there was a little fox. He was very happy and ran to the river.")
    given = f"perplexity {file} -b {backend} --activations {activations} --context 16"
    found = json.loads(cli(f"{given} --reference builtin --json").stdout)
    assert found["activations"] == activations
    least, most = {"bf16": (2.0**-9, 2.0**-5), "i16": (1e-6, 5e-4)}[activations]
    assert least < found["reference"]["logits_error"] < most
    assert 0 < found["reference"]["kl"]["mean"] < most
    page = cli(f"{given} --reference builtin").stdout
    assert "activations" in page
    assert "error of the logits" in page
    cli(f"perplexity {file} -b {backend} --context 16 --save {saved}")
    assert json.loads(cli(f"{given} --reference {saved} --json").stdout)["reference"]["logits_error"] is None


@BOTH
def test_a_server_names_the_type(backend: str, activations: str):
    with served(engine=mlx_engine.load(MICRO, backend, activations=activations)) as server:
        reply = server.chat("hello", max_tokens=2).json()
        with server.client() as client:
            (card,) = client.get("/v1/models").json()["data"]
    assert reply["mlx_engine"]["activations"] == card["activations"] == activations
    assert reply["system_fingerprint"] == f"mlx_engine-{mlx_engine.__version__}-{backend}-{activations}"


@BOTH
def test_a_plan_takes_the_type(backend: str, activations: str):
    given = f"plan -m {MICRO} -b {backend} --activations {activations} --bandwidth 9GB/s --compute 9GFLOP/s"
    assert json.loads(cli(f"{given} --json").stdout)["activations"] == activations
    assert f"on {backend}, activations {activations}" in cli(given).stdout


def test_types_are_spelled_in_one_place():
    assert ACTIVATIONS == ("f32", "i16", "f16", "bf16") == get_args(Activations)
