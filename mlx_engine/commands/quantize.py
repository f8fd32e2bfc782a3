"""The command `quantize`: write a model with quantised matrices, as a GGUF file or as a folder for MLX."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_engine.commands.console import notice, progress_bar, reports_errors
from mlx_engine.commands.options.model import AllowSetting, layers_of, min_dim_of
from mlx_engine.commands.values import columns
from mlx_engine.errors import OptionError, require, size

if TYPE_CHECKING:
    from mlx_engine.convert.requantize import Line

TARGETS = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_1", "q4_0", "f16", "bf16")


@reports_errors
def quantize(
    model: Annotated[
        str, typer.Argument(metavar="IN", help="GGUF file, Hugging Face folder, hub id org/repo[:file], or builtin.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="GGUF file to write; for mlx-* a new folder.")],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="Type of the matrices: q8_0, q4_0, q4_1, f16 or bf16; q4_K_M, q5_K_M or q6_K, mixed as by llama.cpp; "
            "or, for a folder that mlx-lm loads, mlx-4bit, also of 2, 3, 5, 6 or 8 bits, mlx-mxfp4, mlx-mxfp8 or "
            "mlx-nvfp4.",
        ),
    ] = "q8_0",
    min_dim: Annotated[
        str, typer.Option("--min-dim", metavar="auto|N", help="Do not quantise matrices whose longer side is below N.")
    ] = "auto",
    layer: Annotated[
        list[str] | None,
        typer.Option(
            "--layer",
            metavar="LAYER=TYPE",
            help="Type of some layers, such as attention=q8_0 or output=keep; may be given several times.",
        ),
    ] = None,
    preserve_output: Annotated[
        bool,
        typer.Option(
            "--preserve-output", help="Keep the stored type of the output head; the same as --layer output=keep."
        ),
    ] = False,
    allow_mixed: Annotated[
        bool,
        typer.Option(
            "--allow-mixed", help="Write the model even if most bytes of its matrices cannot have the type of --to."
        ),
    ] = False,
    allow_setting: AllowSetting = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite OUT if it exists.")] = False,
) -> None:
    """Quantise a model and write it as a GGUF file or a folder. Print bytes and quantisation error by layer type."""
    from mlx_engine.checkpoint.sources import resolve
    from mlx_engine.config.layer_types import HEAD
    from mlx_engine.convert.file_types import FileConversion
    from mlx_engine.convert.mlx_tensors import TARGETS as MLX_TARGETS
    from mlx_engine.convert.requantize import requantize

    to = to.lower()
    require(to in (*TARGETS, *MLX_TARGETS), option="--to", expected=" or ".join((*TARGETS, *MLX_TARGETS)), found=to)
    layers = {name: type_.lower() for name, type_ in layers_of(layer).items()}
    if preserve_output:
        require(HEAD not in layers, option="--preserve-output", expected=f"no --layer {HEAD}=", found=layers.get(HEAD))
        layers[HEAD] = "keep"
    how: dict[str, Any] = {"allow_settings": allow_setting or (), "allow_mixed": allow_mixed, "note": notice}
    if to in MLX_TARGETS:
        least = min_dim_of(min_dim)
        require(least == "auto", option="--min-dim", expected=f"no other value than auto with --to {to}", found=min_dim)
        from mlx_engine.convert.mlx_folder import to_mlx_folder

        with progress_bar("quantising") as progress:
            lines = to_mlx_folder(resolve(model), out, to, layers, progress=progress, **how)
        notice(table(lines))
        print(out)
        return
    conversion = FileConversion(to, min_dim_of(min_dim), layers)
    if out.exists() and not force:
        raise OptionError(option="OUT", expected="a file that does not exist yet, or --force", found=str(out))
    with progress_bar("quantising") as progress:
        lines = requantize(resolve(model), out, conversion, progress=progress, **how)
    notice(table(lines))
    print(out)


def table(lines: list[Line]) -> str:
    """Format a table by layer type: types, bytes before and after, their ratio, and the errors.

    RMSE has the unit of the weights; the relative one is a part of the root mean square of the converted matrices.
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
