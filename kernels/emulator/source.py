"""Generate a C++ source file with several kernels for clang: a namespace and an entry function for each kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .compiler import uses_tensors
from .signature import ATTRIBUTES, Signature
from .text import code_only, line_of, threadgroup_declarations, with_suffixes

# The sections of a kernel have these file names in clang's messages.
HEADER, BODY, SIGNATURE = "header", "body", "signature"

_PREAMBLE = """namespace msl_attribute {
MSL_FUNC uint3 three(const unsigned* of) { return uint3(of[0], of[1], of[2]); }
MSL_FUNC uint threads_of(const unsigned* of) { return of[0] * of[1] * of[2]; }
"""


class Part(NamedTuple):
    """One kernel of a translation unit."""

    signature: Signature
    header: str
    source: str


def unit(parts: Sequence[Part]) -> str:
    """Return the text of a translation unit, in which the function `msl_entry_i` calls the kernel `parts[i]`.

    Kernels with the same header share one copy of the header.
    """
    bodies = {source: with_suffixes(place_threadgroup_memory(source)) for source in {part.source for part in parts}}
    of_header: dict[str, list[str]] = {}
    for i, part in enumerate(parts):
        of_header.setdefault(part.header, []).append(_part(i, part.signature, bodies[part.source]))
    tensors = any(map(uses_tensors, (*of_header, *bodies)))
    first = "#include <msl/mlx.h>\n" + "#include <msl/tensors.h>\n" * tensors
    groups = (
        f'namespace msl_header_{i} {{\n#line 1 "{HEADER}"\n{with_suffixes(header)}\n{"".join(kernels)}}}\n'
        for i, (header, kernels) in enumerate(of_header.items())
    )
    return "".join([first, attributes(), *groups])


def attributes() -> str:
    """Return the text of a C++ function for each thread attribute of Metal, such as `thread_position_in_grid`."""
    functions = [
        f"MSL_FUNC {kind} {name}(const msl_thread& t, const msl_group& g) {{ return {value}; }}\n"
        for name, (kind, value) in ATTRIBUTES.items()
    ]
    return "".join([_PREAMBLE, *functions, "}\n"])


def _part(index: int, signature: Signature, body: str) -> str:
    space = f"msl_kernel_{index}"
    return (
        f"namespace {space} {{\n"
        f'#line 1 "{SIGNATURE}"\n{signature.head}'
        f'#line 1 "{BODY}"\n{body}\n}}\n'
        f'}}\n#line 1 "entry"\n{_entry(index, f"{space}::{signature.function}{signature.arguments}", signature)}'
    )


def _entry(index: int, function: str, signature: Signature) -> str:
    arguments = []
    for i, parameter in enumerate(signature.parameters):
        pointer = parameter.declaration[:-1] + "*"
        reference = "*" if parameter.declaration.endswith("&") else ""
        arguments.append(f"{reference}({pointer})buffers[{i}]")
    arguments += [f"msl_attribute::{name}(*self, *self->group)" for name in signature.attributes]
    return (
        f'extern "C" __attribute__((visibility("default")))\n'
        f"void msl_entry_{index}(void* const* buffers, const msl_thread* self) {{\n"
        f"  {function}({', '.join(arguments)});\n}}\n"
    )


def place_threadgroup_memory(source: str) -> str:
    """Return the body with threadgroup variables as references to the runtime's memory; line numbers do not change."""
    pieces, last, ordinal = [], 0, 0
    for declared in threadgroup_declarations(source):
        pieces.append(source[last : declared.start])
        line = line_of(source, declared.start)
        for name, dimensions in declared.variables:
            kind = f"msl_type_of_{name}"
            place = f'msl_threadgroup_array({ordinal}, sizeof({kind}), "{name}", {line})'
            pieces.append(
                f"typedef {declared.element} {kind} {code_only(dimensions)}; "
                f"threadgroup {kind}& {name} = *(threadgroup {kind}*){place}; "
            )
            ordinal += 1
        written = source[declared.start : declared.end]
        inside = sum(dimensions.count("\n") for _, dimensions in declared.variables)
        pieces.append("\n" * (written.count("\n") - inside))
        last = declared.end
    return "".join([*pieces, source[last:]])
