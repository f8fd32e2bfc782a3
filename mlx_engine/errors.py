"""The exceptions that mlx_engine raises for errors of a user's input, files or machine.

    EngineError                        the base class of all exceptions below
    ├── FormatError (ValueError)       a file does not follow its format
    │   └── UnsupportedTypeError       a tensor's type is known by name, but reading its values is not implemented
    ├── ModelError (ValueError)        the file is valid, but its model cannot be built
    │   ├── UnknownArchitectureError   no file in mlx_engine/models implements the architecture
    │   ├── UnsupportedConfigError     a setting is not implemented; ignoring it would give wrong results
    │   ├── TensorMismatchError        tensors are missing, unexpected or misshapen
    │   └── NotShardableError          a matrix cannot be cut for the ranks (processes that share the model)
    ├── TokenizerError (ValueError)    the vocabulary cannot be turned into a tokenizer
    ├── ChatTemplateError (ValueError)  a chat template is missing, refuses the messages, fails or takes too long
    ├── BackendUnavailableError (RuntimeError)   this machine lacks what the backend needs
    ├── OptionError (ValueError)       an option's value is invalid
    │   └── ContextLengthError         prompt and requested tokens do not fit the model's context
    ├── CacheFullError (RuntimeError)  the KV cache is full
    ├── ConstraintError (ValueError)   the constraint on an answer allows no next token, or fails
    ├── ProcessorError (RuntimeError)  a function of the user that edits logits or chooses tokens has failed
    ├── NotFiniteError (ArithmeticError)  a forward pass gave logits that are NaN or infinite
    ├── ClosedError (RuntimeError)     an engine or a session has been closed
    ├── NotCopyableError (TypeError)   an engine, stream or session cannot be pickled or copied
    ├── AddressInUseError (OSError)    another program listens at the address of a server
    ├── DistributedError (RuntimeError)   the ranks (processes that share a model) do not agree, or one is gone
    ├── NotEnoughMemoryError (MemoryError)   a model needs more memory than is free, or memory ran out
    └── SourceError (OSError)          a file or folder cannot be found, downloaded, opened or made

A message says what is wrong and what to do. Many exceptions also have the expected and the found value as attributes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

E = TypeVar("E", bound=BaseException)

# The largest number of names in a message; the attributes of the exception have all names.
SHOWN = 20


def shown(value: object) -> str:
    """Return the repr of a value for a message, shortened to 80 characters."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a {type(value).__name__} of too many levels"
    return text if len(text) <= 80 else f"{text[:77]}..."


def listed(names: Iterable[object]) -> str:
    """Return names as text: "a, b or c"."""
    *first, last = map(str, names)
    return f"{', '.join(first)} or {last}" if first else last


def first(names: Sequence[str], most: int = SHOWN) -> str:
    """Return the first `most` names as text, and the number of the remaining names."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def size(n_bytes: int | None) -> str:
    """Format a number of bytes with a binary unit; return "?" for None."""
    if n_bytes is None:
        return "?"
    number, units = float(n_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while number >= 1024 and len(units) > 1:
        number /= 1024
        units.pop(0)
    return f"{n_bytes} B" if units[0] == "B" else f"{number:.1f} {units[0]}"


class EngineError(Exception):
    """The base class of our exceptions. They can be pickled, so that process pools can return them."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle `args` and the attributes. Unpickling cannot call the constructor: its arguments are not stored."""
        return _unpickled, (type(self), self.args), vars(self)


def _unpickled(kind: type[EngineError], args: tuple[Any, ...]) -> EngineError:
    error = kind.__new__(kind)
    error.args = args  # set here, because `OSError.__new__` does not set it for classes that define `__init__`
    return error


class FormatError(EngineError, ValueError):
    """A file does not follow its format."""

    def __init__(self, *, where: str, expected: str, found: str, hint: str) -> None:
        self.where, self.expected, self.found, self.hint = where, expected, found, hint
        super().__init__(f"{where}: expected {expected}, found {found}; {hint}")


class UnsupportedTypeError(FormatError):
    """A tensor's type is known by name, but reading its values is not implemented."""


class ModelError(EngineError, ValueError):
    """The file is valid, but its model cannot be built."""


class UnknownArchitectureError(ModelError):
    """No file in mlx_engine/models implements this architecture.

    Args:
        lacks: a feature of the architecture that is not implemented; None if no such feature is known.
    """

    def __init__(self, *, where: str, architecture: str, supported: Sequence[str], lacks: str | None = None) -> None:
        self.where, self.architecture, self.supported, self.lacks = where, architecture, tuple(supported), lacks
        expected = f"expected an architecture among {', '.join(supported)}, found {shown(architecture)}"
        if lacks is not None:
            expected = f"the architecture {shown(architecture)} is not implemented; it would need {lacks}"
        super().__init__(f"{where}: {expected}; choose another checkpoint, or add a file to mlx_engine/models")


UNKNOWN_SETTING = "the setting is damaged, or the model needs a feature that is not implemented here"


class UnsupportedConfigError(ModelError):
    """A setting of the model is not implemented; ignoring it would give wrong results.

    Args:
        where: the file, and for a nested setting the names of the settings around it.
        expected: the values of the setting that are implemented.
        name: the name by which the option `allow_settings` ignores the setting; None if the setting cannot be ignored.
        hint: a possible cause, or what to do.
    """

    def __init__(
        self,
        *,
        where: str,
        key: str,
        expected: str,
        found: object,
        name: str | None = None,
        hint: str = UNKNOWN_SETTING,
    ) -> None:
        self.where, self.key, self.expected, self.found, self.name = where, key, expected, found, name
        risk = f"; --allow-setting {name} ignores the setting at your own risk" if name else ""
        super().__init__(f"{where}: expected {key} to be {expected}, found {shown(found)}; {hint}{risk}")


class TensorMismatchError(ModelError):
    """The tensors of a checkpoint do not match its config."""

    def __init__(
        self, *, where: str, missing: Sequence[str], unexpected: Sequence[str], misshapen: Sequence[str]
    ) -> None:
        self.where = where
        self.missing, self.unexpected, self.misshapen = tuple(missing), tuple(unexpected), tuple(misshapen)
        lines = [f"{where}: the tensors do not match the model's configuration"]
        for title, names in (("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen)):
            if names:
                lines.append(f"  {title} ({len(names):,}): {first(names)}")
        lines.append("  the file was converted for another model, or is incomplete; convert or download it again")
        super().__init__("\n".join(lines))


class NotShardableError(ModelError):
    """A matrix cannot be cut into one part per rank, or there is no rule how to cut a tensor."""

    def __init__(self, *, where: str, name: str, expected: str, found: str, hint: str) -> None:
        self.where, self.name, self.expected, self.found, self.hint = where, name, expected, found, hint
        super().__init__(f"{where}: {name}: expected {expected}, found {found}; {hint}")


class TokenizerError(EngineError, ValueError):
    """The vocabulary cannot be turned into a tokenizer, or an id or text cannot be converted."""


class ChatTemplateError(EngineError, ValueError):
    """A model's chat template is missing, refuses the messages, fails, or takes too much time or memory.

    Attributes:
        is_refusal: whether the template may accept the same conversation in another form. False if the template is
            missing or damaged, or has exceeded a limit.
    """

    def __init__(self, *, where: str, found: str, hint: str, is_refusal: bool = False) -> None:
        self.where, self.found, self.hint, self.is_refusal = where, found, hint, is_refusal
        super().__init__(f"{where}: expected a chat template that writes the prompt, found {found}; {hint}")


class BackendUnavailableError(EngineError, RuntimeError):
    """This machine lacks what the backend needs, or no backend has this name."""

    def __init__(self, *, name: str, reason: str, hint: str = "the `backends` command lists what works here") -> None:
        self.name, self.reason = name, reason
        super().__init__(f"backend {name!r} is not available: {reason}; {hint}")


class OptionError(EngineError, ValueError):
    """An option's value is invalid, or options exclude each other.

    Attributes:
        option: the name of the option in Python, such as "top_p", or the place of the value, such as
            "messages[0].role". The command line prints the option's flag instead of this name.
        expected: a description of the valid values; None if the message has none.
        found: the invalid value.
    """

    def __init__(self, message: str, *, option: str, expected: str | None = None, found: object = None) -> None:
        self.option, self.expected, self.found = option, expected, found
        super().__init__(message)


def again(error: E) -> E:
    """Return a copy of an exception, with its traceback so far; `error` itself if it cannot be copied.

    Used for an error that ends several requests. If the threads or tasks of these requests raised one exception object,
    each of them would append its frames to the same traceback.
    """
    try:
        made = type(error).__new__(type(error), *error.args)
        # The constructors of our classes take other arguments than `args`, and only set attributes. So the constructor
        # of the built-in base class is called, and the attributes are copied.
        builtin: Any = next(of for of in type(error).__mro__ if of.__module__ == "builtins")
        builtin.__init__(made, *error.args)
        made.__dict__.update(error.__dict__)
        if str(made) != str(error):  # the exception keeps values outside of `__dict__`, such as an OSError's file name
            return error
    except Exception:  # raised by the constructor or `__str__` of a third-party exception
        return error
    made.__cause__, made.__context__ = error.__cause__, error.__context__
    made.__suppress_context__ = error.__suppress_context__
    return made.with_traceback(error.__traceback__)


def is_whole(value: object) -> bool:
    """Return whether a value is a whole number, but not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return whether a value is a finite real number, but not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def require(holds: bool, message: str, *, option: str, expected: str | None = None, found: object = None) -> None:
    """Raise OptionError unless `holds`."""
    if not holds:
        raise OptionError(message, option=option, expected=expected, found=found)


class ContextLengthError(OptionError):
    """Prompt and requested tokens do not fit the model's context."""


class ConstraintError(EngineError, ValueError):
    """The constraint on an answer allows no next token, forbids a given token, or fails."""


class ProcessorError(EngineError, RuntimeError):
    """A logits processor or sampler function of the user has raised an exception or returned an invalid value.

    If the function has raised an exception, it is the `__cause__` of this error.
    """


class CacheFullError(EngineError, RuntimeError):
    """The KV cache has no room for new tokens: too few pages or state slots are free, or the sequence is at its limit.

    Args:
        length: number of tokens that the sequence has.
        wanted: number of new tokens.
        capacity: the limit of the sequence. If `pool_is_full` is true, the number of tokens that fit into the
            sequence's pages and the free pages. If no state slot is free, or no page for the copy of a shared page, no
            new token fits.
        pool_is_full: whether the pool has too few free pages or state slots. If false, the sequence is at its limit.
    """

    def __init__(self, *, length: int, wanted: int, capacity: int, pool_is_full: bool = False) -> None:
        self.length, self.wanted, self.capacity = length, wanted, capacity
        remedy = "close another sequence" if pool_is_full else "truncate the sequence"
        room = f"{capacity - length:,} {'in its free pages' if pool_is_full else f'({length:,} of {capacity:,} used)'}"
        message = f"the KV cache has no room for {wanted:,} more tokens, only for {room}"
        super().__init__(f"{message}; {remedy}, or make a larger pool")


class DistributedError(EngineError, RuntimeError):
    """The ranks (processes that share a model) of a run on several machines do not agree, or one of them is gone.

    Attributes:
        where: the rank, or "ring" for MLX's connections.
        expected: if a setting differs between ranks, its value on rank 0; otherwise None.
        found: if a setting differs between ranks, its value on the rank `where`; otherwise a description of the error,
            or None.
    """

    def __init__(
        self, message: str, *, where: str, expected: str | None = None, found: str | None = None, hint: str
    ) -> None:
        self.where, self.expected, self.found, self.hint = where, expected, found, hint
        super().__init__(f"{where}: {message}; {hint}")


class NotEnoughMemoryError(EngineError, MemoryError):
    """A model needs more memory than is free, or memory ran out."""

    def __init__(self, *, where: str, needed: str, found: str, hint: str) -> None:
        self.where, self.needed, self.found, self.hint = where, needed, found, hint
        super().__init__(f"{where}: expected {needed}, found {found}; {hint}")


def out_of_memory(where: str, error: MemoryError) -> NotEnoughMemoryError:
    """Return a NotEnoughMemoryError for a MemoryError of Python or NumPy, with a hint what to do."""
    if isinstance(error, NotEnoughMemoryError):
        return error
    hint = "end other programs, or use --quant q8_0, fewer tokens or a smaller model"
    return NotEnoughMemoryError(where=where, needed="enough memory", found=str(error) or "none", hint=hint)


class NotFiniteError(EngineError, ArithmeticError):
    """A forward pass gave logits that are NaN or infinite.

    Args:
        n_tokens: number of tokens up to the token whose logits are not finite, including this token.
        found: the kind and number of the values that are not finite, such as "NaN (3 of 100 values)".
        origin: a text about the origin of these values and what to do.
        first: the first intermediate value that is not finite, such as "blk.3.attn_q"; None if it is not known.
        layer: the index of the layer that computed this value; None if no layer did, or if the value is not known.
    """

    def __init__(
        self, *, n_tokens: int, found: str, origin: str, first: str | None = None, layer: int | None = None
    ) -> None:
        self.n_tokens, self.found, self.first, self.layer = n_tokens, found, first, layer
        where = f"logits after {n_tokens:,} token{'' if n_tokens == 1 else 's'}"
        super().__init__(f"{where}: expected finite numbers, found {found}, {origin}")


class ClosedError(EngineError, RuntimeError):
    """The engine, or a session, has been closed."""

    def __init__(self, message: str = "the engine has been closed; load the model again") -> None:
        super().__init__(message)


class NotCopyableError(EngineError, TypeError):
    """An engine, a stream or a session cannot be pickled or copied."""

    def __init__(self, *, name: str, hint: str) -> None:
        super().__init__(f"{name}s cannot be pickled or copied; {hint}")


class AddressInUseError(EngineError, OSError):
    """Another program listens at the address of a server."""

    def __init__(self, *, host: str, port: int) -> None:
        self.host, self.port = host, port
        super().__init__(f"{host}:{port} is in use by another program; stop it, or choose another port with --port")


class SourceError(EngineError, OSError):
    """A file or folder cannot be found, downloaded, opened or created."""
