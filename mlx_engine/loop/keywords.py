"""The options of a run as typed keyword arguments, for `Engine.generate` and similar methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypedDict, TypeVar, get_type_hints

from mlx_engine.backends.sampling import Sampling
from mlx_engine.errors import require
from mlx_engine.loop.options import Options

Method = TypeVar("Method", bound=Callable[..., Any])


class OptionValues(TypedDict, total=False):
    """The keyword arguments that `Options.of` takes; `Options` and `Sampling` define their meaning and defaults."""

    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]
    seed: int | None
    kv: bool
    stop: str | Sequence[str] | None
    ignore_eos: bool
    timeout: float | None
    context_len: int | None
    logprobs: int | None


def one_per_prompt(options: Mapping[str, Any], n: int) -> list[dict[str, Any]]:
    """Return the options of each of n prompts: a list has one value per prompt, any other value is for all.

    A list of strings as `stop` is one value.

    Raises:
        OptionError: a list has another length.
    """
    lists = {name: value for name, value in options.items() if isinstance(value, list | tuple)}
    if "stop" in lists and all(isinstance(text, str) for text in lists["stop"]):
        del lists["stop"]
    for name, values in lists.items():
        require(len(values) == n, option=name, expected=f"one value for all, or {n}, one per prompt", found=values)
    return [{**options, **{name: values[i] for name, values in lists.items()}} for i in range(n)]


def shows_options(method: Method) -> Method:
    """Make `help` and `inspect.signature` list the options and their defaults in place of `**options`."""
    defaults = {field.name: field.default for kind in (Sampling, Options) for field in fields(kind)}
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=annotation)
        for name, annotation in get_type_hints(OptionValues).items()
    ]
    signature = inspect.signature(method)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    method.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return method
