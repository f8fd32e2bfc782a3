"""The options that several commands share: the model, what computes, and what linear layers become on load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import typer

from mlx_engine.errors import OptionError

Model: TypeAlias = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="GGUF file, Hugging Face folder, hub id org/repo[:file], builtin, or shape:NAME (random weights).",
    ),
]
Backend: TypeAlias = Annotated[
    str, typer.Option("--backend", "-b", help="Backend to run on; the `backends` command lists all.")
]
Threads: TypeAlias = Annotated[
    int | None,
    typer.Option("--threads", "-t", help="Number of threads, on backends that use several.", show_default="all cores"),
]
NoJit: TypeAlias = Annotated[bool, typer.Option("--no-jit", help="Use plain NumPy instead of compiled kernels.")]
Quant: TypeAlias = Annotated[
    str, typer.Option("--quant", help="Convert linear layers on load: keep, f32, q8_0, q4_0 or q4_1.")
]
QuantMinDim: TypeAlias = Annotated[
    str,
    typer.Option("--quant-min-dim", metavar="auto|N", help="Do not quantise layers whose longer side is below N."),
]
QuantLayers: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--quant-layer",
        metavar="LAYER=TYPE",
        help="Type of some layers, such as attn_v=f32, ffn=q4_0 or output=keep; may be given several times.",
    ),
]


def min_dim_of(text: str) -> int | str:
    """`auto`, or a number.

    Raises:
        OptionError: it is neither.
    """
    if text == "auto":
        return text
    if not (text.isascii() and text.isdigit()):
        raise OptionError(option="--quant-min-dim", expected="auto, or a whole number >= 0", found=text)
    return int(text)


def layers_of(given: Sequence[str] | None) -> dict[str, str]:
    """Layers and types, of `LAYER=TYPE` each.

    Raises:
        OptionError: one has another form, or a layer is named twice.
    """
    found: dict[str, str] = {}
    for text in given or ():
        layer, equals, quant = text.partition("=")
        if not equals:
            raise OptionError(option="--quant-layer", expected="LAYER=TYPE, such as attn_v=f32", found=text)
        if layer in found:
            raise OptionError(option="--quant-layer", expected=f"{layer} once", found=f"{found[layer]} and {quant}")
        found[layer] = quant
    return found
