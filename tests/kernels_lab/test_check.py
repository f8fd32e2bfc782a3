"""`check`: right kernels pass, wrong ones are caught, and the words say where to look."""

import re

import mlx.core as mx
import numpy as np
import pytest

import kernels
from kernels import Experiment
from kernels.lab.check import EPSILON, compare
from kernels.launch import ExecutorUnavailableError, unavailable
from kernels.metal.twins import Expected
from tests.kernels_lab.toys import PRODUCT, SCALE, changed, rewritten


def check(experiment, sizes, **options):
    return kernels.check(experiment, sizes, executor="emulator", **options)


def test_a_right_kernel_passes_over_ragged_shapes_types_orders_and_builds():
    told = []
    verdict = check(SCALE, None, seeds=(0, 1), progress=lambda done, total: told.append((done, total)))
    n = 2 * len(SCALE.ragged())
    assert verdict
    assert (verdict.shapes, verdict.runs, verdict.executor) == (n, n * (2 * 2 + 1), "emulator")
    assert told == [(i + 1, n) for i in range(n)]
    assert 0 < verdict.worst < 1
    assert str(verdict).startswith(f"scale (emulator): {n} shapes, {5 * n} runs, all right; worst error 0.")
    assert 0 < verdict.compile_seconds <= verdict.seconds


def test_sizes_can_be_combined():
    assert check(PRODUCT, {"N": [1, 5], "K": [32, 64, 96]}, seeds=[0], builds=["spaces"]).runs == 6


def test_out_of_bounds_names_the_smallest_shape_and_the_line():
    verdict = check(rewritten(SCALE, "if (i < N) ", ""), {"N": [64, 40, 33]}, dtypes=["float32"])
    assert not verdict
    assert [failure.shape for failure in verdict.failures] == ["N=33 T=float32", "N=40 T=float32"]
    text = str(verdict)
    assert "smallest: N=33 T=float32" in text
    assert "input 'x' (132 bytes)" in text
    assert "also wrong: N=40 T=float32" in text
    assert "again: kernels.check(scale, [{'N': 33}], dtypes=[\"float32\"], seeds=[0])" in text


def test_a_wrong_number_is_shown_with_what_it_should_be():
    verdict = check(
        rewritten(SCALE, "* a[0]", "* (i == 37u ? 2.0f : a[0])"), [{"N": 36}, {"N": 50}], dtypes=["float32"]
    )
    (failure,) = verdict.failures
    assert re.match(
        r"y\[37\]: expected -?[\d.]+, found -?[\d.]+, [\d.e+]+ times the error that is allowed\n", failure.text
    )
    assert "1 of 50 numbers of y are wrong" in failure.text


def test_what_is_never_written_is_said_so():
    verdict = check(rewritten(SCALE, "i < N", "i + 1 < N"), [{"N": 9}], dtypes=["float16"])
    assert "y[8]: expected " in verdict.failures[0].text
    assert "it was never written" in verdict.failures[0].text


def test_a_race_is_found_however_small_its_effect():
    race = Experiment(
        name="race",
        source="y[0] = 1.0f + 1e-6f * float(simdgroup_index_in_threadgroup);",
        inputs={"x": "N"},
        outputs={"y": "1"},
        reference=lambda: np.ones(1),
        threads=lambda: 128,
        threadgroup=128,
        bound=100,
    )
    verdict = check(race, [{"N": 8}])
    assert not verdict
    assert "the result depends on the order of threads" in verdict.failures[0].text
    assert "seeds=" not in verdict.again


def test_text_that_does_not_compile_is_told_with_its_line():
    verdict = check(rewritten(SCALE, "float(x[i])", "flaot(x[i])"), None)
    assert "flaot" in str(verdict)
    assert len(verdict.failures) == 4  # more would tell nothing new


def test_a_shape_that_alone_does_not_compile_leaves_the_others_be():
    # Fewer than eight elements lie in another address space: that is MLX's rule, not the emulator's.
    strict = changed(SCALE, header="METAL_FUNC float number(const device float* p) { return p[0]; }\n")
    verdict = check(rewritten(strict, "float(x[i])", "number(x + i)"), [{"N": 4}, {"N": 9}], dtypes=["float32"])
    assert [failure.shape for failure in verdict.failures] == ["N=4 T=float32"]
    assert verdict.shapes == 2


def test_half_accumulation_is_no_rounding_of_the_result():
    slip = rewritten(PRODUCT, "float sum = 0.0f;", "half sum = 0.0h;")
    slip = rewritten(slip, "sum += float(ws", "sum += half(float(ws").source.replace("* x[k];", "* x[k]);")
    assert check(PRODUCT, [{"N": 5, "K": 64}], seeds=[0])
    assert not check(changed(PRODUCT, source=slip), [{"N": 5, "K": 64}], seeds=[0])


def test_whole_numbers_must_be_equal():
    count = Experiment(
        name="count",
        source="if (thread_position_in_grid.x < N) y[thread_position_in_grid.x] = x[thread_position_in_grid.x] + 1;",
        inputs={"x": "int32 N"},
        outputs={"y": "int32 N"},
        reference=lambda x: x + 1,
        threads=lambda N: N,
        threadgroup=32,
    )
    assert check(count, [{"N": 40}])
    verdict = check(rewritten(count, "+ 1", "+ 2"), [{"N": 40}])
    assert "40 of 40 numbers of y are wrong" in str(verdict)


@pytest.mark.parametrize(
    ("dtype", "found", "value", "ok"),
    [
        (mx.float32, 1 + 4 * EPSILON, 1.0, True),
        (mx.float32, 1 + 6 * EPSILON, 1.0, False),
        (mx.float16, 1 + 2**-11, 1.0, True),
        (mx.float16, 1 + 2**-9, 1.0, False),
        (mx.float32, np.nan, np.nan, True),
        (mx.float32, np.nan, 1.0, False),
        (mx.float32, np.inf, np.inf, True),
        (mx.float32, -np.inf, np.inf, False),
        (mx.float32, np.inf, 1.0, False),
    ],
)
def test_what_counts_as_wrong(dtype, found, value, ok):
    launch, _ = SCALE.launch({"N": 1})
    launch = launch.__class__(**{**launch.__dict__, "output_dtypes": [dtype]})
    _, wrong = compare(launch, [np.array([found])], [Expected(np.array([value]), np.array([4 * EPSILON]))])
    assert (wrong is None) is ok


def test_who_wrote_a_wrong_number_is_told():
    verdict = check(rewritten(SCALE, "if (i < N) ", "if (i < N && i != 5) "), [{"N": 8}], dtypes=["float32"])
    assert "no thread wrote it; next to it, threadgroup (0, 0, 0), thread (4, 0, 0), lane 4 wrote" in str(verdict)
    assert "check the grid, the guards, and the index of the store" in str(verdict)
    verdict = check(rewritten(SCALE, "if (i < N) ", "if (i < N && i > N) "), [{"N": 8}], dtypes=["float32"])
    assert "no thread wrote any of it" in str(verdict)


def test_an_index_beyond_a_private_array_is_the_cause_of_what_it_damages():
    body = (
        "uint i = thread_position_in_grid.x; float mine[4] = {}; for (int j = -8; j < 4; j++) mine[j] = 1e30f; "
        "if (i < N) y[i] = x[i] + 0.0f * mine[0];"
    )
    assert "index beyond an array's bounds" in str(check(changed(SCALE, source=body), [{"N": 8}], dtypes=["float32"]))


@pytest.mark.parametrize(
    "nothing", [{"sizes": []}, {"sizes": {axis: [] for axis in SCALE.axes}}, {"seeds": []}, {"builds": []}]
)
def test_a_check_of_nothing_is_refused(nothing):
    with pytest.raises(ValueError, match="at least one shape, one seed and one build"):
        check(SCALE, **{"sizes": None} | nothing)


def test_an_executor_that_is_not_there_is_refused_with_the_reason():
    absent = next(name for name in ("metal", "cuda") if unavailable(name) is not None)
    with pytest.raises(ExecutorUnavailableError, match=f"kernels cannot run on '{absent}': MLX finds no"):
        kernels.check(SCALE, executor=absent)
