"""Check paths and the first bytes of files, so that errors can name what a path leads to, such as a Git-LFS pointer."""

from __future__ import annotations

import re
import stat
from pathlib import Path

from mlx_engine.errors import FormatError, SourceError

# Files that are not regular, which are refused: reading a pipe would block until another process writes to it, and a
# device may have no end.
_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)
_TORCH = "convert its folder to safetensors with transformers' save_pretrained, and load the new folder"
_GGML = ("a file of GGML, which is older than GGUF", "download the GGUF file of this model")
# Kinds of files that users pass in place of GGUF files: maps the first bytes of each kind to (description, hint).
_SIGNATURES = {
    b"PK\x03\x04": ("a ZIP archive, as PyTorch writes weights", _TORCH),
    b"\x80": ("a pickle, as PyTorch writes weights", _TORCH),
    b"\x89HDF": ("an HDF5 file, as TensorFlow writes weights", "download safetensors or a GGUF file of the model"),
    b"<": ("a page in HTML or XML", "download the file again: the server sent a page in its place"),
    b"\x1f\x8b": ("a compressed file (gzip)", "unpack it first"),
    **dict.fromkeys((b"ggml", b"tjgg", b"fmgg", b"lmgg"), _GGML),
}


def refuse_other_paths(path: Path, expected: str) -> None:
    """Check that there is a regular file at `path`.

    Raises:
        SourceError: there is nothing at the path, or something other than a regular file, such as a folder or a pipe.
        OSError: the path cannot be examined (`stat` fails).
        ValueError: the path has a NUL character.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise SourceError(f"{path}: no such file") from None
    if stat.S_ISDIR(mode):
        raise SourceError(f"{path}: this is a folder, not {expected}; name a file in it")
    if not stat.S_ISREG(mode):
        found = next((name for is_kind, name in _KINDS if is_kind(mode)), "an unknown kind of file")
        raise SourceError(f"{path}: this is {found}, not {expected}; write its content to a file, and name the file")


def read_file(path: Path, most: int) -> bytes:
    """Return the content of a regular file of at most `most` bytes.

    Raises:
        SourceError: there is no regular file at the path, or it cannot be read.
        FormatError: the file has more than `most` bytes.
    """
    try:
        refuse_other_paths(path, "a readable file")
        if (size := path.stat().st_size) > most:
            expected, found = f"at most {most:,} bytes", f"{size:,}"
            raise FormatError(where=str(path), expected=expected, found=found, hint="download the file again")
        return path.read_bytes()
    except SourceError:
        raise
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror or error}); check the path") from error


def other_kind(path: Path, head: bytes) -> tuple[str, str] | None:
    """Return (description, hint) for a file that is not GGUF; None if its kind is unknown.

    The kind follows from the file's suffix and from `head`, its first bytes.
    """
    name_folder = f"name its folder, {path.parent if path.parent.name else path.parent.absolute()}"
    if head[8:9] == b"{" or path.suffix == ".safetensors":
        return "a safetensors file, which has no settings of a model", name_folder
    if head.lstrip()[:1] == b"{":
        return "a JSON file, which has no weights", name_folder
    return next((kind for magic, kind in _SIGNATURES.items() if head.startswith(magic)), None)


# By its specification, a Git-LFS pointer has fewer bytes than this.
POINTER_BYTES = 1024
_VERSION = b"version https://git-lfs.github.com/spec/"
_SIZE = re.compile(rb"^size (\d{1,18})\r?$", re.MULTILINE)


def refuse_pointer(path: Path, head: bytes, expected: str) -> None:
    """Raise FormatError if `head`, the first bytes of the file at `path`, is a Git-LFS pointer.

    A Git-LFS pointer is a short text file. A repository that was cloned without Git LFS has one for each large file.

    Source: https://github.com/git-lfs/git-lfs/blob/v3.5.1/docs/spec.md
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
