"""Prefill and decode on the micro model: the same ids however they are computed, and how a run ends."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_engine.backends import create_backend
from mlx_engine.backends.observed import tapped
from mlx_engine.cache import KVLayer, KVPool, SequenceInput
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.errors import CacheFullError
from mlx_engine.loop.forward import forward
from mlx_engine.loop.metrics import Metrics
from mlx_engine.loop.sampler import Sampler
from mlx_engine.loop.scheduler import Scheduler
from mlx_engine.loop.stream import Stream
from mlx_engine.options import Options, Sampling
from mlx_engine.weights.model import Model, load_model
from tests.decoding import decode, greedy_ids, prefill
from tests.streams import request_of, stream_of

DATA = Path(__file__).parents[1] / "data" / "qwen3-micro"
FILES = {"f32": ("model-f32.gguf", ""), "q8_0": ("model-q8_0.gguf", "_q8")}
EOS = 510


@pytest.fixture(scope="module")
def models():
    return {name: load_model(open_checkpoint(DATA / file), create_backend("simd")) for name, (file, _) in FILES.items()}


@pytest.fixture(scope="module")
def model(models):
    return models["f32"]


class Letters:
    """A tokenizer's stream in which every token is one letter, so that text shows which tokens it came from."""

    def add(self, token_id):
        return chr(ord("A") + token_id % 26)

    def finish(self):
        return ""


class Bytes:
    """A tokenizer's stream in which a token's id is a byte of UTF-8."""

    def __init__(self):
        self.held = b""

    def add(self, token_id):
        self.held += bytes([token_id])
        try:
            text, self.held = self.held.decode(), b""
        except UnicodeDecodeError:
            return ""
        return text

    def finish(self):
        return "\ufffd" if self.held else ""


class Script(Model):
    """A model that writes the ids it was given, whatever it reads; `passes` are the ids of each pass."""

    class Config:
        vocab_size, context_length = 512, 64

    config = Config()

    def __init__(self, ids):
        self.backend, self.ids, self.passes = create_backend("simd"), iter(ids), []

    def forward(self, batch):
        self.passes.append(list(batch.ids))
        if batch.want == "none":
            return None
        logits = np.zeros((1, 512), dtype=np.float32)
        logits[0, next(self.ids)] = 1
        return logits

    def new_pool(self, n_tokens, **options):
        return KVPool(self.backend, [KVLayer(1, 2)], n_tokens, **options)

    def new_kv(self, n_tokens, **options):
        return self.new_pool(n_tokens, **options).sequence()

    def scratch_kv(self, n_tokens):
        return self.new_kv(n_tokens, kept=False)


def scripted(ids, text=None, *, max_tokens=None, prompt=(1, 2), **options):
    """A run of `Script` with `options`."""
    model = Script(ids)
    stream = stream_of(
        model,
        list(prompt),
        Options(**options),
        max_tokens=max_tokens or len(ids),
        text=text or Letters(),
        end_ids={EOS},
    )
    return model, stream


def run(model, prompt, n, *, kv=True, metrics=None, chunk=512):
    if not kv:
        return greedy_ids(model, prompt, n, kv=False)
    sampler, room = Sampler(model.backend, Sampling(), prompt), model.new_kv(len(prompt) + n)
    return list(itertools.islice(decode(model, prompt, room, sampler, metrics, chunk=chunk), n))


def in_one_pass(model, ids):
    return forward(model, SequenceInput(ids, model.scratch_kv(len(ids))))


# ---- the numbers ----


@pytest.mark.some(3)
@pytest.mark.parametrize("kv", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("i", range(3))
def test_greedy_ids_are_the_golden_ones_with_and_without_a_cache(models, golden, name, i, kv):
    want = golden[f"greedy{i}{FILES[name][1]}"].tolist()
    assert run(models[name], golden[f"prompt{i}"].tolist(), len(want), kv=kv) == want


@pytest.mark.parametrize("chunk", [1, 2, 7, 40, 41, 512])
def test_prefill_in_chunks_gives_the_same_last_logits(model, golden, chunk):
    prompt = golden["prompt2"].tolist()
    kv = model.new_kv(len(prompt))
    logits = prefill(model, prompt, kv, chunk=chunk)
    whole = in_one_pass(model, prompt)
    assert logits.shape == (1, model.config.vocab_size)
    assert (kv.length, kv.pending) == (len(prompt), 0)
    assert np.linalg.norm(logits - whole) <= 1e-6 * np.linalg.norm(whole)


def test_prefill_reports_its_progress_after_each_chunk(model, golden):
    seen, request = [], request_of(golden["prompt2"].tolist(), max_tokens=1)
    scheduler = Scheduler(model, model.new_pool(41), budget=20)
    list(Stream(scheduler, request, progress=lambda done, total: seen.append((done, total))))
    assert seen == [(20, 41), (40, 41), (41, 41)]


def test_prefill_waits_for_each_chunk_before_the_next(model, golden, monkeypatch):
    """On a lazy backend one graph of a long prompt would hold what every chunk computes until the end."""
    log, forward = [], model.forward
    monkeypatch.setattr(model, "forward", lambda batch: (log.append(batch.lengths), forward(batch))[1])
    monkeypatch.setattr(model.backend, "wait", lambda arrays: log.append("wait"))
    list(Stream(Scheduler(model, model.new_pool(41), budget=20), request_of(golden["prompt2"].tolist(), max_tokens=1)))
    assert log == [(20,), "wait", (20,), "wait", (1,), "wait"]  # the last one is for the token


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_there_is_one_pass_per_token_and_prefill_is_one_however_it_is_chunked(model, golden, chunk):
    metrics = Metrics()
    run(model, golden["prompt2"].tolist(), 5, metrics=metrics, chunk=chunk)
    assert len(metrics.passes) == 5


def test_without_a_cache_there_is_one_pass_per_token_too(model, golden):
    prompt = golden["prompt1"].tolist()
    stream = stream_of(model, prompt, Options(kv=False), max_tokens=5, text=Letters(), end_ids=())
    list(stream)
    assert len(stream.generation.metrics.passes) == 5


def test_no_pass_is_run_before_its_token_is_asked_for():
    script = Script([5, 6, 7])
    metrics = Metrics()
    ids = decode(script, [1, 2, 3], script.new_kv(9), Sampler(script.backend, Sampling(), [1, 2, 3]), metrics)
    assert script.passes == []
    assert next(ids) == 5
    assert script.passes == [[1, 2, 3]]
    assert next(ids) == 6
    assert script.passes == [[1, 2, 3], [5]]


def test_decode_says_so_where_the_room_ends(model):
    ids = decode(model, [1, 2], model.new_kv(3), Sampler(model.backend, Sampling(), []), Metrics())
    assert len(list(itertools.islice(ids, 2))) == 2
    with pytest.raises(CacheFullError):
        next(ids)


class Interrupted(BaseException):
    """As KeyboardInterrupt, but no debugger mistakes it for the user's."""


@pytest.mark.parametrize("at", ["blk.0.attn_q", "blk.1.attn_out", "blk.2.layer_out"])
def test_an_interrupted_pass_leaves_the_sequence_usable(model, golden, at):
    prompt = golden["prompt1"].tolist()
    kv = model.new_kv(len(prompt) + 4, page=2)
    prefill(model, prompt[:4], kv)

    def interrupt(name, _):
        if name == at:
            raise Interrupted

    original = model.backend
    model.run_on(tapped(original, interrupt))
    try:
        with pytest.raises(Interrupted):
            forward(model, SequenceInput([9, 9, 9], kv))
    finally:
        model.run_on(original)
    assert (kv.length, kv.pending) == (4, 0)
    after = prefill(model, prompt[4:], kv)
    whole = in_one_pass(model, prompt)
    assert np.linalg.norm(after - whole) <= 1e-6 * np.linalg.norm(whole)


# ---- how a run ends ----


def test_an_end_token_stops_and_is_in_the_ids_but_not_in_the_text():
    script, stream = scripted([0, 1, EOS, 2])
    assert "".join(stream) == "AB"
    result = stream.generation
    assert (result.text, result.token_ids, result.finish_reason) == ("AB", [0, 1, EOS], "stop")
    assert len(script.passes) == len(result.metrics.passes) == 3


def test_an_end_token_first_gives_no_text_and_one_pass():
    _, stream = scripted([EOS, 1])
    assert list(stream) == []
    result = stream.generation
    assert (result.text, result.token_ids, result.finish_reason) == ("", [EOS], "stop")
    assert len(result.metrics.passes) == 1


def test_an_end_token_at_the_cap_is_a_stop():
    _, stream = scripted([0, EOS], max_tokens=2)
    assert "".join(stream) == "A"
    assert stream.generation.finish_reason == "stop"


def test_ignore_eos_goes_on_past_it():
    _, stream = scripted([0, EOS, 2, 3], ignore_eos=True)
    text = "".join(stream)
    result = stream.generation
    assert (result.token_ids, result.finish_reason) == ([0, EOS, 2, 3], "length")
    assert text == result.text
    assert text[0] + text[-2:] == "ACD"


def test_the_cap_ends_a_run_by_length():
    script, stream = scripted([0, 1, 2, 3], max_tokens=3)
    assert "".join(stream) == "ABC"
    assert (stream.generation.token_ids, stream.generation.finish_reason) == ([0, 1, 2], "length")
    assert len(script.passes) == 3


def test_a_stop_string_ends_the_text_before_it_and_no_further_pass_runs():
    script, stream = scripted([0, 1, 2, 3, 4], stop=("CD",))
    assert "".join(stream) == "AB"
    result = stream.generation
    assert (result.text, result.token_ids, result.finish_reason) == ("AB", [0, 1, 2, 3], "stop")
    assert len(script.passes) == 4


def test_what_was_held_back_for_a_stop_string_comes_out_at_the_end():
    _, stream = scripted([0, 1, 2], stop=("CD",))
    assert "".join(stream) == "ABC"
    assert stream.generation.finish_reason == "length"
    _, stream = scripted([0, 2, EOS], stop=("CD",))
    assert "".join(stream) == "AC"
    assert stream.generation.finish_reason == "stop"


def test_a_stop_string_that_only_the_last_flush_completes_is_a_stop_too():
    _, stream = scripted([0x41, 0xC3], Bytes(), stop=("\ufffd",))
    assert "".join(stream) == "A"
    assert stream.generation.finish_reason == "stop"


def test_no_piece_is_empty_and_they_join_to_the_text():
    _, stream = scripted([0, 2, 1, 2, 3, 4], stop=("CDX",))
    pieces = list(stream)
    assert "" not in pieces
    assert "".join(pieces) == stream.generation.text == "ACBCDE"


def test_the_generation_so_far_grows_with_the_pieces():
    _, stream = scripted([0, 1, 2])
    assert stream.generation.finish_reason is None
    assert next(stream) == "A"
    early = stream.generation
    assert (early.text, early.token_ids, early.finish_reason) == ("A", [0], None)
    list(stream)
    assert (early.text, early.token_ids) == ("A", [0])
    assert len(early.metrics.passes) == 1, "a result that was taken early still changes"


def test_a_finished_stream_stays_finished():
    _, stream = scripted([0])
    assert list(stream) == ["A"]
    assert list(stream) == []
    with pytest.raises(StopIteration):
        next(stream)


@given(st.text(min_size=1, max_size=8))
@settings(max_examples=40)
def test_no_piece_holds_half_a_character(text):
    _, stream = scripted([*text.encode("utf-8", "ignore"), EOS], Bytes())
    pieces = list(stream)
    assert "".join(pieces) == text
    assert len(pieces) == len(text)


def test_a_character_cut_off_by_the_cap_is_replaced_not_broken():
    _, stream = scripted(["🙂".encode()[0], "🙂".encode()[1]], Bytes())
    assert list(stream) == ["\ufffd"]


def test_the_prompt_is_read_once_and_each_token_once():
    script, stream = scripted([0, 1, 2], prompt=(7, 8, 9))
    list(stream)
    assert script.passes == [[7, 8, 9], [0], [1]]


def test_without_a_cache_each_pass_reads_all_that_came_before():
    script, stream = scripted([0, 1, 2], prompt=(7, 8), kv=False)
    list(stream)
    assert script.passes == [[7, 8], [7, 8, 0], [7, 8, 0, 1]]
