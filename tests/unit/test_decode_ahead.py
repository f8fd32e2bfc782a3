"""The loop of a lazy backend: the same ids as of any other, and a device that never waits for the host."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

import mlx_engine
from mlx_engine.backends import create_backend
from mlx_engine.backends.base import Backend
from mlx_engine.backends.numpy.simd import SimdBackend
from mlx_engine.backends.observed import profiled, tapped
from mlx_engine.cache import SequenceInput
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.errors import CacheFullError
from mlx_engine.loop.forward import forward
from mlx_engine.loop.metrics import Metrics
from mlx_engine.loop.sampler import Sampler
from mlx_engine.observe.profiler import Profiler
from mlx_engine.options import Options, Sampling
from mlx_engine.weights.model import Model, load_model
from tests.decoding import decode, prefill
from tests.streams import Marks, stream_of

MICRO = Path(__file__).parents[1] / "data" / "qwen3-micro" / "model-q8_0.gguf"
PROMPT = [5, 9, 300, 17, 2]
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=1.5, seed=1),
    "filtered": Sampling(temperature=2.0, top_k=40, top_p=0.9, min_p=0.01, seed=4),
    "penalised": Sampling(repetition_penalty=1.7),
    "sampled and penalised": Sampling(temperature=1.0, repetition_penalty=1.3, seed=5),
}


class Promise:
    """A token that a device computes; nobody can see its id before it is settled."""

    def __init__(self, token: int) -> None:
        self.token, self.done = token, None


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class LazyBackend(SimdBackend):
    """Chooses promises, on a device that takes `device` seconds for a pass; the host takes `build` to describe it."""

    lazy = True

    def __init__(self, device: float = 0.0, build: float = 0.0) -> None:
        super().__init__()
        self.clock, self.device_s, self.build_s, self.busy_until = Clock(), device, build, 0.0
        self.log: list[str] = []
        self.n_begun: list[int] = []
        self.n_open = 0

    @contextmanager
    def session(self):
        with super().session():
            self.n_open += 1
            yield
            self.n_open -= 1

    def embed(self, table, ids):
        assert self.n_open
        self.log.append("build")
        self.clock.now += self.build_s
        return super().embed(table, [i.token if isinstance(i, Promise) else i for i in ids])

    def wait(self, x):
        self.log.append("wait")

    def argmax(self, logits):
        return Promise(super().argmax(logits))

    def sample(self, logits, draw):
        known = [i.token if isinstance(i, Promise) else i for i in draw.recent]
        return Promise(super().sample(logits, dataclasses.replace(draw, recent=known)))

    def begin(self, x):
        self.log.append("begin")
        self.n_begun.append(len(x))
        for token in x:
            if isinstance(token, Promise):
                token.done = self.busy_until = max(self.busy_until, self.clock.now) + self.device_s

    def token_id(self, token):
        assert self.n_open
        self.log.append("settle")
        if token.done is None:
            self.begin([token])
            self.log.pop()
        self.clock.now = max(self.clock.now, token.done)
        return token.token


def micro(backend: Backend) -> Model:
    return load_model(open_checkpoint(MICRO), backend)


def run(model: Model, n: int, sampling: Sampling = SAMPLINGS["greedy"], *, room: int = 0, **options) -> list[int]:
    pick = Sampler(model.backend, sampling, PROMPT)
    kv = model.new_kv(len(PROMPT) + n - 1 + room, page=8)
    return list(islice(decode(model, PROMPT, kv, pick, Metrics(), **options), n))


def whole(model: Model, ids: list[int]) -> np.ndarray:
    """Logits (1, V) of the last of these tokens, which are read in one pass."""
    return forward(model, SequenceInput(ids, model.scratch_kv(len(ids))))


@pytest.fixture(scope="module")
def eager() -> Model:
    return micro(SimdBackend())


@pytest.fixture(params=["promises", "mlx"])
def model(request: pytest.FixtureRequest) -> Model:
    return micro(LazyBackend() if request.param == "promises" else create_backend("mlx"))


# ---- the same ids ----


@pytest.mark.some(2)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_ids_are_those_of_an_eager_backend(model: Model, eager: Model, name: str):
    want = run(eager, 20, SAMPLINGS[name])
    assert run(model, 20, SAMPLINGS[name]) == want
    assert run(model, 20, SAMPLINGS[name], overlap=False) == want


@pytest.mark.some(2)
@pytest.mark.parametrize("name", ["sampled", "penalised"])
def test_the_ids_without_a_cache_are_too(model: Model, eager: Model, name: str):
    def ids(of: Model) -> list[int]:
        options = Options(sampling=SAMPLINGS[name], kv=False)
        stream = stream_of(of, PROMPT, options, max_tokens=8, text=Marks(), end_ids=())
        list(stream)
        return stream.generation.token_ids

    assert ids(model) == ids(eager)


@pytest.mark.some(2)
@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_a_prompt_in_chunks(model: Model, eager: Model, chunk: int):
    assert run(model, 12, chunk=chunk) == run(eager, 12)


def test_how_likely_a_token_was_is_told_of_the_last_one_that_was_read(model: Model, eager: Model):
    told = []
    for of in (model, eager):
        pick = Sampler(of.backend, SAMPLINGS["sampled"], PROMPT)
        ids = decode(of, PROMPT, of.new_kv(20), pick, Metrics())
        told.append([(next(ids), pick.probability()) for _ in range(6)])
    assert [token for token, _ in told[0]] == [token for token, _ in told[1]]
    np.testing.assert_allclose(*([p for _, p in of] for of in told), rtol=1e-4)


# ---- what is begun when ----


def test_each_pass_is_begun_before_the_token_that_it_reads_is_known():
    be = LazyBackend()
    run(micro(be), 4, room=1)
    step = ["build", "begin"]
    assert be.log == [*step, *step, "settle", *step, "settle", *step, "settle", *step, "settle"]
    assert be.n_begun == [2] * 5  # the token, and the sum of the logits


def test_a_prompt_is_computed_chunk_by_chunk():
    """One graph of a long prompt would hold what every chunk computes until the end."""
    be = LazyBackend()
    run(micro(be), 1, chunk=2)
    assert be.log == ["build", "wait", "build", "wait", "build", "begin", "settle"]


def test_nothing_is_begun_that_there_is_no_room_for():
    be = LazyBackend()
    run(micro(be), 4)
    assert be.log.count("build") == be.log.count("begin") == be.log.count("settle") == 4


def test_without_overlap_each_token_is_read_first():
    be = LazyBackend()
    run(micro(be), 4, room=9, overlap=False)
    assert [what for what in be.log if what != "wait"] == ["build", "settle"] * 4


def test_a_profiled_pass_is_not_overlapped():
    be = LazyBackend()
    run(micro(profiled(be, Profiler())), 3, room=9)
    assert [what for what in be.log if what != "wait"] == ["build", "settle"] * 3


def test_nothing_happens_before_the_first_id_is_asked_for():
    be = LazyBackend()
    model = micro(be)
    decode(model, PROMPT, model.new_kv(9), Sampler(be, Sampling(), PROMPT), Metrics())
    assert be.log == []


# ---- what counts ----


def test_a_sequence_is_as_long_as_an_eager_one_whenever_somebody_looks(model: Model, eager: Model):
    """The pass that is under way is pending; it counts when its token is asked for."""
    lengths, pending = [], []
    for of in (model, eager):
        kv = of.new_kv(len(PROMPT) + 7)
        ids = decode(of, PROMPT, kv, Sampler(of.backend, Sampling(), PROMPT), Metrics())
        lengths.append([(kv.length, pending.append(kv.pending))[0] for _ in islice(ids, 8)])
    assert lengths[0] == lengths[1] == [len(PROMPT) + i for i in range(8)]
    # Behind the last token there is no room for another pass.
    assert pending == [1] * 7 + [0] + [0] * 8


def test_the_end_of_the_room_is_told_where_an_eager_backend_tells_it(model: Model):
    kv = model.new_kv(len(PROMPT) + 1)
    ids = decode(model, PROMPT, kv, Sampler(model.backend, Sampling(), []), Metrics())
    assert len(list(islice(ids, 2))) == 2
    with pytest.raises(CacheFullError):
        next(ids)
    assert (kv.length, kv.pending) == (len(PROMPT) + 1, 0)


def test_room_that_another_sequence_gives_back_is_used(model: Model, eager: Model):
    """While there is none, each token is read when it is asked for; nothing is lost of what comes behind it."""
    found = []
    for of in (model, eager):
        pool = of.new_pool(24, n_sequences=2, page=8)
        other, kv = pool.sequence(), pool.sequence()
        other.begin(24)
        other.commit(24)
        ids = decode(of, PROMPT, kv, Sampler(of.backend, Sampling(), PROMPT), Metrics())
        found.append(list(islice(ids, 4)))
        assert (kv.length, kv.pending) == (8, 0)
        other.close()
        found[-1] += islice(ids, 5)
    assert found[0] == found[1] == run(eager, 9)


def test_a_sequence_can_be_read_on_after_a_run_that_was_left(model: Model, eager: Model):
    """The pass that was under way has written into a slot that the next tokens overwrite."""
    kv = model.new_kv(40)
    decoding = decode(model, PROMPT, kv, Sampler(model.backend, Sampling(), PROMPT), Metrics())
    ids = list(islice(decoding, 6))
    assert (kv.length, kv.pending) == (len(PROMPT) + 5, 1)
    decoding.close()
    assert (kv.length, kv.pending) == (len(PROMPT) + 5, 0)
    more = [*ids[-1:], 7, 8, 9]
    with model.backend.session():
        found = model.backend.host(prefill(model, more, kv))
    want = whole(eager, [*PROMPT, *ids, 7, 8, 9])
    assert np.linalg.norm(found - want) <= 1e-6 * np.linalg.norm(want)


class Interrupted(BaseException):
    """As KeyboardInterrupt, but no debugger mistakes it for the user's."""


@pytest.mark.some(3)
@pytest.mark.parametrize("passes", [1, 2, 4])
@pytest.mark.parametrize("at", ["blk.0.attn_q", "blk.2.layer_out"])
def test_an_interrupted_pass_does_not_count_nor_does_the_one_behind_it(
    model: Model, eager: Model, at: str, passes: int
):
    """Interrupted in the `passes`-th pass that is built: the first of them is the prompt."""
    original, seen = model.backend, []

    def interrupt(name: str, _: object) -> None:
        seen.extend([name] if name == at else [])
        if len(seen) == passes:
            raise Interrupted

    kv, got = model.new_kv(40, page=2), []
    model.run_on(tapped(original, interrupt))
    ids = decode(model, PROMPT, kv, Sampler(model.backend, Sampling(), PROMPT), Metrics())
    with pytest.raises(Interrupted):
        got.extend(ids)
    model.run_on(original)
    # What has been read are the tokens of the passes whose own tokens were asked for.
    read = [*PROMPT, *got[:-1]] if got else []
    assert (kv.length, kv.pending) == (len(read), 0)
    rest = [*PROMPT, *got, 3, 4][len(read) :]
    with original.session():
        found = original.host(prefill(model, rest, kv))
    want = whole(eager, [*PROMPT, *got, 3, 4])
    assert np.linalg.norm(found - want) <= 1e-6 * np.linalg.norm(want)


# ---- how a run ends ----


@pytest.fixture(scope="module")
def engines() -> dict[str, mlx_engine.Engine]:
    return {name: mlx_engine.load(MICRO, name) for name in ("mlx", "simd")}


def both(engines: dict[str, mlx_engine.Engine], prompt: list[int], n: int, **options):
    """The same run on a lazy and on an eager backend."""
    return [engines[name].generate(prompt, n, **options) for name in ("mlx", "simd")]


@pytest.mark.slow
def test_a_run_ends_at_an_end_token_at_the_cap_and_at_a_stop_string(engines: dict[str, mlx_engine.Engine]):
    options = {"temperature": 2.0, "seed": 3}
    whole, want = both(engines, PROMPT, 60, **options, ignore_eos=True)
    assert (whole.text, whole.token_ids, whole.finish_reason) == (want.text, want.token_ids, "length")
    assert len(whole.metrics.passes) == 60
    stop = want.text[7:10]
    cut, want = both(engines, PROMPT, 60, **options, ignore_eos=True, stop=stop)
    assert (cut.text, cut.token_ids, cut.finish_reason) == (want.text, want.token_ids, "stop")
    assert len(cut.metrics.passes) == len(cut.token_ids) < 60


def test_a_run_ends_at_an_end_token(engines: dict[str, mlx_engine.Engine], monkeypatch: pytest.MonkeyPatch):
    ids = engines["simd"].generate(PROMPT, 20, ignore_eos=True).token_ids
    for engine in engines.values():
        monkeypatch.setattr(type(engine.tokenizer), "eog_ids", frozenset([ids[9]]))
    for found in both(engines, PROMPT, 20):
        assert (found.token_ids, found.finish_reason) == (ids[: ids.index(ids[9]) + 1], "stop")


def test_one_token_and_a_full_context(engines: dict[str, mlx_engine.Engine], monkeypatch: pytest.MonkeyPatch):
    found, want = both(engines, PROMPT, 1, ignore_eos=True)
    assert found.token_ids == want.token_ids
    for engine in engines.values():
        short = dataclasses.replace(engine.config, context_length=12)
        monkeypatch.setattr(engine.model, "config", short)
    found, want = both(engines, list(range(9)), 3, ignore_eos=True)
    assert found.token_ids == want.token_ids
    assert found.finish_reason == "length"


def test_a_run_may_begin_a_page(engines: dict[str, mlx_engine.Engine]):
    """The token at position 256 is the first of its page."""
    prompt = np.random.default_rng(0).integers(0, 512, 250).tolist()
    found, want = both(engines, prompt, 12, ignore_eos=True)
    assert found.token_ids == want.token_ids


# ---- times ----


def passes_of(be: LazyBackend, away: list[float], *, overlap: bool = True) -> list[float]:
    """Seconds of the passes, for a caller who goes away for so many seconds after each id."""
    model, metrics = micro(be), Metrics(clock=be.clock)
    kv = model.new_kv(len(PROMPT) + len(away) + 5)
    pick = Sampler(be, Sampling(), PROMPT)
    for _, seconds in zip(decode(model, PROMPT, kv, pick, metrics, overlap=overlap), away, strict=False):
        be.clock.now += seconds
    return metrics.passes[: len(away)]


def test_a_pass_is_what_the_device_takes_where_that_is_longer():
    assert passes_of(LazyBackend(device=5.0, build=1.0), [0.0] * 5) == [6.0, 5.0, 5.0, 5.0, 5.0]


def test_a_pass_is_what_the_host_takes_where_that_is_longer():
    assert passes_of(LazyBackend(device=2.0, build=3.0), [0.0] * 5) == [6.0, 3.0, 3.0, 3.0, 3.0]


def test_the_time_of_a_caller_whom_the_device_outlasts_is_the_devices():
    assert passes_of(LazyBackend(device=5.0, build=1.0), [3.0] * 5) == [6.0, 5.0, 5.0, 5.0, 5.0]


@pytest.mark.parametrize("slow", [6.0, 50.0, 1e4])
def test_a_slow_caller_changes_no_pass(slow: float):
    """The pass was hidden behind the caller; it is taken to be as long as the last that was not."""
    away = [0.0, 0.0, slow, 0.0, slow, slow, 0.0]
    assert passes_of(LazyBackend(device=5.0, build=1.0), away) == [6.0] + [5.0] * 3 + [5.0] * 3


def test_a_caller_who_is_always_slow_is_charged_no_more_than_the_prompt_took():
    assert passes_of(LazyBackend(device=5.0, build=1.0), [1e4] * 4) == [6.0] * 4


def test_without_overlap_the_host_and_the_device_add_up_and_the_caller_does_not_count():
    assert passes_of(LazyBackend(device=5.0, build=1.0), [70.0] * 4, overlap=False) == [6.0] * 4


def test_choosing_is_a_part_of_the_pass(engines: dict[str, mlx_engine.Engine]):
    metrics = engines["mlx"].generate(PROMPT, 5, temperature=1.0, ignore_eos=True).metrics
    assert metrics.sampling == []
    assert len(metrics.passes) == 5
    assert min(metrics.passes) > 0
