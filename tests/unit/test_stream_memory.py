"""The memory of keys and values is free as soon as a stream has ended, was closed, or is dropped."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

import mlx_engine
from mlx_engine.cache import KVPool

MICRO = Path(__file__).parents[1] / "data" / "qwen3-micro" / "model-q8_0.gguf"


@pytest.fixture(scope="module", params=["simd", "mlx"])
def engine(request: pytest.FixtureRequest) -> mlx_engine.Engine:
    return mlx_engine.load(MICRO, request.param)


@pytest.fixture
def pools() -> Iterator[list[weakref.ref[KVPool]]]:
    """The pools that are made meanwhile; cycles are not collected."""
    made: list[weakref.ref[KVPool]] = []
    init = KVPool.__init__

    def noted(self: KVPool, *args: object, **options: object) -> None:
        made.append(weakref.ref(self))
        init(self, *args, **options)  # type: ignore[arg-type]

    gc.disable()
    with mock.patch.object(KVPool, "__init__", noted):
        yield made
    gc.enable()


def alive(pools: list[weakref.ref[KVPool]]) -> int:
    return sum(pool() is not None for pool in pools)


@pytest.mark.parametrize("n_pieces", [0, 1, 3])
def test_a_stream_that_is_dropped_frees_its_memory(engine, pools, n_pieces):
    stream = engine.stream([1, 2, 3], 20, ignore_eos=True)
    for _ in range(n_pieces):
        next(stream)
    assert alive(pools) == len(pools) == 1
    del stream
    assert alive(pools) == 0


def test_a_stream_that_is_closed_frees_its_memory_and_keeps_its_result(engine, pools):
    stream = engine.stream([1, 2, 3], 20, ignore_eos=True)
    text = next(stream)
    stream.close()
    assert alive(pools) == 0
    assert stream.generation.text == text
    assert stream.generation.finish_reason is None
    assert list(stream) == []
    stream.close()


def test_a_stream_that_has_ended_frees_its_memory(engine, pools):
    stream = engine.stream([1, 2, 3], 4, ignore_eos=True)
    text = "".join(stream)
    assert (len(pools), alive(pools)) == (1, 0)
    assert stream.generation.text == text


def test_a_stream_that_fails_frees_its_memory(engine, pools, monkeypatch):
    stream = engine.stream([1, 2, 3], 20, ignore_eos=True)
    next(stream)

    def failing(*_: object) -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr(engine.model, "forward", failing)
    with pytest.raises(RuntimeError, match="no more"):
        list(stream)
    assert alive(pools) == 0
