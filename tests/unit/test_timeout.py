"""A run that has a time: it ends at the token, or the chunk of the prompt, at which that is over. No test waits."""

import weakref

import numpy as np
import pytest

import mlx_engine
from mlx_engine.cache.pool import LONGEST_PASS as CHUNK
from mlx_engine.errors import OptionError
from mlx_engine.loop.metrics import Metrics
from mlx_engine.options import Options
from tests.streams import stream_of
from tests.unit.test_decode import DATA, EOS, Bytes, Letters, Script


class Slow(Script):
    """A `Script` whose every pass takes a second of a clock that does not tick otherwise."""

    def __init__(self, ids):
        super().__init__(ids)
        self.now = 100.0

    def forward(self, batch):
        self.now += 1
        return super().forward(batch)


def slow(ids, timeout, *, text=None, prompt=(1, 2), **options):
    model = Slow(ids)
    stream = stream_of(
        model, list(prompt), Options(timeout=timeout, **options), max_tokens=len(ids), text=text or Letters(),
        end_ids={EOS}, metrics=Metrics(clock=lambda: model.now),
    )  # fmt: skip
    return model, stream


@pytest.mark.parametrize("kv", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize(("timeout", "n"), [(0.1, 1), (1, 1), (1.5, 2), (3, 3), (3.5, 4)])
def test_the_run_ends_at_the_token_at_which_the_time_is_up(timeout, n, kv):
    model, stream = slow([0, 1, 2, 3, 4, 5], timeout, kv=kv)
    assert "".join(stream) == "ABCDEF"[:n]
    result = stream.generation
    assert (result.text, result.finish_reason, len(result.token_ids)) == ("ABCDEF"[:n], "timeout", n)
    assert len(model.passes) == len(result.metrics.passes) == n
    assert list(stream) == []


def test_the_time_begins_when_the_first_piece_is_asked_for():
    model, stream = slow([0, 1, 2, 3], 2)
    model.now += 1000
    assert "".join(stream) == "AB"


def test_what_the_caller_does_between_two_pieces_counts():
    model, stream = slow([0, 1, 2, 3], 10)
    assert next(stream) == "A"
    model.now += 60
    assert list(stream) == ["B"]
    assert stream.generation.finish_reason == "timeout"


def test_an_end_of_its_own_comes_before_the_time():
    for ids, options, reason in (([0, EOS], {}, "stop"), ([0, 1], {}, "length"), ([0, 1, 2], {"stop": ("B",)}, "stop")):
        _, stream = slow(ids, 2, **options)
        list(stream)
        assert stream.generation.finish_reason == reason


def test_a_run_that_has_ended_holds_no_keys_and_values():
    alive = weakref.WeakSet()

    class Kept(Script):
        def new_pool(self, n_tokens, **options):
            pool = super().new_pool(n_tokens, **options)
            alive.add(pool)
            return pool

    model = Kept([0, 1])
    stream = stream_of(model, [1], Options(), max_tokens=2, text=Letters(), end_ids={EOS})
    assert next(stream) == "A"
    assert len(alive) == 1
    assert list(stream) == ["B"]
    assert len(alive) == 0
    assert stream.generation.text == "AB"


def test_without_a_timeout_nothing_is_late():
    model, stream = slow([0, 1, 2], None)
    model.now = 1e12
    assert "".join(stream) == "ABC"
    assert stream.generation.finish_reason == "length"


def test_what_was_held_back_is_shown():
    _, stream = slow([0, 2, 3, 4], 2, stop=("CD",))
    assert "".join(stream) == "AC"
    _, stream = slow(["🙂".encode()[0], 0x41, 0x41], 1, text=Bytes())
    assert "".join(stream) == "\ufffd"
    assert stream.generation.finish_reason == "timeout"


@pytest.mark.parametrize(("timeout", "chunks"), [(0.5, 1), (2, 2), (2.5, 3)])
def test_a_long_prompt_is_left_between_two_chunks(timeout, chunks):
    seen = []
    model, stream = slow([0] * 9, timeout, prompt=[1] * (5 * CHUNK))
    stream.progress = lambda done, total: seen.append((done, total))
    assert list(stream) == []
    result = stream.generation
    assert (result.text, result.token_ids, result.finish_reason) == ("", [], "timeout")
    assert result.metrics.time_to_first_token_ms is None
    assert len(model.passes) == len(seen) == chunks
    assert seen[-1] == (chunks * CHUNK, 5 * CHUNK)


def test_a_prompt_that_is_read_gives_its_token_however_late():
    _, stream = slow([0] * 9, 2, prompt=[1] * (2 * CHUNK))
    assert "".join(stream) == "A"
    assert stream.generation.finish_reason == "timeout"


@pytest.mark.parametrize("backend", ["simd", "mlx"])
def test_the_engine_stops_in_time_and_can_go_on(backend):
    engine = mlx_engine.load(DATA / "model-f32.gguf", backend=backend)
    late = engine.generate([5, 6, 7], 400, timeout=1e-9, ignore_eos=True)
    assert (len(late.token_ids), late.finish_reason) == (1, "timeout")
    long = engine.generate([5] * (CHUNK * 2 + 1), 400, timeout=1e-9)
    assert (long.token_ids, long.text, long.finish_reason) == ([], "", "timeout")
    whole = engine.generate([5, 6, 7], 4, timeout=1000.0, ignore_eos=True)
    assert (whole.finish_reason, whole.token_ids[:1]) == ("length", late.token_ids)
    assert np.asarray(engine.logits([1, 2])).shape == (2, 512)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True, "1"], ids=repr)
def test_a_time_that_makes_no_sense_is_refused(value):
    with pytest.raises(OptionError, match="timeout must be a number above 0"):
        Options(timeout=value)
