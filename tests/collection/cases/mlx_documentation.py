"""The kernels of MLX's documentation, taken from its text."""

from __future__ import annotations

import re
from textwrap import dedent
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np

from tests.collection.case import Checkout, Results, case, normal

MLX = "ml-explore/mlx"
PAGE = "docs/src/dev/custom_metal_kernels.rst"


def after_running(checkout: Checkout, heading: str, *more: str) -> dict[str, Any]:
    """Run the code blocks of these sections, and return their variables."""
    sections = re.split(r"^(.+)\n[-=]{5,}\n", checkout.text(PAGE), flags=re.M)
    texts = dict(zip(sections[1::2], sections[2::2], strict=True))
    variables: dict[str, Any] = {"mx": mx, "np": np}
    for name in (heading, *more):
        variables = variables.copy()  # the text calls every kernel `kernel`; functions keep theirs
        for block in re.findall(r"^\.\. code-block:: python *\n((?:\n|  .*\n)+)", texts[name], flags=re.M):
            if "x.shape =" not in block:  # "for an input such as"
                exec(compile(dedent(block), f"{checkout.folder}/{PAGE} {name}", "exec"), variables)
    return variables


@case(MLX, tolerance=1e-3)
def exponential(checkout: Checkout) -> Results:
    variables = after_running(checkout, "Simple Example")
    return variables["b"], mx.exp(variables["a"])


@case(MLX, tolerance=1e-3)
def exponential_strided(checkout: Checkout) -> Results:
    variables = after_running(checkout, "Using Shape/Strides")
    return variables["b"], mx.exp(variables["a"])


def sampled(checkout: Checkout, *, height: int, width: int, reach: float) -> Results:
    variables = after_running(checkout, "Complex Example", "Grid Sample VJP")
    x = normal()(2, height, width, 5)
    grid = mx.array(np.random.default_rng(1).uniform(-reach, reach, (2, 3, 7, 2)).astype(np.float32))

    def gradients(function: Any) -> Any:
        return mx.grad(lambda x, grid: function(x, grid).square().sum(), argnums=(0, 1))(x, grid)

    sample, reference = variables["grid_sample"], variables["grid_sample_ref"]
    found = sample(x, grid), gradients(sample)
    with patch.object(mx, "floor", lambda x, floor=mx.floor: mx.stop_gradient(floor(x))):  # indices have no gradient
        return found, (reference(x, grid), gradients(reference))


@case(MLX)
def grid_sample(checkout: Checkout) -> Results:
    return sampled(checkout, height=8, width=6, reach=0.7)


@case(MLX, bug="the pixels beside the border are read before the mask says that they are outside")
def grid_sample_at_the_border(checkout: Checkout) -> Results:
    return sampled(checkout, height=8, width=6, reach=1.0)


@case(MLX, bug="W / 2 and H / 2 are integer divisions: with an odd width or height the gradient is wrong")
def grid_sample_of_odd_size(checkout: Checkout) -> Results:
    return sampled(checkout, height=7, width=5, reach=0.7)
