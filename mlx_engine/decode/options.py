"""The options of one run, checked before any model is loaded."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar, cast

from mlx_engine.backends.sampling import Sampling
from mlx_engine.decode.logprobs import MOST_ALTERNATIVES
from mlx_engine.decode.stops import LONGEST_STOP, MOST_STOPS
from mlx_engine.errors import Words, is_number, is_whole, require
from mlx_engine.tokenizer.chat_prompt import HALF

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from mlx_engine.decode.keywords import OptionValues

DEFAULT_MAX_TOKENS = 256
UNTIL_FULL = -1

# Names of options in other projects, and on the command line where they differ from those in Python.
ALIASES = {
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "temp": "temperature",
    "repeat_penalty": "repetition_penalty",
    "ctx_size": "context_len",
    "stop_strings": "stop",
    "model": "source",
    "no_jit": "jit",
}

Function = TypeVar("Function", bound=Callable[..., Any])


def names_options(function: Function) -> Function:
    """Make a wrong keyword argument a TypeError that names `function` and the option that was meant.

    The options of a run count as arguments of a function that takes `**options`.
    """
    name = function.__qualname__.removesuffix(".__init__")
    parameters = inspect.signature(function).parameters.values()
    named = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    takes_run_options = len(named) < len(parameters)

    @functools.wraps(function)
    def checked(*args: Any, **given: Any) -> Any:
        known = list(dict.fromkeys([*named, *run_options()])) if takes_run_options else named
        for wrong in given:
            if wrong not in known:
                raise TypeError(f"{name}() has no option {wrong!r}; {_meant(wrong, known)}")
        return function(*args, **given)

    return cast("Function", checked)


def run_options() -> list[str]:
    """Return the names of the options of a run: the fields of `Options` and of `Sampling`."""
    return [f.name for kind in (Sampling, Options) for f in fields(kind) if f.name != "sampling"]


def _meant(wrong: str, known: Sequence[str]) -> str:
    """Return a hint: the option that a wrong name resembles, or all names."""
    if "options" in known and wrong in run_options():
        return f"pass options=Options.of({wrong}=...)"
    if ALIASES.get(wrong) in known:
        return f"the option is {ALIASES[wrong]}"
    close = difflib.get_close_matches(wrong, known, n=1)
    return f"did you mean {close[0]}?" if close else f"it has {', '.join(n for n in known if n not in ('self', 'cls'))}"


@dataclass(frozen=True)
class Options:
    """Options of one run.

    Attributes:
        max_tokens: the largest number of new tokens; None means 256, or what the context leaves; -1 all of that; 0
            reads the prompt alone, into the prefix cache if there is one.
        sampling: the sampling options.
        kv: use a KV cache. Without it each pass runs the whole sequence again.
        stop: the text ends before the first of these strings to appear; at most 16, each of at most 1,000 characters.
        ignore_eos: continue after end-of-text tokens.
        timeout: seconds after which the run ends with the text so far; None for no limit.
        context_len: limit of prompt and new tokens in total, if lower than the model's context.
        logprobs: compute the log-probability of every new token, and list that many of the most likely tokens at its
            position, 0 to 20; None computes none.
    """

    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    kv: bool = True
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    timeout: float | None = None
    context_len: int | None = None
    logprobs: int | None = None

    @classmethod
    @names_options
    def of(cls, max_tokens: int | None = None, **values: Unpack[OptionValues]) -> Options:
        """Make options from keyword arguments: the fields of this class and of `Sampling`.

        `stop` may be one string, several or None.

        Raises:
            OptionError: a value is invalid.
            TypeError: there is no such option; the message has the one that was meant.
        """
        given: dict[str, Any] = {**values}
        sampling = Sampling(**{f.name: given.pop(f.name) for f in fields(Sampling) if f.name in given})
        return cls(max_tokens, sampling, **given | {"stop": _stops(given.get("stop"))})

    def __post_init__(self) -> None:
        """Check the values; raise OptionError if one is invalid."""
        for option, least, unbounded in (("max_tokens", 0, [UNTIL_FULL]), ("context_len", 1, list[int]())):
            n = getattr(self, option)
            sound = n is None or (is_whole(n) and (n >= least or n in unbounded))
            expected = ", ".join([f"a whole number >= {least}", *map(str, unbounded), "or none at all"])
            require(sound, option=option, expected=expected, found=n)
        sound = self.timeout is None or (is_number(self.timeout) and self.timeout > 0)
        require(sound, option="timeout", expected="a finite number of seconds > 0, or none at all", found=self.timeout)
        for option in ("kv", "ignore_eos"):
            value = getattr(self, option)
            require(isinstance(value, bool), option=option, expected="True or False", found=value)
        n = self.logprobs
        sound = n is None or (is_whole(n) and 0 <= n <= MOST_ALTERNATIVES)
        expected = f"a whole number from 0 to {MOST_ALTERNATIVES}, or none at all"
        require(sound, option="logprobs", expected=expected, found=n)
        _check_stops(self.stop)


def _check_stops(stops: tuple[str, ...]) -> None:
    n = len(stops)
    require(n <= MOST_STOPS, option="stop", expected=f"at most {MOST_STOPS} strings", found=Words(f"{n:,} strings"))
    sound = all(isinstance(stop, str) and stop and not HALF.search(stop) for stop in stops)
    require(sound, option="stop", expected="strings of at least one character, in valid Unicode", found=stops)
    n = max(map(len, stops), default=0)
    expected = f"strings of at most {LONGEST_STOP:,} characters"
    require(n <= LONGEST_STOP, option="stop", expected=expected, found=Words(f"one of {n:,}"))


def _stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    require(stop is None or isinstance(stop, Iterable), option="stop", expected="a string or several", found=stop)
    return (stop,) if isinstance(stop, str) else tuple(stop or ())
