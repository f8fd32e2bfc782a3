"""States of a fixed size: passes that fail change nothing, forks and prefixes share states, and slots come back."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from mlx_engine.backends import create_backend
from mlx_engine.backends.numpy.simd import SimdBackend
from mlx_engine.cache import KVLayer, KVPool, KVSequence, PrefixCache, SequenceInput, StateLayer, begin
from mlx_engine.cache.pool import CacheSize, pool_nbytes
from mlx_engine.cache.states import SLOTS_PER_SEQUENCE
from mlx_engine.commands.generate import kv_cache
from mlx_engine.errors import CacheFullError
from mlx_engine.loop.forward import forward
from mlx_engine.loop.memory import Traffic
from mlx_engine.weights.model import Model
from tests.contract.state_cases import delta_net
from tests.random_models import VOCAB, random_model

IDS = [int(i) for i in np.random.default_rng(3).integers(0, VOCAB, 80)]
LAYERS = [StateLayer(((2, 4), (3, 5))), KVLayer(1, 2), StateLayer(((2, 4), (3, 5)))]
ARCHITECTURES = ("lfm2", "qwen35", "qwen35moe")


def pool_of(n_sequences: int = 2, page: int = 4, **options: object) -> KVPool:
    return KVPool(SimdBackend(), LAYERS, 64, n_sequences=n_sequences, page=page, **options)  # type: ignore[arg-type]


@cache
def model(architecture: str) -> Model:
    return random_model(architecture, "Q8_0", create_backend("simd"))


def logits(of: Model, kv: KVSequence, ids: list[int]) -> np.ndarray:
    with of.backend.session():
        return np.array(of.backend.host(forward(of, SequenceInput(ids, kv, wanted=None))))


# ---- slots ----


def test_the_state_does_not_grow():
    """Pages do, the slots do not: one committed state, whatever the length."""
    pool = pool_of()
    kv, before = pool.sequence(), pool.states.n_free
    free = set()
    for _ in range(60):
        kv.begin(1)
        kv.commit(1)
        free.add(pool.states.n_free)
    assert free == {before - 1}
    kv.close()
    assert pool.states.n_free == before == 2 * SLOTS_PER_SEQUENCE


def test_a_pass_reads_one_slot_and_writes_another():
    kv = pool_of().sequence()
    batch = begin([SequenceInput([1, 2, 3], kv)])
    ((first, n, source, target),) = batch.runs.tolist()
    assert (first, n, source) == (0, 3, 0)  # the zeros
    batch.commit()
    assert kv.state.committed == (3, target)
    ahead = [begin([SequenceInput([4], kv)]), begin([SequenceInput([5], kv)])]
    (_, _, *one), (_, _, *two) = (step.runs[0].tolist() for step in ahead)
    assert one[0] == target
    assert two[0] == one[1]
    assert len({target, *one, *two}) == 3
    ahead[1].roll_back()
    ahead[0].roll_back()
    assert kv.state.committed == (3, target) == kv.state.newest


def test_a_pass_without_choices_may_be_committed_before_an_older_one():
    """As `loop/runner.py` does with the chunks of a prompt: only numbers of tokens are known."""
    pool = pool_of()
    kv = pool.sequence()
    begin([SequenceInput([1] * 5, kv)])
    begin([SequenceInput([1] * 3, kv)])
    kv.commit(3)
    assert kv.state.committed.length == 0  # no state after three tokens was computed
    kv.commit(5)
    assert [state.length for state in kv.state.snapshots(8)] == [5, 8]
    kv.begin(1)
    kv.commit(1)
    assert pool.states.n_free == 2 * SLOTS_PER_SEQUENCE - 1


def test_a_pass_of_which_a_part_was_rolled_back_cannot_be_continued():
    kv = pool_of().sequence()
    begin([SequenceInput([1, 2, 3], kv)])
    kv.roll_back(1)
    kv.commit(2)
    with pytest.raises(ValueError, match="expected the state after 2 tokens, found that after 0"):
        kv.begin(1)


def test_too_few_slots_leave_everything_as_it_was():
    pool = pool_of(n_sequences=1)
    kv = pool.sequence()
    for _ in range(SLOTS_PER_SEQUENCE):
        kv.begin(2)
    pages = kv.n_pages
    with pytest.raises(CacheFullError):
        kv.begin(9)
    assert (kv.pending, kv.n_pages, pool.states.n_free) == (2 * SLOTS_PER_SEQUENCE, pages, 0)
    kv.roll_back(kv.pending)
    assert pool.states.n_free == SLOTS_PER_SEQUENCE


def test_a_state_cannot_go_back_and_is_no_other_prefix_s():
    pool = pool_of()
    kv, twin = pool.sequence(), pool.sequence()
    kv.begin(5)
    kv.commit(5)
    with pytest.raises(ValueError, match="cannot truncate to 3 tokens: the state after them"):
        kv.truncate(3)
    with pytest.raises(ValueError, match="adopt: expected the state after 4 tokens"):
        twin.adopt(kv.lend(4), 4, kv.state.committed)
    with pytest.raises(ValueError, match="give_back: expected a slot that is in use"):
        pool.states.give_back(kv.state.committed.slot + 1)


def test_a_fork_shares_the_state():
    pool = pool_of()
    kv = pool.sequence()
    kv.begin(5)
    kv.commit(5)
    twin = kv.fork()
    slot = kv.state.committed.slot
    assert twin.state.committed == kv.state.committed
    assert pool.states.references(slot) == 2
    kv.begin(1)
    kv.commit(1)
    assert (pool.states.references(slot), twin.state.committed.slot) == (1, slot)
    kv.close()
    twin.close()
    assert pool.states.n_free == 2 * SLOTS_PER_SEQUENCE


def test_states_count_in_every_report_of_memory():
    each, slots = 2 * (2 * 4 + 3 * 5) * 4, 1 + 2 * SLOTS_PER_SEQUENCE
    pool = pool_of()
    assert pool.states.nbytes_each == each
    assert pool.nbytes == pool_nbytes(LAYERS, 64, 2, page=4) == pool.n_pages[0] * pool.page_nbytes[0] + slots * each
    short, long = CacheSize(LAYERS, 10), CacheSize(LAYERS, 50)
    assert short.state == long.state == each
    assert long.whole - short.whole == 40 * 2 * 2 * 4
    assert kv_cache(long).endswith("(1 layers x 1 head x 50 x 2 x f32 x 2); states of 2 layers: 184 B, whatever "
                                   "the number of tokens")  # fmt: skip
    alone = kv_cache(CacheSize([layer for layer in LAYERS if isinstance(layer, StateLayer)], 50))
    assert alone == "KV cache: none; states of 2 layers: 184 B, whatever the number of tokens"
    of = model("qwen35")
    traffic = Traffic.of(of, of.new_pool(8))
    assert traffic.state == sum(layer.nbytes for layer in of.kv_layers if isinstance(layer, StateLayer)) > 0


# ---- models ----


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_passes_that_are_rolled_back_leave_no_trace(architecture: str):
    of = model(architecture)
    want = logits(of, of.new_kv(80), IDS)
    kv = of.new_pool(160, n_sequences=2).sequence()
    np.testing.assert_array_equal(logits(of, kv, IDS[:30]), want[:30])
    with of.backend.session():
        for wrong in ([7] * 12, [9]):
            batch = begin([SequenceInput(wrong, kv)])
            of.forward(batch)
            batch.roll_back()
    np.testing.assert_array_equal(logits(of, kv, IDS[30:]), want[30:])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_forks_continue_in_their_own_ways(architecture: str):
    of = model(architecture)
    other = [*IDS[:40], *IDS[60:80]]
    want = [logits(of, of.new_kv(80), ids)[40:60] for ids in (IDS, other)]
    kv = of.new_pool(240, n_sequences=3).sequence()
    logits(of, kv, IDS[:40])
    twin = kv.fork()
    np.testing.assert_array_equal(logits(of, twin, other[40:]), want[1])
    np.testing.assert_array_equal(logits(of, kv, IDS[40:60]), want[0])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("page", [8, 64])
def test_a_prefix_is_reused_where_its_state_is_held(architecture: str, page: int):
    of = model(architecture)
    want = logits(of, of.new_kv(80), IDS)
    pool = of.new_pool(400, n_sequences=4, page=page)
    prefixes, kv = PrefixCache(pool), pool.sequence()
    logits(of, kv, IDS[:70])
    prefixes.insert(IDS[:70], kv)
    inside = 69 // page * page
    for n, length in ((80, 70), (70, 70), (69, inside), (inside, inside), (inside - 1, 0)):
        other = pool.sequence()
        match = prefixes.attach(other, IDS[:n])
        assert (match.length, match.agreeing) == (length, min(n, 70))
        assert match.end == ("state" if length < min(n, 70) else "new" if n > 70 else "whole")
        np.testing.assert_array_equal(logits(of, other, IDS[length:]), want[length:])
        other.close()


def test_a_prefix_that_branches_keeps_its_states():
    pool = pool_of(n_sequences=3)
    prefixes = PrefixCache(pool)
    for ids in ([*range(9)], [*range(6), 50, 51], [*range(9), 60, 61, 62]):
        kv = pool.sequence()
        done = prefixes.attach(kv, ids[:-1]).length
        kv.begin(len(ids) - done)
        kv.commit(len(ids) - done)
        prefixes.insert(ids, kv)
        kv.close()
    lengths = {n: prefixes.match([*range(9), 60, 61, 62][:n]).length for n in (3, 4, 6, 8, 9, 12)}
    assert lengths == {3: 0, 4: 4, 6: 4, 8: 8, 9: 9, 12: 12}
    assert prefixes.match([*range(6), 50, 51]).length == 8
    assert prefixes.nbytes == sum(prefixes.held_pages(0) * n for n in pool.page_nbytes) + 5 * pool.states.nbytes_each
    prefixes.clear()
    assert (prefixes.n_states, pool.states.n_free) == (0, pool.states.n_slots - 1)


def held(pool: KVPool, prefixes: PrefixCache, ids: list[int]) -> KVSequence:
    """Return a sequence of these tokens, which the cache holds too."""
    kv = pool.sequence()
    done = prefixes.attach(kv, ids[:-1]).length
    kv.begin(len(ids) - done)
    kv.commit(len(ids) - done)
    prefixes.insert(ids, kv)
    return kv


def test_a_node_that_is_split_leaves_its_states_on_both_sides():
    pool = pool_of(n_sequences=3)
    prefixes = PrefixCache(pool)
    for ids in ([*range(13)], [*range(12), 50]):
        held(pool, prefixes, ids).close()
    assert prefixes.n_nodes == 3
    assert [prefixes.match([*range(n), 99]).length for n in (11, 12)] == [0, 12]
    assert prefixes.match([*range(13)]).length == prefixes.match([*range(12), 50]).length == 13


def test_states_in_use_stay_in_the_cache_when_slots_run_out():
    pool = pool_of(n_sequences=2)
    prefixes = PrefixCache(pool)
    running = held(pool, prefixes, [10, *range(5)])
    held(pool, prefixes, [20, *range(5)]).close()
    kv = pool.sequence()
    for _ in range(6):
        kv.begin(1)
    assert [prefixes.match([of, *range(4)]).length for of in (10, 20)] == [4, 0]
    kv.roll_back(6)
    running.close()


def test_states_leave_when_slots_run_out():
    """First those inside a prompt, then the prefix that was used least recently."""
    pool = pool_of(n_sequences=1)
    prefixes, kept = PrefixCache(pool), []
    for first in (10, 20, 30):
        kv = pool.sequence()
        kv.begin(6)
        kv.commit(6)
        prefixes.insert([first, *range(5)], kv)
        kv.close()
        kept.append([prefixes.match([of, *range(5)]).length for of in (10, 20, 30)])
    assert kept == [[6, 0, 0], [6, 6, 0], [6, 6, 6]]
    assert prefixes.match([30, 0, 1, 2, 3]).length == 4
    kv = pool.sequence()
    for _ in range(3):
        kv.begin(1)
    assert [prefixes.match([of, *range(5)]).length for of in (10, 20, 30)] == [0, 0, 6]
    kv.roll_back(3)


def test_a_bound_in_bytes_counts_states():
    pool = pool_of(n_sequences=3)
    prefixes = PrefixCache(pool, max_nbytes=2 * pool.page_nbytes[0] + 2 * pool.states.nbytes_each)
    for first in (10, 20):
        kv = pool.sequence()
        kv.begin(6)
        kv.commit(6)
        prefixes.insert([first, *range(5)], kv)
        kv.close()
        assert prefixes.nbytes <= prefixes.max_nbytes
    assert [prefixes.match([of, *range(5)]).length for of in (10, 20)] == [0, 6]


def test_states_at_any_address_have_the_same_bits(monkeypatch: pytest.MonkeyPatch):
    """The kernel of the delta rule writes whole cache lines if the states begin at one."""
    pytest.importorskip("numba")
    be, case = create_backend("parallel", threads=1), delta_net(2, 32, 4, 80)
    assert type(be).__name__ == "CompiledBackend"
    offset = 4

    def state_empty(shape: tuple[int, ...], n_slots: int) -> np.ndarray:
        n = n_slots * int(np.prod(shape))
        memory = np.zeros(n + 32, dtype=np.float32)
        first = -memory.ctypes.data % 64 // 4 + offset
        return memory[first : first + n].reshape(n_slots, *shape)

    def results() -> list[np.ndarray]:
        with be.session():
            found = list(case(be, np.random.default_rng(3)))
        of = random_model("qwen35", "Q8_0", be)
        kv = of.new_kv(80)
        return [*found, logits(of, kv, IDS[:70]), logits(of, kv, IDS[70:73])]

    want = results()
    monkeypatch.setattr(be, "state_empty", state_empty)
    for a, b in zip(want, results(), strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.isfinite(a).all()
        assert a.any()
