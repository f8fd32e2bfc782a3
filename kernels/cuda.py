"""Translation of Metal kernels for `mx.fast.cuda_kernel`, with a header that defines the Metal functions they use.

Address spaces are removed from the text. A macro cannot do this, because CUDA's own headers use the word `device` in
`__device__`. The kernels use only features of both: threadgroups of one dimension, grids of whole threadgroups, arrays
of one element for numbers, shapes read one element at a time. CUDA is a second platform on which threads really race;
speed on CUDA says nothing about speed on Metal.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from .kernel import Kernel

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_THREADGROUP_ARRAY = re.compile(r"\bthreadgroup\s+(?=\w[\w:]*\s+\w+\s*\[)")
_ADDRESS_SPACE = re.compile(r"\b(?:device|constant|threadgroup|thread)\b\s+(?=[\w:])")
_ADDRESS_SPACE_OF_POINTER = re.compile(r"\b(?:device|constant|threadgroup|thread)\b(?=\s*[*&])")


def cuda_kernel(kernel: Kernel) -> Callable[..., list[mx.array]]:
    """Return a kernel for CUDA, called like the result of `mx.fast.metal_kernel`.

    Raises:
        ValueError: the kernel needs a feature that `mx.fast.cuda_kernel` lacks.
        RuntimeError: MLX was built without CUDA. Unlike Metal kernels, CUDA kernels cannot even be created then.
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
    """Return Metal text without address spaces, except that threadgroup arrays become `__shared__`."""
    text = _COMMENT.sub("", text)
    text = _THREADGROUP_ARRAY.sub("__shared__ ", text)
    text = _ADDRESS_SPACE.sub("", text)
    return _ADDRESS_SPACE_OF_POINTER.sub("", text)


@cache
def header() -> str:
    """Return the header of the translated text."""
    return Path(__file__).with_suffix(".cuh").read_text(encoding="utf-8")
