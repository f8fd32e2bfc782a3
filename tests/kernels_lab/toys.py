"""Small kernels to try the lab with: right ones, and wrong ones."""

import numpy as np

from kernels import Experiment
from kernels.lab.ladder import Product

SCALE = Experiment(
    name="scale",
    source="""
    const uint i = thread_position_in_grid.x;
    if (i < N) y[i] = T(float(x[i]) * a[0]);
""",
    inputs={"x": "T N", "a": "1"},
    outputs={"y": "T N"},
    reference=lambda x, a: a * x,
    threads=lambda N: N,
    threadgroup=32,
)

PRODUCT = Experiment(
    name="product",
    source="""
    const uint row = thread_position_in_grid.x;
    if (row < N) {
      float sum = 0.0f;
      for (uint k = 0; k < K; k++) {
        const int code = int(wq[(row * K + k) / 4] >> (k % 4 * 8) & 0xffu) - 128;
        sum += float(ws[(row * K + k) / 32]) * float(code) * x[k];
      }
      y[row] = sum;
    }
""",
    inputs={"x": "1 K", "w": "q8_0 N K"},
    outputs={"y": "1 N"},
    reference=lambda x, w: x @ w.T,
    magnitude=lambda x, w: np.abs(x) @ np.abs(w).T,
    threads=lambda N: N,
    threadgroup=32,
)


# What a very small model multiplies.
SMALL = [
    Product("q+k+v", (9, 4, 5), 64),
    Product("o", (33,), 32),
    Product("gate+up", (12, 12), 64),
    Product("down", (16,), 96),
    Product("head", (40,), 64),
]


def changed(experiment, **changes):
    """The same with other fields."""
    fields = {name: getattr(experiment, name) for name in experiment.__dataclass_fields__}
    return Experiment(**(fields | changes))


def rewritten(experiment, old, new):
    """The same with another text."""
    assert old in experiment.source
    return changed(experiment, source=experiment.source.replace(old, new))
