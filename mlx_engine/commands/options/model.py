"""Options shared by several commands: model, backend, weights. The options of a run are in `mlx_engine.options`.

Options of one subject are the fields of a class (see `groups`). Each type alias is a single option.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from mlx_engine.commands.console import notice
from mlx_engine.commands.options.groups import RARE
from mlx_engine.commands.values import bytes_of
from mlx_engine.errors import BackendUnavailableError, OptionError, SourceError, require
from mlx_engine.options import option

if TYPE_CHECKING:
    from mlx_engine.engine import Engine
    from mlx_engine.weights.conversion import Conversion

# The default of --prefix-disk.
DISK = "20GiB"
# The title of a panel in help. The docstrings of `LoadOptions` and `ComputeOptions` begin with the same title.
MODEL_PANEL = "Model and backend"

Model: TypeAlias = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="GGUF file, Hugging Face folder, hub id org/repo[:FILE or :TYPE] such as org/repo:Q4_K_M, builtin, or "
        "shape:NAME (random weights).",
        rich_help_panel=MODEL_PANEL,
    ),
]
Backend: TypeAlias = Annotated[
    str,
    typer.Option(
        "--backend",
        "-b",
        metavar="NAME",
        help="Backend to run on; the `backends` command lists all.",
        rich_help_panel=MODEL_PANEL,
    ),
]
Strict: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Fail if the backend is unavailable here, instead of running on auto.",
        rich_help_panel=MODEL_PANEL,
    ),
    RARE,
]

Think: TypeAlias = Annotated[
    bool | None,
    typer.Option(
        "--think/--no-think",
        help="Turn thinking on or off, if the template has a switch.",
        show_default="the template's",
        rich_help_panel="Prompt",
    ),
]
Speculate: TypeAlias = Annotated[
    str,
    typer.Option(
        "--speculate",
        metavar="HOW",
        help="Speculative decoding: off, lookup, draft, mtp or auto. Answers do not change, with the exceptions of "
        "docs/exactness.md.",
        rich_help_panel=MODEL_PANEL,
    ),
    RARE,
]
Draft: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--draft",
        metavar="MODEL",
        help="A small model with the same vocabulary that proposes tokens.",
        rich_help_panel=MODEL_PANEL,
    ),
    RARE,
]
AdapterPaths: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="[NAME=]PATH",
        help="Folder of a LoRA adapter, of PEFT or mlx-lm. `serve` takes several; requests name one as MODEL:NAME.",
        rich_help_panel=MODEL_PANEL,
    ),
    RARE,
]


def one_adapter(paths: Sequence[str] | None) -> Sequence[str]:
    """Return the values of --adapter; raise OptionError if there are several. For all commands except `serve`."""
    if paths is not None and len(paths) > 1:
        message = "--adapter can be given once; `serve` takes several adapters, and a request chooses one"
        raise OptionError(message, option="--adapter", expected="one adapter", found=list(paths))
    return paths or ()


SUGGESTED = "Take sampling options that are not given from the model's files."


def _keep_no_shape(context: typer.Context, wanted: bool) -> bool:
    """The callback of --no-cache: if it is given, remove the random weights of `shape:` models at the command's end."""
    if wanted:
        from mlx_engine.checkpoint.shapes import not_kept

        try:
            context.with_resource(not_kept())
        except SourceError as error:
            raise typer.BadParameter(str(error)) from None
    return wanted


# Used by the alias `AllowSetting`, and by `LoadOptions`, where only --help-all lists the option.
ALLOW_SETTING = typer.Option(
    "--allow-setting",
    metavar="NAME",
    help="Ignore this setting of the model if it is not implemented; results may be wrong. May be given several times.",
)
AllowSetting: TypeAlias = Annotated[list[str] | None, ALLOW_SETTING]


@dataclass(frozen=True)
class LoadOptions:
    """Model and backend. Types of weights, activations, keys and values; ignored settings; number of threads."""

    quant: str = option("keep", "Convert linear layers: keep, f32, q8_0, q4_0 or q4_1.", metavar="TYPE")
    quant_min_dim: str = option(
        "auto", "Do not quantise matrices whose longer side is below N.", metavar="auto|N", is_rare=True
    )
    quant_layer: list[str] | None = option(
        None,
        "Type of some layers, such as attn_v=f32, ffn=q4_0 or output=keep; may be given several times.",
        metavar="LAYER=TYPE",
        is_rare=True,
    )
    allow_setting: Annotated[list[str] | None, ALLOW_SETTING, RARE] = None
    threads: int | None = option(
        None, "Number of threads of CPU backends.", flags=("--threads", "-t"), unset="all cores"
    )
    activations: str = option(
        "f32", "Type of activations: f32; on CPUs also i16; on MLX also f16 or bf16.", metavar="TYPE"
    )
    kv_type: str | None = option(
        None,
        "Keys and values: f32, f16, bf16 or q8_0.",
        metavar="TYPE",
        unset="f32; with f16 or bf16 activations the same type",
    )
    no_cache: Annotated[
        bool,
        typer.Option(
            "--no-cache",
            callback=_keep_no_shape,
            help="Remove the random weights of a shape: model at the end, instead of keeping them for later runs.",
        ),
        RARE,
    ] = False

    @property
    def allow_settings(self) -> tuple[str, ...]:
        """The settings that are ignored if they are not implemented."""
        return tuple(self.allow_setting or ())

    def types(self) -> dict[str, Any]:
        """Return the types of activations, and of keys and values, as keyword arguments of `load`."""
        return {"activations": self.activations, "kv_type": self.kv_type}

    def conversion(self) -> Conversion:
        """Return the conversion of linear layers; raise OptionError if it or the number of threads is invalid."""
        from mlx_engine.weights.conversion import check_load_options

        layers = layers_of(self.quant_layer)
        return check_load_options(self.quant, self.threads, min_dim_of(self.quant_min_dim), layers)


@dataclass(frozen=True)
class ComputeOptions(LoadOptions):
    """Model and backend. Adds to `LoadOptions` the choice of compiled kernels or NumPy, and limits of memory."""

    no_jit: bool = option(False, "Use plain NumPy instead of compiled kernels.", is_rare=True)
    allow_too_large: bool = option(False, "Load a model that needs more memory than is free.", is_rare=True)
    experts_memory: str | None = option(
        None,
        "Keep at most SIZE of experts in memory, such as 8GiB; read the others when tokens choose them.",
        metavar="SIZE",
        unset="all; on the CPU as many as fit",
        is_rare=True,
    )

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of `load`, except the context and the conversion of linear layers."""
        how = {"jit": not self.no_jit, **self.types(), "allow_settings": self.allow_settings}
        return {**self.machine(), **how}

    def machine(self) -> dict[str, Any]:
        """Return the keyword arguments of `load` that do not change results."""
        how: dict[str, Any] = {"threads": self.threads, "allow_too_large": self.allow_too_large}
        if self.experts_memory is not None:
            how["experts_memory"] = bytes_of("--experts-memory", self.experts_memory)
        return how

    def changes(self, context_len: int | None) -> dict[str, Any]:
        """Return the keyword arguments of `load` that change results; raise OptionError as `conversion` does."""
        given: dict[str, Any] = {} if context_len is None else {"context": context_len}
        given |= self.types()
        if self.allow_settings:
            given["allow_settings"] = list(self.allow_settings)
        return {"jit": not self.no_jit, **given, **self.conversion().options()}


def choose_backend(requested: str, *, strict: bool) -> str:
    """Return the requested backend. If it is unavailable on this machine, print a notice and return "auto".

    Raises:
        BackendUnavailableError: no backend has this name, or it is unavailable and `strict` is set.
    """
    from mlx_engine.backends import auto, unavailable

    reason = None if requested == "auto" else unavailable(requested)
    if reason is None:
        return requested
    if strict:
        raise BackendUnavailableError(name=requested, reason=reason)
    notice(f"backend {requested!r} is not available: {reason}; running on {auto()!r}")
    return "auto"


def min_dim_of(text: str) -> int | str:
    """Parse `auto` or a number; raise OptionError if the text is neither."""
    if text == "auto":
        return text
    if not (text.isascii() and text.isdigit()):
        message = f"quant_min_dim must be auto or a whole number of at least 0, not {text!r}"
        raise OptionError(message, option="quant_min_dim", found=text)
    return int(text)


def layers_of(given: Sequence[str] | None) -> dict[str, str]:
    """Parse a list of `LAYER=TYPE`; raise OptionError if an entry has another form, or a layer is given twice."""
    found: dict[str, str] = {}
    for text in given or ():
        layer, equals, quant = text.partition("=")
        if not equals:
            message = f"quant_layer must be LAYER=TYPE, such as attn_v=f32, not {text!r}"
            raise OptionError(message, option="quant_layer", found=text)
        if layer in found:
            message = f"quant_layer gives {layer} two types, {found[layer]} and {quant}"
            raise OptionError(message, option="quant_layer", found=text)
        found[layer] = quant
    return found


@dataclass(frozen=True)
class PrefixOptions:
    """Prefixes on disk. Keys and values of prompts in files, so that later runs of the model need not compute them."""

    prefix_dir: Annotated[
        Path | None,
        typer.Option(
            "--prefix-dir",
            metavar="DIR",
            file_okay=False,
            help="Keep the keys and values of prompts in this folder. Its files reveal the prompts.",
        ),
    ] = None
    prefix_disk: str | None = option(
        None,
        "Remove the least recently used files of --prefix-dir if all files take more than SIZE.",
        metavar="SIZE",
        unset=DISK,
        is_rare=True,
    )

    def check(self) -> None:
        """Raise OptionError if --prefix-disk is not a size, or is given without --prefix-dir."""
        if self.prefix_disk is not None:
            bytes_of("--prefix-disk", self.prefix_disk)
            given, message = self.prefix_dir is not None, "--prefix-disk needs --prefix-dir"
            require(given, option="--prefix-disk", expected="--prefix-dir", found=self.prefix_disk, message=message)

    def use(self, engine: Engine) -> None:
        """If --prefix-dir is given, make an engine keep prefixes there; raise OptionError if the engine cannot."""
        if self.prefix_dir is not None:
            engine.keep_prefixes(self.prefix_dir, bytes_of("--prefix-disk", self.prefix_disk or DISK))
