"""The type of activations: what is refused, what each type is made of, and where results name it."""

import json
import shlex
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from typer.testing import CliRunner

import mlx_engine
from mlx_engine.backends import ACTIVATIONS, VARIABLE, activations_of, backend_names, create_backend, refused
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
NEEDS_KERNELS = pytest.mark.skipif(refused("simd", "i16") is not None, reason="no kernels of i16 in the tree")


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
        pytest.param(
            "scalar",
            "i16",
            "activations i16 needs the backend simd or parallel; scalar has f32",
            marks=NEEDS_KERNELS,
        ),
        pytest.param(
            "mlx",
            "i16",
            "activations i16 needs the backend simd or parallel; mlx has f32, f16 or bf16",
            marks=NEEDS_KERNELS,
        ),
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


@NEEDS_KERNELS
def test_numpy_has_no_fixed_point():
    with pytest.raises(OptionError, match=r"activations i16 needs compiled kernels, and --no-jit .* NumPy has f32"):
        create_backend("simd", jit=False, activations="i16")


@NEEDS_KERNELS
def test_metal_does_not_have_fixed_point_either():
    with mock.patch.dict("os.environ", {VARIABLE: "emulate"}), pytest.raises(OptionError, match="metal has f32, f16"):
        create_backend("metal", activations="i16")


def test_metal_with_rounded_activations_is_mlx_by_another_name():
    """The kernels of `metal` read float32."""
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


def test_ranks_with_other_activations_are_refused():
    def run(group: Group) -> None:
        activations = ("f32", "bf16")[group.rank]
        open_source(MICRO, "mlx", activations=activations, shard=PipelineShard(group, (1, 1), None))

    with pytest.raises(DistributedError, match="rank 1: differs from rank 0 in activations, 'bf16' and 'f32'"):
        run_ranks(2, run)


def test_a_pipeline_has_the_bits_of_one_process():
    planned = plan_model(open_checkpoint(FLOATS), Conversion())

    def built(stage: Any = None) -> Any:
        return planned._replace(stage=stage).build(create_backend("mlx", activations="bf16")).model

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


def test_generate_names_rounded_activations_and_no_others():
    said = [cli(f"generate -m builtin -b mlx -n 1 --activations {name} -v Once").stderr for name in ("bf16", "f32")]
    assert "backend mlx (cpu), activations bf16, ended by length" in said[0]
    assert "on mlx (cpu), activations bf16\n" in said[0]
    assert "x bf16 x 2)" in said[0]
    assert "activations" not in said[1]
    found = json.loads(cli("generate -m builtin -b mlx -n 1 --activations f16 --json Once").stdout)
    assert found["backend"] == {"requested": "mlx", "used": "mlx", "device": "cpu", "activations": "f16"}


@pytest.mark.usefixtures("quick")
def test_rows_of_bench_have_the_type_and_those_without_it_a_reason():
    found = list(engines(str(MICRO), ["mlx", "simd"], lambda opened: None, activations="bf16"))
    assert [row["activations"] for row, _, _ in found] == ["bf16", "bf16"]
    assert found[1][1] == "activations bf16 needs the backend mlx, metal or cuda; simd has f32 or i16"
    bench: Any = found[0][2]
    assert bench.about()["weights"] == "Q8_0"
    exact: Any = next(engines(str(MICRO), ["mlx"], lambda opened: None))[2]
    assert 2 * bench.sizes.cached == exact.sizes.cached
    assert bench.sizes.nbytes < exact.sizes.nbytes


@pytest.mark.usefixtures("quick")
def test_a_sweep_has_the_rungs_with_the_type():
    plan = Plan([4], 0, repetitions=1, passes=0, backends=["mlx", "simd"], activations="bf16")
    rows = list(sweep(str(MICRO), plan))
    assert {row["activations"] for row in rows} == {"bf16"}
    assert {row["weights"] for row in rows if not row["unavailable"]} == {"BF16", "Q8_0"}
    assert {row["unavailable"] for row in rows if row["backend"] == "simd"} == {
        "activations bf16 needs the backend mlx, metal or cuda; simd has f32 or i16"
    }


@pytest.mark.usefixtures("quick")
def test_a_report_names_the_type_and_the_command_that_repeats_it(tmp_path: Path):
    sizes = f"-m {MICRO} -p 4 -n 1 -r 1 --out {tmp_path}"
    page = cli(f"report {sizes} -b mlx --activations bf16").stdout
    found = json.loads((tmp_path / "report.json").read_text())
    assert "backend mlx on cpu, activations bf16; weights" in page
    assert (found["backend"]["activations"], found["settings"]["activations"]) == ("bf16", "bf16")
    assert "--activations bf16" in found["command"]


def test_perplexity_compares_the_type_with_float32(tmp_path: Path):
    file = tmp_path / "text.txt"
    file.write_text("Once upon a time there was a little fox. He was very happy and ran to the river.")
    given = f"perplexity {file} -b mlx --activations bf16 --context 16 --reference builtin"
    found = json.loads(cli(f"{given} --json").stdout)
    assert found["activations"] == "bf16"
    assert 0 < found["reference"]["kl"]["mean"] < 1e-2
    assert 2.0**-9 < found["reference"]["logits_error"] < 2.0**-5
    page = cli(given).stdout
    assert "activations" in page
    assert "error of the logits" in page
    saved = tmp_path / "reference.bin"
    cli(f"perplexity {file} -b mlx --context 16 --save {saved}")
    of_file = json.loads(cli(f"perplexity {file} -b mlx --context 16 --reference {saved} --json").stdout)
    assert of_file["reference"]["logits_error"] is None


def test_a_server_names_the_type():
    with served(engine=mlx_engine.load(MICRO, "mlx", activations="bf16")) as server:
        reply = server.chat("hello", max_tokens=2).json()
        with server.client() as client:
            (card,) = client.get("/v1/models").json()["data"]
    assert reply["mlx_engine"]["activations"] == card["activations"] == "bf16"
    assert reply["system_fingerprint"] == f"mlx_engine-{mlx_engine.__version__}-mlx-bf16"


def test_types_are_spelled_in_one_place():
    assert ACTIVATIONS == ("f32", "i16", "f16", "bf16")
