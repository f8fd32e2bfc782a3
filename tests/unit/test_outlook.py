"""How a model would run: the sizes of a loaded model without its weights, and the errors of loading."""

import json
from pathlib import Path

import pytest

import mlx_engine
from mlx_engine.backends.experts import share_missed
from mlx_engine.bench import outlook as module
from mlx_engine.bench.outlook import machine_bandwidth, outlook
from mlx_engine.cache.pool import pool_nbytes
from mlx_engine.checkpoint.sources import BUILTIN
from mlx_engine.commands.inspect import run_rows
from mlx_engine.commands.values import experts_text
from mlx_engine.errors import ContextLengthError, EngineError, OptionError
from mlx_engine.loop.memory import Traffic
from mlx_engine.quant.weight import Weight
from tests.builtin import LONGEST
from tests.unit.test_command_generate import cli

DATA = Path(__file__).parents[1] / "data"
MODELS = [BUILTIN, DATA / "qwen3-micro" / "model-q8_0.gguf", DATA / "gemma3-micro" / "hf", DATA / "gpt2-micro" / "hf"]


@pytest.mark.some(2)
@pytest.mark.parametrize("backend", ["scalar", "simd", "parallel", "mlx"])
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.parent.name)
def test_the_bytes_are_those_of_the_loaded_model(path, backend):
    found = outlook(path, backend, 64)
    model = mlx_engine.load(path, backend).model
    traffic = Traffic.of(model, model.new_pool(1))
    kv = sum(nbytes * min(64, window or 64) for window, nbytes in traffic.kv.items())
    assert found.decode_bytes == traffic.weights + kv
    assert found.kv_bytes == pool_nbytes(model.kv_layers, 64)
    assert found.weights_bytes >= traffic.weights


def test_no_weight_is_read(monkeypatch):
    monkeypatch.setattr(Weight, "dequantize", Weight.dequantize)
    read = []
    before = Weight.dequantize
    monkeypatch.setattr(Weight, "dequantize", lambda self: read.append(self.name) or before(self))
    outlook(BUILTIN, "simd")
    assert set(read) <= {"probe"}


def test_the_errors_are_those_of_loading(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "lama"}')
    with pytest.raises(EngineError) as expected:
        mlx_engine.load(tmp_path)
    run = json.loads(cli("inspect", DATA / "qwen3-gqa", "--json").out)["run"]
    assert run["supported"]
    with pytest.raises(EngineError) as found:
        outlook(tmp_path)
    assert str(found.value) == str(expected.value)


def test_a_context_beyond_the_model_s_is_refused():
    with pytest.raises(ContextLengthError, match=f"at most {LONGEST:,} tokens"):
        outlook(BUILTIN, "simd", LONGEST + 1)
    assert "runs here" in cli("inspect", "builtin", "--context", LONGEST + 1).out


def test_inspect_prints_memory_and_rate(monkeypatch):
    monkeypatch.setattr(module, "machine_bandwidth", lambda _: 1e9)
    run = json.loads(cli("inspect", "builtin", "--context", 100, "--backend", "parallel", "--json").out)["run"]
    assert run["context"] == 100
    assert run["decode_tokens_per_second"] == pytest.approx(1e9 / run["decode_bytes"])
    text = cli("inspect", "builtin", "--backend", "parallel").out
    assert "yes, on parallel" in text
    assert f"of keys and values for {LONGEST:,} tokens" in text
    assert "read per token at 1.0 GB/s, measured" in text
    assert "decode" not in cli("inspect", "builtin", "--backend", "scalar").out.split("metadata")[0]


def test_a_table_that_is_also_the_head_counts_once():
    run = json.loads(cli("inspect", DATA / "qwen3-micro" / "model-f32.gguf", "--backend", "parallel", "--json").out)[
        "run"
    ]
    assert run["left_bytes"] == 0
    assert run["weights_bytes"] < (DATA / "qwen3-micro" / "model-f32.gguf").stat().st_size


def test_what_does_not_fit_is_said():
    run = {"supported": True, "fits": False, "weights_bytes": 5 << 30, "kv_bytes": 1 << 30, "available_bytes": 2 << 30}
    run |= {"backend": "simd", "left_bytes": 0, "context": 9, "decode_tokens_per_second": None}
    run |= {"bandwidth_bytes_per_second": None, "experts_bytes": 0}
    assert run_rows(run)[0] == ("runs here", "does not fit into memory: 6.0 GiB needed, 2.0 GiB available, on simd")


def test_the_experts_that_are_not_in_memory_are_said():
    moe = DATA / "qwen3moe-micro" / "hf"
    whole = module.outlook(moe, "mlx")
    half = module.outlook(moe, "mlx", experts_memory=whole.experts_bytes // 2)
    assert (whole.experts_held_bytes, whole.experts_read_bytes) == (whole.experts_bytes, 0)
    assert half.weights_bytes == whole.weights_bytes - whole.experts_bytes + half.experts_held_bytes
    assert whole.rate(1e9) == 1e9 / whole.decode_bytes
    assert half.rate(1e9) is None  # the rate of the disk is not known
    for backend, nbytes, message in (("scalar", 1 << 20, "needs a backend with"), ("mlx", 9, "of one token in every")):
        with pytest.raises(OptionError, match=message):
            module.outlook(moe, backend, experts_memory=nbytes)
    with pytest.raises(OptionError, match="needs a model with experts"):
        module.outlook(BUILTIN, "mlx", experts_memory=1 << 20)
    # Each token uses 3 of 8 experts.
    assert half.experts_read_bytes == round(whole.experts_bytes * 3 / 8 * share_missed(0.5))
    assert experts_text(4 << 30, 4 << 30, 0) == "4.0 GiB, all in memory"
    assert experts_text(4 << 30, 1 << 30, 9 << 20).startswith("25% of 4.0 GiB in memory; a token reads about 9 MB of")


def test_a_file_of_tensors_alone_does_not_run():
    run = json.loads(cli("inspect", DATA / "qwen3-gqa" / "model.safetensors", "--json").out)["run"]
    assert run == {"supported": False, "reason": run["reason"]}
    assert "give the folder" in run["reason"]


def test_bandwidth_is_a_rate_or_unknown(monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 1 << 22)
    monkeypatch.setattr(module, "cache_bytes", lambda: 1 << 20)
    assert machine_bandwidth(1) > 1e8
    monkeypatch.setattr(module, "cache_bytes", lambda: 1 << 22)
    assert machine_bandwidth(1) is None
