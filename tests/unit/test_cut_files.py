"""A mapped file that is truncated while it is in use: one line and exit code 1."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_engine.checkpoint import mapping
from mlx_engine.checkpoint.gguf import open_gguf
from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "qwen3-micro"
# Cuts the file of the weights when the prompt has been read: what follows reads the lost part.
CUT = """
import os, sys
from mlx_engine.loop import stream
step = stream.Stream._step
def cut(self, scheduler):
    step(self, scheduler)
    os.truncate(sys.argv.pop(), 100) if len(sys.argv) > 8 else None
stream.Stream._step = cut
from mlx_engine.commands import main
main()
"""


@pytest.mark.skipif(not hasattr(signal, "SIGBUS"), reason="systems with SIGBUS")
@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("simd", "gguf"),
        ("parallel", "folder"),
        pytest.param("parallel", "gguf", marks=pytest.mark.slow),
    ],
)
def test_a_truncated_file_ends_the_run_with_one_line(tmp_path, backend, kind):
    if kind == "gguf":
        model = weights = Path(shutil.copy(DATA / "model-q8_0.gguf", tmp_path / "model.gguf"))
    else:
        model = Path(shutil.copytree(DATA / "hf", tmp_path / "hf"))
        weights = model / "model.safetensors"
    command = ["generate", "-q", "-n", "50", "-b", backend, "-m", model, weights]
    run = subprocess.run(
        [sys.executable, "-c", CUT, *command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert run.returncode == 1, run.stderr
    blank, line = run.stderr.splitlines()
    assert blank == ""
    assert line.startswith(f"error: {weights}: expected ")
    assert "found that one was truncated; write a new file under another name" in line


def test_the_guard_is_called_once_and_not_for_headers(monkeypatch):
    called = []
    monkeypatch.setattr(mapping, "before_first_view", called.append)
    with open_gguf(DATA / "model-q8_0.gguf") as file:
        assert called == []
        for name in list(file.tensors)[:2]:
            file.weight(name)
    assert called == [DATA / "model-q8_0.gguf"]


def test_a_library_installs_no_handler():
    code = (
        "import ctypes, signal, sys, mlx_engine\n"
        "mlx_engine.load(sys.argv[1], 'simd').generate([1], max_tokens=1)\n"
        "kind = ctypes.CDLL(None).signal; kind.restype = ctypes.c_void_p\n"
        "print(kind(signal.SIGBUS, None))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, DATA / "model-q8_0.gguf"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout == "None\n"
