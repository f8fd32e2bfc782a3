"""Benchmark mlx-lm, if it is installed, on the same file with its own model and decode loop.

mlx-lm cannot read GGUF. Its 8-bit matrices are repacked from the file's quants without rounding, see
kernels/metal/layout.py; all other tensors are float16, in which mlx-lm computes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from mlx_engine.bench.hugging_face import open_qwen3
from mlx_engine.bench.samples import Test
from mlx_engine.quant.types import Q8_0
from mlx_engine.quant.weight import Weight

Row = dict[str, Any]


def rates(path: Path, tests: Sequence[Test], *, repetitions: int) -> Row:
    """Return the median tokens per second of each test, or the reason why there are none."""
    try:
        version = metadata.version("mlx-lm")
    except metadata.PackageNotFoundError:
        return {"unavailable": "not installed; pip install mlx-lm"}
    try:
        model = _model(path)
        found = {test.name: statistics.median(_samples(model, test, repetitions)) for test in tests}
    except Exception as error:  # third-party code, of any version
        # An ImportError contains the user's file paths, and a report is shared with others.
        reason = f": {error}" if type(error) is ValueError else ""
        return {"unavailable": f"version {version} does not support this model: {type(error).__name__}{reason}"}
    return {"version": version, "weights": "8 bit, groups of 32, float16", "rates": found}


def _model(path: Path) -> Any:
    import mlx.core as mx
    from mlx.nn.layers.quantized import quantize
    from mlx_lm.models import qwen3

    opened = open_qwen3(path)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(opened.settings))
    # MLX is lazy: the random weights quantised here are replaced before they are computed.
    quantize(model, group_size=32, bits=8)
    model.load_weights([part for name, weight in opened.weights for part in _arrays(name, weight)])
    mx.eval(model.parameters())
    return model


def _arrays(name: str, weight: Weight) -> Iterator[tuple[str, Any]]:
    """Yield mlx-lm's arrays for a tensor."""
    import mlx.core as mx

    from mlx_engine.kernels.metal.formats import split_q8_0

    if len(weight.shape) == 1:
        yield name, mx.array(weight.dequantize()).astype(mx.float16)
        return
    if weight.type != Q8_0:
        raise ValueError(f"{name}: expected Q8_0, found {weight.type.name}")
    matrix = split_q8_0(weight.data.reshape(-1), (weight.shape[0], weight.shape[1]))
    stem = name.removesuffix("weight")
    yield from ((name, matrix.wq), (f"{stem}scales", matrix.ws), (f"{stem}biases", matrix.biases()))


def _samples(model: Any, test: Test, repetitions: int) -> list[float]:
    """Return tokens per second of each repetition, after a warm-up run."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    found = []
    for _ in range(repetitions + 1):
        prompt = mx.array([i % 100 for i in range(test.depth + max(test.n_prompt, 1))])
        times = [time.perf_counter()]
        times += [time.perf_counter() for _ in generate_step(prompt, model, max_tokens=max(test.n_gen, 0) + 1)]
        # The first token ends prefill; each of the others is a decode step.
        seconds = (times[1] - times[0] if test.n_prompt else 0) + (times[-1] - times[1])
        found.append(test.n_tokens / seconds)
    return found[1:]
