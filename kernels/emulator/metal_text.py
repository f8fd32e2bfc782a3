"""Preprocess a whole .metal file and find its kernels, instantiations and function constants."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..folder import cache_folder
from .compiler import preprocess
from .declarations import declarations, without_template, without_twins
from .errors import CompileError
from .metal_parameters import MetalParameter, parameters
from .source import place_threadgroup_memory
from .text import with_suffixes
from .vector_text import Rewriter

# Headers of Metal's library; msl/all.h, which is included later, has what they declare.
_STANDARD = frozenset(
    {
        "assert",
        "array",
        "atomic",
        "common",
        "compute",
        "extended_vector",
        "geometric",
        "graphics",
        "integer",
        "limits",
        "logging",
        "math",
        "matrix",
        "numeric",
        "pack",
        "packed",
        "quadgroup",
        "relational",
        "simdgroup",
        "simdgroup_matrix",
        "stdlib",
        "texture",
        "type_traits",
        "types",
        "uniform",
    }
)


@dataclass(frozen=True)
class MetalFunction:
    """A kernel function, or an instantiation of a template of kernel functions.

    Attributes:
        name: what `newFunctionWithName` takes: the `host_name`, or the function's own name.
        function: how C++ calls it: `softmax<float, 4>`.
        parameters: its parameters in order.
        arrays: the number of threadgroup arrays in its body.
        is_typed: whether the types of arguments choose the function, because it is a template without arguments.
    """

    name: str
    function: str
    parameters: tuple[MetalParameter, ...]
    arrays: int
    is_typed: bool = False


@dataclass(frozen=True)
class FunctionConstant:
    """A function constant: `constant bool has_mask [[function_constant(20)]];`."""

    index: int
    name: str
    type: str


@dataclass(frozen=True)
class MetalText:
    """A preprocessed file.

    Attributes:
        code: C++ text: each function constant is still declared with its attribute.
        functions: by name.
        constants: the function constants in order.
        sources: the text of each file in it by the name that findings use.
    """

    code: str
    functions: dict[str, MetalFunction]
    constants: tuple[FunctionConstant, ...]
    sources: dict[str, str]

    def with_constants(self, values: dict[int, str]) -> str:
        """Return the code with values of function constants; those without a value are declared only.

        Then a kernel that uses one cannot be linked, and one that does not can.
        """

        def define(match: re.Match[str]) -> str:
            one = self.constants[int(match["ordinal"])]
            defined = f"static constexpr bool msl_defined_{one.name} = {str(one.index in values).lower()};"
            if one.index not in values:
                return f'{defined} extern const {one.type} {one.name} __attribute__((visibility("default")));'
            return f"{defined} static constexpr {one.type} {one.name} = {one.type}({values[one.index]});"

        return re.sub(r"msl_function_constant\((?P<ordinal>\d+)\);", define, self.code)


def read_metal(file: Path | None, text: str, folders: Sequence[Path]) -> MetalText:
    """Preprocess a file, or text that lies in no file, and find its kernels.

    Raises:
        CompileError: it cannot be preprocessed, or has no kernels.
    """
    name = file.name if file else "metal"
    with tempfile.TemporaryDirectory(dir=cache_folder("emulator"), prefix="reading-") as scratch:
        for header in sorted(_STANDARD):
            (Path(scratch) / f"metal_{header}").write_text("")
        places = [file.resolve().parent] if file else []
        given = f'#line 1 "{file.resolve() if file else name}"\n{text}'
        expanded = preprocess(given, [*places, *folders], Path(scratch))
    expanded, sources = _with_short_names(expanded, {str(file.resolve()) if file else name: text})
    functions, constants, code = _parsed(without_twins(expanded))
    if not functions:
        raise CompileError(
            f"{name}: expected functions `kernel void NAME(...)`, found none; a kernel's body alone is a kernel of "
            "kernels.emulator.metal_kernel"
        )
    return MetalText(code, functions, constants, sources)


_LINE = re.compile(r'(?m)^# (\d+) "([^"\n]*)".*$')


def _with_short_names(text: str, sources: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Replace the paths in line markers by names without folders; return the texts by these names, too."""
    short: dict[str, str] = {}
    for path in dict.fromkeys(match[2] for match in _LINE.finditer(text)):
        parts, n = Path(path).parts, 1
        while "|".join(parts[-n:]) in short.values() and n < len(parts):
            n += 1
        short[path] = "|".join(parts[-n:])
        if path not in sources and Path(path).is_file():
            sources[path] = Path(path).read_text(encoding="utf-8", errors="replace")
    named = {short[path]: content for path, content in sources.items() if path in short}
    return _LINE.sub(lambda match: f'#line {match[1]} "{short[match[2]]}"', text), named


_HOST_NAME = re.compile(r'\[\[\s*host_name\s*\(((?:\s*"[^"]*")+)\s*\)\s*\]\]')
_KERNEL = re.compile(r"\[\[\s*kernel\s*\]\]|\bkernel\b")
_CONSTANT = re.compile(
    r"^(?:(?:static|constant|const|constexpr)\s+)+(?P<type>[\w: ]+?)\s+(?P<name>\w+)\s*"
    r"\[\[\s*function_constant\s*\((?P<index>[^\]]*)\)\s*\]\]\s*;$"
)


def _parsed(text: str) -> tuple[dict[str, MetalFunction], tuple[FunctionConstant, ...], str]:
    kernels: dict[str, MetalFunction] = {}
    instances: list[tuple[str, str, str]] = []
    constants: list[FunctionConstant] = []
    functions: dict[str, MetalFunction] = {}
    pieces, last, vectors = [], 0, Rewriter(text)
    for one in declarations(text):
        if one.start < last or one.is_class:
            continue
        head, body = text[one.start : one.head], text[one.head : one.end]
        body = vectors.rewritten(body) if one.has_body else body
        written = head + body
        if not one.has_body and (constant := _CONSTANT.match(_plain(head))):
            constants.append(FunctionConstant(_index(constant["index"]), constant["name"], constant["type"]))
            written = f"msl_function_constant({len(constants) - 1});" + "\n" * head.count("\n")
        elif _KERNEL.search(head):
            hosts = ["".join(re.findall(r'"([^"]*)"', match[1])) for match in _HOST_NAME.finditer(head)]
            bare = _KERNEL.sub("", _HOST_NAME.sub("", head))
            if one.has_body:
                found = _kernel(bare, body)
                kernels[found.name] = found
                if without_template(bare) == bare:
                    bare = f"static {bare}"
                    host = hosts[0] if hosts else found.name
                    functions[host] = MetalFunction(host, found.function, found.parameters, found.arrays)
                written = re.sub(r"\[\[[^\[\]]*\]\]", "", bare) + place_threadgroup_memory(body)
            else:
                instances += [(host, *_instantiated(bare)) for host in hosts]
                written = re.sub(r"[^\n]", "", head)
        pieces += [text[last : one.start], written]
        last = one.end
    for host, function, listed in instances:
        base = kernels[function.split("<")[0].rsplit("::", 1)[-1].strip()]
        is_typed = "<" not in function and bool(listed)
        given = tuple(parameters(host, _plain_lines(listed))) if is_typed else base.parameters
        functions[host] = MetalFunction(host, function, given, base.arrays, is_typed)
    return functions, tuple(constants), _legal("".join([*pieces, text[last:]]))


_PRAGMA = re.compile(r"(?m)^[ \t]*#[ \t]*pragma\b.*$")  # of no consequence here, and macros in them are not expanded
_SLOT = re.compile(r"\[\[\s*threadgroup\s*\([^\]]*\)\s*\]\]")  # also on parameters of helper functions
_CAST = re.compile(r"\bstatic_cast(?=\s*<[^<>&*()]*(?:<[^<>&*()]*>[^<>&*()]*)?>)")


def _legal(text: str) -> str:
    """Return the text as clang takes it: literals are floats, attributes are gone, halves become bfloats."""
    return with_suffixes(_CAST.sub("metal::msl_static_cast", _SLOT.sub("", _PRAGMA.sub("", text))))


def _plain(head: str) -> str:
    return " ".join(re.sub(r"(?m)^#.*$", "", head).split())


def _index(expression: str) -> int:
    """Return the value of a sum of numbers, as preprocessing leaves `FC_ROPE + 1`."""
    terms = re.findall(r"\d+", expression)
    if re.sub(r"[\d\s+()]", "", expression) or not terms:
        raise CompileError(f"function_constant({expression}): expected a number, or a sum of numbers")
    return sum(int(term) for term in terms)


def _kernel(head: str, body: str) -> MetalFunction:
    plain = without_template(head)
    opened = re.search(
        r"(\w+)\s*\(", re.sub(r"__attribute__\s*\(\(.*?\)\)|\[\[.*?\]\]", lambda m: " " * len(m[0]), plain)
    )
    if opened is None:
        raise CompileError(f"`{_plain(head)}`: expected a kernel's name and parameters")
    listed = plain[opened.end() : plain.rindex(")")]
    name = opened[1]
    arrays = place_threadgroup_memory(body).count("msl_threadgroup_array(")
    return MetalFunction(name, name, tuple(parameters(name, _plain_lines(listed))), arrays)


def _plain_lines(text: str) -> str:
    return re.sub(r"(?m)^#.*$", "", text)


def _instantiated(head: str) -> tuple[str, str]:
    """Return `softmax<float>` of `template decltype(softmax<float>) softmax<float>;`, and parameters if it has some."""
    plain, listed = _plain(head).rstrip("; "), ""
    if plain.endswith(")"):  # parameters are written again
        opened = _opening(plain, "(", ")")
        plain, listed = plain[:opened].rstrip(), plain[opened + 1 : -1]
    if not plain.endswith(">"):
        return plain.split()[-1], listed
    opened = _opening(plain, "<", ">")
    name = re.search(r"[\w:]+\s*$", plain[:opened])
    return (name[0].strip() if name else "") + plain[opened:], listed


def _opening(text: str, opens: str, closes: str) -> int:
    """Return where the bracket opens that the last character closes."""
    depth, at = 0, len(text)
    while at and (at == len(text) or depth):
        at -= 1
        depth += {closes: 1, opens: -1}.get(text[at], 0)
    return at
