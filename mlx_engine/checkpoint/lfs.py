"""Git-LFS pointers: short text files that a clone has in place of its large files where Git LFS is not installed.

Source: https://github.com/git-lfs/git-lfs/blob/v3.5.1/docs/spec.md
"""

from __future__ import annotations

import re
from pathlib import Path

from mlx_engine.errors import FormatError

# The specification's limit on a pointer; its first line is the version, and no model file begins like it.
POINTER_BYTES = 1024
_VERSION = b"version https://git-lfs.github.com/spec/"
_SIZE = re.compile(rb"^size (\d{1,18})\r?$", re.MULTILINE)


def refuse_pointer(path: Path, head: bytes, expected: str) -> None:
    """Raise an error that names the pointer if `head`, the first bytes of the file at `path`, is one.

    Raises:
        FormatError: the file is a Git-LFS pointer; the message has the size of the file that it stands for.
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
