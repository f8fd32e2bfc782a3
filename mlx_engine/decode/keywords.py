"""The options of a run as typed keyword arguments, for `Engine.generate` and similar methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypedDict, TypeVar, get_type_hints

from mlx_engine.backends.sampling import Sampling
from mlx_engine.decode.options import Options

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
