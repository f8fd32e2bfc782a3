"""What `mlx` promises beside its numbers: exact weights, no evaluation that nobody asked for, one stream for all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlx_engine
from mlx_engine.backends.mlx import device as mlx_device
from mlx_engine.backends.mlx.backend import MlxBackend
from mlx_engine.backends.mlx.weights import GroupMatrix
from mlx_engine.backends.numpy.simd import SimdBackend
from mlx_engine.backends.observed import profiled
from mlx_engine.backends.parameters import Linear, Rope
from mlx_engine.backends.sampling import Draw
from mlx_engine.cache import SequenceInput
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.loop.forward import forward
from mlx_engine.loop.metrics import Metrics
from mlx_engine.loop.sampler import Sampler
from mlx_engine.observe.profiler import Profiler
from mlx_engine.options import Sampling
from mlx_engine.quant import BY_NAME
from mlx_engine.quant.weight import Weight
from mlx_engine.weights.model import load_model
from tests.decoding import decode
from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]
MICRO = ROOT / "tests" / "data" / "qwen3-micro" / "model-q8_0.gguf"
PROMPT = [5, 9, 300, 17, 2]
EPS = float(np.finfo(np.float32).eps)


@pytest.fixture(scope="module")
def be() -> MlxBackend:
    return MlxBackend()


@pytest.fixture(scope="module")
def engine() -> mlx_engine.Engine:
    return mlx_engine.load(MICRO, "mlx")


def q8_0(scales: np.ndarray, codes: np.ndarray) -> Weight:
    """A matrix of these scales (N, K / 32) and codes (N, K)."""
    n, k = codes.shape
    blocks = np.empty((n, k // 32), dtype=[("d", "<f2"), ("qs", "i1", (32,))])
    blocks["d"], blocks["qs"] = scales, codes.reshape(n, k // 32, 32)
    raw = blocks.view(np.uint8).reshape(-1)
    raw.flags.writeable = False  # as a mapped file is
    return Weight("w", (n, k), BY_NAME["Q8_0"], raw)


# ---- weights ----


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**31))
def test_every_weight_keeps_its_value(be: MlxBackend, n: int, blocks: int, seed: int):
    """Whatever the bytes say: subnormal scales, negative ones, and those whose bias would be no float16."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**16, (n, blocks)).astype(np.uint16)
    bits[(bits & 0x7C00) == 0x7C00] = 0x7BFF  # neither infinite nor NaN: the largest float16
    weight = q8_0(bits.view(np.float16), rng.integers(-128, 128, (n, 32 * blocks)))
    found = be.prepare(weight)
    assert isinstance(found, GroupMatrix)
    assert found.shape == weight.shape
    np.testing.assert_array_equal(be.host(found.rows(mx.arange(n))), weight.dequantize())


@pytest.mark.parametrize("scale", [np.inf, -np.inf, np.nan])
def test_scales_that_are_no_numbers_are_expanded_as_anywhere_else(be: MlxBackend, scale: float):
    scales = np.ones((3, 2), dtype=np.float16)
    scales[1, 1] = scale
    weight = q8_0(scales, np.arange(-96, 96).reshape(3, 64))
    found = be.prepare(weight)
    assert isinstance(found, mx.array)
    np.testing.assert_array_equal(be.host(found), weight.dequantize())


@pytest.mark.parametrize("mean", [0.0, 2.0])
@pytest.mark.parametrize(("t", "n", "k"), [(1, 7, 32), (1, 33, 1024), (3, 5, 96), (9, 40, 160), (20, 64, 256)])
def test_products_are_right_to_rounding(be: MlxBackend, t: int, n: int, k: int, mean: float):
    rng = np.random.default_rng(n)
    weight = q8_0(rng.uniform(1e-3, 2, (n, k // 32)), rng.integers(-128, 128, (n, k)))
    x = rng.normal(mean, 1, (t, k)).astype(np.float32)
    found = be.host(be.linear(be.array(x), Linear("w", be.prepare(weight))))
    w = weight.dequantize().astype(np.float64)
    error = np.abs(found - x.astype(np.float64) @ w.T) / (np.abs(x) @ np.abs(w).T)
    assert error.max() <= 4 * EPS


def test_weights_are_held_once_and_a_tied_head_is_the_table(engine: mlx_engine.Engine):
    table = engine.model.token_embd
    assert engine.model.output.weight is table
    assert table.nbytes == table.shape[0] * table.shape[1] * 40 // 32
    assert all(array.dtype == mx.float32 for array in (table.scales, table.biases))


def test_other_types_are_expanded(be: MlxBackend):
    values = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1"):
        weight = Weight.pack("w", values, BY_NAME[name])
        found = be.prepare(weight)
        assert found.dtype == mx.float32
        np.testing.assert_array_equal(be.host(found), weight.dequantize())


@pytest.mark.parametrize("ids", [[-1], [5], [0, 4, 5]])
@pytest.mark.parametrize("type_name", ["F32", "Q8_0"])
def test_rows_that_a_table_does_not_have_are_refused(be: MlxBackend, type_name: str, ids: list[int]):
    table = be.prepare(Weight.pack("w", np.ones((5, 32)), BY_NAME[type_name]))
    with pytest.raises(IndexError, match="token ids must be from 0 to 4, not"):
        be.embed(table, ids)


@pytest.mark.parametrize("type_name", ["F32", "Q8_0"])
def test_rows_may_be_named_by_choices_and_by_any_sequence(be: MlxBackend, type_name: str):
    values = np.random.default_rng(1).standard_normal((9, 32))
    table = be.prepare(Weight.pack("w", values, BY_NAME[type_name]))
    want = be.host(be.embed(table, [3, 0, 8]))
    chosen = be.argmax(be.array(np.eye(9)[[8]]))
    for ids in ([3, 0, chosen], [3, mx.array(0), chosen], np.array([3, 0, 8]), (3, 0, 8)):
        np.testing.assert_array_equal(be.host(be.embed(table, ids)), want)


# ---- rotations and masks ----


def test_tables_of_rotations_grow_with_the_positions(be: MlxBackend):
    rope = Rope.plain(8, 1e4)
    x = np.random.default_rng(2).standard_normal((3, 2, 8)).astype(np.float32)
    for positions in ([0, 1, 2], [508, 509, 510], [509, 510, 511], [510, 511, 512], [5000, 7, 0], [1, 2, 3]):
        angles = np.array(positions)[:, None, None] * np.array(rope.frequencies)
        turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)
        found = be.host(be.rope(be.array(x), rope, positions))
        np.testing.assert_allclose(found, np.concatenate([turned.real, turned.imag], -1), rtol=1e-5, atol=1e-6)
    assert len(be.rotation(rope, 1)[0]) == 8192


def test_two_rotations_have_a_table_each(be: MlxBackend):
    one, other = Rope.plain(8, 1e4), Rope.plain(8, 1e2)
    tables = [be.rotation(rope, 2)[0] for rope in (one, other, one)]
    assert tables[0] is tables[2]
    assert not np.array_equal(be.host(tables[0]), be.host(tables[1]))


# ---- promises ----


def test_nothing_is_evaluated_from_embedding_to_choice(engine: mlx_engine.Engine):
    """A function that is traced has no values: whoever asks for one fails."""
    be, model = MlxBackend(), engine.model
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1}
    penalized = Sampling(temperature=0.8, top_k=5, top_p=0.9, min_p=0.1, logit_bias={3: 1.5}, **penalties)

    def step(token: mx.array) -> list[mx.array]:
        with be.session():
            pool = model.new_pool(600, n_sequences=2)
            kv, other = pool.sequence(), pool.sequence()
            logits = forward(model, SequenceInput([token], kv))
            chosen = be.argmax(logits)
            logits = forward(model, SequenceInput([chosen] * 280, kv), SequenceInput([chosen] * 70, other))
            logits = be.take(logits, (1,))
            return [be.argmax(logits), be.sample(logits, Draw(penalized, [1, 2, token], 0.5, 1))]

    seen: list[Any] = []
    mx.export_function(lambda what: seen.append(what), step, mx.array(5, dtype=mx.uint32))
    assert seen


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.5}, {"top_k": 3, "min_p": 0.5}, {"top_p": 0.3}], ids=str)
def test_of_equal_tokens_the_lower_ids_are_kept(be: MlxBackend, options: dict[str, float]):
    logits, sampling = np.array([[1, 2, 2, 0, 2, 2, -1]], dtype=np.float32), Sampling(temperature=1.0, **options)
    for u in np.linspace(0, 1, 30, endpoint=False):
        draw = Draw(sampling, [], float(u))
        assert be.token_id(be.sample(be.array(logits), draw)) == SimdBackend().sample(logits, draw)


def test_a_profiled_twin_waits_for_every_operation():
    """What has been computed costs nothing to wait for: the spans have all of it."""
    be, profiler = MlxBackend(), Profiler()
    waited: list[Any] = []
    wait = be.wait
    be.wait = lambda x: (waited.append(x), wait(x))[1]  # type: ignore[method-assign, func-returns-value]
    model = load_model(open_checkpoint(MICRO), profiled(be, profiler))
    pick = Sampler(model.backend, Sampling(temperature=1.0, seed=1), PROMPT)
    ids = decode(model, PROMPT, model.new_kv(9), pick, Metrics())
    assert [next(ids) for _ in range(3)]
    assert len(waited) >= sum(op.calls for op in profiler.ops.values())
    assert profiler.ops["attention"].calls == 3 * model.config.n_layers
    assert profiler.ops["sample"].calls == 3
    assert profiler.ops["linear"].nbytes > profiler.ops["rms_norm"].nbytes > 0


# ---- threads ----


def in_a_thread(work: Callable[[], Any]) -> Any:
    """What `work` returns in a thread that has ended before anybody sees it."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


OPTIONS = {"max_tokens": 12, "temperature": 0.8, "seed": 7, "repetition_penalty": 1.1, "ignore_eos": True}


def test_an_engine_may_be_made_in_one_thread_and_used_in_others(engine: mlx_engine.Engine):
    want = engine.generate(PROMPT, **OPTIONS).token_ids
    logits = np.asarray(engine.logits(PROMPT))
    made = in_a_thread(lambda: mlx_engine.load(MICRO, "mlx"))
    for _ in range(2):
        assert in_a_thread(lambda: made.generate(PROMPT, **OPTIONS).token_ids) == want
    assert made.generate(PROMPT, **OPTIONS).token_ids == want
    np.testing.assert_array_equal(np.asarray(in_a_thread(lambda: made.logits(PROMPT))), logits)


def test_a_stream_may_go_on_in_another_thread_for_every_piece(engine: mlx_engine.Engine):
    """Each piece leaves a pass under way that was built in a thread which has ended since."""
    want = engine.generate(PROMPT, **OPTIONS)
    stream = in_a_thread(lambda: engine.stream(PROMPT, **OPTIONS))
    while in_a_thread(lambda: next(stream, None)) is not None:
        pass
    assert stream.generation.token_ids == want.token_ids
    assert stream.generation.text == want.text


def test_what_was_left_unevaluated_may_be_evaluated_in_another_thread(engine: mlx_engine.Engine):
    be, model = engine.backend, engine.model

    def build(ids: list[int]) -> Any:
        with be.session():
            return forward(model, SequenceInput(ids, kv))

    kv = model.new_kv(20)
    in_a_thread(lambda: build(PROMPT))
    logits = in_a_thread(lambda: build([7, 8]))
    with be.session():
        found = be.host(logits)
    want = np.asarray(engine.logits([*PROMPT, 7, 8]))[-1:]
    assert np.linalg.norm(found - want) <= 1e-6 * np.linalg.norm(want)


@pytest.mark.slow
def test_threads_at_one_time_get_what_each_would_get_alone(engine: mlx_engine.Engine):
    prompts = [PROMPT, PROMPT[:2], [8, 8, 1], [400]]
    want = [engine.generate(prompt, **OPTIONS).token_ids for prompt in prompts]
    found: dict[int, list[int]] = {}

    def run(i: int) -> None:
        found[i] = engine.generate(prompts[i], **OPTIONS).token_ids

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(len(prompts))] == want


# ---- the device ----


def test_the_device_is_what_mlx_computes_on(be: MlxBackend):
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    assert (be.device != "cpu") == on_gpu
    assert mlx_engine.create_backend("mlx").name == "mlx"


@pytest.mark.parametrize(
    ("metal", "name", "device"),
    [(True, "Apple M3 Max", "metal (Apple M3 Max)"), (False, "NVIDIA H100", "cuda (NVIDIA H100)"), (True, "", "metal")],
)
def test_a_gpu_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch, metal: bool, name: str, device: str):
    monkeypatch.setattr(mlx_device.mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mlx_device.mx.metal, "is_available", lambda: metal)
    monkeypatch.setattr(mlx_device.mx, "device_info", lambda: {"device_name": name})
    assert mlx_device.description() == device


@pytest.mark.parametrize("kind", ["metal", "cuda", "cpu"])
def test_weights_are_wired_on_metal_alone(monkeypatch: pytest.MonkeyPatch, kind: str):
    limits: list[int] = []
    monkeypatch.setattr(mlx_device, "kind", lambda: kind)
    monkeypatch.setattr(mlx_device.mx, "device_info", lambda: {"max_recommended_working_set_size": 12345})
    monkeypatch.setattr(mlx_device.mx, "set_wired_limit", limits.append)
    mlx_device.keep_weights_resident()
    assert limits == ([12345] if kind == "metal" else [])


VARIABLES = ("MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER", "MLX_ENABLE_TF32")
IMPORT = (
    "import os, sys; sys.platform = sys.argv[1]; import mlx_engine; print(*map(os.environ.get, sys.argv[2:]), sep=',');"
    "sys.exit('mlx.core' in sys.modules)"
)


@pytest.mark.parametrize(
    ("platform", "mine", "told"),
    [
        ("darwin", {}, "1000,400,0"),
        ("darwin", {"MLX_MAX_OPS_PER_BUFFER": "7", "MLX_ENABLE_TF32": "1"}, "7,400,1"),
        ("linux", {}, "None,None,0"),
    ],
)
def test_what_mlx_reads_when_it_is_imported(platform: str, mine: dict[str, str], told: str):
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, "-c", IMPORT, platform, *VARIABLES]
    run = subprocess.run(command, cwd=ROOT, env=clean | mine, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == told


# ---- the end of a process ----

PROCESS = """
import signal, sys
import mlx_engine

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
path, how = sys.argv[1:]
engine = mlx_engine.load(path, "mlx")
stream = engine.stream([1, 2, 3], 200, ignore_eos=True)
next(stream)
print("ready", flush=True)
if how == "exception":
    raise RuntimeError("on purpose")
while how == "interrupt":
    engine.generate([1, 2, 3], max_tokens=50, ignore_eos=True)
"""


@pytest.mark.slow
def test_a_process_ends_at_once_and_quietly_with_a_pass_under_way():
    ways = {"end": 0, "exception": 1, "interrupt": -signal.SIGINT}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", PROCESS, str(MICRO)]
    running = {how: subprocess.Popen([*command, how], cwd=ROOT, **pipes) for how in ways}
    try:
        assert running["interrupt"].stdout.readline() == "ready\n"
        running["interrupt"].send_signal(signal.SIGINT)
        said = {how: process.communicate(timeout=PATIENCE)[1] for how, process in running.items()}
    finally:
        for process in running.values():
            process.kill()
    assert {how: process.returncode for how, process in running.items()} == ways
    assert said["end"] == ""
    assert said["exception"].endswith("\nRuntimeError: on purpose\n")
    assert said["interrupt"].endswith("\nKeyboardInterrupt\n")
