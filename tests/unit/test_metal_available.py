"""Where `metal` and `cuda` can run, why not elsewhere, and what the commands say about it."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest
from typer.testing import CliRunner

import mlx_engine
from kernels import emulator, launch
from mlx_engine import backends
from mlx_engine.backends import VARIABLE, auto, create_backend, unavailable
from mlx_engine.commands import app
from mlx_engine.errors import BackendUnavailableError
from tests.contract.check import EMULATED, load

MICRO = Path(__file__).parents[1] / "data" / "qwen3-micro" / "model-q8_0.gguf"
NEEDS_COMPILER = pytest.mark.skipif(emulator.unavailable() is not None, reason=str(emulator.unavailable()))
NO_METAL = platform.system() != "Darwin" or platform.machine() != "arm64"


def on(monkeypatch, system: str, machine: str) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)


def test_an_apple_gpu_is_needed(monkeypatch):
    on(monkeypatch, "Linux", "x86_64")
    reason = unavailable("metal")
    assert reason.startswith("it needs an Apple GPU; this is Linux on x86_64")
    assert VARIABLE in reason
    assert "\n" not in reason


def test_mlx_has_to_find_it(monkeypatch):
    on(monkeypatch, "Darwin", "arm64")
    monkeypatch.setattr(launch.mx.metal, "is_available", lambda: False)
    assert "finds no Metal GPU" in unavailable("metal")
    monkeypatch.setattr(launch.mx.metal, "is_available", lambda: True)
    assert unavailable("metal") is None
    assert auto() == "metal"


@pytest.mark.parametrize(
    ("system", "devices", "found", "reason"),
    [
        ("Darwin", [], False, "on Linux; this is Darwin"),
        ("Linux", ["/no/such/device"], False, "has none, or no driver"),
        ("Linux", ["/dev/null"], False, "finds no CUDA GPU"),
        ("Linux", ["/dev/null"], True, None),
    ],
)
def test_cuda_is_asked_for_only_where_there_may_be_some(monkeypatch, system, devices, found, reason):
    on(monkeypatch, system, "x86_64")
    monkeypatch.setattr(backends, "_NVIDIA_DEVICES", devices)
    monkeypatch.setattr(launch.mx.cuda, "is_available", lambda: found)
    if reason is None:
        assert unavailable("cuda") is None
        assert auto() == "cuda"
    else:
        assert reason in unavailable("cuda")
        with pytest.raises(BackendUnavailableError, match=reason):
            create_backend("cuda")


@NEEDS_COMPILER
def test_emulated_metal_runs_anywhere_and_is_never_chosen_by_itself(monkeypatch):
    monkeypatch.setenv(VARIABLE, "emulate")
    assert unavailable("metal") is None
    assert auto() != "metal"
    on(monkeypatch, "Darwin", "arm64")
    assert auto() != "metal"
    made = create_backend("metal")
    assert (made.name, made.device) == ("metal", "emulated on cpu")


def test_the_emulator_says_what_it_lacks(monkeypatch):
    monkeypatch.setenv(VARIABLE, "emulate")
    monkeypatch.setattr(emulator, "unavailable", lambda: "no clang")
    assert unavailable("metal") == "no clang"
    with pytest.raises(BackendUnavailableError, match="no clang"):
        mlx_engine.load(MICRO, "metal")


def test_another_value_is_no_wish_that_could_be_fulfilled(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    assert unavailable("metal") == f"{VARIABLE} must be 'emulate' or unset, not '1'"


# ---- the command ----


@NEEDS_COMPILER
def test_an_emulated_run_says_that_it_is_one(monkeypatch):
    load(EMULATED, MICRO)
    monkeypatch.setenv(VARIABLE, "emulate")
    command = ["generate", "Once", "--model", str(MICRO), "--backend", "metal", "--kv", "--strict", "-n", "2"]
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.output
    expected = {"requested": "metal", "used": "metal", "device": "emulated on cpu", "activations": "f32"}
    expected["kv_type"] = "f32"
    assert json.loads(result.stdout)["backend"] == expected
    assert "on backend metal (emulated on cpu)" in CliRunner().invoke(app, command).stderr


@pytest.mark.skipif(not NO_METAL, reason="this machine has Metal")
@pytest.mark.parametrize("value", [None, "please"])
def test_without_a_gpu_one_line_says_so_and_the_numbers_are_those_of_what_ran(monkeypatch, value):
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    command = ["generate", "Once upon a time", "--backend", "metal", "--kv", "-n", "2", "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0
    (line,) = result.stderr.splitlines()
    assert "'metal' is not available" in line
    assert f"running on {auto()!r}" in line
    used = json.loads(result.stdout)["backend"]
    assert (used["requested"], used["used"]) == ("metal", auto())
    strict = CliRunner().invoke(app, [*command, "--strict"])
    assert (strict.exit_code, strict.stdout) == (2, "")
    assert len(strict.stderr.splitlines()) == 1
