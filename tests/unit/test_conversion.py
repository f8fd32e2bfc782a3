"""Quantise on load: what becomes of which layer, what is said about it, and what it costs."""

import json
import weakref
from pathlib import Path

import numpy as np
import pytest

import mlx_engine
from benchmarks import crossover, sections
from mlx_engine.backends import create_backend
from mlx_engine.backends.cpu.backend import CompiledBackend
from mlx_engine.bench.roofline import linears
from mlx_engine.checkpoint import shapes
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.checkpoint.shapes import Gemma3Shape, GPT2Shape
from mlx_engine.errors import OptionError
from mlx_engine.quant.types import BF16, F32, Q4_0, Q8_0
from mlx_engine.quant.weight import Weight
from mlx_engine.weights import conversion
from mlx_engine.weights.conversion import Conversion, layer_type
from mlx_engine.weights.model import convert_model

DATA = Path(__file__).parents[1] / "data"
Q8 = DATA / "qwen3-micro" / "model-q8_0.gguf"
# As many layers as the real ones, each of them small.
TINY = {
    "gpt2": GPT2Shape(12, 64, 4, 700, 32),
    "gemma3": Gemma3Shape(26, 64, 96, 4, 1, 32, 700, 128, 8),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, shape in TINY.items():
        made[name] = tmp_path_factory.mktemp("shapes") / name
        shape.write(made[name], name)
    return made


@pytest.fixture(scope="module")
def backend():
    made = create_backend("simd")
    if not isinstance(made, CompiledBackend):
        pytest.skip("there are no compiled kernels here")
    return made


def kinds(model) -> list[str]:
    return [layer.weight.format for value in vars(model).values() for layer in linears(value)]


@pytest.mark.parametrize(("name", "n"), [("gpt2", 73), ("gemma3", 183)])
def test_all_linear_layers_and_the_head_are_counted_and_converted(folders, backend, name, n):
    model, converted = convert_model(open_checkpoint(folders[name]), backend, Conversion("q8_0"))
    assert converted.counts == {"q8_0": n}
    assert converted.notes() == (f"quantised {n} linear layers to q8_0",)
    made = kinds(model)
    assert len(made) == n
    assert len(set(made)) == 1
    assert set(made) != set(kinds(convert_model(open_checkpoint(folders[name]), backend, Conversion()).model))


@pytest.mark.parametrize("name", TINY)
def test_the_table_stays_in_the_file_as_it_is(folders, backend, name):
    model = convert_model(open_checkpoint(folders[name]), backend, Conversion("q8_0")).model
    assert isinstance(model.token_embd, Weight)
    assert model.token_embd.type == TINY[name].type
    assert not model.token_embd.data.flags.owndata  # a view of the mapped file
    ids = [0, 5, 699]
    np.testing.assert_array_equal(backend.embed(model.token_embd, ids), model.token_embd.dequantize()[ids])


def test_the_logits_are_those_of_the_rounded_weights(folders):
    """As a float32 model has them whose linear layers were rounded to Q8_0 beforehand, by other means."""
    ids = [1, 2, 3, 400]
    ours = np.asarray(mlx_engine.load(folders["gpt2"], "simd", "q8_0").logits(ids))
    checkpoint = open_checkpoint(folders["gpt2"])
    plain = mlx_engine.load(folders["gpt2"], "simd", jit=False)
    for layer in (layer for value in vars(plain.model).values() for layer in linears(value)):
        object.__setattr__(layer, "weight", Weight.pack("w", layer.weight, Q8_0).dequantize())
    want = np.asarray(plain.logits(ids))
    assert np.linalg.norm(ours - want) <= 1e-5 * np.linalg.norm(want)
    assert checkpoint.architecture == "gpt2"


def test_what_is_quantized_already_keeps_its_bits():
    stored, engine = open_checkpoint(Q8), mlx_engine.load(Q8, "simd", "q8_0")
    note = engine.notes[0]  # the next is about what was fused
    assert note.startswith("quantised 0 linear layers to q8_0, ")
    assert "already q8_0 (first blk.0.attn_q)" in note
    ids = [1, 2, 3]
    np.testing.assert_array_equal(np.asarray(engine.logits(ids)), np.asarray(mlx_engine.load(Q8, "simd").logits(ids)))
    assert stored.weight("blk.0.attn_q.weight").type == Q8_0


def test_layers_that_were_of_their_type_already_are_said_to_be_left():
    engine = mlx_engine.load(Q8, "simd", quant_layers={"attn_q": "q8_0"})
    note, n = engine.notes[0], engine.config.n_layers
    assert note == f"quantised 0 linear layers, {n} left: already q8_0 (first blk.0.attn_q)"


def test_keep_says_nothing():
    assert not [note for note in mlx_engine.load(Q8, "simd").notes if not note.startswith("fused ")]


def test_overrides_of_layers_and_groups(folders, backend):
    asked = Conversion("q8_0", layers={"attention": "q4_0", "attn_v": "f32", "output": "keep"})
    converted = convert_model(open_checkpoint(folders["gemma3"]), backend, asked).converted
    assert converted.counts == {"q4_0": 26 * 3, "f32": 26, "q8_0": 26 * 3}
    assert [(left.reason, left.count, left.first) for left in converted.left] == [("kept as asked", 1, "token_embd")]


def test_one_layer_type_alone(folders, backend):
    asked = Conversion(layers={"ffn_down": "q4_0"})
    converted = convert_model(open_checkpoint(folders["gpt2"]), backend, asked).converted
    assert converted.notes() == ("quantised 12 linear layers to q4_0",)


def test_rows_that_fill_no_blocks_are_left_and_named(tmp_path, backend):
    GPT2Shape(1, 48, 4, 700, 32).write(tmp_path / "odd", "odd")
    converted = convert_model(open_checkpoint(tmp_path / "odd"), backend, Conversion("q8_0")).converted
    # Only the way back from the feed-forward network has rows of 192.
    assert converted.counts == {"q8_0": 1}
    assert converted.notes() == (
        "quantised 1 linear layers to q8_0, 6 left: rows do not fill blocks of 32 (first blk.0.attn_q)",
    )


def test_narrow_layers_are_left_unless_they_are_named(folders, backend):
    checkpoint = open_checkpoint(folders["gpt2"])
    asked = Conversion("q8_0", 65, {"attn_v": "q8_0"})
    converted = convert_model(checkpoint, backend, asked).converted
    # Three of the four attention layers are 64 x 64; up and down have 256 rows or columns.
    assert converted.counts == {"q8_0": 12 * 3 + 1}
    assert [(left.reason, left.count) for left in converted.left] == [("no side of 65 or more", 36)]
    assert convert_model(checkpoint, backend, Conversion("q8_0", 64)).converted.counts == {"q8_0": 73}
    assert convert_model(checkpoint, backend, Conversion("q8_0", 0)).converted.counts == {"q8_0": 73}


def test_floats_have_no_narrowest_layer():
    assert Conversion("f32", 10**6).type_of("blk.0.attn_q", (64, 64), BF16) == (F32, "")


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"quant": "q8"}, "quant"),
        ({"quant_min_dim": -1}, "quant_min_dim"),
        ({"quant_min_dim": "many"}, "quant_min_dim"),
        ({"quant_min_dim": 1.5}, "quant_min_dim"),
        ({"quant_layers": {"attn": "f32"}}, "quant_layers"),
        ({"quant_layers": {"attn_q": "f16"}}, "quant_layers attn_q"),
        ({"quant_layers": ["attn_q=f32"]}, "quant_layers"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(options, option):
    with pytest.raises(OptionError) as caught:
        mlx_engine.load(Q8, "simd", **options)
    assert caught.value.option == option


def test_errors_list_what_there_is(folders):
    with pytest.raises(OptionError, match=r"attn_q, .*ffn_down, .*output, attention, mixer, ffn or per_layer"):
        mlx_engine.load(Q8, "simd", quant_layers={"attn": "f32"})
    with pytest.raises(OptionError, match="ffn_up, ffn_down, output") as caught:
        mlx_engine.load(folders["gpt2"], "simd", quant_layers={"ffn_gate": "q8_0"})
    assert "ffn_gate" not in caught.value.expected


def test_a_head_is_an_output_under_both_names():
    assert layer_type("token_embd") == layer_type("output.weight") == "output"
    assert layer_type("blk.11.attn_output.weight") == "attn_output"


def test_the_constant_is_what_the_committed_table_says():
    rows = [json.loads(line) for line in crossover.RESULTS.read_text().splitlines()]
    assert crossover.crossover(sections.last_run(rows)) == conversion.AUTO_MIN_DIM


def test_measuring_the_crossover_keeps_one_width_in_memory(tmp_path, monkeypatch, backend):
    made, alive = [], []

    def create(name):
        alive.append(sum(one() is not None for one in made[:-1]))
        new = create_backend(name)
        made.append(weakref.ref(new))
        return new

    monkeypatch.setattr(crossover, "create_backend", create)
    # Whatever is faster here.
    few = {"RESULTS": tmp_path / "rows", "WIDTHS": (32, 64, 128), "TOTAL": 2**16, "ROUNDS": 1, "TOLERANCE": 1e9}
    for name, value in few.items():
        monkeypatch.setattr(crossover, name, value)
    crossover.main()
    assert alive == [0] * 6
    assert len((tmp_path / "rows").read_text().splitlines()) == 6


def test_the_crossover_is_behind_the_last_width_that_is_slower():
    def row(width, f32, q8):
        return {"width": width, "medians_us": {"F32": f32, "Q8_0": q8}}

    rows = [row(32, 1, 0.5), row(64, 1, 1.5), row(128, 1, 1.01), row(256, 1, 0.3)]
    assert crossover.crossover(rows) == 128
    assert crossover.crossover([*rows, row(128, 1, 2.0)]) == 256


@pytest.mark.parametrize("type_", [F32, BF16, Q4_0])
def test_conversion_piece_by_piece_is_that_of_the_whole(type_, monkeypatch):
    values = np.random.default_rng(0).standard_normal((96, 64)).astype(np.float32)
    stored = Weight.pack("w", values, type_)
    whole = Weight.pack("w", stored.dequantize(), Q8_0)
    monkeypatch.setattr("mlx_engine.quant._PIECE", 256)
    np.testing.assert_array_equal(stored.as_type(Q8_0).data, whole.data)
    assert stored.as_type(type_) is stored


def test_shapes_of_the_real_models_count_the_same():
    assert shapes.SHAPES["gpt2"].n_layers == TINY["gpt2"].n_layers
    assert shapes.SHAPES["gemma3-1b"].n_layers == TINY["gemma3"].n_layers
