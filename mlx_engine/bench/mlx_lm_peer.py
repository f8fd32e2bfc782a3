"""mlx-lm beside us, where it is installed: the same file, its own model, its own loop.

mlx-lm reads no GGUF. Its 8-bit matrices are made of the file's codes without rounding, see kernels/metal/layout.py;
everything else is float16, in which it computes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from mlx_engine.bench.cells import Test
from mlx_engine.checkpoint.model_files import Checkpoint, open_checkpoint
from mlx_engine.models import model_file
from mlx_engine.quant.types import Q8_0
from mlx_engine.quant.weight import Weight

Row = dict[str, Any]


def rates(path: Path, tests: Sequence[Test], *, repetitions: int) -> Row:
    """Tokens per second of each test, the median; or why there are none."""
    try:
        version = metadata.version("mlx-lm")
    except metadata.PackageNotFoundError:
        return {"unavailable": "not installed; pip install mlx-lm"}
    try:
        model = _model(open_checkpoint(path))
    except Exception as error:  # another project's code, in a version that we may not know
        return {"unavailable": f"version {version} does not take this model: {type(error).__name__}: {error}"}
    found = {test.name: statistics.median(_samples(model, test, repetitions)) for test in tests}
    return {"version": version, "weights": "8 bit, groups of 32, float16", "rates": found}


def _model(checkpoint: Checkpoint) -> Any:
    import mlx.core as mx
    from mlx.nn.layers.quantized import quantize
    from mlx_lm.models import qwen3

    plan = model_file(checkpoint).plan(checkpoint)
    cfg = plan.config
    settings = {
        "model_type": "qwen3",
        "num_hidden_layers": cfg.n_layers,
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.intermediate_size,
        "num_attention_heads": cfg.n_heads,
        "num_key_value_heads": cfg.n_kv_heads,
        "head_dim": cfg.head_dim,
        "vocab_size": cfg.vocab_size,
        "max_position_embeddings": cfg.context_length,
        "rms_norm_eps": cfg.norm_eps,
        "rope_theta": cfg.rope_theta,
        "tie_word_embeddings": "output.weight" not in checkpoint.shapes,
    }
    model = qwen3.Model(qwen3.ModelArgs.from_dict(settings))
    # Lazy: the random weights that are quantised here are replaced before anybody looks at them.
    quantize(model, group_size=32, bits=8)
    names = {tensor.name: tensor.stored("hf").name for tensor in plan.tensors}
    model.load_weights([part for name in checkpoint.shapes for part in _arrays(names[name], checkpoint.weight(name))])
    mx.eval(model.parameters())
    return model


def _arrays(name: str, weight: Weight) -> Iterator[tuple[str, Any]]:
    """What mlx-lm wants for a tensor."""
    import mlx.core as mx

    from kernels.metal.layout import split_q8_0

    if len(weight.shape) == 1:
        yield name, mx.array(weight.dequantize()).astype(mx.float16)
        return
    if weight.type != Q8_0:
        raise ValueError(f"{name}: expected Q8_0, found {weight.type.name}")
    matrix = split_q8_0(weight.data.reshape(-1), (weight.shape[0], weight.shape[1]))
    stem = name.removesuffix("weight")
    yield from ((name, matrix.wq), (f"{stem}scales", matrix.ws), (f"{stem}biases", matrix.biases()))


def _samples(model: Any, test: Test, repetitions: int) -> list[float]:
    """Tokens per second, once per repetition, after a run that is not counted."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    found = []
    for _ in range(repetitions + 1):
        prompt = mx.array([i % 100 for i in range(test.depth + max(test.n_prompt, 1))])
        times = [time.perf_counter()]
        times += [time.perf_counter() for _ in generate_step(prompt, model, max_tokens=max(test.n_gen, 0) + 1)]
        # The first token ends the reading of the prompt; each of the others is a pass.
        seconds = (times[1] - times[0] if test.n_prompt else 0) + (times[-1] - times[1])
        found.append(test.n_tokens / seconds)
    return found[1:]
