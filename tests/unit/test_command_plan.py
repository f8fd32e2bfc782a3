"""`plan`: what it prints, its options, and one line for every mistake."""

import json
from pathlib import Path

import pytest

from mlx_engine.commands import plan as plan_options
from mlx_engine.commands.plan import (
    bandwidth_of,
    bits_of,
    compute_of,
    each_host,
    memories_of,
    seconds_of,
)
from mlx_engine.errors import OptionError
from tests.builtin import LONGEST, N_LAYERS
from tests.published import PUBLISHED
from tests.unit.test_command_generate import cli, only_line

DATA = Path(__file__).parents[1] / "data"
SPEED = "--bandwidth", "10GB/s", "--compute", "100GFLOP/s"
GOLDEN = """\
weights  qwen3, 4 layers, 2.9 MiB on parallel
ranks    2, each with 10.0 GB/s of memory, 100 GFLOP/s
links    1 Gbit/s, 0.1 ms, and 0 ms for the software of a message

rank  holds                  weights  KV of a token  KV of 2 x 256 tokens  activations                 left
0     tables, layers 0 to 1  1.2 MiB        2.0 KiB               1.1 MiB      4.5 MiB  8.4 MiB of 15.3 MiB
1     layers 2 to 3, head    1.7 MiB        2.0 KiB               1.1 MiB      4.5 MiB  7.9 MiB of 15.3 MiB

split    --split 2,2
a token  1,024 bytes over each border, 8 bytes of logits from the last rank to the first
a chunk  256 tokens of a prompt: 262,144 bytes over each border, 8 bytes of logits from the last rank to the first
fits     yes; fewest ranks of a pipeline, each with the last rank's memory: 1
"""


def plan(*args, speed=SPEED):
    return cli("plan", "-b", "parallel", *speed, *args)


def facts(*args, code=0):
    found = plan(*args, "--json")
    assert found.code == code, found.err
    return json.loads(found.out)


def test_everything_of_the_builtin_model():
    options = "--context", 256, "--latency", "0.1ms", "--overhead", 0, "--usable", 80
    found = plan("--hosts", "2x20MB", *options)
    first, rest = found.out.split("\n", 1)
    assert (found.code, first.split()[0], first.endswith("storyteller-q8_0.gguf")) == (0, "model", True)
    assert rest.startswith(GOLDEN)
    decode, several, prefill, prompts = rest.removeprefix(GOLDEN).splitlines()
    rates = facts("--hosts", "2x20MB", *options)["rates"]
    assert decode.startswith(f"decode   one request: about {rates['decode']:,.0f} tokens/s after 256 tokens (")
    assert several == f"         2 requests: about {rates['decode_all']:,.0f} tokens/s in all"
    assert prefill.startswith(f"prefill  one prompt of 256 tokens: about {rates['prefill']:,.0f} tokens/s")
    assert prompts == f"         several prompts: about {rates['prefill_all']:,.0f} tokens/s in all"


def test_the_numbers_as_json():
    found = facts("--hosts", "3x1GB", "--link", "10Gbit/s", "--latency", "1ms", "--overhead", "0")
    assert found["link"] == {"bits_per_second": 1e10, "latency_s": 1e-3, "overhead_s": 0.0}
    assert sum(rank["weights_bytes"] for rank in found["ranks"]) == found["weights_bytes"] + found["duplicated_bytes"]
    assert sum(rank["n_layers"] for rank in found["ranks"]) == found["n_layers"] == N_LAYERS
    assert [rank["has_tables"] for rank in found["ranks"]] == [True, False, False]
    assert [rank["has_head"] for rank in found["ranks"]] == [False, False, True]
    assert {rank["usable_bytes"] for rank in found["ranks"]} == {750_000_000}
    assert (found["measured_here"], found["fits"], found["slots"]) == ([], True, 3)
    sent = found["messages_per_token"]
    assert found["rates"]["link_seconds"] == pytest.approx(3 * 1e-3 + 8 * sent["nbytes"] / 1e10)


def test_what_does_not_fit_is_missing_and_the_exit_code_says_so():
    found = plan("--hosts", "2x10MB", "--context", 512)
    assert found.code == 1
    assert "lacks 1.2 MiB of 7.2 MiB" in found.out
    assert "fits     no: " in found.out
    assert "fewest ranks of a pipeline, each with the last rank's memory: 4" in found.out
    assert "decode" not in found.out
    assert "no number of ranks with the last rank's memory is enough for a pipeline" in plan("--hosts", "2x5MB").out


def test_slices_of_a_model():
    found = facts("--hosts", "2x1GB", "--shard", "tensor")
    assert found["messages_per_token"]["n_hidden"] == 2 * N_LAYERS
    one = found["weights_bytes"]
    each = [rank["weights_bytes"] for rank in found["ranks"]]
    assert one <= sum(each) <= 1.01 * one
    assert max(each) < 0.6 * one
    assert [rank["kv_bytes_per_token"] for rank in found["ranks"]] == [512 * N_LAYERS] * 2
    assert "1/2 of all layers" in plan("--hosts", "2x1GB", "--shard", "tensor").out
    found = plan("--hosts", "5x1GB", "--shard", "tensor")
    assert (found.code, "ranks" in only_line(found)) == (1, True)


def test_a_config_alone_is_planned(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["meta-llama/Llama-3.1-8B-Instruct"]["config"]))
    for source in (tmp_path, tmp_path / "config.json"):
        found = facts("-m", source, "--hosts", "4x16GB", "--quant", "q8_0", "--split", "8,8,8,8")
        # 7.5 billion weights of 34 bytes per 32, and norms.
        assert found["weights_bytes"] == pytest.approx(7.504e9 * 34 / 32, rel=1e-3)
        assert [rank["n_layers"] for rank in found["ranks"]] == [8, 8, 8, 8]


def test_the_speeds_of_hosts_differ():
    found = facts("--hosts", "1GB,2GB", "--bandwidth", "10GB/s,30GB/s", "--compute", "1TFLOP/s")
    assert [rank["bandwidth_bytes_per_second"] for rank in found["ranks"]] == [1e10, 3e10]
    assert [rank["n_layers"] for rank in found["ranks"]] == [1, N_LAYERS - 1]


def test_ranks_on_one_host_share_its_memory_and_cores():
    ideal = "--link", "100Gbit/s", "--latency", "0", "--overhead", "0", "-t", 1, "--split", f"{N_LAYERS - 3},1,1,1"
    found = facts("--hosts", "2GB", "--ranks-per-host", 4, "--cores", 2, *ideal)
    assert {rank["usable_bytes"] for rank in found["ranks"]} == {375_000_000}
    alone = facts("--hosts", "4x2GB", *ideal)
    assert found["rates"]["compute_seconds"] == alone["rates"]["compute_seconds"]  # each shorter than a slice
    assert found["rates"]["decode_all"] < alone["rates"]["decode_all"]


def test_what_is_not_given_is_measured_here(monkeypatch):
    monkeypatch.setattr(plan_options, "measured_bandwidth", lambda *_: 5e9)
    monkeypatch.setattr(plan_options, "measured_compute", lambda *_: 6e9)
    found = plan("--hosts", "2x1GB", speed=())
    assert "each with 5.0 GB/s of memory, 6 GFLOP/s, bandwidth and compute measured on this machine" in found.out


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hosts", "4y16GB"], "--hosts: '4y16GB' is no list of machines, such as 4x16GB or 16GB,64GB"),
        (["--hosts", "4"], "--hosts: 4 has no unit; 4x16GB means 4 machines with 16 GB of memory each"),
        (["--hosts", "16GB,2x8.5"], "--hosts: 2x8.5 has no unit; 4x16GB means"),
        (["--hosts", "0x16GB"], "--hosts: 0x16GB must be 1 to 1,024 machines"),
        (
            ["--hosts", "9x16GB"],
            f"--hosts: the model's {N_LAYERS} layers can be cut for at most {N_LAYERS} ranks, not for 9",
        ),
        (["--link", "10"], "--link: '10' is no rate, such as 10Gbit/s or 1.25GB/s"),
        (["--link", "0Gbit/s"], "--link: '0Gbit/s' is no rate"),
        (["--latency", "5"], "--latency: '5' is no time, such as 0.1ms or 200us"),
        (["--bandwidth", "1GB/s,2GB/s,3GB/s"], "--bandwidth needs one value, or one for each of the 2 machines"),
        (["--bandwidth", "120Gbit/s"], "--bandwidth: '120Gbit/s' is no rate, such as 120GB/s"),
        (["--compute", "fast"], "--compute: 'fast' is no rate, such as 300GFLOP/s or 3.5TFLOP/s"),
        (["--shard", "data"], "--shard: unknown kind 'data'; choose pipeline or tensor"),
        (
            ["--split", "3,4"],
            f"--split: 3,4 must be 2 numbers of at least 1 that add up to the model's {N_LAYERS} layers",
        ),
        (["--split", "a"], "--split: 'a' is not a list of the layers of each rank, such as 20,8"),
        (["--split", "3,3", "--shard", "tensor"], "--split needs --shard pipeline"),
        (["--context", LONGEST + 1], f"--context must be at most {LONGEST:,} tokens, the model's context"),
        (["--prompt", LONGEST + 1], f"--prompt must be at most {LONGEST:,} tokens, the value of --context"),
        (["-m", "org/repo"], "org/repo: not on this machine, and `plan` downloads nothing"),
    ],
)
def test_a_mistake_is_one_line(options, message, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    found = plan("--hosts", "2x1GB", *options)
    assert message in only_line(found)
    assert found.code in (1, 2)


def test_quantities():
    assert memories_of("-", "2x16GB, 64GiB,1*1MB") == [16 * 10**9, 16 * 10**9, 64 << 30, 10**6]
    assert bits_of("-", "10Gbit/s") == bits_of("-", "1.25 GB/s") == bits_of("-", "10Gb/s") == 1e10
    assert bits_of("-", "1Mibit/s") == 1 << 20
    assert bandwidth_of("-", "120GB/s") == 120e9
    assert compute_of("-", "3.5TFLOP/s") == 3.5e12
    assert [seconds_of("-", text) for text in ("0.1ms", "200us", "1s", "0")] == pytest.approx([1e-4, 2e-4, 1, 0])
    assert each_host("-", "1GB/s", 2, bandwidth_of) == [1e9, 1e9]
    for parse in (bits_of, bandwidth_of, compute_of, seconds_of, memories_of):
        with pytest.raises(OptionError, match="--x: '1 apple/s' is no "):
            parse("--x", "1 apple/s")
