"""Start and use sandbox processes, which run chat templates and tokenizer.json files (`sandbox.py`).

A process is started on first use, and kept for the next requests. A hostile template or regular expression in a
downloaded model makes one request fail, and does not block the engine or fill the memory.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, cast

from mlx_engine.errors import ChatTemplateError
from mlx_engine.tokenizer import sandbox


@dataclass(frozen=True)
class Limits:
    """Resource limits of a request. The `_per_byte` limits are added for each byte of `Request.text`.

    Attributes:
        seconds: CPU time; the limit on wall time is START_SECONDS plus three times the CPU time.
        nbytes: address space in addition to what the process already uses, on systems that can limit it (Linux).
        characters: length of the text that a template renders for one conversation; None for other tasks.
    """

    seconds: float = 1.5
    nbytes: int = 300 << 20
    characters: int | None = 1 << 18
    seconds_per_byte: float = 2e-5
    nbytes_per_byte: int = 100
    characters_per_byte: int = 16


DEFAULT_LIMITS = Limits()

# Seconds for a process to start on a busy machine.
START_SECONDS = 30

# A process that renders templates is replaced after this number of requests, so that its memory cannot grow forever.
MAX_USES = 1000

# The signal that ends a process which exceeds its CPU time.
AT_THE_LIMIT = getattr(signal, "SIGPROF", None)

# Hints in errors: DAMAGED if the template cannot be parsed, EXPENSIVE if it exceeds its limits, REFUSED if it refuses a
# conversation or fails.
DAMAGED = "the template is damaged; convert or download the file again"
EXPENSIVE = "shorten the conversation, or use a model with another template"
REFUSED = "the template cannot write these messages; change their order or roles, or use another model"

# Environment variables that a sandbox process gets: the time zone for `strftime_now`, the paths of shared libraries,
# and a variable that Windows needs. Templates cannot read any others, such as API keys.
KEPT = ("TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")
# Options of Python: ignore the user's environment and site-packages (each request sends this process's `sys.path`
# instead), write no byte code, use UTF-8.
OPTIONS = ("-I", "-S", "-B", "-X", "utf8")


@dataclass(frozen=True)
class Request:
    """A task of `sandbox.py`, its arguments, and its limits.

    `text` is the task's first argument: the inputs of a template as JSON, a tokenizer.json, or the text to encode.
    `arguments` has the other arguments.
    """

    task: str
    arguments: Mapping[str, object]
    limits: Limits
    text: bytes = b""


class SandboxError(Exception):
    """A task failed or exceeded its limits; `found` describes the failure.

    `is_limit` is true if a limit of time, memory, recursion or length was exceeded, or no process could be started.
    """

    def __init__(self, found: str, *, is_limit: bool = False) -> None:
        self.found, self.is_limit = found, is_limit
        super().__init__(found)


# Exceptions in the sandbox that report an exceeded limit.
LIMIT_ERRORS = ("OverflowError", "MemoryError", "RecursionError")


class SandboxProcess:
    """A process that runs `sandbox.py` and answers one request at a time. Thread-safe.

    The process is ended after a failure, after MAX_USES requests if it renders templates, when this object is dropped,
    and at exit. An input that a template or the library `tokenizers` refuses is not a failure. When the process has
    ended, the next request starts another process. After a fork, the child also starts another process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._uses = 0
        self._end: weakref.finalize[[subprocess.Popen[bytes]], SandboxProcess] | None = None
        _ALL.add(self)

    def ask(self, request: Mapping[str, object], limits: Limits, where: str) -> list[str]:
        """Return the text that the template renders for each input; `where` names the template's file.

        `request` has the arguments `template`, `inputs` and `names` of `sandbox.render`.

        Raises:
            ChatTemplateError: the template is invalid, refuses an input, fails or exceeds its limits, or the process
                cannot be started.
        """
        answer = self._rendered("render", request, limits, where)
        if "refused" in answer:
            found, is_damaged = f"a failure: {printable(answer['refused'])}", answer["is_damaged"]
            hint = DAMAGED if is_damaged else REFUSED
            raise ChatTemplateError(where=where, found=found, hint=hint, is_refusal=not is_damaged)
        texts: list[str] = answer["texts"]
        return texts

    def ask_each(self, request: Mapping[str, object], limits: Limits, where: str) -> list[str | None]:
        """Return what `ask` returns, but None for an input that the template refuses, or for which it fails.

        Raises:
            ChatTemplateError: the template exceeds its limit of time or of length, or the process cannot be started.
        """
        texts: list[str | None] = self._rendered("render_each", request, limits, where)["texts"]
        return texts

    def _rendered(self, task: str, request: Mapping[str, object], limits: Limits, where: str) -> dict[str, Any]:
        arguments = {name: request[name] for name in ("template", "names")}
        try:
            return self.exchange(Request(task, arguments, limits, _encoded(request["inputs"])), max_uses=MAX_USES)
        except SandboxError as problem:
            hint = EXPENSIVE if problem.is_limit else REFUSED
            hint = hint if problem.__cause__ is None else "give the prompt as text instead"
            error = ChatTemplateError(where=where, found=problem.found, hint=hint, is_refusal=not problem.is_limit)
            raise error from problem.__cause__

    def exchange(
        self, request: Request, *, first: Request | None = None, max_uses: int | None = None
    ) -> dict[str, Any]:
        """Return the answer to a request. A newly started process first gets the request `first`.

        The process is ended after `max_uses` requests.

        Raises:
            SandboxError: the task fails or exceeds its limits, or the process cannot be started.
        """
        with self._lock:
            process, is_new = self._running()
            self._uses += 1
            try:
                for each in (first, request) if first is not None and is_new else (request,):
                    answer = _exchange(process, each)
            # Also stop the process after a KeyboardInterrupt: otherwise, the next request would read the answer to this
            # request.
            except BaseException:
                self._stop()
                raise
            if max_uses is not None and self._uses >= max_uses:
                self._stop()
            return answer

    def _running(self) -> tuple[subprocess.Popen[bytes], bool]:
        """Return the process, and whether it has just been started."""
        if self._process is not None and self._process.poll() is None:
            return self._process, False
        self._stop()
        command, pipe = [sys.executable or "", *OPTIONS, str(Path(sandbox.__file__))], subprocess.PIPE
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        try:
            # A new session, because Ctrl-C in the terminal must end the generation, not the sandbox process.
            started = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True, env=kept
            )
        except OSError as error:
            raise SandboxError(
                f"no process: {sys.executable or 'Python'} cannot start: {error.strerror or error}",
                is_limit=True,
            ) from error
        self._process, self._uses = started, 0
        self._end = weakref.finalize(self, _kill, started)
        return started, True

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def _forget(self) -> None:
        """In the child of a fork, drop the sandbox process of the parent: two processes cannot share its pipes."""
        self._lock = threading.Lock()
        if self._process is not None and self._end is not None:
            self._end.detach()
            # After `poll`, dropping the `Popen` object gives no ResourceWarning that its process still runs.
            self._process.poll()
            _close(self._process)
        self._process = self._end = None


_ALL: weakref.WeakSet[SandboxProcess] = weakref.WeakSet()


def _forget_all() -> None:
    for process in _ALL:
        process._forget()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_all)


def _exchange(process: subprocess.Popen[bytes], request: Request) -> dict[str, Any]:
    """Send a request and return the answer."""
    limits, n_bytes = request.limits, len(request.text)
    seconds = limits.seconds + limits.seconds_per_byte * n_bytes
    arguments = dict(request.arguments)
    if limits.characters is not None:
        arguments["characters"] = limits.characters + limits.characters_per_byte * n_bytes
    asked = {
        "path": [str(path) for path in sys.path], "task": request.task, "arguments": arguments, "seconds": seconds,
        "bytes": limits.nbytes + limits.nbytes_per_byte * n_bytes, "n_bytes": n_bytes,
    }  # fmt: skip
    data = b"\n".join([_encoded(asked), request.text])
    is_late = threading.Event()

    def expire() -> None:
        is_late.set()
        process.kill()

    timer = threading.Timer(START_SECONDS + 3 * seconds, expire)
    timer.start()
    try:
        line = _send_and_read(process, data)
        if not line.endswith(b"\n"):
            process.wait()
    finally:
        timer.cancel()
        timer.join()  # from here on, `is_late` does not change
    if is_late.is_set() or (AT_THE_LIMIT and process.returncode == -AT_THE_LIMIT):
        raise SandboxError(f"one that takes over {seconds:.1f} seconds", is_limit=True)
    answer: dict[str, Any]
    if line.endswith(b"\n"):
        answer = json.loads(line.decode(sandbox.ENCODING, sandbox.HALVES))
    else:
        answer = {"error": _last_words(process)}
    if "error" in answer:
        is_limit = answer["error"].startswith(LIMIT_ERRORS)
        raise SandboxError(f"a failure: {printable(answer['error'])}", is_limit=is_limit)
    return answer


def printable(message: str) -> str:
    """Replace control characters by spaces in an error message, which may have text of a downloaded file."""
    return "".join(c if c.isprintable() else " " for c in message)


def _encoded(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode(sandbox.ENCODING, sandbox.HALVES)


def _send_and_read(process: subprocess.Popen[bytes], data: bytes) -> bytes:
    """Send `data`, and return the line that answers it. If the process ends early, the line is incomplete."""
    stdin, stdout = cast("FileIO", process.stdin), cast("FileIO", process.stdout)
    pieces = [b""]
    try:
        view = memoryview(data)
        while view:
            view = view[stdin.write(view) :]
        while not pieces[-1].endswith(b"\n"):
            piece = stdout.read(1 << 16)
            if not piece:
                break
            pieces.append(piece)
    except BrokenPipeError:
        pass
    return b"".join(pieces)


def _last_words(process: subprocess.Popen[bytes]) -> str:
    """Return the last line of stderr of a process that has ended, or its exit status."""
    text = cast("FileIO", process.stderr).read().decode(errors="replace")
    # Rust appends advice that begins with "note: ".
    lines = [line for line in text.split("\n") if line.strip() and not line.startswith("note: ")]
    return [f"exit status {process.returncode}", *lines][-1]


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    _close(process)


def _close(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout, process.stderr):
        cast("FileIO", pipe).close()
