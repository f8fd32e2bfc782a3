"""The command `quantize`: write a model with quantised matrices, as a GGUF file or as a folder for MLX."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_engine.commands.console import notice, progress_bar, reports_errors
from mlx_engine.commands.options.groups import takes_groups
from mlx_engine.commands.options.model import AllowSetting, layers_of, min_dim_of
from mlx_engine.commands.values import columns
from mlx_engine.errors import OptionError, listed, size
from mlx_engine.options import option

if TYPE_CHECKING:
    from mlx_engine.convert.requantize import Line

TARGETS = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_1", "q4_0", "f16", "bf16")


@reports_errors
@takes_groups
def quantize(
    model: Annotated[
        str, typer.Argument(metavar="IN", help="GGUF file, Hugging Face folder, hub id org/repo[:file], or builtin.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="GGUF file to write; for mlx-* a new folder.")],
    to: str = option(
        "q8_0",
        "Type of the matrices. In a GGUF file: q8_0, q4_0, q4_1, f16 or bf16; or llama.cpp's mixtures of types q4_K_M, "
        "q5_K_M or q6_K. In a folder that mlx-lm loads: mlx-Nbit with 2, 3, 4, 5, 6 or 8 for N; mlx-mxfp4, mlx-mxfp8 "
        "or mlx-nvfp4.",
    ),
    quant_min_dim: Annotated[
        str, typer.Option("--min-dim", metavar="auto|N", help="Do not quantise matrices whose longer side is below N.")
    ] = "auto",
    quant_layer: Annotated[
        list[str] | None,
        typer.Option(
            "--layer",
            metavar="LAYER=TYPE",
            help="Type of some layers, such as attention=q8_0 or output=keep; may be given several times.",
        ),
    ] = None,
    preserve_output: bool = option(False, "Keep the stored type of the output head; the same as --layer output=keep."),
    allow_mixed: bool = option(
        False, "Write the model even if most bytes of its matrices cannot have the type of --to."
    ),
    allow_setting: AllowSetting = None,
    force: bool = option(False, "Overwrite OUT if it exists."),
) -> None:
    """Quantise a model and write it as a GGUF file or a folder. Print bytes and quantisation error by layer type."""
    from mlx_engine.checkpoint.sources import resolve
    from mlx_engine.convert.file_types import FileConversion
    from mlx_engine.convert.mlx_tensors import TARGETS as MLX_TARGETS
    from mlx_engine.convert.requantize import requantize
    from mlx_engine.weights.conversion import HEAD

    to = to.lower()
    if to not in (*TARGETS, *MLX_TARGETS):
        message = f"--to: unknown type {to!r}; choose {listed((*TARGETS, *MLX_TARGETS))}"
        raise OptionError(message, option="--to", found=to)
    layers = {name: type_.lower() for name, type_ in layers_of(quant_layer).items()}
    if preserve_output:
        if HEAD in layers:
            raise OptionError(f"--preserve-output cannot be combined with --layer {HEAD}=", option="--preserve-output")
        layers[HEAD] = "keep"
    how: dict[str, Any] = {"allow_settings": allow_setting or (), "allow_mixed": allow_mixed, "note": notice}
    if to in MLX_TARGETS:
        least = min_dim_of(quant_min_dim)
        if least != "auto":
            raise OptionError(f"--min-dim cannot be combined with --to {to}", option="--min-dim", found=quant_min_dim)
        from mlx_engine.convert.mlx_folder import to_mlx_folder

        with progress_bar("quantising") as progress:
            lines = to_mlx_folder(resolve(model), out, to, layers, progress=progress, **how)
        notice(table(lines))
        print(out)
        return
    conversion = FileConversion(to, min_dim_of(quant_min_dim), layers)
    if out.exists() and not force:
        raise OptionError(f"{out} exists; --force overwrites it", option="OUT", found=str(out))
    with progress_bar("quantising") as progress:
        lines = requantize(resolve(model), out, conversion, progress=progress, **how)
    notice(table(lines))
    print(out)


def table(lines: list[Line]) -> str:
    """Format a table with a row per layer type, and a last row for all layers.

    The column "RMSE" is the root mean square error of all weights; weights that are not converted have the error 0. The
    column "relative" is the RMSE of the converted weights, divided by their root mean square before the conversion.
    """
    from mlx_engine.convert.requantize import total

    rows = [["layers", "matrices", "type", "before", "after", "ratio", "RMSE", "relative"]]
    for line in [*lines, total(lines)]:
        types = ", ".join(f"{n} {name}" if len(line.types) > 1 else name for name, n in line.types.items())
        ratio = f"{line.bytes_out / line.bytes_in:.3f}" if line.bytes_in else "-"
        sizes = size(line.bytes_in), size(line.bytes_out)
        errors = f"{line.rmse:.3g}", f"{line.relative_rmse:.3%}"
        rows.append([line.kind, str(line.count), types, *sizes, ratio, *errors])
    return "\n".join(columns(rows, "<><>>>>>"))
