"""What the tests run on emulated `metal`, compiled together: one unit per kernel, many times faster than one by one."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from pathlib import Path

from kernels.cpu.build.machine_code import locked
from kernels.files import cache_folder
from kernels.lab.run import prepare
from kernels.launch import Launch, planned
from mlx_engine.backends.metal.backend import MetalBackend
from mlx_engine.cache import SequenceInput
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.checkpoint.sources import resolve
from mlx_engine.loop.forward import forward
from mlx_engine.weights.model import load_model
from tests.contract.cases import CASES

DATA = Path(__file__).parent / "data"
# The checkpoints with Q8_0 weights, and how many tokens at a time the tests show them. More than eight take the kernels
# for many, which depend on no number.
PASSES = {
    DATA / "qwen3-micro" / "model-q8_0.gguf": (1, 2, 3, 7, 20),
    DATA / "qwen3-mqa" / "model-q8_0.gguf": (1, 9),
    resolve("builtin"): (1, 4),
}


@cache
def compile_together() -> None:
    """Once per process. Which kernels there will be is found by running everything, and launching nothing.

    Of several test processes one compiles, and the others wait for its cache.
    """
    launches: dict[str, list[Launch]] = defaultdict(list)
    with planned() as seen:
        for case in CASES:
            case.on(MetalBackend("emulator"))
        for path, lengths in PASSES.items():
            _run(path, lengths)
    for launch in seen:
        launches[launch.kernel.name].append(launch)
    with locked([cache_folder("emulator") / "tests"]):
        for of_kernel in launches.values():
            prepare(of_kernel, ["spaces"])


def _run(path: Path, lengths: tuple[int, ...]) -> None:
    model = load_model(open_checkpoint(path), MetalBackend("emulator"))
    with model.backend.session():
        for n in lengths:
            for wanted in (1, None):
                forward(model, SequenceInput(list(range(n)), model.scratch_kv(n), wanted))
