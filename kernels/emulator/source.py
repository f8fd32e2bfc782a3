"""Generate a C++ source file with several kernels for clang: a namespace and an entry function for each kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .compiler import uses_tensors
from .signature import ATTRIBUTES, Signature
from .text import code_only, line_of, threadgroup_declarations, with_suffixes

# The file names that clang's messages give to the sections of a kernel.
HEADER, BODY, SIGNATURE = "header", "body", "signature"

# {attribute of a thread: C++ expression of its value}. `t` is the thread and `g` its threadgroup (the structs in
# runtime/abi.h).
KNOWN = {
    "dispatch_quadgroups_per_threadgroup": "(threads_of(g.dispatched) + 3) / 4",
    "dispatch_simdgroups_per_threadgroup": "(threads_of(g.dispatched) + 31) / 32",
    "dispatch_threads_per_threadgroup": "three(g.dispatched)",
    "grid_origin": "uint3(0)",
    "grid_size": "three(g.threads_per_grid)",
    "quadgroup_index_in_threadgroup": "t.index / 4",
    "quadgroups_per_threadgroup": "(g.threads + 3) / 4",
    "simdgroup_index_in_threadgroup": "t.index / 32",
    "simdgroups_per_threadgroup": "(g.threads + 31) / 32",
    "thread_execution_width": "32",
    "thread_index_in_quadgroup": "t.index % 4",
    "thread_index_in_simdgroup": "t.index % 32",
    "thread_index_in_threadgroup": "t.index",
    "thread_position_in_grid": "three(g.position) * three(g.dispatched) + three(t.position)",
    "thread_position_in_threadgroup": "three(t.position)",
    "threadgroup_position_in_grid": "three(g.position)",
    "threadgroups_per_grid": "three(g.threadgroups_per_grid)",
    "threads_per_grid": "three(g.threads_per_grid)",
    "threads_per_simdgroup": "32",
    "threads_per_threadgroup": "three(g.size)",
}

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
    """Return the text of a translation unit; its function `msl_entry_i` calls part i. Equal headers occur only once."""
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
    """Return the text of C++ functions, each of which returns one attribute of a thread."""
    functions = [
        f"MSL_FUNC {kind} {name}(const msl_thread& t, const msl_group& g) {{ return {KNOWN[name]}; }}\n"
        for name, kind in ATTRIBUTES.items()
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
    """Return the body with threadgroup variables as references to the runtime's memory. Line numbers do not change."""
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
