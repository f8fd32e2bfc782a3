"""At most eight dispatches per layer and token: what is counted agrees with the graph that MLX would run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import pytest
from typer.testing import CliRunner

import mlx_engine
from kernels import emulator, launch
from mlx_engine.backends import VARIABLE
from mlx_engine.bench.dispatches import TWO_PASSES, dispatches
from mlx_engine.cache import SequenceInput, begin
from mlx_engine.commands import app
from mlx_engine.loop.memory import linears
from tests.contract.check import EMULATED, load

MICRO = Path(__file__).parents[1] / "data" / "qwen3-micro" / "model-q8_0.gguf"
NEEDS_COMPILER = pytest.mark.skipif(emulator.unavailable() is not None, reason=str(emulator.unavailable()))

# What a node costs on Metal. Views move no numbers; whatever is not listed fails the test.
NODES = {
    **dict.fromkeys(["Slice", "Squeeze", "ExpandDims", "Transpose", "Reshape", "View", "Broadcast"], 0),
    **dict.fromkeys(["CustomKernel", "SliceUpdate", "ArgReduce", "Gather", "QuantizedMatmul", "Matmul", "Add"], 1),
    **dict.fromkeys(["Multiply", "Sigmoid", "Reduce"], 1),
}


def single_node(name: str, *inputs: mx.array) -> mx.array:
    """A node of the graph that is like the first input, and is never run."""
    kernel = mx.fast.metal_kernel(name, [f"x{i}" for i in range(len(inputs))], ["y"], source="")
    shape, dtype = inputs[0].shape, inputs[0].dtype
    (y,) = kernel(
        inputs=list(inputs), grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[shape], output_dtypes=[dtype]
    )
    return y


@pytest.fixture(scope="module")
def story() -> mlx_engine.Engine:
    """Heads of 64, which MLX has a kernel for."""
    return load(EMULATED, "builtin")


def graph(engine: mlx_engine.Engine, depth: int) -> list[dict[str, Any]]:
    """The nodes of one decode step: a token that is not known yet, `depth` tokens before it."""
    model, be = engine.model, engine.backend
    kv = model.new_kv(depth + 2, longest_pass=depth + 2)  # an update of a whole store would be no update
    stores = kv.pool.stores
    if depth:
        kv.begin(depth)
        kv.commit(depth)
    with be.session():
        be.wait(stores.layers)

    def step(token: mx.array, *layers: mx.array) -> list[mx.array]:
        stores.layers[:] = layers
        batch = begin([SequenceInput([token], kv)])
        logits = model.forward(batch)
        chosen = [be.row_sums(logits), be.argmax(logits)]
        batch.roll_back()
        return [*chosen, *stores.layers]

    def attention(q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: None, sinks: None) -> mx.array:
        return single_node("sdpa", q, k, v)

    nodes: list[dict[str, Any]] = []
    # MLX's own executor: it has no Metal here, which it would only notice when it runs.
    chosen = launch._chosen.set("metal")
    try:
        with (
            mock.patch.object(mx.fast, "scaled_dot_product_attention", attention),
            mock.patch.object(mx.fast, "rms_norm", lambda x, weight, eps: single_node("rms_norm", x, weight)),
        ):
            mx.export_function(nodes.append, step, mx.array(3, dtype=mx.uint32), *stores.layers)
    finally:
        launch._chosen.reset(chosen)
    return [node for node in nodes if node["type"] == "primitive"]


def kernel_name(node: dict[str, Any]) -> str:
    return node["arguments"][0].removeprefix("custom_kernel_").split("__")[0].removesuffix("_float" * 4)


def cost(node: dict[str, Any]) -> int:
    if node["name"] == "CustomKernel" and kernel_name(node) == "sdpa":
        return 1 if node["inputs"][1][1][2] < TWO_PASSES else 2
    return NODES[node["name"]]


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("depth", "per_layer"), [(0, 7), pytest.param(300, 7, marks=pytest.mark.slow), (TWO_PASSES + 7, 7)]
)
def test_a_layer_takes_seven_dispatches_as_the_graph_says(story, depth: int, per_layer: int):
    found = dispatches(story, depth)
    assert sum(found.layer.values()) == per_layer
    assert found.around == {"embed_rows": 1, "norm_project": 1, "row_sums": 1, "argmax": 1}
    nodes = graph(story, depth)
    assert sum(map(cost, nodes)) == story.config.n_layers * per_layer + 4


@NEEDS_COMPILER
def test_the_graph_has_our_kernels_as_often_as_the_door_counts_them(story):
    kernels = Counter(kernel_name(node) for node in graph(story, 5) if node["name"] == "CustomKernel")
    n = story.config.n_layers
    assert kernels == {
        "embed_rows": 1, "norm_qkv": n, "head_norm_rope": n, "attention": n, "project_add": 2 * n, "norm_gate_up": n,
        "norm_project": 1,
    }  # fmt: skip
    layer = dispatches(story).layer
    assert {**kernels, "embed_rows": 0, "norm_project": 0} == {name: n * layer.get(name, 0) for name in kernels}


@NEEDS_COMPILER
def test_keys_and_values_are_written_by_one_update_of_one_buffer(story):
    updates = [node for node in graph(story, 5) if node["name"] == "SliceUpdate"]
    assert len(updates) == story.config.n_layers
    for node in updates:
        (_, store, _), (_, new, _) = node["inputs"]
        assert (store[0], new) == (2, (2, store[1], 1, store[3]))


@NEEDS_COMPILER
def test_float_matrices_biases_and_norms_apart_are_counted_once():
    """Kernels of ours that stand where MLX has an operation: the door counts them, and the table does not."""
    engine = load(EMULATED, MICRO.parents[1] / "qwen2-micro" / "hf")
    found, n = dispatches(engine, 5), engine.config.n_layers
    assert found.layer["dense"] == 7
    assert found.layer["norm_rows"] == 2
    assert found.layer["linear"] == 3  # the biases
    assert "rms_norm" not in found.layer
    kernels = Counter(kernel_name(node) for node in graph(engine, 5) if node["name"] == "CustomKernel")
    assert (kernels["dense"], kernels["norm_rows"]) == (7 * n + 1, 2 * n + 1)


def test_mlx_is_counted_by_the_same_table():
    """All but its embedding, which expands a row with an operation that is no single node on the CPU."""
    engine = mlx_engine.load("builtin", "mlx")
    found, nodes, n = dispatches(engine, 5), graph(engine, 5), engine.config.n_layers
    first = next(i for i, node in enumerate(nodes) if node["name"] == "CustomKernel")
    behind = sum(found.around.values()) - found.around["embed"]
    assert sum(map(cost, nodes[first:])) == n * sum(found.layer.values()) + behind
    assert sum(found.layer.values()) == 25


@NEEDS_COMPILER
def test_heads_that_mlx_has_no_kernel_for_cost_more():
    assert dispatches(mlx_engine.load(MICRO, "mlx")).layer["attention"] == 4
    assert dispatches(load(EMULATED, MICRO)).layer["attention"] == 1


def test_other_backends_have_no_dispatches():
    with pytest.raises(TypeError, match="simd"):
        dispatches(mlx_engine.load(MICRO, "simd"))


# ---- printed ----


@pytest.mark.slow
@NEEDS_COMPILER
def test_the_command_says_what_a_token_costs(monkeypatch):
    load(EMULATED, MICRO)
    monkeypatch.setenv(VARIABLE, "emulate")
    result = CliRunner().invoke(app, ["backends", "--model", str(MICRO)])
    assert result.exit_code == 0, result.output
    counted = "MLX's operations count as the dispatches that they need on Metal"
    title = f"GPU dispatches of one token of {MICRO} on metal ({counted}):\n"
    told = result.stdout.partition(title)[2].splitlines()
    assert told[0].startswith("  7 dispatches per layer: attention, head_norm_rope, kv_write,")
    assert told[1] == "  4 outside the 3 layers: argmax, embed_rows, norm_project, row_sums; 25 in all"
    assert told[2].startswith("  0.21 MB of weights are read, and 1.5 kB of keys and values")


@pytest.mark.slow
@NEEDS_COMPILER
def test_the_same_as_json(monkeypatch):
    model = load(EMULATED, MICRO).model
    monkeypatch.setenv(VARIABLE, "emulate")
    result = CliRunner().invoke(app, ["backends", "--model", str(MICRO), "--json"])
    rows = {row["name"]: row for row in json.loads(result.stdout)["backends"]}
    decode = rows["metal"]["decode"]
    assert (decode["per_layer"], decode["per_layer_from_1024_keys"]) == (7, 7)
    assert decode["per_step"] == 7 * model.config.n_layers + 4
    multiplied = [*linears(model.layers), model.output]
    assert decode["weight_bytes"] == sum(linear.weight.nbytes for linear in multiplied)
    assert decode["bytes_per_token"] == decode["weight_bytes"] + decode["cache_bytes_per_token"]
    assert "decode" not in rows["parallel"]
