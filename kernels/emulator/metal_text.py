"""Convert a complete .metal file to C++ for clang; find its kernels, instantiations and function constants."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..files import cache_folder
from .compiler import preprocess
from .errors import CompileError
from .signature import ATTRIBUTES
from .source import place_threadgroup_memory
from .text import closing, code_only, with_suffixes

# ---- the parameters that a kernel of a .metal file declares ----


class MetalParameter(NamedTuple):
    """One parameter of a kernel."""

    name: str
    role: str  # "buffer", "threadgroup" or "attribute"
    slot: int  # the index of the buffer or threadgroup memory
    type: str  # the text of the type, without address space, `const`, pointer or reference
    is_reference: bool  # whether the parameter is `T&`, not `T*`
    is_written: bool  # whether the kernel may write to the buffer
    attribute: str  # for the role "attribute": the attribute's name, such as "thread_position_in_grid"
    declared: str  # the whole text of the type
    is_optional: bool = False  # whether the parameter exists only for some values of a function constant
    is_tensor: bool = False  # whether the parameter is a tensor, made from an array and the array's shape


_TENSOR = re.compile(r"(?:metal\s*::\s*)?tensor\s*<\s*(?P<element>[^,<>]+),.*>$", re.DOTALL)
_ATTRIBUTE = re.compile(r"(\w+)\s*(?:\(([^()]*(?:\([^()]*\)[^()]*)*)\))?")
_BRACKETS = re.compile(r"\[\[(.*?)\]\]", re.DOTALL)


def parameters(kernel: str, listed: str) -> Iterator[MetalParameter]:
    """Parse the text of a kernel's parameter list, and yield the parameters.

    Buffers and threadgroup memory without an index get the lowest free index, in order.

    Raises:
        CompileError: a parameter cannot be parsed, or is neither a buffer nor threadgroup memory nor a known attribute.
    """
    taken: dict[str, set[int]] = {"buffer": set(), "threadgroup": set()}
    written = [_split(one) for one in _separated(listed)]
    for _, given in written:
        for role, used in taken.items():
            if given.get(role):
                used.add(int(given[role]))
    for declared, given in written:
        name, kind, is_pointer, is_reference = _declared(kernel, declared)
        whole = re.sub(rf"\b{name}\b[^*&]*$", "", declared).strip()
        attribute = next((one for one in given if one in ATTRIBUTES), "")
        if attribute:
            yield MetalParameter(name, "attribute", 0, kind, False, False, attribute, "")
            continue
        tensor = _TENSOR.match(whole)
        if not (is_pointer or is_reference or tensor):
            found = ", ".join(given) or "no attribute"
            raise CompileError(
                f"kernel '{kernel}', parameter '{name}': expected a buffer, threadgroup memory or an attribute of a "
                f"compute kernel, found {found}; textures, samplers and stage inputs are not supported"
            )
        role = "threadgroup" if re.search(r"\bthreadgroup\b", declared) else "buffer"
        index = int(given[role]) if given.get(role) else next(i for i in range(99) if i not in taken[role])
        taken[role].add(index)
        fixed = re.search(
            r"\b(?:const|constant)\b", (tensor["element"] if tensor else declared).split("*")[0].split("&")[0]
        )
        optional = "function_constant" in given
        yield MetalParameter(name, role, index, kind, is_reference, not fixed, "", whole, optional, bool(tensor))


def _separated(listed: str) -> Iterator[str]:
    depth, start = 0, 0
    for at, character in enumerate(listed):
        depth += {"(": 1, "[": 1, "<": 1, "{": 1, ")": -1, "]": -1, ">": -1, "}": -1}.get(character, 0)
        if character == "," and not depth:
            yield listed[start:at]
            start = at + 1
    if listed[start:].strip():
        yield listed[start:]


def _split(parameter: str) -> tuple[str, dict[str, str]]:
    """Return (the text of a parameter without attributes, {attribute: the text of its arguments})."""
    given = {
        one[1]: (one[2] or "").strip() for inside in _BRACKETS.findall(parameter) for one in _ATTRIBUTE.finditer(inside)
    }
    return " ".join(_BRACKETS.sub(" ", parameter).split()), given


def _declared(kernel: str, declared: str) -> tuple[str, str, bool, bool]:
    """Return a parameter's (name or "unnamed", type, whether a pointer or an array, whether a reference)."""
    written = declared.split("=")[0].strip()
    found = re.search(r"(\w+)\s*((?:\[[^\]]*\]\s*)*)$", f"{written} unnamed" if written[-1:] in "*&" else written)
    if found is None:
        raise CompileError(f"kernel '{kernel}': expected a parameter, found `{declared}`")
    kind = written[: found.start()]
    plain = re.sub(
        r"\b(?:const|constant|device|threadgroup|thread|volatile|restrict|__restrict|coherent)\b|[*&]", " ", kind
    )
    return found[1], " ".join(plain.split()), "*" in kind or bool(found[2]), "&" in kind


# ---- conversions to vectors: Metal converts each element's value; clang would reinterpret the bits, or refuse ----

_ELEMENTS = "bool|u?char|u?short|u?int|u?long|half|b?float"
_VECTOR = rf"(?:(?:packed_)?(?:{_ELEMENTS})[234])"
_QUALIFIERS = ("const", "constant", "device", "thread", "threadgroup")
_SIZED = r"(?:(?:metal\s*::\s*)?vec\s*<[^<>]*>)"
_TYPE_PARAMETER = re.compile(r"\b(?:typename|class)\s+(?!\.)(\w+)\b(?=\s*[,>=])")
_ALIAS = re.compile(r"\busing\s+(\w+)\s*=|\btypedef\b[^;{}]*?\b(\w+)\s*;")


def type_names(text: str) -> list[str]:
    """Return the names of types that a file declares: type parameters of templates, and aliases."""
    code = code_only(text, directives=False)
    found = [match[1] for match in _TYPE_PARAMETER.finditer(code)]
    found += [match[1] or match[2] for match in _ALIAS.finditer(code)]
    return sorted({name for name in found if name not in ("type", "value", "value_type")})


# Matches the list `{x, y, z}` in `f({x, y, z}, n)`, which constructs a vector. An element of the list may be a call.
_ITEM = r"(?:[^(){};,]|\((?:[^(){};]|\([^(){};]*\))*\))*"
_LIST = re.compile(rf"(?<=[\w>]\()(\s*)\{{({_ITEM},{_ITEM},{_ITEM})\}}(?=\s*,)")


class Rewriter:
    """Rewrites the bodies of functions, so that C++ constructs and converts vectors as Metal does.

    If T is a vector type, a type parameter or an alias, `(T)x` becomes a conversion by value, and `T(a, b)` becomes a
    call of `msl_construct<T>`. `int2 at(a, b);` becomes `int2 at = msl_construct<int2>(a, b);`. A first argument
    `{x, y, z}` becomes a call of `msl_list`.
    """

    def __init__(self, text: str) -> None:
        names = "|".join(map(re.escape, type_names(text)))
        kind = rf"(?:{_VECTOR}|{_SIZED}" + (rf"|(?:{names})(?:\s*<[^<>]*>)?" if names else "") + ")"
        self._cast = re.compile(
            rf"(?P<before>(?:^|[^\w\s)\]>]|\breturn\b|\belse\b)\s*)\(\s*(?:const\s+|thread\s+)*(?P<type>{kind})\s*\)"
            r"(?=\s*[\w(*&~!.+-])"
        )
        self._declaration = re.compile(
            rf"(?P<type>\b(?:{_VECTOR}|{_SIZED}))(?P<space>\s+)(?P<name>\w+)\s*\((?=\s*[^\s)])"
        )
        # `T(*p)` constructs a T and is rewritten. `T (*)`, `T (&a)`, `device T (*a)[4]` and `T (*f)(int)` are parts of
        # declarations and stay as they are.
        before = "".join(f"(?<!{word} )" for word in ("typename", *_QUALIFIERS))
        declares = r"\)|[*&]+\s*\)|&\s*\w+\s*\)|\*+\s*\w+\s*\)\s*\("
        self._call = re.compile(rf"(?<![\w:.~>]){before}(?P<type>{kind})\s*\((?!\s*(?:{declares}))")

    def rewritten(self, body: str) -> str:
        """Return the rewritten body of a function; line numbers do not change."""
        body = self._cast.sub(lambda match: f"{match['before']}metal::msl_to<{match['type']}>{{}}->*", body)
        body = self._declaration.sub(_initialized, body)
        body = _LIST.sub(r"\1metal::msl_list(\2)", body)
        return self._call.sub(lambda match: f"metal::msl_construct<{match['type']}>(", body)


def _initialized(match: re.Match[str]) -> str:
    return f"{match['type']}{match['space']}{match['name']} = metal::msl_construct<{match['type']}>("


# ---- declarations at namespace and class level, found without a parser ----


class Declaration(NamedTuple):
    """A declaration, or a definition with a body. All positions are indices into the text."""

    start: int
    head: int  # the position where the body begins; `end` if there is no body
    end: int  # the position after the last character
    scope: int  # the position of the innermost open brace before the declaration; -1 if there is none
    is_class: bool = False  # whether this is the definition of a class; the declarations of its members follow

    @property
    def has_body(self) -> bool:
        """Whether this is a definition with a body."""
        return self.end > self.head


_MARK = re.compile(r"[{}();]")
_LABEL = re.compile(r"\s*(?:(?:public|private|protected)\s*:)?\s*")
_ATTRIBUTES = re.compile(r"\[\[.*?\]\]|__attribute__\s*\(\(.*?\)\)|alignas\s*\([^()]*\)", re.DOTALL)
_CLASS = re.compile(r"\s*(?:typedef\s+)?(?:struct|class|union)\b[^()=]*$")
_NAMESPACE = re.compile(r"(?:inline\s+)?namespace\b[^()]*$|extern\s*$")


def declarations(text: str) -> Iterator[Declaration]:
    """Yield the declarations in preprocessed text in order, without declarations inside functions."""
    code = code_only(text, directives=False)
    scopes = [(-1, False)]
    start = position = parentheses = 0
    while mark := _MARK.search(code, position):
        at, position = mark.start(), mark.end()
        if mark.group() in "()":
            parentheses += 1 if mark.group() == "(" else -1
        elif mark.group() == "}":
            scopes = scopes[:-1] or scopes
            start = position
        elif parentheses:
            position = closing(code, at) if mark.group() == "{" else position
        elif mark.group() == ";":
            yield Declaration(_first(code, start), position, position, scopes[-1][0])
            start = position
        else:
            first = _first(code, start)
            head = code[first:at].strip()
            plain = without_template(_ATTRIBUTES.sub(" ", head)).strip()
            if _NAMESPACE.match(plain):
                scopes.append((at, False))
                start = position
            elif _CLASS.match(plain):
                yield Declaration(first, at, closing(code, at), scopes[-1][0], is_class=True)
                scopes.append((at, True))
                start = position
            else:
                position = closing(code, at)
                if "(" in plain and not re.search(r"=\s*$", plain):
                    yield Declaration(first, at, position, scopes[-1][0])
                    start = position


def _first(code: str, start: int) -> int:
    """Return the position where a declaration begins, after spaces and a label such as `public:`."""
    label = _LABEL.match(code, start)
    return label.end() if label else start


def without_template(head: str) -> str:
    """Return the head of a declaration without `template <...>`."""
    while opened := re.match(r"\s*template\s*<", head):
        depth, at = 1, opened.end()
        while depth and at < len(head):
            depth += {"<": 1, ">": -1}.get(head[at], 0)
            at += 1
        head = head[at:]
    return head


# Matches the address space after the parameters of a member function, as in `int f() const device {`.
_QUALIFIER = re.compile(r"(\)\s*(?:const\s+)?)((?:thread|device|threadgroup|constant)\b)(?=\s*(?:[{:;]|noexcept))")
_SPACES = re.compile(r"\b(?:thread|device|threadgroup)\b")


def without_twins(text: str) -> str:
    """Blank out each function or specialisation that differs from an earlier one only in address spaces (a twin).

    In the converted text, all address spaces are one memory, so the twins would be redefinitions, which clang refuses.
    Address spaces after the parameters of member functions are also removed. Line numbers do not change.
    """
    text = _QUALIFIER.sub(lambda match: match[1] + re.sub(r"[^\n]", " ", match[2]), text)
    seen: set[tuple[int, str]] = set()
    pieces, last = [], 0
    for one in declarations(text):
        is_plain_class = one.is_class and "<" not in without_template(text[one.start : one.head])
        if one.has_body and one.start >= last and not is_plain_class:
            key = (one.scope, _normal(text[one.start : one.head]))
            if key in seen:
                pieces += [text[last : one.start], re.sub(r"[^\n]", " ", text[one.start : one.end])]
                last = one.end
            seen.add(key)
    return "".join([*pieces, text[last:]])


def _normal(head: str) -> str:
    head = _plain_lines(head).replace("constant", "const")
    words = re.findall(r"\w+|[^\w\s]", _SPACES.sub(" ", head))
    return " ".join(word for i, word in enumerate(words) if not (word == "const" and words[i - 1 : i] == ["const"]))


# The headers `metal_NAME` of Metal's library. While a file is preprocessed, empty files stand in for them; msl/all.h,
# which is included later, has their declarations.
_STANDARD = (
    "assert", "array", "atomic", "common", "compute", "cooperative_tensor", "extended_vector", "geometric", "graphics",
    "integer", "limits", "logging", "math", "matrix", "numeric", "pack", "packed", "quadgroup", "relational",
    "simdgroup", "simdgroup_matrix", "stdlib", "tensor", "texture", "type_traits", "types", "uniform",
)  # fmt: skip


@dataclass(frozen=True)
class MetalFunction:
    """A kernel function, or an instantiation of a template of kernel functions."""

    name: str  # the name by which a host program loads the function: its `host_name`, or else the name in the text
    function: str  # the name in C++, such as `softmax<float, 4>`
    parameters: tuple[MetalParameter, ...]
    arrays: int  # the number of threadgroup arrays in the body
    # Whether an instantiation repeats the parameters but gives no template arguments. C++ then deduces these arguments
    # from the types of the parameters.
    is_typed: bool = False


@dataclass(frozen=True)
class FunctionConstant:
    """A function constant, such as `constant bool has_mask [[function_constant(20)]];`."""

    index: int
    name: str
    type: str


@dataclass(frozen=True)
class MetalText:
    """A preprocessed file."""

    code: str  # C++ text, in which `msl_function_constant(i);` stands for the declaration of `constants[i]`
    functions: dict[str, MetalFunction]  # maps the name of each kernel to the kernel
    constants: tuple[FunctionConstant, ...]
    sources: dict[str, str]  # maps a file's name in findings (reports of bugs) to its text, also for included files

    def with_constants(self, values: dict[int, str]) -> str:
        """Return the code with definitions of the function constants. `values` maps indices to values, as C++ text.

        A kernel that uses a constant without a value cannot be loaded.
        """

        def define(match: re.Match[str]) -> str:
            one = self.constants[int(match["ordinal"])]
            defined = f"static constexpr bool msl_defined_{one.name} = {str(one.index in values).lower()};"
            if one.index not in values:
                return f'{defined} extern const {one.type} {one.name} __attribute__((visibility("default")));'
            return f"{defined} static constexpr {one.type} {one.name} = {one.type}({values[one.index]});"

        return re.sub(r"msl_function_constant\((?P<ordinal>\d+)\);", define, self.code)


def read_metal(file: Path | None, text: str, folders: Sequence[Path]) -> MetalText:
    """Preprocess the text of a .metal file and find its kernels. `file` is None for a text that is not in a file.

    Raises:
        CompileError: the text cannot be preprocessed, or has no kernels.
    """
    name = file.name if file else "metal"
    with tempfile.TemporaryDirectory(dir=cache_folder("emulator"), prefix="reading-") as scratch:
        for header in _STANDARD:
            (Path(scratch) / f"metal_{header}").write_text("")
        (Path(scratch) / "MetalPerformancePrimitives").mkdir()
        (Path(scratch) / "MetalPerformancePrimitives" / "MetalPerformancePrimitives.h").write_text("")
        places = [file.resolve().parent] if file else []
        given = f'#line 1 "{file.resolve() if file else name}"\n{text}'
        expanded = preprocess(given, [*places, *folders], Path(scratch))
    expanded, sources = _with_short_names(expanded, {str(file.resolve()) if file else name: text})
    functions, constants, code = _parsed(without_twins(expanded))
    if not functions:
        raise CompileError(
            f"{name}: expected functions `kernel void NAME(...)`, found none; to run the body of a kernel alone, "
            "use kernels.emulator.metal_kernel"
        )
    return MetalText(code, functions, constants, sources)


_LINE = re.compile(r'(?m)^# (\d+) "([^"\n]*)".*$')


def _with_short_names(text: str, sources: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Replace paths in line markers by short, unique names; return the text, and {name: source text}."""
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


# Matches pragmas, which are removed. The preprocessor does not expand macros in pragmas, so clang would find undefined
# names there.
_PRAGMA = re.compile(r"(?m)^[ \t]*#[ \t]*pragma\b.*$")
# Matches `[[threadgroup(n)]]` at parameters of functions that are not kernels.
_SLOT = re.compile(r"\[\[\s*threadgroup\s*\([^\]]*\)\s*\]\]")
_CAST = re.compile(r"\bstatic_cast(?=\s*<[^<>&*()]*(?:<[^<>&*()]*>[^<>&*()]*)?>)")


# Matches the type in declarations such as `thread half2 (&pairs)[4]`, not in the constructor `half2(*pair)`. The
# preprocessor would take both for the macro `half2(...)` of msl/constructors.h, which is only for constructors.
_REFERENCE = re.compile(rf"\b((?:{'|'.join(_QUALIFIERS)})\s+)({_VECTOR})(?=\s*\(\s*[&*]\s*\w+\s*\))")


def _legal(text: str) -> str:
    """Rewrite text that clang would refuse: pragmas, `[[threadgroup(n)]]`, `static_cast`, types such as `half2 (&x)`.

    Also append `f` to floating-point literals.
    """
    text = _REFERENCE.sub(r"\1__typeof__(\2)", text)
    return with_suffixes(_CAST.sub("metal::msl_static_cast", _SLOT.sub("", _PRAGMA.sub("", text))))


def _plain(head: str) -> str:
    return " ".join(_plain_lines(head).split())


def _index(expression: str) -> int:
    """Return the value of a number or a sum of numbers, such as `FC_ROPE + 1` after preprocessing."""
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
    """Return the text without preprocessor lines."""
    return re.sub(r"(?m)^#.*$", "", text)


def _instantiated(head: str) -> tuple[str, str]:
    """Return an instantiation's (name, such as "softmax<float>"; text of its parameters, or "" if it has none)."""
    plain, listed = _plain(head).rstrip("; "), ""
    if plain.endswith(")"):  # the instantiation repeats the parameters
        opened = _opening(plain, "(", ")")
        plain, listed = plain[:opened].rstrip(), plain[opened + 1 : -1]
    if not plain.endswith(">"):
        return plain.split()[-1], listed
    opened = _opening(plain, "<", ">")
    name = re.search(r"[\w:]+\s*$", plain[:opened])
    return (name[0].strip() if name else "") + plain[opened:], listed


def _opening(text: str, opens: str, closes: str) -> int:
    """Return the position of the opening bracket that matches the last character."""
    depth, at = 0, len(text)
    while at and (at == len(text) or depth):
        at -= 1
        depth += {closes: 1, opens: -1}.get(text[at], 0)
    return at
