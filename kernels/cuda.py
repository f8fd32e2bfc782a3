"""The same kernels for `mx.fast.cuda_kernel`: translated text, behind a header with the words of Metal that they use.

Address spaces are taken out of the text. A macro could not do that: CUDA's own `__device__` is made of the word
`device`. The kernels keep to what both can do: threadgroups of one dimension, grids of whole threadgroups, arrays of
one element for numbers, shapes read one by one. That gives them a second machine to run on, with threads that really
race; it says nothing about speed on Metal.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from kernels.kernel import Kernel

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_THREADGROUP_ARRAY = re.compile(r"\bthreadgroup\s+(?=\w[\w:]*\s+\w+\s*\[)")
_ADDRESS_SPACE = re.compile(r"\b(?:device|constant|threadgroup|thread)\b\s+(?=[\w:])")
_ADDRESS_SPACE_OF_POINTER = re.compile(r"\b(?:device|constant|threadgroup|thread)\b(?=\s*[*&])")


def cuda_kernel(kernel: Kernel) -> Callable[..., list[mx.array]]:
    """A kernel as CUDA runs it; called like the result of `mx.fast.metal_kernel`.

    Raises:
        ValueError: the kernel asks for what `mx.fast.cuda_kernel` has not.
        RuntimeError: MLX was built without CUDA. Unlike Metal's, its kernels cannot even be made then.
    """
    if kernel.atomic_outputs or kernel.math_mode != "safe":
        raise ValueError(f"kernel {kernel.name}: CUDA has no atomic outputs, and no math mode but 'safe'")
    arguments: dict[str, Any] = {
        "name": kernel.name,
        "input_names": kernel.input_names,
        "output_names": kernel.output_names,
        "source": translated(kernel.source),
        "header": header() + translated(kernel.header),
        "ensure_row_contiguous": kernel.ensure_row_contiguous,
    }
    return cast("Callable[..., list[mx.array]]", mx.fast.cuda_kernel(**arguments))


def translated(text: str) -> str:
    """Metal's text without address spaces: arrays of a threadgroup are `__shared__`, every other space is none."""
    text = _COMMENT.sub("", text)
    text = _THREADGROUP_ARRAY.sub("__shared__ ", text)
    text = _ADDRESS_SPACE.sub("", text)
    return _ADDRESS_SPACE_OF_POINTER.sub("", text)


@cache
def header() -> str:
    """What stands before the translated text."""
    return Path(__file__).with_suffix(".cuh").read_text(encoding="utf-8")
