"""On `metal` the bits of a row do not depend on how many rows a pass has, nor on pages: kernels run in the emulator."""

from __future__ import annotations

import dataclasses
import importlib
import logging
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kernels import emulator
from kernels.lab.run import prepare
from kernels.launch import counted, planned
from kernels.metal import attention
from kernels.metal.cases import numbers
from mlx_engine.backends.batch import KVSpan, KVView, StateView
from mlx_engine.backends.metal.backend import MetalBackend
from mlx_engine.backends.parameters import DeltaRule, Linear, RMSNorm, Scores, StateSpace
from mlx_engine.cache import SequenceInput
from mlx_engine.loop.forward import forward
from mlx_engine.quant import BY_NAME
from mlx_engine.quant.weight import Weight
from tests.contract.check import EMULATED, load
from tests.golden.goldens import DATA

pytestmark = pytest.mark.skipif(emulator.unavailable() is not None, reason=str(emulator.unavailable()))

# Outputs and inputs, with the numbers of rows of the passes: a step of 128 columns and a part of one; two segments,
# with a part of a step in each, which take the emulator ten times as long.
SHAPES = ((24, 160, (2, 3, 5, 8, 9, 16, 17, 33)), (20, 2144, (3, 9, 17)))


class Blocks:
    """What a layer of this width calls, each as a function of its rows alone."""

    def __init__(self, be: MetalBackend, n: int, k: int, lengths: tuple[int, ...]) -> None:
        self.be, self.lengths, rng = be, lengths, np.random.default_rng(k)

        def weight(name: str) -> Any:
            return be.prepare(Weight.pack("w", rng.standard_normal((n, k)) * k**-0.5, BY_NAME[name]))

        self.q, self.k, self.v = (Linear("w", weight("Q8_0")) for _ in range(3))
        self.biased = Linear("w", weight("Q8_0"), numbers(rng, (n,)))
        # One that has no kernel in its own format, and one that is narrower than a load is long.
        self.floats, self.narrow = Linear("w", weight("F16"), numbers(rng, (n,))), Linear("w", numbers(rng, (n, 20)))
        self.norm = RMSNorm("n", numbers(rng, (k,), mean=1), 1e-6)
        self.post = RMSNorm("n", numbers(rng, (n,), mean=1), 1e-6)
        self.rows, self.residual = numbers(rng, (max(lengths), k)), numbers(rng, (n,))

    def residuals(self, x: mx.array) -> mx.array:
        return mx.broadcast_to(self.residual, (len(x), len(self.residual))) + x[:, :1]

    def run_norm_project(self, x: mx.array) -> mx.array:
        return mx.concatenate(self.be.norm_project(x, self.norm, [self.q, self.k, self.v]), axis=1)

    def run_norm_project_of_one(self, x: mx.array) -> mx.array:
        return self.be.norm_project(x, self.norm, [self.q])[0]

    def run_norm_project_of_mixed(self, x: mx.array) -> mx.array:
        return mx.concatenate(self.be.norm_project(x, self.norm, [self.q, self.biased, self.floats]), axis=1)

    def run_norm_gate_up(self, x: mx.array) -> mx.array:
        return self.be.norm_gate_up(x, self.norm, self.q, self.k, "silu")

    def run_norm_gate_up_gelu(self, x: mx.array) -> mx.array:
        return self.be.norm_gate_up(x, self.norm, self.q, self.k, "gelu")

    def run_norm_gate_up_of_floats(self, x: mx.array) -> mx.array:
        return self.be.norm_gate_up(x, self.norm, self.floats, self.k, "silu")

    def run_norm_up(self, x: mx.array) -> mx.array:
        return self.be.norm_up(x, self.norm, self.biased, "gelu")

    def run_project_add(self, x: mx.array) -> mx.array:
        return self.be.project_add(x, self.q, self.residuals(x))

    def run_project_norm_add(self, x: mx.array) -> mx.array:
        return self.be.project_norm_add(x, self.q, self.post, self.residuals(x))

    def run_norm_head(self, x: mx.array) -> mx.array:
        return self.be.norm_head(x, self.norm, self.q)

    def run_linear(self, x: mx.array) -> mx.array:
        return self.be.linear(x, self.q)

    def run_linear_of_floats(self, x: mx.array) -> mx.array:
        return self.be.linear(x, self.floats)

    def run_linear_of_narrow_rows(self, x: mx.array) -> mx.array:
        return self.be.linear(x[:, :20], self.narrow)

    def run_rms_norm(self, x: mx.array) -> mx.array:
        return self.be.rms_norm(x, self.norm.weight, 1e-6)

    def run_layer_norm(self, x: mx.array) -> mx.array:
        return self.be.layer_norm(x, self.norm.weight, self.norm.weight, 1e-6)

    def run_silu(self, x: mx.array) -> mx.array:
        return self.be.silu(x)

    def run_gelu(self, x: mx.array) -> mx.array:
        return self.be.gelu(x)


BLOCKS = [name.removeprefix("run_") for name in vars(Blocks) if name.startswith("run_")]


@pytest.fixture(scope="module")
def be() -> MetalBackend:
    return MetalBackend("emulator")


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def blocks(request: pytest.FixtureRequest, be: MetalBackend) -> Blocks:
    """All kernels that the blocks launch, compiled together."""
    made = Blocks(be, *request.param)
    with be.session(), planned() as launches:
        for name in BLOCKS:
            for n in (1, *made.lengths):
                getattr(made, f"run_{name}")(made.rows[:n])
    for kernel in {launch.kernel for launch in launches}:
        prepare([launch for launch in launches if launch.kernel == kernel], ["spaces"])
    return made


@pytest.mark.some(2)
@pytest.mark.parametrize("name", BLOCKS)
def test_a_row_has_the_same_bits_in_every_pass(blocks: Blocks, name: str):
    """Each row of every pass is compared with the same row alone, and one row at every place with itself."""
    be, run, most = blocks.be, getattr(blocks, f"run_{name}"), max(blocks.lengths)
    with be.session():
        alone = np.concatenate([be.host(run(blocks.rows[i : i + 1])) for i in range(most)])
        assert len(np.unique(alone[:, 0])) == len(alone)
        for n in blocks.lengths:
            np.testing.assert_array_equal(be.host(run(blocks.rows[:n])), alone[:n], err_msg=f"{n} rows")
        same = mx.broadcast_to(blocks.rows[2:3], (most, blocks.rows.shape[1]))
        np.testing.assert_array_equal(be.host(run(same)), np.repeat(alone[2:3], most, axis=0))
    assert be.kernels.refused == {}


# ---- attention ----

H, G, E, SEQUENCES = 4, 2, 32, (1, 40, 300)


class Paged:
    """Keys and values of some sequences, laid into pages of any size in any order."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.kv = [rng.standard_normal((2, G, n, E)).astype(np.float32) for n in SEQUENCES]
        self.q = [rng.standard_normal((n, H, E)).astype(np.float32) for n in SEQUENCES]

    def arguments(
        self, which: Sequence[int], rows: Sequence[tuple[int, int]], page: int, order: np.random.Generator
    ) -> tuple[mx.array, ...]:
        """What the kernel is given for rows (sequence, position), when only the sequences `which` are held."""
        held = [-(-SEQUENCES[b] // page) for b in which]
        starts = order.permutation(sum(held) + 3) * page
        store = np.full((2, G, len(starts) * page, E), np.nan, np.float32)
        pages = np.full((len(which), max(held) + int(order.integers(3))), -1, np.int32)
        for i, b in enumerate(which):
            pages[i, : held[i]], starts = starts[: held[i]], starts[held[i] :]
            p = np.arange(SEQUENCES[b])
            store[:, :, pages[i, p // page] + p % page] = self.kv[b]
        q = np.stack([self.q[b][p] for b, p in rows])
        owner = np.array([which.index(b) for b, _ in rows], np.int32)
        return tuple(map(mx.array, (q, store, pages, owner, np.array([p for _, p in rows], np.int32))))


@pytest.mark.some(1)
@pytest.mark.parametrize("window", [0, 1, 45])
@pytest.mark.parametrize("page", [16, 64, 256])
def test_attention_of_a_row_has_the_same_bits_in_every_pass(be: MetalBackend, page: int, window: int):
    """Rows alone in pages of 16 that follow each other, and many at once from several sequences in shuffled pages."""
    made, scale, order = Paged(), E**-0.5, np.random.default_rng(page)
    # Pages of 256 with a soft cap and sinks, too.
    softcap, sinks = (2.0, mx.array([0.5, -60.0, 3.0, 60.0])) if page == 256 else (None, None)
    scores = Scores(scale, softcap, sinks)
    rows = [(b, p) for b, n in enumerate(SEQUENCES) for p in sorted({0, 1, 31, 32, 39, 255, 256, 299}) if p < n]
    with be.session():
        alone = {}
        for b, p in rows:
            given = made.arguments([b], [(b, p)], 16, order)
            alone[b, p] = be.host(be.kernels.attention(*given, 16, window, scores))[0]
        for n in (1, 2, 5, 9, len(rows)):
            some = [rows[i] for i in order.permutation(len(rows))[:n]]
            given = made.arguments([2, 0, 1], some, page, order)
            found = be.host(be.kernels.attention(*given, page, window, scores))
            np.testing.assert_array_equal(found, np.stack([alone[row] for row in some]))
            wanted = attention.reference(*given, page, window, scale, softcap, sinks).value
            assert np.linalg.norm(found - wanted) < 1e-6 * np.linalg.norm(wanted)


def test_keys_behind_a_row_and_before_its_window_do_not_matter(be: MetalBackend):
    """A chunk of a prompt gives the rows of the whole prompt: what is written later, or is no number, is not read."""
    made, order = Paged(), np.random.default_rng(1)
    rows, window = [(2, 190), (2, 100)], 60
    given = list(made.arguments([2], rows, 16, order))
    store, pages = np.array(given[1]), np.array(given[2])
    for p in [*range(100 - window + 1), *range(191, 300)]:
        store[:, :, pages[0, p // 16] + p % 16] = np.nan
    pages[0, : (100 - window + 1) // 16], pages[0, 192 // 16 :] = -1, -1
    with be.session():
        whole = be.host(be.kernels.attention(*given, 16, window, Scores(0.2)))
        given[1:3] = mx.array(store), mx.array(pages)
        np.testing.assert_array_equal(be.host(be.kernels.attention(*given, 16, window, Scores(0.2))), whole)


def test_attention_is_mlx_s_for_other_heads_and_where_the_kernel_is_refused(monkeypatch, caplog):
    module = importlib.import_module("kernels.metal.attention")
    monkeypatch.setattr(module, "KERNEL", dataclasses.replace(module.KERNEL, source="this is no kernel;"))
    be, order = MetalBackend("emulator"), np.random.default_rng(2)
    q, store, pages, owner, position = Paged().arguments([1], [(1, 39)], 16, order)
    span = KVSpan(np.array(pages[0]), 40, 1)
    with be.session(), caplog.at_level(logging.WARNING), counted() as launches:
        narrow = be.attention(q[:, :, :12], KVView(store[:, :, :, :12], 16, [span]), [1], Scores(1.0))
        assert be.kernels.refused == {}
        for _ in range(2):
            found = be.host(be.attention(q, KVView(store, 16, [span]), [1], Scores(1.0)))
        assert launches == {"attention": 1}  # which was tried
    assert narrow.shape == (1, H, 12)
    wanted = attention.reference(q, store, pages, owner, position, 16, 0, 1.0).value
    assert np.linalg.norm(found - wanted) < 2e-6 * np.linalg.norm(wanted)
    assert list(be.kernels.refused) == ["attention"]
    assert len(caplog.records) == 1


def test_the_first_attention_makes_no_second_store(be: MetalBackend):
    store, page = mx.zeros((2, 1, 100_000, 8)), 128
    mx.eval(store)
    tables = mx.zeros((1, 1), mx.int32), mx.zeros((1,), mx.int32), mx.zeros((1,), mx.int32)
    with be.session():
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        be.wait(be.kernels.attention(mx.ones((1, 1, 8)), store, *tables, page, 0, Scores(1.0)))
    assert mx.get_peak_memory() - before < store.nbytes // 4


@pytest.mark.parametrize("operation", ["delta_rule", "state_space"])
def test_recurrent_states_have_the_same_bits_in_any_passes(be: MetalBackend, operation: str):
    rng, T, H, E = np.random.default_rng(5), 9, 4, 16
    rate, steps = be.array(-np.exp(numbers(rng, (H,)))), be.array(numbers(rng, (T, H)))
    bias, skip = be.array(numbers(rng, (H,))), be.array(numbers(rng, (H,)))
    x = be.array(numbers(rng, (T, 2 * 2 * E + H * E)))

    def run(cuts: Sequence[int]) -> list[np.ndarray]:
        store, at, outs = be.state_empty((H, E, E), 2), 0, []
        for i, n in enumerate(cuts):
            state, rows = StateView(store, np.array([[0, n, i % 2, (i + 1) % 2]])), slice(at, at + n)
            if operation == "delta_rule":
                rule = DeltaRule("r", rate, bias, 2, E, H, E)
                outs.append(be.delta_rule(x[rows], steps[rows], steps[rows], rule, state))
            else:
                outs.append(be.state_space(x[rows], steps[rows], StateSpace("s", rate, bias, skip, H, E, 2, E), state))
            at += n
        return [be.host(mx.concatenate(outs)), be.state_read(store, len(cuts) % 2)]

    with be.session():
        want = run([T])
        assert np.isfinite(want[0]).all()
        assert want[0].any()
        assert want[1].any()
        for cuts in ([1] * T, [1, 3, 5], [4, 4, 1]):
            for found, expected in zip(run(cuts), want, strict=True):
                np.testing.assert_array_equal(found, expected)


# ---- a whole model ----


SLOW = [
    pytest.param(f"{name}-micro/hf", marks=pytest.mark.slow) for name in ("gemma2", "gemma4moe", "granite4h", "qwen3_5")
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-micro/model-q8_0.gguf", "gemma4e-micro/hf", *SLOW])
def test_logits_have_the_same_bits_in_any_batch(name: str):
    """Alone in one pass, in chunks, and beside another sequence, in pages of any size."""
    engine = load(EMULATED, DATA / name)
    model, be = engine.model, engine.backend
    ids, other = [5, 9, 1, 2, 44, 8, 3, 31, 7, 20, 11], [3, 3, 40, 6]
    want = np.asarray(engine.logits(ids))
    with be.session():
        for page, cuts in ((16, [7, 1, 1, 1, 1]), (4, [2, 9]), (64, [3, 5, 3])):
            pool = model.new_pool(64, n_sequences=2, page=page)
            kv, beside, at = pool.sequence(), pool.sequence(), 0
            for n, m in zip(cuts, [2, 1, 1, *[0] * len(cuts)], strict=False):
                new = [SequenceInput(ids[at : at + n], kv, wanted=None)]
                if m:
                    new.insert(0, SequenceInput(other[beside.length : beside.length + m], beside, wanted=0))
                found = be.host(forward(model, *new))
                np.testing.assert_array_equal(found, want[at : at + n])
                at += n
