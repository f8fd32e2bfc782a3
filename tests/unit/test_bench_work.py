"""Bytes and operations of a test, against numbers worked out by hand for the shape of Qwen3-0.6B."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mlx_engine.backends import create_backend
from mlx_engine.bench import cells
from mlx_engine.bench.samples import Test as Cell
from mlx_engine.bench.work import Sizes, bytes_per_weight, passes, sizes, work
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.checkpoint.shapes import SHAPES
from mlx_engine.observe.profiler import Cost
from mlx_engine.quant.types import F16, F32, Q8_0
from mlx_engine.quant.weight import Weight
from mlx_engine.weights.conversion import Conversion
from tests.unit.timed_model import Backend, Clock, Spy

MICRO = Path(__file__).parents[1] / "data" / "qwen3-micro" / "model-q8_0.gguf"

# Per layer: q and o 1024 x 2048 each, k and v 1024 x 1024, gate, up and down 1024 x 3072. 28 layers.
LAYERS = 28 * (2 * 2_097_152 + 2 * 1_048_576 + 3 * 3_145_728)
HEAD = 151_936 * 1024
# Of the last layer, what only the last token is multiplied with: o, gate, up and down; and a query's scores and sums.
LAST_ONLY, SCORED = 2_097_152 + 3 * 3_145_728, 2 * 16 * 128
STORED = {F32: 4.0, Q8_0: 34 / 32}


def shape_06b(*, tied=True):
    """The checkpoint of `shape:qwen3-0.6b` without its bytes."""
    s = SHAPES["qwen3-0.6b"]
    D, F, E, H, K = s.hidden_size, s.intermediate_size, s.head_dim, s.n_heads * s.head_dim, s.n_kv_heads * s.head_dim
    of_layer = {
        "attn_norm": (D,), "ffn_norm": (D,), "attn_q_norm": (E,), "attn_k_norm": (E,), "attn_q": (H, D),
        "attn_k": (K, D), "attn_v": (K, D), "attn_output": (D, H),
        "ffn_gate": (F, D), "ffn_up": (F, D), "ffn_down": (D, F),
    }  # fmt: skip
    shapes = {f"blk.{i}.{name}.weight": shape for i in range(s.n_layers) for name, shape in of_layer.items()}
    shapes |= {"token_embd.weight": (s.vocab_size, D), "output_norm.weight": (D,)}
    shapes |= {} if tied else {"output.weight": (s.vocab_size, D)}
    settings = {
        "block_count": s.n_layers, "context_length": s.context_length, "embedding_length": D, "feed_forward_length": F,
        "attention.head_count": s.n_heads, "attention.head_count_kv": s.n_kv_heads, "attention.key_length": E,
        "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": s.rope_theta,
    }  # fmt: skip
    weight = lambda name: SimpleNamespace(shape=shapes[name], type=Q8_0 if len(shapes[name]) == 2 else F32)  # noqa: E731
    return Checkpoint("here", "gguf", "qwen3", settings, {}, shapes, weight)


KEPT = Conversion()


def of_06b(conversion=KEPT, **options):
    return sizes(shape_06b(**options), STORED.__getitem__, conversion)


# ---- sizes ----


def test_the_sizes_of_06b():
    assert (LAYERS, HEAD) == (440_401_920, 155_582_464)
    # Keys and values: 28 layers x 2 x 8 heads x 128 x 4 bytes. Attention: 28 x (scores and sums) x 16 heads x 128.
    assert of_06b() == Sizes(
        LAYERS, HEAD, 633_233_408.0, 229_376, 114_688,
        last_token_only=LAST_ONLY, scored_last=SCORED, head_nbytes=HEAD * 34 / 32
    )  # fmt: skip


def test_float32_takes_four_bytes_a_weight():
    assert of_06b(Conversion("f32")).nbytes == 4 * 595_984_384


def test_a_head_of_its_own_is_read_instead_of_the_table_not_besides():
    assert of_06b(tied=False) == of_06b()


def test_a_layer_of_another_type_counts_as_that():
    head_in_floats = of_06b(Conversion("keep", layers={"output": "f32"})).nbytes
    assert head_in_floats == of_06b().nbytes + HEAD * (4 - 34 / 32)


@pytest.mark.parametrize(
    ("name", "jit", "type_", "nbytes"),
    [
        ("scalar", True, Q8_0, 32.0),
        ("scalar", True, F32, 32.0),
        ("simd", False, Q8_0, 4.0),
        ("simd", True, Q8_0, 34 / 32),
        ("simd", True, F16, 4.0),
        ("parallel", True, Q8_0, 34 / 32),
        ("parallel", False, Q8_0, 4.0),
    ],
)
def test_what_a_backend_holds_is_seen_on_what_it_prepares(name, jit, type_, nbytes):
    if jit and name != "scalar":
        pytest.importorskip("numba")
    assert bytes_per_weight(create_backend(name, jit=jit), type_) == nbytes


# ---- work ----


def test_a_token_written_reads_every_weight_once_and_the_cache_so_far():
    one = work(of_06b(), Cell(n_gen=1), kv=True)
    assert one == Cost(2.0 * (LAYERS + HEAD + 114_688), 633_233_408.0 + 229_376)


def test_depth_costs_keys_and_values():
    shallow, deep = (work(of_06b(), Cell(n_gen=1, depth=depth), kv=True) for depth in (0, 4096))
    assert deep.nbytes - shallow.nbytes == 4096 * 229_376
    assert deep.flops - shallow.flops == 2.0 * 114_688 * 4096


def test_tokens_written_see_one_token_more_each():
    assert work(of_06b(), Cell(n_gen=3), kv=True).nbytes == 3 * 633_233_408.0 + (1 + 2 + 3) * 229_376


def test_a_prompt_reads_the_weights_once_per_chunk_and_asks_the_head_for_one_token():
    one, two = (work(of_06b(), Cell(n), kv=True) for n in (512, 513))
    pairs, last = 27 * SCORED * 512 * 513 // 2, SCORED * 512
    assert one.flops == 2.0 * (512 * LAYERS - 511 * LAST_ONLY + HEAD + pairs + last)
    assert one.nbytes == 633_233_408.0 + 512 * 229_376
    # The logits of the first chunk are wanted by nobody.
    assert two.nbytes == 2 * 633_233_408.0 - HEAD * 34 / 32 + (512 + 513) * 229_376
    assert two.flops == 2.0 * (512 * (LAYERS - LAST_ONLY) + pairs) + 2.0 * (LAYERS + HEAD + 28 * SCORED * 513)


def test_without_a_cache_every_pass_runs_the_whole_sequence():
    done = work(of_06b(), Cell(n_gen=2, depth=9), kv=False)
    seen = 27 * (10 * 11 // 2 + 11 * 12 // 2) + 10 + 11
    assert done == Cost(2.0 * (21 * LAYERS - 19 * LAST_ONLY + 2 * HEAD + SCORED * seen), 2 * 633_233_408.0)


def test_a_test_that_does_both_needs_what_both_need():
    both = work(of_06b(), Cell(64, 2), kv=True)
    parts = [work(of_06b(), Cell(64), kv=True), work(of_06b(), Cell(0, 2, 64), kv=True)]
    assert both == Cost(sum(part.flops for part in parts), sum(part.nbytes for part in parts))


@pytest.mark.parametrize("kv", [True, False])
@pytest.mark.parametrize("test", [(16, 0, 0), (0, 5, 0), (16, 3, 20), (1030, 0, 7), (0, 2, 600), (600, 1, 0)])
def test_the_passes_are_those_that_a_cell_makes(test, kv, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(cells, "time", SimpleNamespace(perf_counter=clock))
    model = Spy(Backend(clock, lazy=False), lambda n, at: 1.0)
    engine = SimpleNamespace(model=model, backend=model.backend, config=model.config)
    cells.measure(engine, Cell(*test), kv=kv, repetitions=1)
    made = [(n, at or 0, wanted) for n, at, wanted in zip(model.lengths, model.at, model.wanted, strict=True)]
    made = made[len(made) // 2 :]
    before = sum(1 for n, at, _ in made if kv and at + n <= test[2])
    assert made[before:] == list(passes(Cell(*test), kv=kv))


def test_a_small_matrix_is_a_weight_like_any_other():
    """What `bytes_per_weight` prepares is sound, or it would say nothing about a real one."""
    weight = Weight("small", (32, 32), Q8_0, np.zeros(34 * 32, dtype=np.uint8))
    assert not weight.dequantize().any()


def test_local_layers_see_their_window():
    """Of 4 layers 3 see the last 8 tokens; 5 bytes and 7 multiplications for each token and layer."""
    of = Sizes(layers=0, head=0, nbytes=0, cached=4 * 5, scored=4 * 7, local=0.75, window=8)
    one = work(of, Cell(n_gen=1, depth=100), kv=True)
    assert one.nbytes == 5 * (101 + 3 * 8)
    assert one.flops == 2 * 7 * (101 + 3 * 8)
    # Four tokens in one pass see from 3 to 6 tokens; of those behind them a window misses nothing yet.
    assert work(of, Cell(n_prompt=4, depth=2), kv=True) == Cost(2 * 4 * 7 * (3 + 4 + 5 + 6), 4 * 5 * 6)
    many = work(of, Cell(n_prompt=4, depth=20), kv=True)
    assert many == Cost(2 * 7 * (21 + 22 + 23 + 24 + 3 * 4 * 8), 5 * (24 + 3 * 11))
