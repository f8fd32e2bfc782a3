"""Run untrusted chat templates and tokenizer.json files in a separate process.

`sandbox_process.py` starts this file as a program, so this file imports no other module of the package. Jinja's sandbox
denies a template access to Python, and the tokenizers library executes no code of a file. But both may use any amount
of CPU time and memory, and the system can limit these only for a whole process.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import itertools
import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment

# HALVES lets UTF-8 encode lone surrogates, which `chat.py` uses as placeholders for characters.
ENCODING, HALVES = "utf-8", "surrogatepass"


class _Dict:
    """The part of the type `dict` that a template may use."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


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
        """The tag `{% generation %}`, which marks text for training: render the contents, and ignore the tag."""

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

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
        "namespace": Names,
        "dict": _Dict(),
    }
    return made


@functools.lru_cache(maxsize=1)
def compiled(template: str) -> Template:
    """Return the compiled template. The cache has one entry, because a sandbox process runs only one template."""
    return environment().from_string(template)


def render(template: str, inputs: Sequence[Mapping[str, Any]], names: Mapping[str, str], characters: int) -> list[str]:
    """Render `template` with each input, up to the beginning of the model's answer.

    An input maps names of variables, such as `messages` and `tools`, to values. `names` has the variables that all
    inputs share.

    Raises:
        OverflowError: a rendered text has more than `characters` characters.
        Exception: whatever the template raises.
    """
    texts = []
    for variables in inputs:
        pieces, size = [], 0
        for piece in compiled(template).generate({**names, **variables, "add_generation_prompt": True}):
            pieces.append(piece)
            size += len(piece)
            if size > characters:
                raise OverflowError(f"it writes more than {characters:,} characters")
        texts.append("".join(pieces))
    return texts


def load(text: str) -> dict[str, object]:
    """Load a tokenizer.json for the next requests; return the fields of `hf.Loaded`, or the library's error.

    Raises:
        BaseException: a Rust panic.
    """
    import tokenizers

    try:
        core = tokenizers.Tokenizer.from_str(text)
    except Exception as problem:
        return {"refused": f"{problem}"}
    core.no_truncation()
    core.no_padding()
    _loaded[:] = [core]
    ids = core.get_vocab(with_added_tokens=True)
    parts = (core.normalizer, core.pre_tokenizer, core.decoder)
    added = core.get_added_tokens_decoder()
    return {
        "tokens": [*ids],
        "numbers": [*ids.values()],
        "special": {token_id: token.special for token_id, token in added.items()},
        "parts": [None if part is None else json.loads(part.__getstate__()) for part in parts],
        "unknown": getattr(core.model, "unk_token", None),
        "first": core.encode("").ids[:1],
        "last": _last(core),
        "trims": any(token.lstrip or token.rstrip for token in added.values()),
        "byte_fallback": bool(getattr(core.model, "byte_fallback", False)),
    }


def _last(core: Any) -> list[int]:
    """Return the ids that the post-processor adds after a text."""
    part = core.post_processor
    state = {} if part is None else json.loads(part.__getstate__())
    for step in state.get("processors", [state]):
        if "single" in step:  # a TemplateProcessing
            after = itertools.takewhile(lambda piece: "SpecialToken" in piece, reversed(step["single"]))
            names = [piece["SpecialToken"]["id"] for piece in after][::-1]
            return [i for name in names for i in step["special_tokens"][name]["ids"]]
        if "sep" in step:
            return [step["sep"][1]]
    return []


def encode(text: str = "", special: bool = False) -> dict[str, object]:
    """Return the ids of a text, or the library's error.

    Raises:
        OverflowError: there are more ids than any valid tokenizer gives.
        BaseException: a Rust panic.
    """
    core = _loaded[0]
    core.encode_special_tokens = not special
    try:
        ids = core.encode(text, add_special_tokens=False).ids
    except Exception as problem:
        return {"refused": f"{problem}"}
    # An id stands for at least one byte, and Unicode's normal forms expand a character to at most 33 bytes (U+FDFA), so
    # a valid tokenizer gives fewer than MOST_IDS ids per character.
    if len(ids) > MOST_IDS * (len(text) + 1):
        raise OverflowError(f"{len(text):,} characters become {len(ids):,} ids")
    return {"ids": ids}


def written() -> dict[str, object]:
    """Return the loaded tokenizer.json in the library's own serialisation."""
    return {"text": _loaded[0].to_str()}


# The largest number of ids per character of a text.
MOST_IDS = 64
_loaded: list[Any] = []


def render_all(inputs: str, **request: Any) -> dict[str, object]:
    """Return the texts of `render`. If the template refuses an input or is invalid, return the reason.

    `inputs` is JSON; `request` has the other arguments of `render`.
    """
    from jinja2 import TemplateError, TemplateSyntaxError

    try:
        return {"texts": render(inputs=json.loads(inputs), **request)}
    except TemplateError as error:
        # After other exceptions, such as an attempt to leave the sandbox, the parent ends this process.
        if type(error) is TemplateError or isinstance(error, TemplateSyntaxError):
            is_damaged = isinstance(error, TemplateSyntaxError)
            return {"refused": f"{type(error).__name__}: {error}"[:500], "is_damaged": is_damaged}
        raise


def render_each(inputs: str, **request: Any) -> dict[str, object]:
    """Return the rendered text of each input; None if the template refuses the input, or fails.

    Raises:
        OverflowError: a rendered text has more than `characters` characters (an argument of `render`).
    """
    texts: list[str | None] = []
    for each in json.loads(inputs):
        try:
            texts += render(inputs=[each], **request)
        except OverflowError:
            raise
        except Exception:
            texts.append(None)
    return {"texts": texts}


TASKS: dict[str, Callable[..., dict[str, object]]] = {
    "render": render_all, "render_each": render_each, "load": load, "encode": encode, "written": written,
}  # fmt: skip
# Maps a task to the library that it uses; tasks that are not in LIBRARIES use `tokenizers`.
LIBRARIES = {"render": "jinja2.sandbox", "render_each": "jinja2.sandbox"}


def confine() -> None:
    """Forbid this process to start processes and to write files, and limit its open files, if the system supports it.

    The limits are a second barrier against templates that escape Jinja's sandbox. Root is exempt from RLIMIT_NPROC.
    """
    try:
        import resource
    except ImportError:  # Windows
        return
    for name, value in (("NPROC", 0), ("NOFILE", MOST_FILES), ("FSIZE", 0), ("CORE", 0)):
        # The system may lack this limit, or may already have set a lower one.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


# The most files that the process may have open. Imports need a few at a time.
MOST_FILES = 16


def limit(seconds: float, nbytes: int) -> None:
    """Limit this process to `seconds` more CPU time and `nbytes` more address space, if the system supports it.

    Address space that is already in use does not count towards `nbytes`, because the allocator keeps hundreds of
    megabytes after a long text.
    """
    try:
        import resource
    except ImportError:  # Windows; the parent process still enforces a time limit
        return
    signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF, which no template can catch, ends the process
    # macOS cannot limit the address space, and other systems may already have set a lower limit.
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - pathlib takes time to import
            nbytes += int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (nbytes, resource.getrlimit(resource.RLIMIT_AS)[1]))


def answer(request: Mapping[str, Any], text: bytes) -> dict[str, object]:
    """Return the result of a task, or `{"error": "..."}`. A `text` that is not empty is the task's first argument."""
    sys.path[:] = request["path"]
    # Import the library before `limit`, so that the import does not use up the task's time.
    importlib.import_module(LIBRARIES.get(request["task"], "tokenizers"))
    limit(request["seconds"], request["bytes"])
    try:
        first = [text.decode(ENCODING, HALVES)] if text else []
        return TASKS[request["task"]](*first, **request["arguments"])
    except BaseException as error:  # a template may raise any exception, and a Rust panic is not an Exception
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def main() -> None:
    """Answer requests until stdin ends. A request is a line of JSON and a UTF-8 text; an answer is a line of JSON."""
    confine()
    for line in sys.stdin.buffer:
        request = json.loads(line.decode(ENCODING, HALVES))
        found = answer(request, sys.stdin.buffer.read(request["n_bytes"]))
        sys.stdout.buffer.write(json.dumps(found, ensure_ascii=False).encode(ENCODING, HALVES) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
