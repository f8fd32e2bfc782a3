"""Run untrusted chat templates, in a process of their own. `chat.py` starts this file as a program.

Jinja's sandbox denies a template access to Python; the process limits its CPU time and memory, which no sandbox inside
an interpreter can do. The program imports no other module of this package, reads a JSON request from stdin and writes
a JSON answer to stdout.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

# Stand-ins for characters are lone surrogates, which strict UTF-8 cannot encode.
ENCODING, HALVES = "utf-8", "surrogatepass"


def environment() -> ImmutableSandboxedEnvironment:
    """Return a Jinja environment set up as in transformers, for which chat templates are written.

    Undefined names are empty text; `namespace` and `dict` expose no Python attributes.

    Source: transformers 5, utils/chat_template_utils.py, `_cached_compile_jinja_template`.
    """
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """`{% generation %}` marks training text; here the tag is ignored and its contents are rendered."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Names(Namespace):
        """A namespace without names that begin with an underscore."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            Namespace.__init__(args[0])
            for name, value in dict(*args[1:], **kwargs).items():
                args[0][name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise SecurityError(f"a namespace cannot have {name!r}")
            Namespace.__setitem__(self, name, value)

    def raise_exception(message: object) -> None:
        raise TemplateError(str(message))

    def strftime_now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
               sort_keys: bool = False) -> str:  # fmt: skip
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = tojson
    made.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
        "namespace": Names,
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),
    }
    return made


def render(
    template: str, conversations: Sequence[Sequence[Mapping[str, str]]], names: Mapping[str, str], characters: int
) -> list[str]:
    """Render each conversation with `template`, up to the beginning of the model's answer.

    Raises:
        OverflowError: a rendered conversation exceeds `characters`.
        Exception: whatever the template raises.
    """
    compiled, texts = environment().from_string(template), []
    for messages in conversations:
        pieces, size = [], 0
        for piece in compiled.generate(
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **names,
        ):
            pieces.append(piece)
            size += len(piece)
            if size > characters:
                raise OverflowError(f"it writes more than {characters:,} characters")
        texts.append("".join(pieces))
    return texts


def limit(seconds: int, nbytes: int) -> None:
    """Limit this process to `seconds` of CPU time and `nbytes` of address space, where the system supports it."""
    try:
        import resource
    except ImportError:  # Windows; the parent process still enforces a time limit
        return
    limits = {
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_AS: (nbytes, nbytes),
        resource.RLIMIT_CORE: (0, 0),
    }
    for which, values in limits.items():
        try:
            resource.setrlimit(which, values)
        except (OSError, ValueError):  # macOS has no limit on address space, and a lower limit may be set already
            continue


def main() -> None:
    """Answer one request with `{"texts": [...]}` or `{"error": "..."}`."""
    request = json.loads(sys.stdin.buffer.read().decode(ENCODING, HALVES))
    sys.path[:] = request["path"]
    limit(request["seconds"], request["bytes"])
    try:
        texts = render(request["template"], request["conversations"], request["names"], request["characters"])
        answer: dict[str, object] = {"texts": texts}
    except Exception as error:  # a template may raise anything
        answer = {"error": f"{type(error).__name__}: {error}"[:500]}
    sys.stdout.buffer.write(json.dumps(answer, ensure_ascii=False).encode(ENCODING, HALVES))


if __name__ == "__main__":
    main()
