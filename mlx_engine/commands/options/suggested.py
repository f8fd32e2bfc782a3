"""The sampling options that a model's files suggest, and a warning about options that have no effect.

Folders suggest sampling in `generation_config.json`, GGUF files under the keys `general.sampling.*`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from mlx_engine.commands.options.groups import flags_given
from mlx_engine.errors import EngineError, FormatError, OptionError
from mlx_engine.options import COLDEST, Sampling, declared

if TYPE_CHECKING:
    from mlx_engine.engine import CheckedCheckpoint

# Options without an effect at temperature 0. The penalties and the bias are not among them: they change which token is
# the most likely one.
IDLE_IF_GREEDY = tuple(f.name for f, about in declared(Sampling) if about.needs_draw)

GENERATION_CONFIG = "generation_config.json"

# Maps each GGUF key to the name of a sampling option. In generation_config.json, the keys are the names of options.
GGUF_KEYS = {f"general.sampling.{about.gguf}": f.name for f, about in declared() if about.gguf is not None}
HF_KEYS = {name: name for name in GGUF_KEYS.values()}
# Settings that change the choice of tokens, but are not implemented. Each is mapped to the values that switch it off.
UNUSED: dict[str, tuple[object, ...]] = {
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "num_beams": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "penalty_alpha": (0.0,),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "bad_words_ids": ([],),
    "general.sampling.xtc_probability": (0.0,),
    "general.sampling.mirostat": (0,),
}


class Chosen(NamedTuple):
    """The sampling options of a run, with notes and warnings for the user."""

    sampling: Sampling
    notes: list[str]
    warnings: list[str]


@dataclass(frozen=True)
class Suggested:
    """The sampling options that the file `where` suggests.

    `unused` names settings of the file that change the choice of tokens and are not implemented.
    """

    where: str
    values: Mapping[str, Any]
    unused: tuple[str, ...] = ()


def choose_sampling(
    invocation: typer.Context, given: Sampling, opened: CheckedCheckpoint, *, suggested: bool
) -> Chosen:
    """Return the given options, with notes and warnings.

    With `suggested`, options that are not on the command line get the values that the model's files suggest.

    Raises:
        SourceError, FormatError, OptionError: a file cannot be read, or suggests an invalid value.
    """
    if not suggested:
        return Chosen(given, [], without_effect(given, given))
    found, notes, warnings = checked(opened.path, opened.checkpoint.metadata), [], []
    values = {name: value for name, value in found.values.items() if not _is_given(invocation, name)}
    if values:
        notes.append(f"sampling as {Path(found.where).name} suggests: {named(values)}; --no-suggested leaves this out")
    if not found.values and _is_given(invocation, "suggested"):
        warnings.append(f"warning: {opened.path} suggests no sampling, so --suggested has no effect")
    if found.unused:
        warnings.append(f"warning: {found.where} also has {', '.join(found.unused)}, which is not implemented")
    used = replace(given, **values)
    return Chosen(used, notes, [*warnings, *without_effect(given, used)])


def offered(invocation: typer.Context, opened: CheckedCheckpoint) -> list[str]:
    """Return a hint if the model's files suggest values other than the defaults, and --temp was not given."""
    try:
        suggested = checked(opened.path, opened.checkpoint.metadata)
    except EngineError:  # a damaged file whose suggestions are not used must not end a run
        return []
    if _is_given(invocation, "temperature") or Sampling(**suggested.values) == Sampling():
        return []
    name, values = Path(suggested.where).name, named(suggested.values)
    return [f"hint: {name} suggests {values}; --suggested uses these values, --no-suggested omits this line"]


def without_effect(given: Sampling, used: Sampling) -> list[str]:
    """If decoding is greedy, return a warning about the options on the command line that only affect sampling."""
    flags = flags_given(given)
    idle = [flags[name] for name in IDLE_IF_GREEDY if name in flags]
    if not idle or used.temperature >= COLDEST:
        return []
    have = "has" if len(idle) == 1 else "have"
    why = "at temperature 0, which always takes the most likely token"
    return [f"warning: {', '.join(idle)} {have} no effect {why}; --temp T samples"]


def checked(path: Path, metadata: Mapping[str, object] | None = None) -> Suggested:
    """Return the result of `suggested_sampling`. Raise its errors, and OptionError if `Sampling` refuses a value."""
    suggested = suggested_sampling(path, metadata)
    try:
        Sampling(**suggested.values)
    except OptionError as error:
        message = f"{suggested.where}: {error}; --no-suggested ignores the file"
        option = f"{suggested.where}: {error.option}"
        raise OptionError(message, option=option, expected=error.expected, found=error.found) from error
    return suggested


def described(sampling: Sampling) -> str:
    """Return the sampling options that differ from their defaults, as text. At temperature 0, begin with "greedy"."""
    changed = {f.name: getattr(sampling, f.name) for f in fields(sampling)}
    changed = {f.name: changed[f.name] for f in fields(sampling) if changed[f.name] != f.default}
    is_greedy = "temperature" not in changed
    return ", ".join(["greedy"] * is_greedy + [named(changed)] * bool(changed))


def named(values: Mapping[str, Any]) -> str:
    """Return options as text: `temperature 0.6, top_k 20`."""
    return ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()
    )


def _is_given(invocation: typer.Context, name: str) -> bool:
    """Return whether an option is on the command line, even with its default value."""
    source = invocation.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def suggested_sampling(path: Path, metadata: Mapping[str, object] | None = None) -> Suggested:
    """Return the sampling options that a folder or a GGUF file suggests.

    `metadata` is the metadata of the GGUF file; if it is None, read the file. If `do_sample` is false, or if neither
    `do_sample` nor a temperature is set, suggest greedy decoding. A folder's only other suggestion is then its
    repetition penalty.

    Raises:
        SourceError: a file cannot be read.
        FormatError: a file is damaged, or a value is not a number.
    """
    from mlx_engine.checkpoint.gguf import open_gguf
    from mlx_engine.checkpoint.hf_folder import read_json

    if path.is_dir():
        config = path / GENERATION_CONFIG
        return _suggested(str(config), read_json(config), HF_KEYS) if config.exists() else Suggested(str(config), {})
    if metadata is None:
        with open_gguf(path) as file:
            metadata = file.metadata
    return _suggested(str(path), metadata, GGUF_KEYS)


def _suggested(where: str, settings: Mapping[str, Any], keys: Mapping[str, str]) -> Suggested:
    values: dict[str, Any] = {
        name: _number(where, key, settings[key]) for key, name in keys.items() if settings.get(key) is not None
    }
    # 0 and -1 switch top_k off.
    if "top_k" in values:
        values["top_k"] = int(values["top_k"]) if values["top_k"] >= 1 else None
    samples = settings.get("do_sample", "temperature" in values)
    if samples:
        values = {"temperature": 1.0, **values}  # transformers' default
    elif keys is HF_KEYS:
        values = {name: value for name, value in values.items() if name == "repetition_penalty"}
    unused = (key for key, off in UNUSED.items() if settings.get(key) is not None and settings[key] not in off)
    return Suggested(where, values, tuple(unused))


def _number(where: str, key: str, value: object) -> float:
    # The comparison also refuses NaN, and ints that are too large for a float.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        hint = "correct the file, or use --no-suggested"
        raise FormatError(where=where, expected=f"a number as {key}", found=repr(value)[:80], hint=hint)
    return value
