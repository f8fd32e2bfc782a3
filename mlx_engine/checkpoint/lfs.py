"""Detect Git LFS pointers: short text files in place of large files, in a clone made without Git LFS.

Source: https://github.com/git-lfs/git-lfs/blob/v3.5.1/docs/spec.md
"""

from __future__ import annotations

import re
from pathlib import Path

from mlx_engine.errors import FormatError

# The specification's size limit of a pointer. Its first line is a version line, which begins no model file.
POINTER_BYTES = 1024
_VERSION = b"version https://git-lfs.github.com/spec/"
_SIZE = re.compile(rb"^size (\d{1,18})\r?$", re.MULTILINE)


def refuse_pointer(path: Path, head: bytes, expected: str) -> None:
    """Raise an error that names the pointer if `head`, the first bytes of the file at `path`, is one.

    Raises:
        FormatError: the file is a Git-LFS pointer; the message has the size of the real file.
    """
    if not head.startswith(_VERSION):
        return
    size = _SIZE.search(head[:POINTER_BYTES])
    raise FormatError(
        where=str(path),
        expected=expected,
        found="a Git-LFS pointer" + (f" to a file of {int(size[1]):,} bytes" if size else ""),
        hint="run `git lfs pull` in the repository that this file belongs to, or download the file again",
    )
