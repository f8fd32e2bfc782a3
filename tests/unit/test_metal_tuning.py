"""The choice of launch sizes is arithmetic; what was measured is believed for the chip that it was measured on."""

from __future__ import annotations

import json
import logging
import stat

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kernels.metal
from kernels.metal.formats import split_q8_0
from kernels.metal.norm_qkv import norm_qkv
from kernels.metal.project_add import project_add
from kernels.metal.rows import TUNINGS, Tuning, default_tuning, geometry, k_split
from mlx_engine.backends.metal import tuning as metal_tuning
from mlx_engine.backends.metal.tuning import MARGIN, Tuner, candidates, fastest, following, identity, measured, tuner

DEFAULT = Tuning(4, 4)
OTHER = Tuning(2, 8)


def matrix(n: int, k: int):
    return split_q8_0(np.zeros(n * k // 32 * 34, dtype=np.uint8), (n, k))


LARGE = matrix(2048, 1024)
CALL = (mx.zeros((1, 1024)), LARGE, mx.zeros((1, 2048)))


# ---- the choice ----


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(TUNINGS), st.lists(st.floats(1e-6, 1e-3), min_size=1, max_size=5)))
def test_nothing_is_faster_than_the_fastest_by_more_than_noise(samples):
    chosen = fastest(samples, DEFAULT)
    medians = {tuning: float(np.median(seconds)) for tuning, seconds in samples.items()}
    if not samples:
        assert chosen == DEFAULT
    else:
        assert medians[chosen] * (1 - MARGIN) <= min(medians.values())
        assert chosen == DEFAULT or medians[chosen] == min(medians.values())


@pytest.mark.parametrize(
    ("samples", "chosen"),
    [
        ({}, DEFAULT),
        ({DEFAULT: [3.0], OTHER: [1.0]}, OTHER),
        ({DEFAULT: [1.0], OTHER: [3.0]}, DEFAULT),
        ({DEFAULT: [1.0], OTHER: [0.999]}, DEFAULT),
        ({OTHER: [5.0]}, OTHER),  # the GPU does not take the default
        ({DEFAULT: [1.0, 1.0, 1.0], OTHER: [0.1, 2.0, 2.0]}, DEFAULT),  # one lucky sample
    ],
)
def test_the_default_stands_unless_another_is_clearly_faster(samples, chosen):
    assert fastest(samples, DEFAULT) == chosen


@pytest.mark.parametrize("split", [1, 2, 4])
def test_every_candidate_can_be_launched(split: int):
    found = candidates(split)
    assert len(found) >= 8
    for tuning in found:
        assert geometry((1000,), 1, tuning, split).split == split


# ---- when there is something to measure ----


def counting(monkeypatch, chosen: Tuning = OTHER) -> list[str]:
    """Instead of a GPU: what was measured, by kernel."""
    calls = []

    def measure(kernel, args, tunings):
        calls.append(kernel.__name__)
        return {tuning: [1.0 if tuning == chosen else 2.0] for tuning in tunings}

    monkeypatch.setattr(metal_tuning, "measured", measure)
    return calls


def test_a_shape_is_measured_once_and_remembered_on_disk(monkeypatch, tmp_path, caplog):
    calls = counting(monkeypatch)
    file = tmp_path / "cache" / "tuning.json"
    one = Tuner("chip A", file)
    with caplog.at_level(logging.WARNING):
        assert one.choose(project_add, CALL) == OTHER
        assert one.choose(project_add, CALL) == OTHER
        assert one.choose(norm_qkv, (CALL[0], mx.zeros(1024), 1e-6, LARGE, LARGE, LARGE)) == OTHER
    assert calls == ["project_add", "norm_qkv"]
    assert sum("once" in record.getMessage() for record in caplog.records) == 1
    assert Tuner("chip A", file).choose(project_add, CALL) == OTHER
    assert calls == ["project_add", "norm_qkv"]
    assert [path.name for path in file.parent.iterdir()] == ["tuning.json"]
    assert json.loads(file.read_text()) == {
        "chip A": {"norm_qkv 2048 x 1024 + 2048 x 1024 + 2048 x 1024": [2, 8], "project_add 2048 x 1024": [2, 8]}
    }


def test_another_chip_measures_for_itself_and_both_are_kept(monkeypatch, tmp_path):
    file = tmp_path / "tuning.json"
    calls = counting(monkeypatch)
    Tuner("chip A", file).choose(project_add, CALL)
    monkeypatch.undo()
    calls += counting(monkeypatch, Tuning(4, 2))
    assert Tuner("chip B", file).choose(project_add, CALL) == Tuning(4, 2)
    assert Tuner("chip A", file).choose(project_add, CALL) == OTHER


@pytest.mark.parametrize(
    "args",
    [(mx.zeros((2, 1024)), LARGE, mx.zeros((2, 2048))), (mx.zeros((1, 64)), matrix(64, 64), mx.zeros((1, 64)))],
    ids=["two vectors", "a small matrix"],
)
def test_where_nothing_can_be_told_apart_nothing_is_measured(monkeypatch, tmp_path, args):
    calls = counting(monkeypatch)
    assert Tuner("chip", tmp_path / "tuning.json").choose(project_add, args) is None
    assert calls == []


def test_rows_that_are_shared_keep_their_neighbors_in_a_threadgroup(monkeypatch, tmp_path):
    wide = matrix(256, 4096)
    assert k_split(256, 4096) == 4
    counting(monkeypatch, Tuning(1, 2))
    chosen = Tuner("chip", tmp_path / "t.json").choose(project_add, (mx.zeros((1, 4096)), wide, mx.zeros((1, 256))))
    assert chosen == default_tuning(256, 1)


HOSTILE = [
    b"", b"\x00\xff\xfe", b"[]", b"null", b"{", b'{"chip": 3}', b'{"chip": []}',
    b'{"chip": {"project_add 2048 x 1024": 7}}',
    b'{"chip": {"project_add 2048 x 1024": "48"}}', b'{"chip": {"project_add 2048 x 1024": [2]}}',
    b'{"chip": {"project_add 2048 x 1024": [0, 4]}}', b'{"chip": {"project_add 2048 x 1024": [3, 5]}}',
    b'{"chip": {"project_add 2048 x 1024": [2.5, 4]}}', b'{"chip": {"project_add 2048 x 1024": [1e400, NaN]}}',
    b"[" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("content", HOSTILE, ids=lambda content: repr(content[:50]))
def test_a_file_that_makes_no_sense_is_measured_over(monkeypatch, tmp_path, content: bytes):
    file = tmp_path / "tuning.json"
    file.write_bytes(content)
    calls = counting(monkeypatch)
    assert Tuner("chip", file).choose(project_add, CALL) == OTHER
    assert calls == ["project_add"]
    assert Tuner("chip", file).choose(project_add, CALL) == OTHER
    assert calls == ["project_add"]


@pytest.mark.parametrize("words", ["[2, 8]", "[2.0, 8.0]", "[2, 8.0]"])
def test_what_is_remembered_is_handed_out_as_whole_numbers(monkeypatch, tmp_path, words: str):
    file = tmp_path / "tuning.json"
    file.write_text(f'{{"chip": {{"project_add 2048 x 1024": {words}}}}}')
    calls = counting(monkeypatch)
    chosen = Tuner("chip", file).choose(project_add, CALL)
    assert (chosen, calls) == (Tuning(2, 8), [])
    assert type(chosen.rows) is type(chosen.simdgroups) is int


def test_what_cannot_be_written_is_measured_each_time(monkeypatch, tmp_path):
    calls = counting(monkeypatch)
    (tmp_path / "no folder").write_text("")
    for _ in range(2):
        assert Tuner("chip", tmp_path / "no folder" / "tuning.json").choose(project_add, CALL) == OTHER
    (tmp_path / "a folder").mkdir()
    assert Tuner("chip", tmp_path / "a folder").choose(project_add, CALL) == OTHER
    assert len(calls) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a folder", "no folder"]


# ---- the measurement ----


def test_weights_are_cold_and_every_launch_waits_for_the_one_before(monkeypatch):
    monkeypatch.setattr(metal_tuning, "COLD_BYTES", 5 * LARGE.nbytes)
    seen = []

    def kernel(x, weight, residual, *, tuning):
        if tuning == TUNINGS[1]:
            raise ValueError("Thread group size (1024) is greater than the maximum")
        y = residual + 1
        seen.append((id(weight.wq), x, residual, y, weight))
        return y

    samples = measured(kernel, CALL, TUNINGS[:3])
    assert set(samples) == {TUNINGS[0], TUNINGS[2]}
    assert all(len(seconds) == metal_tuning.ROUNDS and min(seconds) > 0 for seconds in samples.values())
    one_round = seen[2:7]
    assert len({key for key, *_ in one_round}) == 5
    assert sum(weight.nbytes for *_, weight in one_round) >= metal_tuning.COLD_BYTES
    # 2,048 results are enough for the next 1,024 inputs, and are the next residual.
    np.testing.assert_array_equal(np.asarray(one_round[-1][3]), np.full((1, 2048), 5))


def test_results_that_are_too_short_feed_nothing():
    x, residual, y = mx.zeros((1, 96)), mx.zeros((1, 64)), mx.ones((1, 64))
    fed = following((x, LARGE, residual), y)
    assert fed[0] is x
    assert fed[1] is LARGE
    assert np.asarray(fed[2]).all()
    assert following((x,), None) == (x,)


# ---- who measures ----


def test_the_emulator_is_never_measured_and_nobody_is_where_it_is_switched_off(monkeypatch):
    assert tuner("emulator") is None
    assert isinstance(tuner("cuda"), Tuner)
    monkeypatch.setenv("MLX_ENGINE_TUNING", "off")
    assert tuner("metal") is None


def test_the_file_lies_where_the_user_keeps_such_files(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuner("metal").file == tmp_path / "mlx_engine" / "tuning.json"


def test_a_measurement_belongs_to_a_chip_an_executor_and_a_text(monkeypatch, tmp_path):
    here = identity("metal", "Apple M9")
    assert here.startswith("Apple M9, metal, MLX ")
    assert len({here, identity("cuda", "Apple M9"), identity("metal", "Apple M9 Pro")}) == 3
    (tmp_path / "other.metal").write_text("other")
    monkeypatch.setattr(kernels.metal, "__file__", str(tmp_path / "__init__.py"))
    assert identity("metal", "Apple M9") != here


def test_the_file_is_its_owners(monkeypatch, tmp_path):
    counting(monkeypatch)
    file = tmp_path / "tuning.json"
    Tuner("chip", file).choose(project_add, CALL)
    assert not stat.S_IMODE(file.stat().st_mode) & stat.S_IWOTH
