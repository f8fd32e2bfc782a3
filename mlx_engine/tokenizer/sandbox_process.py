"""The sandbox process of a tokenizer's chat template: started on first use, and kept for the next conversations."""

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
    """Resource limits of a template.

    Attributes:
        seconds: CPU time of one request; the limit on wall time is three times this, plus time to start the process.
        nbytes: address space, on systems that can limit it (Linux).
        characters: length of the rendered text of one conversation.
    """

    seconds: float = 5
    nbytes: int = 1 << 30
    characters: int = 1 << 24


DEFAULT_LIMITS = Limits()

# Seconds for a process to start on a busy machine.
START_SECONDS = 10

# A process is replaced after so many requests, so that its memory cannot grow without end.
MAX_USES = 1000

# The signal that ends a process which exceeds its CPU time.
AT_THE_LIMIT = getattr(signal, "SIGPROF", None)

HINT = "the template is damaged, or not made for these messages"


class SandboxProcess:
    """A process that runs `sandbox.py` and answers one request at a time. Safe for use from several threads.

    The process is ended after a failure, after MAX_USES requests, when this object is dropped, and at exit; the next
    request starts another. A forked process starts its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._uses = 0
        self._end: weakref.finalize[[subprocess.Popen[bytes]], SandboxProcess] | None = None
        _ALL.add(self)

    def ask(self, request: Mapping[str, object], limits: Limits, where: str) -> list[str]:
        """Return the texts that the sandbox renders for a request; `where` names the template's file.

        Raises:
            ChatTemplateError: the template fails or exceeds its limits, or the process cannot be started.
        """
        asked = {
            **request, "seconds": limits.seconds, "bytes": limits.nbytes, "characters": limits.characters,
        }  # fmt: skip
        data = json.dumps(asked, ensure_ascii=False).encode(sandbox.ENCODING, sandbox.HALVES) + b"\n"
        with self._lock:
            process = self._running(where)
            self._uses += 1
            try:
                texts = _exchange(process, data, limits, where)
            except BaseException:  # also when interrupted: the answer to this request must not be read for the next
                self._stop()
                raise
            if self._uses >= MAX_USES:
                self._stop()
            return texts

    def _running(self, where: str) -> subprocess.Popen[bytes]:
        """Return the process; start one if there is none, or if something has ended it."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        command, pipe = [sys.executable, "-I", str(Path(sandbox.__file__))], subprocess.PIPE
        try:
            # A session of its own: Ctrl-C in the terminal ends an answer, and must not end this process.
            started = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True)
        except OSError as error:
            found = f"no way to start {sys.executable or 'Python'} for it: {error.strerror or error}"
            raise ChatTemplateError(where=where, found=found, hint="give the prompt as text instead") from error
        self._process, self._uses = started, 0
        self._end = weakref.finalize(self, _kill, started)
        return started

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def _forget(self) -> None:
        """Drop the process of the parent, after a fork: its pipes must have one user."""
        self._lock = threading.Lock()
        if self._process is not None and self._end is not None:
            self._end.detach()
            self._process.poll()  # it is no child of this process, which `poll` notes: no warning when it is dropped
            _close(self._process)
        self._process = self._end = None


_ALL: weakref.WeakSet[SandboxProcess] = weakref.WeakSet()


def _forget_all() -> None:
    for process in _ALL:
        process._forget()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_all)


def _exchange(process: subprocess.Popen[bytes], data: bytes, limits: Limits, where: str) -> list[str]:
    """Send a request and return the texts of the answer."""
    is_late = threading.Event()

    def expire() -> None:
        is_late.set()
        process.kill()

    timer = threading.Timer(START_SECONDS + 3 * limits.seconds, expire)
    timer.start()
    try:
        line = _send_and_read(process, data)
    finally:
        timer.cancel()
        timer.join()  # afterwards `is_late` is final
    if not line.endswith(b"\n") and not is_late.is_set():
        process.wait()
    if is_late.is_set() or (AT_THE_LIMIT and process.returncode == -AT_THE_LIMIT):
        raise ChatTemplateError(where=where, found=f"one that takes over {limits.seconds:g} seconds", hint=HINT)
    answer: dict[str, Any]
    if line.endswith(b"\n"):
        answer = json.loads(line.decode(sandbox.ENCODING, sandbox.HALVES))
    else:
        answer = {"error": _last_words(process)}
    if "error" in answer:
        # The message comes from the template and may contain control characters.
        words = "".join(c if c.isprintable() else " " for c in answer["error"])
        raise ChatTemplateError(where=where, found=f"a failure: {words}", hint=HINT)
    texts: list[str] = answer["texts"]
    return texts


def _send_and_read(process: subprocess.Popen[bytes], data: bytes) -> bytes:
    """Return the line that answers a request; less than a line if the process ends before."""
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
    """Return the last line that a process which has ended wrote to stderr, or its exit status."""
    text = cast("FileIO", process.stderr).read().decode(errors="replace")
    return [f"exit status {process.returncode}", *(line for line in text.split("\n") if line.strip())][-1]


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    _close(process)


def _close(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout, process.stderr):
        cast("FileIO", pipe).close()
