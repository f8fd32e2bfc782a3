"""Generate the signature that MLX writes for a `metal_kernel`, from names, arrays and template arguments.

The text equals the output of MLX's generator byte for byte; the tests compare both. As in MLX, thread attributes, and
names such as `x_shape`, become parameters if they occur in the body, even in a comment. The header is not searched.

Source: `write_signature` and `metal_kernel` in mlx/backend/common/metal_kernel.cpp,
https://github.com/ml-explore/mlx/blob/846d17622/mlx/backend/common/metal_kernel.cpp
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .errors import LaunchError

# Maps each MLX dtype to its Metal type.
TYPES = {
    "bool": "bool",
    "uint8": "uint8_t",
    "uint16": "uint16_t",
    "uint32": "uint32_t",
    "uint64": "uint64_t",
    "int8": "int8_t",
    "int16": "int16_t",
    "int32": "int32_t",
    "int64": "int64_t",
    "float16": "float16_t",
    "float32": "float",
    "bfloat16": "bfloat16_t",
    "complex64": "complex64_t",
}

# Maps each thread attribute, in MLX's order, to its Metal type and to the C++ expression by which the emulator computes
# it. In the expressions, `t` is the thread and `g` its threadgroup (the structs in runtime/abi.h).
ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": ("uint", "(threads_of(g.dispatched) + 3) / 4"),
    "dispatch_simdgroups_per_threadgroup": ("uint", "(threads_of(g.dispatched) + 31) / 32"),
    "dispatch_threads_per_threadgroup": ("uint3", "three(g.dispatched)"),
    "grid_origin": ("uint3", "uint3(0)"),
    "grid_size": ("uint3", "three(g.threads_per_grid)"),
    "quadgroup_index_in_threadgroup": ("uint", "t.index / 4"),
    "quadgroups_per_threadgroup": ("uint", "(g.threads + 3) / 4"),
    "simdgroup_index_in_threadgroup": ("uint", "t.index / 32"),
    "simdgroups_per_threadgroup": ("uint", "(g.threads + 31) / 32"),
    "thread_execution_width": ("uint", "32"),
    "thread_index_in_quadgroup": ("uint", "t.index % 4"),
    "thread_index_in_simdgroup": ("uint", "t.index % 32"),
    "thread_index_in_threadgroup": ("uint", "t.index"),
    "thread_position_in_grid": ("uint3", "three(g.position) * three(g.dispatched) + three(t.position)"),
    "thread_position_in_threadgroup": ("uint3", "three(t.position)"),
    "threadgroup_position_in_grid": ("uint3", "three(g.position)"),
    "threadgroups_per_grid": ("uint3", "three(g.threadgroups_per_grid)"),
    "threads_per_grid": ("uint3", "three(g.threads_per_grid)"),
    "threads_per_simdgroup": ("uint", "32"),
    "threads_per_threadgroup": ("uint3", "three(g.size)"),
}

# MLX passes inputs with fewer elements than this in the address space `constant`.
SMALL = 8


class Input(NamedTuple):
    """The properties of an input on which the signature depends."""

    dtype: str
    ndim: int
    small: bool

    @classmethod
    def of(cls, dtype: str, shape: Sequence[int]) -> Input:
        """Return the properties of an array with this dtype and shape."""
        size = 1
        for n in shape:
            size *= n
        return cls(dtype, len(shape), size < SMALL)


class Parameter(NamedTuple):
    """One buffer of the kernel: an input, an output, or the shape, strides or ndim of an input."""

    declaration: str  # the text before the name, such as `const device float*`
    name: str
    role: str  # input, shape, strides, ndim, output
    place: int  # the index of the input or of the output in its list
    dtype: str  # the dtype of the input or of the output


@dataclass(frozen=True)
class Signature:
    """The signature of an instantiation of a kernel."""

    function: str
    template: str  # the line `template <...>`, or ""
    arguments: str  # the template arguments, such as "<float, 3>", or ""
    parameters: tuple[Parameter, ...]
    attributes: tuple[str, ...]

    @property
    def head(self) -> str:
        """The text between the header and the body."""
        lines = [f"  {p.declaration} {p.name} [[buffer({i})]]" for i, p in enumerate(self.parameters)]
        lines += [f"  {ATTRIBUTES[name][0]} {name} [[{name}]]" for name in self.attributes]
        return f"{self.template}[[kernel]] void {self.function}(\n" + ",\n".join(lines) + ") {\n"

    @property
    def tail(self) -> str:
        """The text after the body: the explicit instantiation of the template, or "" without a template."""
        if not self.template:
            return ""
        whole = self.function + self.arguments
        return f'\ntemplate [[host_name("{self.function}")]] [[kernel]] decltype({whole}) {whole};\n'

    def text(self, header: str, source: str) -> str:
        """Return the text that MLX compiles, without MLX's preamble."""
        return f"{header}{self.head}{source}\n}}\n{self.tail}"


class Argument(NamedTuple):
    """A template argument as text."""

    name: str
    kind: str  # int, bool or typename
    text: str

    @classmethod
    def of(cls, name: str, value: Any) -> Argument:
        """Return the argument. Its text is the Metal name of a dtype, the digits of an int, or 0 or 1 for a bool."""
        if isinstance(value, bool):
            return cls(name, "bool", str(int(value)))
        if isinstance(value, int):
            return cls(name, "int", str(value))
        dtype = dtype_name(value)
        if dtype not in TYPES:
            raise LaunchError(f"template argument {name}={value!r}: expected an int, a bool or an MLX dtype")
        return cls(name, "typename", TYPES[dtype])


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype: "float32" for mlx.core.float32, numpy.float32 or "float32"."""
    name = str(getattr(dtype, "__name__", None) or dtype).rsplit(".", 1)[-1]
    return "bool" if name == "bool_" else name


def signature(
    name: str,
    source: str,
    inputs: Sequence[tuple[str, Input]],
    outputs: Sequence[tuple[str, str]],
    template: Sequence[Argument] = (),
    *,
    atomic_outputs: bool = False,
) -> Signature:
    """Return the signature of a kernel with the body `source`. `outputs` has the name and dtype of each output."""
    values = [argument.text for argument in template]
    named = [f"{argument.kind} {argument.name}" for argument in template]
    return Signature(
        function=_function_name(name, values, inputs, outputs),
        template=f"template <{', '.join(named)}>\n" if named else "",
        arguments=f"<{', '.join(values)}>" if values else "",
        parameters=tuple(_parameters(source, inputs, outputs, atomic_outputs)),
        attributes=tuple(attribute for attribute in ATTRIBUTES if attribute in source),
    )


def _function_name(
    name: str, values: Sequence[str], inputs: Sequence[tuple[str, Input]], outputs: Sequence[tuple[str, str]]
) -> str:
    parts = [f"custom_kernel_{name}"]
    if values:
        parts.append("_" + "_".join(values).replace("-", "_"))
    for _, kind in inputs:
        parts.append(TYPES[kind.dtype] + ("s" if kind.ndim == 0 else "c" if kind.small else ""))
    parts += [TYPES[dtype] for _, dtype in outputs]
    return "_".join(parts)


def _parameters(
    source: str, inputs: Sequence[tuple[str, Input]], outputs: Sequence[tuple[str, str]], atomic_outputs: bool
) -> list[Parameter]:
    parameters = []
    for place, (name, kind) in enumerate(inputs):
        space, reference = "constant" if kind.small else "device", "*" if kind.ndim else "&"
        parameters.append(Parameter(f"const {space} {TYPES[kind.dtype]}{reference}", name, "input", place, kind.dtype))
        if kind.ndim == 0:
            continue
        for role, metal_type in (("shape", "int*"), ("strides", "int64_t*"), ("ndim", "int&")):
            if f"{name}_{role}" in source:
                parameters.append(Parameter(f"const constant {metal_type}", f"{name}_{role}", role, place, kind.dtype))
    for place, (name, dtype) in enumerate(outputs):
        element = f"atomic<{TYPES[dtype]}>" if atomic_outputs else TYPES[dtype]
        parameters.append(Parameter(f"device {element}*", name, "output", place, dtype))
    return parameters
