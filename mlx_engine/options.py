"""The options of a run, declared once: defaults, bounds, help and names.

The fields of `Sampling` and `Options` declare the options. The command line, the keywords of `Engine.generate`, the
parameters of the server and its OpenAPI document are made from these fields. To add an option, add a field, and add its
keyword to `OptionValues` and `BatchOptionValues`, for type checkers. This module imports neither NumPy nor a backend,
so that `--help` is fast.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast, get_type_hints

from mlx_engine.constraint import Constraint
from mlx_engine.errors import OptionError, is_number, is_whole, listed, shown
from mlx_engine.kernels.cached import cached_property

if TYPE_CHECKING:
    from typing_extensions import Unpack

# The values of the option `speculate`, which `engine.load` describes.
OFF, LOOKUP, DRAFT, MTP, AUTO_SPECULATION = "off", "lookup", "draft", "mtp", "auto"
SPECULATE = (OFF, LOOKUP, DRAFT, MTP, AUTO_SPECULATION)

DEFAULT_MAX_TOKENS = 256
UNTIL_FULL = -1

# Below this temperature, sampling is greedy, because only tokens whose logits almost equal the largest logit could be
# drawn.
COLDEST = 1e-7

# The largest penalty and bias, as in the OpenAI API. In effect, a bias of -100 bans a token, and 100 forces the token.
MOST_PENALTY, MOST_BIAS = 2, 100

# The number and the length of stop strings are bounded, because matching them delays the next forward pass.
# `MOST_ALTERNATIVES` is the bound of `top_logprobs` in the OpenAI API.
MOST_STOPS, LONGEST_STOP = 16, 1000
MOST_ALTERNATIVES = 20

# Maps the command-line names of some arguments of `load` to their names in Python.
LOAD_ALIASES = {"model": "source", "no_jit": "jit"}

# A user's function of (ids, logits), called for each new token. `ids` has the ids of all earlier tokens, `logits` is a
# NumPy array (V,) float32. A processor returns changed logits, and a sampler returns the id of the new token.
Processor = Callable[[list[int], Any], Any]

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class About:
    """The declaration of an option, in addition to its type and its default.

    Attributes:
        help: the help of the command line, of Python and of the OpenAPI document.
        kind: float, int or bool: the type of the value, which the function `check` checks. If `kind` is None, `check`
            skips the option: typer checks `least` and `most` on the command line, and the declaring class may check the
            value in `__post_init__`.
        least: the smallest value.
        most: the largest value.
        above: the exclusive lower bound.
        also: a further valid value, outside of the bounds, that has a special meaning.
        unset: the meaning of the default, for help texts. If `unset` is None, help shows the default itself.
        flags: names on the command line. If empty, the flag is made from the name of the field: "--min-p" for min_p.
        aliases: the option's names in other projects, such as "n_predict".
        metavar: the word that stands for the value in help.
        parameter: the type of the server's parameter of this name; None if the server has no such parameter, or if
            `serve/parameters.py` declares it.
        gguf: KEY, if GGUF files may suggest a value under the key "general.sampling.KEY". In generation_config.json,
            the key of a suggested value is the name of the field.
        needs_draw: whether the option does nothing in greedy decoding.
        is_rare: whether only `--help-all` lists the option.
        has_flag: whether the command line has exactly one flag for the option, and not several or none.
    """

    help: str
    kind: type | None = None
    least: float | None = None
    most: float | None = None
    above: float | None = None
    also: float | None = None
    unset: str | None = None
    flags: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    metavar: str | None = None
    parameter: Any = None
    gguf: str | None = None
    needs_draw: bool = False
    is_rare: bool = False
    has_flag: bool = True

    @property
    def rule(self) -> str:
        """What a value must be, in words: "a number from 0 to 1"."""
        if self.kind is bool:
            return "True or False"
        number = "a whole number" if self.kind is int else "a number"
        if self.most is not None:
            bounds = f"from {self.least} to {self.most}"
        else:
            bounds = f"above {self.above}" if self.above is not None else f"of at least {self.least}"
        return f"{number} {bounds}" + (f", or {self.also}" if self.also is not None else "")

    @property
    def schema(self) -> dict[str, Any]:
        """The bounds as keywords of JSON Schema."""
        bounds = {"minimum": self.least, "maximum": self.most, "exclusiveMinimum": self.above}
        return {name: bound for name, bound in bounds.items() if bound is not None}

    def allows(self, value: Any) -> bool:
        """Return whether a value is of the declared kind, and is within the bounds or equals `also`.

        NaN and infinity are not allowed.
        """
        if self.kind is bool:
            return isinstance(value, bool)
        if not (is_whole(value) if self.kind is int else is_number(value)):
            return False
        above = self.above is None or value > self.above
        within = (self.least is None or value >= self.least) and (self.most is None or value <= self.most)
        return (within and above) or (self.also is not None and value == self.also)


def option(default: T, help: str, kind: type | None = None, /, **about: Any) -> T:
    """Return a dataclass field with an `About` in its metadata. The default of `About.parameter` is `kind`."""
    return field(default=default, metadata={"about": About(help=help, kind=kind, **{"parameter": kind, **about})})


def declared(*kinds: Any) -> Iterator[tuple[Field[Any], About]]:
    """Yield the fields of these classes or objects that declare options, each with its `About`.

    Without arguments, yield the fields of `Options` and then those of `Sampling`.
    """
    for kind in kinds or (Options, Sampling):
        for f in fields(kind):
            if "about" in f.metadata:
                yield f, f.metadata["about"]


def check(values: Any) -> None:
    """Check the declared fields of an object; raise OptionError if `About.allows` refuses a value."""
    for f, about in declared(values):
        value = getattr(values, f.name)
        if about.kind is None or (value is None and f.default is None) or about.allows(value):
            continue
        message = f"{f.name} must be {about.rule}, not {shown(value)}"
        raise OptionError(message, option=f.name, expected=about.rule, found=value)


def check_speculate(value: object) -> None:
    """Raise OptionError unless the value is one of `SPECULATE`."""
    if value not in SPECULATE:
        expected = listed(SPECULATE)
        raise OptionError(
            f"speculate must be {expected}, not {shown(value)}", option="speculate", expected=expected, found=value
        )


def aliases() -> dict[str, str]:
    """Return a dict that maps the names of options in other projects, and the keys of `LOAD_ALIASES`, to our names."""
    return {alias: f.name for f, about in declared() for alias in about.aliases} | LOAD_ALIASES


def run_options() -> list[str]:
    """Return the names of the options of a run: the fields of `Sampling` and of `Options`."""
    return [f.name for f, _ in declared(Sampling, Options)]


def names_options(function: Function) -> Function:
    """Decorate a function: for an unknown keyword argument, raise a TypeError that suggests the option that was meant.

    If the function takes `**options`, all options of a run are known keyword arguments.
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


def _meant(wrong: str, known: Sequence[str]) -> str:
    """Return a hint for an unknown name: how to pass the option, our name of it, a similar name, or all names."""
    if "options" in known and wrong in run_options():
        return f"pass options=Options.of({wrong}=...)"
    if aliases().get(wrong) in known:
        return f"the option is {aliases()[wrong]}"
    close = difflib.get_close_matches(wrong, known, n=1)
    return f"did you mean {close[0]}?" if close else f"it has {', '.join(n for n in known if n not in ('self', 'cls'))}"


@dataclass(frozen=True)
class Sampling:
    """Sampling of each token. The defaults choose the most likely token.

    `backends/sampling.py` defines the meaning of the fields except `seed`, and the order in which they apply.
    """

    temperature: float = option(
        0.0, "Divide the logits by T; 0 is greedy.", float, least=0,
        flags=("--temp",), aliases=("temp",), metavar="T", gguf="temp",
    )  # fmt: skip
    top_k: int | None = option(
        None, "Sample from the K most likely tokens.", int, least=1,
        unset="off", metavar="K", gguf="top_k", needs_draw=True,
    )  # fmt: skip
    top_p: float = option(
        1.0, "Sample from the most likely tokens whose probabilities sum to P.", float, least=0, most=1,
        unset="off", metavar="P", gguf="top_p", needs_draw=True,
    )  # fmt: skip
    min_p: float = option(
        0.0, "Drop tokens below P times the top probability.", float, least=0, most=1,
        unset="off", metavar="P", gguf="min_p", needs_draw=True,
    )  # fmt: skip
    repetition_penalty: float = option(
        1.0, "Above 1, earlier tokens become less likely.", float, above=0,
        unset="off", aliases=("repeat_penalty",), metavar="R", gguf="penalty_repeat",
    )  # fmt: skip
    presence_penalty: float = option(
        0.0, "Above 0, generated tokens become less likely; from -2 to 2.", float, least=-MOST_PENALTY,
        most=MOST_PENALTY, unset="off", metavar="X", is_rare=True,
    )  # fmt: skip
    frequency_penalty: float = option(
        0.0, "Above 0, tokens become less likely each time they are generated; from -2 to 2.", float,
        least=-MOST_PENALTY, most=MOST_PENALTY, unset="off", metavar="X", is_rare=True,
    )  # fmt: skip
    # Pairs (token id, bias). `_biases` also accepts a mapping, and texts such as "17=-100".
    logit_bias: tuple[tuple[int, float], ...] = option(
        (), "Add a number from -100 (ban) to 100 (force) to the logits of tokens, by their ids.",
        unset="none", metavar="ID=VALUE", parameter=dict[str, float], is_rare=True,
    )  # fmt: skip
    seed: int | None = option(
        None, "Random seed; the same seed gives the same text.", int, least=0,
        unset="random", metavar="N", needs_draw=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))

    def check_vocabulary(self, n_tokens: int) -> None:
        """Check that the ids of the logit bias are below `n_tokens`, the vocabulary size; raise OptionError if not."""
        for token_id, _ in self.logit_bias:
            if token_id >= n_tokens:
                expected = f"token ids from 0 to {n_tokens - 1}"
                message = f"logit_bias must have {expected}, not {token_id}"
                raise OptionError(message, option="logit_bias", expected=expected, found=token_id)

    # Cached, because it is read for every token.
    @cached_property
    def is_greedy(self) -> bool:
        """Whether the token with the largest logit, after bias and penalties, is chosen."""
        return self.temperature < COLDEST

    @cached_property
    def has_penalties(self) -> bool:
        """Whether the presence penalty or the frequency penalty changes the logits of generated tokens."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @cached_property
    def is_argmax(self) -> bool:
        """Whether the token with the largest unchanged logit is chosen: greedy, without bias and penalties."""
        return self.is_greedy and self.repetition_penalty == 1 and not self.has_penalties and not self.logit_bias


def _biases(given: object) -> tuple[tuple[int, float], ...]:
    """Return logit biases as pairs (token id, bias), sorted by id, from a mapping, pairs, or texts such as "17=-100".

    If an id is no whole number >= 0 or occurs twice, or a bias is out of its range, raise OptionError.
    """
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    if isinstance(pairs, list | tuple):
        pairs = [_bias_of(pair) if isinstance(pair, str) else pair for pair in pairs]
    if not (
        isinstance(pairs, list | tuple) and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs)
    ):
        raise _wrong_bias(f"must map token ids to numbers, not be {shown(given)}", given)
    checked: dict[int, float] = {}
    for token_id, bias in pairs:
        if not (is_whole(token_id) and token_id >= 0):
            raise _wrong_bias(f"must have token ids of at least 0, not {shown(token_id)}", token_id)
        if not (is_number(bias) and abs(bias) <= MOST_BIAS):
            bounds = f"from -{MOST_BIAS} to {MOST_BIAS}"
            raise _wrong_bias(f"must be a number {bounds} for token {token_id}, not {shown(bias)}", bias)
        if token_id in checked:
            raise _wrong_bias(f"must have each token id once, but has {token_id} twice", token_id)
        checked[int(token_id)] = float(bias)
    return tuple(sorted(checked.items()))


def _bias_of(text: str) -> tuple[int, float]:
    token_id, _, value = text.partition("=")
    try:
        return int(token_id), float(value)
    except ValueError:
        raise _wrong_bias(f"must be ID=VALUE, such as 1234=-100, not {shown(text)}", text) from None


def _wrong_bias(rule: str, found: object) -> OptionError:
    return OptionError(f"logit_bias {rule}", option="logit_bias", expected=rule.removeprefix("must "), found=found)


@dataclass(frozen=True)
class Options:
    """Limits of a run.

    The class has all options of a run. In `--help`, the first sentence is the title of the options that are not in
    `sampling`.
    """

    max_tokens: int | None = option(
        None, "Generate at most N tokens; -1 fills the context.", int, least=0, also=UNTIL_FULL,
        unset="256, or what the context leaves", flags=("--max-tokens", "-n"),
        aliases=("n_predict", "max_new_tokens"), metavar="N", parameter=None,
    )  # fmt: skip
    sampling: Sampling = field(default_factory=Sampling)
    kv: bool = option(
        True, "Use a KV cache, or recompute the whole sequence for every token.", bool,
        flags=("--kv/--no-kv",), parameter=None, is_rare=True,
    )  # fmt: skip
    # In Python, `stop` may also be a single string.
    stop: tuple[str, ...] = option(
        (), "Stop before this string; up to 16 may be given.",
        unset="none", aliases=("stop_strings",), metavar="TEXT", parameter=str | list[str],
    )  # fmt: skip
    # In Python, `stop_token_ids` may also be a single id, and an id may be a text such as "17".
    stop_token_ids: tuple[int, ...] = option(
        (), "Stop at this token, whose text is left out; may be repeated.",
        unset="none", flags=("--stop-token-id",), metavar="ID", parameter=list[int], is_rare=True,
    )  # fmt: skip
    ignore_eos: bool = option(False, "Continue past end-of-text tokens.", bool, is_rare=True)
    timeout: float | None = option(
        None, "Stop after S seconds and keep the text so far; in a batch, S seconds for each prompt.", float, above=0,
        unset="none", metavar="S", parameter=None, is_rare=True,
    )  # fmt: skip
    context_len: int | None = option(
        None, "Limit the context to N tokens.", int, least=1, unset="the model's",
        flags=("--context-len", "-c"), aliases=("ctx_size", "context"), metavar="N", parameter=None,
    )  # fmt: skip
    logprobs: int | None = option(
        None, "Compute the log-probability of every new token, and list the N (0 to 20) most likely tokens at its "
        "place.",
        int, least=0, most=MOST_ALTERNATIVES, unset="off", metavar="N", parameter=None, is_rare=True,
    )  # fmt: skip
    prompt_logprobs: int | None = option(
        None, "Compute the log-probability of every token of the prompt, and list the N (0 to 20) most likely tokens "
        "at its place. The prompt is then read without the prefix cache.",
        int, least=0, most=MOST_ALTERNATIVES, unset="off", metavar="N", parameter=None, is_rare=True,
    )  # fmt: skip
    constraint: Constraint | None = option(
        None, "Generate only text that a JSON Schema, a regular expression, a grammar or a list of choices allows.",
        unset="none", parameter=None, has_flag=False,
    )  # fmt: skip
    prediction: str | None = option(
        None, "A text that the answer may repeat, such as a file before an edit. Lookup proposes its tokens, which may "
        "make the answer faster. On backends with a fixed order of sums, the answer does not change.",
        unset="none", metavar="TEXT", parameter=None, is_rare=True,
    )  # fmt: skip
    speculate: str = option(
        AUTO_SPECULATION, "How tokens are proposed for this answer: off, lookup, draft, mtp, or auto for all of them "
        "that the model was loaded with. On backends with a fixed order of sums, all values give the same answer.",
        metavar="HOW", parameter=None, has_flag=False,
    )  # fmt: skip

    adapter: str | None = option(
        None, "The name of an adapter that the model was loaded with; \"base\" for the model without an adapter.",
        unset="the first", parameter=None, has_flag=False,
    )  # fmt: skip

    # In Python, `processors` may also be a single function.
    processors: tuple[Processor, ...] = option(
        (), "Functions of (ids, logits) that return changed logits. All sampling options apply after them.",
        unset="none", aliases=("logits_processor", "logits_processors"), parameter=None, has_flag=False,
    )  # fmt: skip
    sampler: Processor | None = option(
        None, "A function of (ids, logits) that returns the id of the token, in place of the sampling options.",
        unset="none", parameter=None, has_flag=False,
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Check the values; raise OptionError if one is invalid, or if two exclude each other."""
        check(self)
        check_speculate(self.speculate)
        object.__setattr__(self, "processors", _functions(self.processors))
        if self.sampler is not None and not callable(self.sampler):
            raise _wrong_function("sampler", self.sampler)
        object.__setattr__(self, "stop", _stops(self.stop))
        if self.prediction is not None and not (isinstance(self.prediction, str) and _is_unicode(self.prediction)):
            message = f"prediction must be a text in valid Unicode, not {shown(self.prediction)}"
            raise OptionError(message, option="prediction", expected="a text", found=self.prediction)
        object.__setattr__(self, "stop_token_ids", _stop_ids(self.stop_token_ids))
        if self.constraint is not None and not isinstance(self.constraint, Constraint):
            expected = "a Constraint, such as Constraint.json_schema({...})"
            message = f"constraint must be {expected}, not {shown(self.constraint)}"
            raise OptionError(message, option="constraint", expected=expected, found=self.constraint)
        if self.constraint is not None and self.ignore_eos:
            message = "ignore_eos cannot be combined with a constraint, which says where the text ends; leave one out"
            raise OptionError(message, option="ignore_eos", expected="False", found=True)

    def check_vocabulary(self, n_tokens: int) -> None:
        """Check that all token ids in options are below `n_tokens`, the vocabulary size; raise OptionError if not."""
        self.sampling.check_vocabulary(n_tokens)
        for token_id in self.stop_token_ids:
            if token_id >= n_tokens:
                raise _wrong_stop_id(f"token ids from 0 to {n_tokens - 1}", token_id)

    @classmethod
    @names_options
    def of(cls, max_tokens: int | None = None, **values: Unpack[OptionValues]) -> Options:
        """Make options from keyword arguments: the fields of this class and of `Sampling`.

        Raises:
            OptionError: a value is invalid.
            TypeError: a keyword is no option; the message suggests the option that was meant.
        """
        given: dict[str, Any] = {**values}
        sampling = Sampling(**{f.name: given.pop(f.name) for f in fields(Sampling) if f.name in given})
        return cls(max_tokens, sampling, **given)


def _stops(given: object) -> tuple[str, ...]:
    """Return a tuple of stop strings, given one string, several strings or None; raise OptionError if invalid."""
    if given is not None and not isinstance(given, Iterable):
        raise _wrong_stop("a string or several", given)
    stops = (given,) if isinstance(given, str) else tuple(given or ())
    if len(stops) > MOST_STOPS:
        raise _wrong_stop(f"at most {MOST_STOPS} strings", f"{len(stops):,}")
    if not all(isinstance(stop, str) and stop and _is_unicode(stop) for stop in stops):
        raise _wrong_stop("strings of at least one character, in valid Unicode", stops)
    longest = max(map(len, stops), default=0)
    if longest > LONGEST_STOP:
        raise _wrong_stop(f"strings of at most {LONGEST_STOP:,} characters", f"{longest:,}")
    return stops


def _functions(given: object) -> tuple[Processor, ...]:
    """Return a tuple of processors, given one function, several functions or None; raise OptionError if invalid."""
    functions = given if isinstance(given, list | tuple) else () if given is None else (given,)
    for i, function in enumerate(functions):
        if not callable(function):
            raise _wrong_function(f"processors[{i}]", function)
    return tuple(functions)


def _wrong_function(name: str, found: object) -> OptionError:
    expected = "a function of (ids, logits)"
    message = f"{name} must be {expected}, not {shown(found)}"
    return OptionError(message, option=name.partition("[")[0], expected=expected, found=found)


def name_of(function: Processor) -> str:
    """Return the name of a processor or sampler function, for messages and results."""
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _stop_ids(given: object) -> tuple[int, ...]:
    """Return a tuple of stop token ids without repetitions, given one id, several ids or None.

    An id may be a text such as "17". If an id is no whole number of at least 0, raise OptionError.
    """
    values = given if isinstance(given, list | tuple | set | frozenset | range) else () if given is None else (given,)
    ids = [int(v) if isinstance(v, str) and v.isdecimal() and v.isascii() and len(v) < 12 else v for v in values]
    if wrong := [v for v in ids if not is_whole(v) or v < 0]:
        raise _wrong_stop_id("token ids of at least 0", wrong[0])
    return tuple(dict.fromkeys(int(v) for v in ids))


def _wrong_stop_id(rule: str, found: object) -> OptionError:
    message = f"stop_token_ids must be {rule}, not {shown(found)}"
    return OptionError(message, option="stop_token_ids", expected=rule, found=found)


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _wrong_stop(rule: str, found: object) -> OptionError:
    value = found if isinstance(found, str) else shown(found)
    return OptionError(f"stop must be {rule}, not {value}", option="stop", expected=rule, found=found)


class OptionValues(TypedDict, total=False):
    """The keywords of `Options.of` except `max_tokens`, for type checkers. A test compares them with the options."""

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
    stop_token_ids: int | Sequence[int] | None
    ignore_eos: bool
    timeout: float | None
    context_len: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    constraint: Constraint | None
    prediction: str | None
    speculate: str
    adapter: str | None
    processors: Processor | Sequence[Processor] | None
    sampler: Processor | None


class BatchOptionValues(TypedDict, total=False):
    """The keywords of `Engine.generate_batch`: one value for all prompts or, except `kv`, a list of one per prompt."""

    temperature: float | Sequence[float]
    top_k: int | Sequence[int | None] | None
    top_p: float | Sequence[float]
    min_p: float | Sequence[float]
    repetition_penalty: float | Sequence[float]
    presence_penalty: float | Sequence[float]
    frequency_penalty: float | Sequence[float]
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float] | Sequence[tuple[int, float]]]
    seed: int | Sequence[int | None] | None
    kv: bool
    stop: str | Sequence[str] | Sequence[str | Sequence[str] | None] | None
    stop_token_ids: int | Sequence[int] | Sequence[int | Sequence[int] | None] | None
    ignore_eos: bool | Sequence[bool]
    timeout: float | Sequence[float | None] | None
    context_len: int | Sequence[int | None] | None
    logprobs: int | Sequence[int | None] | None
    prompt_logprobs: int | Sequence[int | None] | None
    constraint: Constraint | Sequence[Constraint | None] | None
    prediction: str | Sequence[str | None] | None
    speculate: str | Sequence[str]
    adapter: str | Sequence[str | None] | None
    processors: Processor | Sequence[Processor] | Sequence[Processor | Sequence[Processor] | None] | None
    sampler: Processor | Sequence[Processor | None] | None


def one_per_prompt(options: Mapping[str, Any], n: int) -> list[dict[str, Any]]:
    """Return the options of each of n prompts. A list has one value per prompt; any other value applies to all prompts.

    But a list of strings for `stop`, of ids for `stop_token_ids`, or of functions for `processors` is one value, which
    applies to all prompts.

    Raises:
        OptionError: a list with one value per prompt does not have n values.
    """
    lists = {name: value for name, value in options.items() if isinstance(value, list | tuple)}
    if "stop" in lists and all(isinstance(text, str) for text in lists["stop"]):
        del lists["stop"]
    if "stop_token_ids" in lists and all(map(is_whole, lists["stop_token_ids"])):
        del lists["stop_token_ids"]
    if "processors" in lists and all(map(callable, lists["processors"])):
        del lists["processors"]
    for name, values in lists.items():
        if len(values) != n:
            message = f"{name} must be one value for all {n} prompts, or {n} values, not {len(values)}"
            raise OptionError(message, option=name, expected=f"one value, or {n}", found=values)
    return [{**options, **{name: values[i] for name, values in lists.items()}} for i in range(n)]


def shows_options(method: Function) -> Function:
    """Replace `**options` in the signature of a method by the options, and add their help to its docstring."""
    about = {f.name: (f.default, about.help) for f, about in declared()}
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=about[name][0], annotation=annotation)
        for name, annotation in get_type_hints(OptionValues).items()
    ]
    signature = inspect.signature(method)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    method.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    lines = [f"    {p.name}: {about[p.name][1]}" for p in options]
    method.__doc__ = "\n".join([inspect.cleandoc(method.__doc__ or ""), "", "Options:", *lines])
    return method
