"""Instantiations of kernels: their text, and its compilation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from . import lint
from .builds import BUILDS, QUICK, SPACES, UNOPTIMIZED
from .compiler import calls_of, kernel_library
from .errors import CompileError, LaunchError, LintError
from .recursion import defined_at, recursive, suspects
from .runtime import Entry
from .signature import TYPES, Argument, Input, Signature, dtype_name, signature
from .source import Part, unit
from .text import casts_pointers

Template = Sequence[tuple[str, Any]]
# An input, or its shape and dtype.
InputSpec = Any


class Instance(NamedTuple):
    """Everything besides its text that determines a kernel's machine code."""

    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    template: tuple[Argument, ...]
    build: str
    suffixes: bool


class Compiled(NamedTuple):
    """A compiled instance."""

    signature: Signature
    entry: Entry


@dataclass(frozen=True)
class KernelText:
    """The kernel as the user wrote it."""

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str
    header: str
    atomic_outputs: bool

    @property
    def casts(self) -> bool:
        """Whether it may read or write more than an element at once."""
        return casts_pointers(self.header) or casts_pointers(self.source)

    def instance(
        self,
        inputs: Sequence[InputSpec],
        output_dtypes: Sequence[Any],
        template: Template | None,
        *,
        build: str = "spaces",
        suffixes: bool = False,
    ) -> Instance:
        """Return the instance for inputs like these.

        Raises:
            LaunchError: MLX or Metal does not support a dtype or template argument.
        """
        outputs = tuple(map(dtype_name, output_dtypes))
        for dtype in outputs:
            if dtype not in TYPES:
                raise LaunchError(f"kernel '{self.name}', output dtype {dtype}: expected one of {', '.join(TYPES)}")
        arguments = tuple(Argument.of(name, value) for name, value in template or ())
        return Instance(tuple(map(_input_of, inputs)), outputs, arguments, build, suffixes)

    def signature(self, instance: Instance) -> Signature:
        """Return the signature of an instance."""
        return signature(
            self.name,
            self.source,
            list(zip(self.input_names, instance.inputs, strict=True)),
            list(zip(self.output_names, instance.outputs, strict=True)),
            instance.template,
            atomic_outputs=self.atomic_outputs,
        )

    def generated(self, instance: Instance) -> str:
        """Return the text that MLX compiles, without its preamble."""
        return self.signature(instance).text(self.header, self.source)


def _input_of(spec: InputSpec) -> Input:
    """Return the signature's input for an array, or for a pair of shape and dtype."""
    if isinstance(spec, Input):
        return spec
    shape, dtype = spec if isinstance(spec, tuple) else (spec.shape, spec.dtype)
    return Input.of(dtype_name(dtype), shape)


def compile_together(wanted: Sequence[tuple[KernelText, Instance]], *, optimize: bool = True) -> list[Compiled]:
    """Compile instances as one unit; their builds and rules are equal.

    Without `optimize` this takes a tenth of the time, and the kernels run several times slower.

    Raises:
        CompileError: for the first that does not compile.
    """
    name, suffixes = wanted[0][1].build, wanted[0][1].suffixes
    build = (BUILDS if optimize else QUICK).get(name, UNOPTIMIZED)
    for text in dict.fromkeys(text for text, _ in wanted):
        lint.check(text.name, text.header, text.source, suffixes=suffixes)
    signatures = [text.signature(instance) for text, instance in wanted]
    parts = [Part(one, text.header, text.source) for one, (text, _) in zip(signatures, wanted, strict=True)]
    try:
        file = kernel_library(
            unit(parts), build, partial(_refuse_recursion, wanted, parts) if name == SPACES.name else None
        )
    except CompileError as error:
        if len(wanted) > 1:  # one of them, but which?
            return [compiled for one in wanted for compiled in compile_together([one], optimize=optimize)]
        if isinstance(error, LintError):
            raise
        ((text, instance),) = wanted
        hint = lint.hints(str(error), list(zip(text.input_names, instance.inputs, strict=True)))
        raise CompileError(f"kernel '{text.name}' does not compile\n{error}{hint}") from None
    return [Compiled(one, Entry(file, i)) for i, one in enumerate(signatures)]


def _refuse_recursion(wanted: Sequence[tuple[KernelText, Instance]], parts: Sequence[Part]) -> None:
    """Raise LintError if a function of a header calls itself, as the first instance of each kernel shows."""
    first = {text: part for (text, _), part in zip(reversed(wanted), reversed(parts), strict=True)}
    for text, part in first.items():
        names = suspects(text.header)
        found = recursive(calls_of(unit([part]), SPACES), names) if names else None
        if found:
            raise LintError(
                f"kernel '{text.name}' is not what Metal takes\n  header, line {defined_at(text.header, found)}: "
                f"`{found}` calls itself; Metal has no recursion, write a loop"
            )
