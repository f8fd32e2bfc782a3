"""Options shared by several commands: model, backend, weights, length of a run, sampling.

Options of one subject are one class (see `groups`); single options are aliases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from mlx_engine.errors import OptionError, Words

if TYPE_CHECKING:
    from mlx_engine.decode.options import Options
    from mlx_engine.models.conversion import Conversion

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
Strict: TypeAlias = Annotated[
    bool, typer.Option("--strict", help="Fail if the backend is unavailable here, instead of running on auto.")
]

Think: TypeAlias = Annotated[
    bool | None,
    typer.Option(
        "--think/--no-think",
        help="Turn thinking on or off, if the model's template can.",
        show_default="the template's",
    ),
]
SUGGESTED = "Use the sampling that the model's files suggest (generation_config.json) where no option sets it."


# The option of every command that builds a model or its plan.
AllowSetting: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-setting",
        metavar="NAME",
        help="Ignore this setting of the model if it is not implemented; results may be wrong. May be given several "
        "times.",
    ),
]


@dataclass(frozen=True)
class LoadOptions:
    """Conversion of linear layers on load, settings that are ignored, and the number of threads."""

    quant: Annotated[
        str, typer.Option("--quant", help="Convert linear layers on load: keep, f32, q8_0, q4_0 or q4_1.")
    ] = "keep"
    quant_min_dim: Annotated[
        str,
        typer.Option("--quant-min-dim", metavar="auto|N", help="Do not quantise layers whose longer side is below N."),
    ] = "auto"
    quant_layer: Annotated[
        list[str] | None,
        typer.Option(
            "--quant-layer",
            metavar="LAYER=TYPE",
            help="Type of some layers, such as attn_v=f32, ffn=q4_0 or output=keep; may be given several times.",
        ),
    ] = None
    allow_setting: AllowSetting = None
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads", "-t", help="Number of threads, on backends that use several.", show_default="all cores"
        ),
    ] = None

    @property
    def allow_settings(self) -> tuple[str, ...]:
        """The settings that are ignored if they are not implemented."""
        return tuple(self.allow_setting or ())

    def conversion(self) -> Conversion:
        """Return the conversion of linear layers.

        Raises:
            OptionError: a value in this group is invalid.
        """
        from mlx_engine.models.conversion import check_load_options

        layers = layers_of(self.quant_layer)
        return check_load_options(self.quant, self.threads, min_dim_of(self.quant_min_dim), layers)


@dataclass(frozen=True)
class ComputeOptions(LoadOptions):
    """`LoadOptions`, and the choice of compiled kernels or NumPy."""

    no_jit: Annotated[bool, typer.Option("--no-jit", help="Use plain NumPy instead of compiled kernels.")] = False

    def options(self) -> dict[str, Any]:
        """Return keyword arguments of `load`, without the conversion."""
        return {"threads": self.threads, "jit": not self.no_jit, "allow_settings": self.allow_settings}


@dataclass(frozen=True)
class EngineOptions(ComputeOptions):
    """`ComputeOptions`, and the context that the model is loaded for."""

    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            metavar="N",
            help="Load for texts of up to N tokens: LongRoPE and dynamic NTK have other frequencies for long contexts.",
            show_default="that of the training",
        ),
    ] = None

    def changes(self) -> dict[str, Any]:
        """Return the keyword arguments of `load` that change results.

        Raises:
            OptionError: a value in this group is invalid.
        """
        given: dict[str, Any] = {} if self.context is None else {"context": self.context}
        if self.allow_settings:
            given["allow_settings"] = list(self.allow_settings)
        return {"jit": not self.no_jit, **given, **self.conversion().options()}


@dataclass(frozen=True)
class RunOptions:
    """Limits of a run, and its KV cache."""

    kv: Annotated[
        bool,
        typer.Option("--kv/--no-kv", help="Use a KV cache, or recompute the whole sequence for every token."),
    ] = True
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens", "-n", help="Generate at most N tokens.", show_default="256, or what the context leaves"
        ),
    ] = None
    context_len: Annotated[
        int | None,
        typer.Option(
            "--context-len",
            help="Limit the prompt and the generated text together to N tokens.",
            show_default="the model's",
        ),
    ] = None
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout", help="Stop after S seconds and keep the text so far; in a batch, S seconds for each prompt."
        ),
    ] = None
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="Stop before this string; may be given several times.")
    ] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue past end-of-text tokens.")] = False
    logprobs: Annotated[
        int | None,
        typer.Option(
            "--logprobs",
            metavar="N",
            help="Print the log-probability of every new token, and the N most likely tokens at its place, 0 to 20.",
            show_default="off",
        ),
    ] = None


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling of each token."""

    temperature: Annotated[
        float, typer.Option("--temp", help="Sampling temperature; 0 is greedy: always the most likely token.")
    ] = 0.0
    top_k: Annotated[
        int | None, typer.Option("--top-k", help="Sample from the K most likely tokens.", show_default="off")
    ] = None
    top_p: Annotated[
        float,
        typer.Option("--top-p", help="Sample from the most likely tokens whose probabilities sum to P; 1 is off."),
    ] = 1.0
    min_p: Annotated[
        float,
        typer.Option(
            "--min-p", help="Drop tokens that are less than P times as likely as the most likely one; 0 is off."
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        typer.Option(
            "--repetition-penalty", help="Values above 1 make tokens that occurred before less likely; 1 is off."
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        typer.Option(
            "--presence-penalty", help="Values above 0 make generated tokens less likely; from -2 to 2, 0 is off."
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        typer.Option(
            "--frequency-penalty",
            help="Values above 0 make tokens less likely each time they are generated; from -2 to 2, 0 is off.",
        ),
    ] = 0.0
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            "--logit-bias",
            metavar="ID=VALUE",
            help="Add a number from -100 (ban) to 100 (force) to the logit of a token; may be given several times.",
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", help="Random seed for sampling; the same seed gives the same text.", show_default="random"
        ),
    ] = None


def options_of(run: RunOptions, sampling: SamplingOptions) -> Options:
    """Return the engine's options of a run.

    Raises:
        OptionError: a value is invalid.
    """
    from mlx_engine.decode.options import Options

    return Options.of(**vars(run), **vars(sampling) | {"logit_bias": biases_of(sampling.logit_bias)})


def min_dim_of(text: str) -> int | str:
    """Parse `auto` or a number.

    Raises:
        OptionError: the text is neither.
    """
    if text == "auto":
        return text
    if not (text.isascii() and text.isdigit()):
        raise OptionError(option="--quant-min-dim", expected="auto, or a whole number >= 0", found=text)
    return int(text)


def layers_of(given: Sequence[str] | None) -> dict[str, str]:
    """Parse a list of `LAYER=TYPE` into a dict.

    Raises:
        OptionError: an entry has another form, or a layer is given twice.
    """
    found: dict[str, str] = {}
    for text in given or ():
        layer, equals, quant = text.partition("=")
        if not equals:
            raise OptionError(option="--quant-layer", expected="LAYER=TYPE, such as attn_v=f32", found=text)
        if layer in found:
            raise OptionError(
                option="--quant-layer", expected=f"{layer} once", found=Words(f"{found[layer]} and {quant}")
            )
        found[layer] = quant
    return found


def biases_of(given: Sequence[str] | None) -> list[tuple[int, float]]:
    """Parse a list of `ID=VALUE`; the ranges are checked later.

    Raises:
        OptionError: an entry has another form.
    """
    found = []
    for text in given or ():
        token_id, _, value = text.partition("=")
        try:
            found.append((int(token_id), float(value)))
        except ValueError as error:
            expected = "ID=VALUE, such as 1234=-100"
            raise OptionError(option="--logit-bias", expected=expected, found=text) from error
    return found
