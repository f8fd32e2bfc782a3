"""The memory bandwidth, measured when a server starts."""

from __future__ import annotations

import numpy as np
import pytest

import mlx_engine
from mlx_engine.bench import roofline
from mlx_engine.bench.roofline import bandwidth_of, read_bandwidth
from tests.unit.test_chat import MICRO


def test_all_bytes_are_read_once_per_reading(monkeypatch: pytest.MonkeyPatch):
    now, read = [0.0], list[int]()

    def one_second(array: np.ndarray) -> int:
        now[0] += 1.0
        read.append(array.nbytes)
        return 0

    monkeypatch.setattr(roofline, "read", one_second)
    monkeypatch.setattr(roofline.time, "perf_counter", lambda: now[0])
    words = [np.zeros(n, dtype=np.int64) for n in (100, 7)]
    assert bandwidth_of(words, 1) == 107 * 8 / 2
    assert sum(read) == roofline.READINGS * 107 * 8
    read.clear()
    bandwidth_of(words, 2)
    assert sum(read) == roofline.READINGS * 107 * 8
    read.clear()
    monkeypatch.setattr(roofline, "MOST_BYTES", 820)
    bandwidth_of(words, 1)
    assert sum(read) == roofline.READINGS * 800


def test_weights_in_the_cache_or_on_another_device_say_nothing(monkeypatch: pytest.MonkeyPatch):
    engine = mlx_engine.load(MICRO, "parallel", threads=1)
    assert read_bandwidth(engine) is None
    monkeypatch.setattr(roofline, "cache_bytes", lambda: None)
    assert read_bandwidth(engine) is None
    monkeypatch.setattr(roofline, "cache_bytes", lambda: 1024)
    assert 0 < (read_bandwidth(engine) or 0) < 1e13
    assert read_bandwidth(mlx_engine.load(MICRO, "mlx")) is None
