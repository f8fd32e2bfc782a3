"""Options of a run that `generate` and `chat` share: limits and sampling.

The first name of an option is ours; the others are those of llama.cpp and transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_engine.errors import OptionError

if TYPE_CHECKING:
    from mlx_engine.options import Options

CONTEXT_LEN = ("--context-len", "-c", "--ctx-size")


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
            *("--max-tokens", "-n", "--n-predict", "--max-new-tokens"),
            help="Generate at most N tokens; -1 generates until the context is full.",
            show_default="256, or what the context leaves",
        ),
    ] = None
    context_len: Annotated[
        int | None,
        typer.Option(
            *CONTEXT_LEN,
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
        list[str] | None, typer.Option("--stop", help="Stop before this string; may be given up to 16 times.")
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
        float,
        typer.Option(
            "--temp", "--temperature", help="Sampling temperature; 0 is greedy: always the most likely token."
        ),
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
            *("--repetition-penalty", "--repeat-penalty"),
            help="Values above 1 make tokens that occurred before less likely; 1 is off.",
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
    from mlx_engine.options import Options

    return Options.of(**vars(run), **vars(sampling) | {"logit_bias": biases_of(sampling.logit_bias)})


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
