"""Chat templates are programs that come with a model, from anybody: here they run, in a process of its own.

Jinja's sandbox keeps a template away from Python; the process keeps it from taking the machine's time and memory,
which no sandbox inside an interpreter can. This file is that process's program: it imports nothing of ours, reads a
request on stdin and writes an answer to stdout, both JSON. `chat.py` starts it.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

# Stand-ins for characters are halves of surrogate pairs, which strict UTF-8 would refuse.
ENCODING, HALVES = "utf-8", "surrogatepass"


def environment() -> ImmutableSandboxedEnvironment:
    """Jinja as transformers sets it up for chat templates, which are written for that.

    What is not defined is empty text; `namespace` and `dict` show none of Python's own attributes.

    Source: transformers 5, utils/chat_template_utils.py, `_cached_compile_jinja_template`.
    """
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """`{% generation %}` marks what a model is trained on; here it is what stands inside."""

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
    """Each conversation as `template` writes it, up to where the model's answer begins.

    Raises:
        OverflowError: one has more than this many characters.
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
    """End this process after `seconds` of processor time; refuse it more than `nbytes` of addresses. Where one can."""
    try:
        import resource
    except ImportError:  # Windows; whoever started the process still watches the clock
        return
    limits = {
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_AS: (nbytes, nbytes),
        resource.RLIMIT_CORE: (0, 0),
    }
    for which, values in limits.items():
        try:
            resource.setrlimit(which, values)
        except (OSError, ValueError):  # macOS has no bound on addresses, and a lower one may be set already
            continue


def main() -> None:
    """One request, one answer: `{"texts": [...]}` or `{"error": "..."}`."""
    request = json.loads(sys.stdin.buffer.read().decode(ENCODING, HALVES))
    sys.path[:] = request["path"]
    limit(request["seconds"], request["bytes"])
    try:
        texts = render(request["template"], request["conversations"], request["names"], request["characters"])
        answer: dict[str, object] = {"texts": texts}
    except Exception as error:  # whatever a template raises is what there is to say about it
        answer = {"error": f"{type(error).__name__}: {error}"[:500]}
    sys.stdout.buffer.write(json.dumps(answer, ensure_ascii=False).encode(ENCODING, HALVES))


if __name__ == "__main__":
    main()
