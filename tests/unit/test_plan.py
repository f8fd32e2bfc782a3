"""Plans for several machines: bytes against loaded models, splits, messages and rates against hand-computed cases."""

import json
import math
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

import mlx_engine
from mlx_engine.backends import create_backend
from mlx_engine.bench.roofline import product_rate
from mlx_engine.cache import KVLayer
from mlx_engine.cache.pool import pool_nbytes
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.checkpoint.sources import BUILTIN
from mlx_engine.distributed.plan import (
    Asked,
    Host,
    Link,
    Messages,
    ModelParts,
    Part,
    Pass,
    Timing,
    Work,
    balanced,
    held,
    model_parts,
    pipeline,
    smallest,
)
from mlx_engine.errors import OptionError, UnsupportedConfigError
from mlx_engine.loop.memory import Traffic
from mlx_engine.quant.types import F32, Q8_0
from mlx_engine.quant.weight import Weight
from mlx_engine.weights.conversion import Conversion
from mlx_engine.weights.model import plan_model
from mlx_engine.weights.outline import Outline, need_of, open_config, outlined
from tests.published import PUBLISHED

DATA = Path(__file__).parents[1] / "data"
MODELS = [
    BUILTIN,
    *(DATA / name / "hf" for name in ("gpt2-micro", "gemma3-micro", "gemma4-micro", "gemma4e-micro", "gptoss-micro")),
    *(DATA / name / "hf" for name in ("qwen3_5-micro", "lfm2-micro", "qwen3moe-micro", "llama-micro")),
]
ASKED = Asked(context=64, slots=2, prompt=16)
LARGE = Host(1 << 40, 1e9, 1e9)


def outline_of(path, backend="parallel"):
    return outlined(plan_model(open_checkpoint(path), Conversion()), create_backend(backend))


# ---- what lies where, against the files ----


@pytest.mark.parametrize("path", [path for path in MODELS if path.exists()], ids=lambda path: path.parent.name)
def test_the_ranks_hold_the_model_once_without_tables_that_one_looks_up_in_the_file(path):
    outline = outline_of(path)
    model = model_parts(outline)
    assert held([model.tables, *model.layers, model.head]) == model.total == need_of(outline).weights
    n = min(3, len(model.cuts) + 1)
    ranks = pipeline(model, [LARGE] * n, ASKED)
    left = sum(table.nbytes for table in model.tables.tables if table not in model.head.arrays) if n > 1 else 0
    assert sum(rank.weights for rank in ranks) == model.total - left
    layers = outline.model.kv_layers
    assert sum(rank.kv for rank in ranks) == pool_nbytes(layers, 2 * 64, 2)
    assert sum(len(rank.layers) for rank in ranks) == len(model.layers)
    assert [rank.first for rank in ranks[1:]] == [rank.first + len(rank.layers) for rank in ranks[:-1]]


def test_the_bytes_of_a_layer_are_those_of_its_tensors_in_the_file():
    checkpoint, model = open_checkpoint(BUILTIN), model_parts(outline_of(BUILTIN))
    matrices = [name for name, shape in checkpoint.shapes.items() if name.startswith("blk.2.") and len(shape) > 1]
    vectors = [name for name, shape in checkpoint.shapes.items() if name.startswith("blk.2.") and len(shape) == 1]
    nbytes = [sum(checkpoint.weight(name).nbytes for name in names) for names in (matrices, vectors)]
    assert model.layers[2].read == nbytes[0]
    assert held([model.layers[2]]) == sum(nbytes)
    assert model.layers[2].multiplied == sum(math.prod(checkpoint.shapes[name]) for name in matrices)


@pytest.mark.parametrize("name", ["storyteller", "qwen3moe-micro/hf", "qwen3_5-micro/hf", "gemma3-micro/hf"])
def test_a_token_reads_what_the_loaded_model_reads(name):
    path = BUILTIN if name == "storyteller" else DATA / name
    parts = model_parts(outline_of(path))
    model = mlx_engine.load(path, "parallel").model
    traffic = Traffic.of(model, model.new_pool(1))
    read = sum(part.work(Pass(1, 1, 63)).nbytes for part in (*parts.layers, parts.head))
    kv = sum(nbytes * min(64, window or 64) for window, nbytes in traffic.kv.items())
    experts = sum(nbytes * share for share, nbytes in traffic.experts.items())
    assert read == pytest.approx(traffic.weights + experts + kv + 2 * traffic.state)


def test_layers_that_share_keys_and_values_stay_on_the_rank_that_has_them():
    entry = PUBLISHED["google/gemma-4-E2B-it"]["config"]
    layers = entry["text_config"]["num_hidden_layers"]
    model = from_config(entry)
    assert model.cuts == set(range(1, layers - entry["text_config"]["num_kv_shared_layers"] - 1))
    second = pipeline(model, [LARGE] * 2, ASKED)[1]
    assert second.first in model.cuts
    with pytest.raises(
        OptionError, match=r"--split: .* separates layers from the layer whose keys and values they share"
    ):
        pipeline(model, [LARGE] * 2, ASKED, [layers - 1, 1])
    with pytest.raises(OptionError, match=r"--hosts: .* at most 14 ranks"):
        pipeline(model, [LARGE] * 20, ASKED)


# ---- a config.json alone ----


def from_config(config):
    with tempfile.TemporaryDirectory() as made:
        (Path(made) / "config.json").write_text(json.dumps(config))
        planned = plan_model(open_config(Path(made)), Conversion())
        return model_parts(outlined(planned, create_backend("parallel")))


@pytest.mark.parametrize("name", ["qwen3-gqa", "gemma3-micro/hf", "gpt2-micro/hf", "mlx-4bit/hf", "mlx-mixed/hf"])
def test_a_config_gives_the_bytes_of_its_folder(name, tmp_path):
    folder = DATA / name
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = outlined(plan_model(open_config(tmp_path), Conversion()), create_backend("mlx")).sizes
    checkpoint = open_checkpoint(folder)
    types = {checkpoint.weight(n).type for n, shape in checkpoint.shapes.items() if len(shape) > 1}
    assert set(found.types) <= types
    assert found.nbytes == outlined(plan_model(checkpoint, Conversion()), create_backend("mlx")).sizes.nbytes


def test_the_published_numbers_of_parameters():
    of = from_config(PUBLISHED["meta-llama/Llama-3.1-8B-Instruct"]["config"])
    # 8.03 billion parameters, of which the embedding table has 128,256 x 4,096.
    assert sum(part.multiplied for part in (*of.layers, of.head)) + 128_256 * 4096 == pytest.approx(8.03e9, rel=1e-3)
    of = from_config(PUBLISHED["mistralai/Mixtral-8x7B-v0.1"]["config"])
    # 12.9 billion that one token uses, of which the table has 32,000 x 4,096.
    assert sum(part.multiplied for part in (*of.layers, of.head)) == pytest.approx(12.9e9 - 131e6, rel=0.01)


def test_a_config_whose_types_it_does_not_tell_is_refused(tmp_path):
    path = tmp_path / "config.json"
    config = json.loads((DATA / "qwen3-gqa" / "config.json").read_text())
    for change, named in (
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        ({"torch_dtype": "int3"}, "torch_dtype"),
    ):
        path.write_text(json.dumps(config | change))
        with pytest.raises(UnsupportedConfigError, match=f"config.json: expected {named} to be"):
            open_config(path)


# ---- a model by hand: four layers of 100 MB, a table and a head ----


def layer(nbytes=100_000_000, multiplied=1e8):
    array = Outline((1, nbytes), nbytes)
    return Part(arrays=(array,), read=nbytes, multiplied=multiplied, exchanges=2)


def by_hand(n=4, **sizes):
    head = Part(arrays=(Outline((1, 1), 50_000_000),), read=50_000_000, multiplied=5e7, is_head=True)
    total = n * 100_000_000 + 50_000_000
    fields = {"left": 0, "total": total, "hidden": 1000, "vocab_size": 10_000, "widest": 0} | sizes
    layers = tuple(layer() for _ in range(n))
    return ModelParts(tables=Part(), layers=layers, head=head, cuts=frozenset(range(1, n)), **fields)


def timing(hosts, link, shard="pipeline", asked=ASKED):
    model = by_hand()
    ranks = pipeline(model, hosts, asked)
    return Timing(model, ranks, link, shard)


HOST = Host(memory=300_000_000, bandwidth=1e10, compute=1e12)
LINK = Link(rate=1e9, latency=1e-3, overhead=0.0)


def passed(*ranks):
    """Return the seconds of ranks with so many megabytes and millions of operations each, one after the other."""
    return sum(HOST.seconds(Work(megabytes * 1e6, operations * 1e6)) for megabytes, operations in ranks)


def test_reading_and_arithmetic_overlap_in_part():
    assert HOST.seconds(Work(3e8, 0)) == pytest.approx(0.03)
    assert HOST.seconds(Work(3e8, 4e10)) == pytest.approx(0.05)


def test_the_rates_of_a_pipeline_by_hand():
    found = timing([HOST] * 2, LINK)
    # Two ranks with two layers each, and the head; 4,000 bytes and 40,000 bytes at 1 Gbit/s, each after 1 ms.
    compute, sent = passed((200, 400), (250, 500)), 2e-3 + 32e-6 + 320e-6
    rates = found.rates(ASKED, 512)
    assert (rates.compute_seconds, rates.link_seconds) == pytest.approx((compute, sent))
    assert rates.decode == pytest.approx(1 / (compute + sent))
    # Two requests: the second rank has 250 MB, 25 ms, for each of them; the links add nothing to 47 ms.
    assert rates.decode_all == pytest.approx(1 / passed((250, 500)))
    # The head computes one of sixteen tokens.
    compute = passed((200, 16 * 400), (250, 16 * 400 + 100))
    assert rates.prefill == pytest.approx(16 / (compute + 2e-3 + 512e-6 + 320e-6))
    chunk, compute = found.alone(Pass(1, 512, 0)), passed((200, 512 * 400), (250, 512 * 400 + 100))
    assert chunk == pytest.approx(compute + 2e-3 + 512 * 32e-6 + 320e-6)


def test_the_parts_of_a_prompt_follow_each_other_through_the_ranks():
    found = timing([HOST] * 2, LINK)
    part = Pass(1, 512, 0)
    first, second = (rank.host.seconds(rank.work(part)) for rank in found.ranks)
    hop, logits = 1e-3 + 512 * 32e-6, 1e-3 + 320e-6
    assert second > first
    # The second rank waits for the first part, and then has no pause.
    assert found.all_of([part] * 3) == pytest.approx(first + hop + 3 * second + logits)
    assert found.all_of([part]) == pytest.approx(found.alone(part))
    assert found.rates(Asked(1024, 2, 1024), 512).prefill_all == pytest.approx(
        2048
        / (first + hop + 2 * second + 2 * found.ranks[1].host.seconds(found.ranks[1].work(Pass(1, 512, 512))) + logits)
    )


def test_a_slow_link_limits_several_requests_too():
    slow = Link(rate=1e6, latency=0.0)
    rates = timing([HOST] * 2, slow).rates(ASKED, 512)
    # Logits of 40,000 bytes take 0.32 s, hidden states 0.032 s; both requests need the link of the logits.
    assert rates.decode_all == pytest.approx(2 / (2 * 0.32))


def test_the_largest_logits_and_their_columns_are_counted():
    of = Pass(3, 1, 64)
    for shard, whole in (("pipeline", 40_000), ("tensor", 20_000)):
        found = timing([HOST] * 2, LINK, shard)
        assert found.messages(of).logits == 3 * whole
        assert replace(found, best=1).messages(of).logits == 3 * 8
        assert replace(found, best=40).messages(of).logits == 3 * 320
    pipeline = timing([HOST] * 2, LINK)
    assert replace(pipeline, best=9_999).messages(of).logits == 3 * 40_000  # columns beside them would be more
    assert replace(pipeline, best=1).sent(of) < pipeline.sent(of)


def test_the_rates_of_slices_by_hand():
    found = timing([HOST] * 2, LINK, "tensor")
    messages = found.messages(Pass(1, 1, 64))
    assert messages == Messages(4000, 8, 20_000, 1, 1)
    assert messages.seconds(LINK) == pytest.approx(10e-3 + 8 * 32e-6 + 160e-6)
    assert Timing(found.model, found.ranks * 2, LINK, "tensor").messages(Pass(1, 1, 64)).n_hidden == 24
    assert found.compute(Pass(1, 1, 64)) == pytest.approx(passed((250, 500)))


def test_one_rank_sends_nothing():
    large = Host(1 << 40, 1e10, 1e12)
    rates = timing([large], LINK).rates(ASKED, 512)
    assert (rates.link_seconds, rates.decode) == (0.0, pytest.approx(1 / passed((450, 900))))


def test_cores_that_ranks_share_slow_them_down():
    four = Host(1 << 30, 1e9, 1e12, cores=2, ranks=4, threads=1)
    # After a slice of 3 ms the rank that computes has half of a core: two of the three that wait take the rest.
    assert four.crowding == 2.0
    assert [four.among_waiting(Work(n, 0)) for n in (2e6, 3e6, 10e6)] == pytest.approx([2e-3, 3e-3, 17e-3])
    # Two ranks read their sockets on each core: half of the messages wait for half of a slice, on average.
    assert four.delay == pytest.approx(0.75e-3)
    assert (replace(four, together=1.2).crowding, replace(HOST, together=1.2).crowding) == (2.4, 1.0)
    two = Host(1 << 30, 1e9, 1e12, cores=2, ranks=2, threads=1)
    assert two.delay == 0
    assert (two.among_waiting(Work(10e6, 0)), two.crowding) == (10e-3, 1.0)
    assert Host(1 << 30, 1e9, 1e12, ranks=4).among_waiting(Work(10e6, 0)) == 10e-3
    shared = [Host(300_000_000, 1e10, 1e12, cores=1, ranks=2, threads=1)] * 2
    sent = timing(shared, LINK).sent(Pass(1, 1, 0))
    assert sent == pytest.approx(timing([HOST] * 2, LINK).sent(Pass(1, 1, 0)) + 2 * 0.75e-3)
    assert timing(shared, LINK).compute(Pass(1, 1, 0)) == pytest.approx(2 * passed((200, 400), (250, 500)) - 2 * 0.003)


def test_attention_reads_what_its_window_sees():
    part = Part(scored=8.0, attended=KVLayer(1, 4, window=10), kept=None)
    # 32 bytes per token; a token after 100 sees 10 of them, and a chunk of 5 tokens 14.
    assert part.work(Pass(1, 1, 100)) == Work(320, 2 * 8 * 10)
    assert part.work(Pass(2, 5, 100)) == Work(2 * 14 * 32, 2 * 8 * 10 * 10)
    everything = Part(scored=8.0, attended=KVLayer(1, 4))
    assert everything.work(Pass(1, 4, 0)) == Work(4 * 32, 2 * 8 * (1 + 2 + 3 + 4))


# ---- splits ----


def test_faster_hosts_get_more_layers_as_far_as_they_have_memory():
    model = by_hand(12)
    slow, fast = Host(1 << 40, 1e9, 1e12), Host(1 << 40, 3e9, 1e12)
    assert [len(rank.layers) for rank in pipeline(model, [fast, slow], ASKED)] == [10, 2]
    little = Host(450_000_000, 3e9, 1e12)
    assert [len(rank.layers) for rank in pipeline(model, [little, slow], ASKED)] == [4, 8]


def test_hosts_that_are_too_small_are_filled_evenly():
    found = pipeline(by_hand(), [Host(10_000_000, 1e9, 1e12)] * 2, ASKED)
    assert [rank.weights for rank in found] == [200_000_000, 250_000_000]
    assert [rank.left < 0 for rank in found] == [True, True]


def test_the_smallest_number_of_hosts():
    model, asked = by_hand(), ASKED
    logits = 4 * model.vocab_size
    assert smallest(model, Host(450_000_000 + logits, 1, 1), asked) == 1
    assert smallest(model, Host(450_000_000 + logits - 1, 1, 1), asked) == 2
    # The last rank has the head: two layers do not fit beside it.
    assert smallest(model, Host(200_000_000, 1, 1), asked) == 3
    assert smallest(model, Host(150_000_000 + logits, 1, 1), asked) == 4
    assert smallest(model, Host(150_000_000 + logits - 1, 1, 1), asked) is None
    for memory in (200_000_000, 250_040_000, 300_000_000):
        host = Host(memory, 1e9, 1e12)
        n = smallest(model, host, asked)
        assert all(rank.left >= 0 for rank in pipeline(model, [host] * n, asked))
        assert n == 1 or any(rank.left < 0 for rank in pipeline(model, [host] * (n - 1), asked))


@pytest.mark.parametrize("split", [[4], [2, 3], [0, 4], [1, 1, 2]])
def test_a_split_must_be_one(split):
    with pytest.raises(
        OptionError, match=r"--split: .* must be 2 numbers of at least 1 that add up to the model's 4 layers"
    ):
        pipeline(by_hand(), [LARGE] * 2, ASKED, split)


def test_a_given_split_is_taken():
    assert [len(rank.layers) for rank in pipeline(by_hand(), [LARGE] * 2, ASKED, [3, 1])] == [3, 1]


def test_the_split_is_the_best_of_all():
    costs = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0]
    speeds = [1.0, 2.0, 4.0]

    def cost(rank, first, end):
        return sum(costs[first:end]) / speeds[rank]

    (one, two, three) = balanced(7, 3, range(1, 7), cost)
    largest = max(cost(0, 0, one), cost(1, one, one + two), cost(2, one + two, 7))
    every = [(a, b) for a in range(1, 6) for b in range(a + 1, 7)]
    assert largest == min(max(cost(0, 0, a), cost(1, a, b), cost(2, b, 7)) for a, b in every)
    assert one + two + three == 7
    assert balanced(7, 2, [6], cost) == [6, 1]
    assert balanced(3, 2, [1, 2], lambda *_: math.inf) is None


def test_more_ranks_are_never_slower_in_the_part_that_limits():
    turns = [timing([LARGE] * n, Link(1e12, 0.0)).rates(Asked(64, n, 16), 512).decode_all for n in (1, 2, 4)]
    assert all(a < b for a, b in pairwise(turns))


# ---- what this machine offers ----


@pytest.mark.parametrize("type_", [F32, Q8_0])
def test_the_rate_of_products_is_that_of_real_products(type_):
    assert 1e7 < product_rate(create_backend("simd"), type_, rows=8, side=256) < 1e13


def test_no_weight_is_read(monkeypatch):
    read, before = [], Weight.dequantize
    monkeypatch.setattr(Weight, "dequantize", lambda self: read.append(self.name) or before(self))
    model_parts(outline_of(BUILTIN, "simd"))
    assert set(read) <= {"probe"}
