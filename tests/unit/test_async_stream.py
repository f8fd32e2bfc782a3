"""Streams in asyncio: the event loop goes on, several run at once, and cancelling frees what a run holds."""

import asyncio
import threading

import pytest

import mlx_engine
from mlx_engine.errors import ClosedError, ContextLengthError, OptionError
from mlx_engine.loop.stream import Stream
from tests.patience import PATIENCE, wait_for

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def engine():
    with mlx_engine.load("builtin", backend="simd") as loaded:
        yield loaded


def run(main):
    return asyncio.run(asyncio.wait_for(main, PATIENCE))


async def read(stream):
    return [piece async for piece in stream]


@pytest.mark.parametrize("name", ["stream", "astream"])
def test_the_pieces_are_those_of_a_stream(engine, name):
    options = {"temperature": 0.8, "seed": 3, "logprobs": 0}
    expected = engine.generate(PROMPT, 12, **options)

    async def main():
        async with aiter_of(getattr(engine, name)(PROMPT, 12, **options)) as stream:
            return await read(stream), stream.generation, [piece async for piece in stream]

    pieces, found, after = run(main())
    assert "".join(pieces) == expected.text
    assert len(pieces) > 3
    assert (found.token_ids, found.digest, found.finish_reason) == (expected.token_ids, expected.digest, "length")
    assert after == []


def aiter_of(stream):
    return stream.__aiter__()


def test_several_run_at_once_and_each_is_its_own(engine):
    prompts = [PROMPT, "The little dog", [1, 2, 3]]
    alone = [engine.generate(prompt, 10).text for prompt in prompts]

    async def main():
        return await asyncio.gather(*(read(engine.astream(prompt, 10)) for prompt in prompts))

    assert ["".join(pieces) for pieces in run(main())] == alone


def test_the_event_loop_goes_on_during_a_pass(engine, monkeypatch):
    entered, released, step = threading.Event(), threading.Event(), Stream._step

    def held(*args):
        entered.set()
        released.wait(PATIENCE)
        step(*args)

    monkeypatch.setattr(Stream, "_step", held)

    async def main():
        task = asyncio.create_task(read(engine.astream(PROMPT, 3)))
        while not entered.is_set():
            await asyncio.sleep(0)
        assert not task.done()  # a pass is under way, and this coroutine runs
        released.set()
        return await task

    assert "".join(run(main())) == engine.generate(PROMPT, 3).text


def watched(monkeypatch):
    """Return a list of the streams that are made."""
    made, init = [], Stream.__init__

    def noted(self, *args, **options):
        init(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(Stream, "__init__", noted)
    return made


def test_cancelling_the_task_ends_the_run_within_a_pass(engine, monkeypatch):
    made, passes, step, released = watched(monkeypatch), [], Stream._step, threading.Event()

    def held(*args):
        passes.append(1)
        released.wait(PATIENCE)
        step(*args)

    monkeypatch.setattr(Stream, "_step", held)

    async def main():
        # No piece leaves before the end: its beginning may be the stop string.
        task = asyncio.create_task(read(engine.astream(PROMPT, 200, ignore_eos=True, stop="Once" + "x" * 900)))
        while not passes:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        released.set()

    run(main())
    wait_for(lambda: made[0]._scheduler is None)
    assert len(passes) == 1


def test_closing_and_leaving_the_loop_end_the_run(engine, monkeypatch):
    made = watched(monkeypatch)

    async def main():
        async with engine.astream(PROMPT, 50, ignore_eos=True) as stream:
            async for _ in stream:
                break
        assert made[0]._scheduler is None
        assert 0 < len(stream.generation.token_ids) < 50
        other = engine.astream(PROMPT, 50)
        await other.__anext__()
        await other.aclose()
        await other.aclose()
        assert await read(other) == []
        assert made[1]._scheduler is None

    run(main())


def test_errors_are_raised_where_they_are_made(engine):
    with pytest.raises(OptionError, match="temperature"):
        engine.astream(PROMPT, temperature=-1)
    with pytest.raises(TypeError, match=r"Engine.astream\(\) has no option 'temprature'; did you mean temperature"):
        engine.astream(PROMPT, temprature=1)
    with pytest.raises(ContextLengthError):
        run(read(engine.astream([1] * 5000)))
    with pytest.raises(RuntimeError, match="expected a stream that has begun"):
        _ = engine.astream(PROMPT).generation
    closed = mlx_engine.load("builtin", backend="simd")
    closed.close()
    with pytest.raises(ClosedError):
        closed.astream(PROMPT)
