"""Which rows and columns each rank holds: a partition of every matrix, on borders of blocks, or a refusal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from mlx_engine.backends import create_backend
from mlx_engine.distributed.tensor import COLUMNS, Heads, Pieces, Slices, Vocabulary, sliced
from mlx_engine.errors import NotShardableError
from mlx_engine.quant import BY_NAME
from mlx_engine.quant.group_weight import GroupWeight, Parts
from mlx_engine.quant.groups import affine
from mlx_engine.quant.weight import Weight
from mlx_engine.weights.conversion import Conversion
from mlx_engine.weights.model import Planned, plan_model
from mlx_engine.weights.outline import outlined
from mlx_engine.weights.plan import Tensor
from tests.random_blocks import random_blocks
from tests.random_models import SETTINGS, random_checkpoint


def planned(architecture: str, type_name: str = "F32", quant: str = "keep", **changes: Any) -> Planned:
    return plan_model(random_checkpoint(architecture, type_name, **changes), Conversion(quant))


def held(slices: Slices, name: str, size: int) -> list[int]:
    """Return the rows or columns of all ranks, rank by rank."""
    found = [slices.ranges(name, rank, size) for rank in range(size)]
    return [i for of in found if of is not None for first, last in of[1] for i in range(first, last)]


# Latent attention and Mamba2 are not cut.
WHOLE = ("deepseek2", "falcon-h1", "granitehybrid", "mamba2", "minicpm3", "mistral4", "nemotron_h", "nemotron_h_moe")


@pytest.mark.some(7)
@pytest.mark.parametrize("architecture", [name for name in SETTINGS if name not in WHOLE])
def test_every_row_and_column_is_on_one_rank(architecture: str):
    plan = planned(architecture)
    slices = Slices.of(plan)
    slices.check(2)
    cut = [name for name in plan.tensors if slices.ranges(name, 0, 2) is not None]
    assert {"token_embd.weight", "blk.1.attn_output.weight", "blk.1.attn_q.weight"} <= set(cut)
    for name in cut:
        # Both ranks have the only KV head.
        is_shared = plan.config.n_kv_heads == 1 and ("attn_k" in name or "attn_v" in name)
        found = set(held(slices, name, 2)) if is_shared else held(slices, name, 2)
        assert sorted(found) == list(range(plan.tensors[name].shape[slices.cuts[name].axis])), name


@pytest.mark.some(2)
@pytest.mark.parametrize("architecture", WHOLE)
def test_models_that_are_not_cut_are_refused(architecture: str):
    with pytest.raises(NotShardableError, match="--shard pipeline"):
        Slices.of(planned(architecture)).check(2)


def test_a_rank_has_the_query_heads_that_read_its_kv_heads():
    heads = Heads(n_heads=12, n_kv_heads=4, head_dim=8, block=1)
    assert [heads.queries(rank, 2) for rank in range(2)] == [(0, 6), (6, 12)]
    assert [heads.keys(rank, 2) for rank in range(2)] == [(0, 2), (2, 4)]
    # More ranks than KV heads: a copy of each KV head on two ranks or four.
    shared = Heads(n_heads=8, n_kv_heads=2, head_dim=8, block=1)
    assert [shared.queries(rank, 4) for rank in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [shared.keys(rank, 4) for rank in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]


@pytest.mark.parametrize(
    ("heads", "fitting"),
    [
        (Heads(8, 8, 64, block=1), [1, 2, 3, 4, 8]),
        (Heads(6, 3, 64, block=1), [1, 3, 6]),  # two ranks would have one and two KV heads
        (Heads(8, 1, 64, block=1), [1, 2, 4, 8]),
        (Heads(6, 2, 64, block=1), [1, 2, 6]),  # four ranks cannot share three queries of a KV head
        (Heads(8, 8, 64, block=256), [1, 2]),  # four heads fill a block
        (Heads(8, 2, 128, block=256), [1, 2, 4]),
        (Heads(8, 4, 64, block=1, equal=True), [1, 2, 4, 8]),
    ],
)
def test_numbers_of_ranks_that_fit_the_heads(heads: Heads, fitting: list[int]):
    assert [size for size in range(1, 10) if heads.fits(size)] == fitting


def test_blocks_may_be_shared_a_little_unevenly():
    odd = Pieces(35, (256,), "")
    assert odd.fits(2)
    assert [odd.ranges(rank, 2) for rank in range(2)] == [((0, 17 * 256),), ((17 * 256, 35 * 256),)]
    assert not Pieces(3, (256,), "").fits(2)
    assert Pieces(3, (256,), "").fits(3)


def test_sections_are_cut_alike():
    """Queries, keys and values of a delta net: value head h reads key head h % 2."""
    channels = Pieces(2, (4, 4, 8, 8), "")
    assert channels.ranges(0, 2) == ((0, 4), (8, 12), (16, 24), (32, 40))
    assert channels.ranges(1, 2) == ((4, 8), (12, 16), (24, 32), (40, 48))


def test_the_last_rank_may_have_fewer_tokens():
    assert [Vocabulary(10).ranges(rank, 4) for rank in range(4)] == [((0, 3),), ((3, 6),), ((6, 9),), ((9, 10),)]
    assert not Vocabulary(5).fits(4)  # three ranks have them all


# ---- bytes ----


@pytest.mark.parametrize("type_name", ["F32", "F16", "Q8_0", "Q4_K"])
@pytest.mark.parametrize(
    ("axis", "ranges"),
    [(0, ((1, 3),)), (0, ((0, 1), (3, 5))), (1, ((256, 768),)), (1, ((0, 256), (768, 1024)))],
)
def test_a_slice_has_the_values_of_the_whole(type_name: str, axis: int, ranges: tuple[tuple[int, int], ...]):
    rng = np.random.default_rng(4)
    written = type_name != "Q4_K"
    whole = (
        Weight.pack("w", rng.standard_normal((5, 1024)), BY_NAME[type_name])
        if written
        else random_blocks(rng, "w", type_name, 5, 1024, 1.0)
    )
    cut, values = whole.cut(axis, ranges), whole.dequantize()
    expected = np.concatenate([values[a:b] if axis == 0 else values[:, a:b] for a, b in ranges], axis=axis)
    np.testing.assert_array_equal(cut.dequantize(), expected)
    assert cut.nbytes == cut.data.nbytes
    assert np.shares_memory(cut.data, whole.data) == (axis == 0 and len(ranges) == 1)


@pytest.mark.parametrize("ranges", [((0, 100),), ((32, 2048),), ((64, 64),), ()])
def test_no_slice_ends_inside_a_block_or_outside(ranges: tuple[tuple[int, int], ...]):
    whole = Weight.pack("w", np.ones((2, 1024)), BY_NAME["Q8_0"])
    with pytest.raises(ValueError, match="w: expected"):
        whole.cut(1, ranges)


def test_a_slice_of_parts_makes_no_blocks():
    rng, type_ = np.random.default_rng(5), affine(4, 64, "F16")
    scales, biases = (rng.standard_normal((12, 1)).astype(np.float16).view(np.uint8) for _ in range(2))
    whole = GroupWeight("w", (3, 256), type_, Parts(rng.integers(0, 256, (12, 32), dtype=np.uint8), scales, biases))
    columns, rows = whole.cut(1, ((64, 192),)), whole.cut(0, ((1, 3),))
    assert "data" not in vars(whole)
    np.testing.assert_array_equal(columns.dequantize(), whole.dequantize()[:, 64:192])
    np.testing.assert_array_equal(rows.dequantize(), whole.dequantize()[1:])
    assert np.shares_memory(rows.parts.quants, whole.parts.quants)


@pytest.mark.some(2)
@pytest.mark.parametrize("architecture", ["llama", "qwen3moe", "qwen35", "gpt2", "gemma3"])
def test_two_ranks_have_little_more_than_half_of_the_weights(architecture: str):
    plan = planned(architecture, "Q8_0")
    whole = outlined(plan, create_backend("simd")).sizes
    shards = [outlined(sliced(plan, rank, 2), create_backend("simd")).sizes for rank in range(2)]
    assert max(shard.nbytes for shard in shards) <= 0.6 * whole.nbytes


def test_one_rank_alone_has_the_bias_of_a_sum():
    plan = planned("gpt2")
    for rank in range(2):
        own = sliced(plan, rank, 2).slices
        assert own is not None
        assert own.has("blk.0.ffn_down.bias") == own.has("blk.0.attn_output.bias") == (rank == 0)
        assert own.has("blk.0.ffn_up.bias")
        assert own.is_partial("blk.0.ffn_down")
        assert not own.is_partial("blk.0.ffn_up")


# ---- refusals ----


@pytest.mark.parametrize(
    ("architecture", "type_name", "options", "size", "message"),
    [
        (
            "qwen3", "F32", {"attention__head_count_kv": 1, "attention__head_count": 3}, 2,
            "random: blk.0.attn_output.weight: expected sizes that 2 ranks can share, found 3 query heads and 1 KV "
            "heads of 64; possible with 3 ranks",
        ),
        (
            "qwen3", "Q4_K", {"attention__key_length": 128, "attention__value_length": 128,
                              "feed_forward_length": 768}, 2,
            "random: blk.0.ffn_down.weight: expected sizes that 2 ranks can share, found 768 columns in blocks of 256; "
            "no number of ranks works",
        ),
        ("qwen35", "F32", {}, 4, "found 2 key heads of the delta rule in groups of 1; possible with 2 ranks"),
        ("llama", "F32", {}, 200, "ranks; --shard pipeline cuts between layers"),
    ],
)  # fmt: skip
def test_sizes_that_ranks_cannot_share(
    architecture: str, type_name: str, options: Mapping[str, Any], size: int, message: str
):
    with pytest.raises(NotShardableError) as error:
        sliced(planned(architecture, type_name, **options), 0, size)
    assert message in str(error.value)


def test_a_conversion_has_blocks_of_its_own():
    sizes = {"attention__key_length": 24, "attention__value_length": 24, "rope__dimension_count": 24}
    plan = planned("qwen3", **sizes)
    assert Slices.of(plan).cuts["blk.0.attn_output.weight"].partition.fits(4)
    converted = planned("qwen3", quant="q8_0", **sizes)
    assert not Slices.of(converted).cuts["blk.0.attn_output.weight"].partition.fits(4)


def test_an_unknown_tensor_is_refused_by_name():
    plan = planned("llama")
    name = "blk.0.attn_lora.weight"
    plan = plan._replace(tensors={**plan.tensors, name: Tensor(name, name, (4, 4))})
    with pytest.raises(NotShardableError, match=r"random: blk\.0\.attn_lora\.weight: expected a tensor with a rule"):
        Slices.of(plan)


def test_what_is_cut_by_columns_gives_parts_of_a_sum():
    slices = Slices.of(planned("qwen2moe"))
    partial = {name for name, cut in slices.cuts.items() if cut.axis == COLUMNS and ".1." in name}
    assert {name.split(".")[2] for name in partial} == {"attn_output", "ffn_down_exps", "ffn_down_shexp"}
    assert all(slices.is_partial(name) for name in partial)
