"""Resolve the name of a model, as users give it, to a path; download or write the model first if necessary.

A name is "builtin", a path, "shape:NAME" (random weights, see `shapes.py`), or the name of a model on the Hugging Face
hub: org/repo, org/repo:FILE, org/repo:TYPE such as Q4_K_M, or the address of a page or a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from mlx_engine.errors import SourceError

ASSETS = Path(__file__).parent.parent / "assets"
BUILTIN = ASSETS / "storyteller-q8_0.gguf"

PREFIX = "shape:"
KINDS = "a file, a folder, 'builtin' or a hub id org/repo[:file]"


def resolve(source: str | Path, progress: Callable[[int, int], None] | None = None) -> Path:
    """Return the path of a model, given its name; the docstring of this module lists the forms of names.

    A `Path` is always a path, even one such as `Path("builtin")`. While a folder with random weights is written,
    `progress` is called with (pieces written, total pieces).

    Raises:
        SourceError: nothing of this name exists, or it cannot be downloaded.
    """
    if source == "builtin":
        return BUILTIN
    if isinstance(source, str) and source.startswith(PREFIX):
        from mlx_engine.checkpoint.shapes import shape_path

        return shape_path(source.removeprefix(PREFIX), progress)
    if not str(source):
        raise SourceError(f"the name of the model is empty; give {KINDS}")
    try:
        path = Path(source).expanduser()
        if path.exists():
            return path
        # Causes of these errors: the name is too long, begins with ~USER of an unknown user, or has a NUL character.
    except (OSError, RuntimeError, ValueError) as error:
        raise SourceError(f"{str(source)[:80]!r}: neither a path nor a hub id ({error})") from error
    name = None if isinstance(source, Path) else hub_name(source)
    # "models/qwen3.gguf" has the form of a hub id, but means a file. If the folder "models" exists, "models/NAME" means
    # a file or folder in it.
    means_file = name is not None and source == name.repo and path.suffix in (".gguf", ".safetensors")
    if name is None or means_file or path.parent.is_dir():
        raise SourceError(f"{source}: no such file or folder; give {KINDS}")
    from mlx_engine.checkpoint.hub import download

    return download(*name)


def is_cached(source: str) -> bool | None:
    """Return whether a model of the hub is in the cache; None if `source` exists as a path or names no such model."""
    try:
        if Path(source).expanduser().exists():
            return None
        name = hub_name(source)
    except (OSError, RuntimeError, ValueError):  # as in `resolve`; a SourceError is an OSError
        return None
    if name is None:
        return None
    from mlx_engine.checkpoint import hub

    return hub.is_cached(*name)


# org/repo or org/repo:file. The names of organisations and repositories on the hub have only these characters.
HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<file>[^:]+))?")

# The beginnings of addresses. The hub's host may be given without https://.
ADDRESS = re.compile(r"https?://|(www\.)?(huggingface\.co|hf\.co)/", re.IGNORECASE)
HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")

# If the first part of a page's path is one of these, the page does not belong to a model.
NO_MODELS = ("datasets", "spaces", "collections", "papers", "docs", "blog")
# The address of a file is org/repo/PAGE/branch/file, where PAGE is one of these.
FILE_PAGES = ("resolve", "blob", "raw")
# The only branch that is read.
BRANCH = "main"


class HubName(NamedTuple):
    """A model on the hub.

    Attributes:
        repo: the repository, org/repo.
        file: a file of the repository, or a type such as Q4_K_M that is part of a GGUF file's name; None if only the
            repository is given.
    """

    repo: str
    file: str | None

    def __str__(self) -> str:
        return self.repo if self.file is None else f"{self.repo}:{self.file}"


def hub_name(text: str) -> HubName | None:
    """Parse a hub id or an address; return None for any other text. Raise SourceError if an address names no model."""
    if ADDRESS.match(text) is not None:
        return _from_address(text)
    match = HUB_ID.fullmatch(text)
    return None if match is None else HubName(match["repo"], match["file"])


def is_type(file: str) -> bool:
    """Return whether the part of a hub id after the colon is a type of weights; names of files have a dot."""
    return "." not in file


def of_type(names: list[str], wanted: str) -> list[str]:
    """Return the names that contain the type `wanted`, such as Q4_K_M, as a whole word. Case is ignored."""
    word = re.compile(rf"(?<![a-z0-9]){re.escape(wanted)}(?![a-z0-9_])", re.IGNORECASE)
    return [name for name in names if word.search(name)]


def _from_address(text: str) -> HubName:
    """Return the model whose page or GGUF file has this address; raise SourceError for any other address."""
    try:
        parts = urlsplit(text if "://" in text else f"https://{text}")
    except ValueError as error:
        raise SourceError(f"{text}: not a valid address ({error})") from error
    if parts.netloc.lower() not in HOSTS and parts.netloc != _own_host():
        raise SourceError(f"{text}: {parts.netloc} is not huggingface.co; download the file and give its path")
    path = unquote(parts.path).strip("/")
    match, (first, *rest) = HUB_ID.fullmatch(path), path.split("/")
    if match is not None and first not in NO_MODELS:
        # The hub shows the details of a file at org/repo?show_file_info=FILE.
        shown = parse_qs(parts.query).get("show_file_info", [None])
        return HubName(match["repo"], match["file"] or shown[0])
    is_page = len(rest) >= 3 and first not in NO_MODELS and rest[1] in (*FILE_PAGES, "tree")
    if not is_page or {"", ".", ".."} & {*rest}:
        raise SourceError(f"{text}: this is not the page of a model or of its GGUF file; check the address")
    repo, (page, branch, *file) = f"{first}/{rest[0]}", rest[1:]
    if branch != BRANCH:
        raise SourceError(
            f"{text}: only the branch {BRANCH} is read, not {branch}; download the file and give its path"
        )
    if page == "tree" and not file:
        return HubName(repo, None)
    if page == "tree" or not file or not file[-1].lower().endswith(".gguf"):
        raise SourceError(f"{text}: not a GGUF file; for a folder of safetensors give {repo}")
    return HubName(repo, "/".join(file))


def _own_host() -> str:
    """Return the host of the hub, or of the mirror that the environment variable HF_ENDPOINT names."""
    from huggingface_hub import constants

    return urlsplit(constants.ENDPOINT).netloc
