"""Download models by hub id, with the cache, access token and progress bars of huggingface_hub."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from mlx_engine.checkpoint.gguf import part_names
from mlx_engine.checkpoint.sources import HubName, is_type, of_type
from mlx_engine.errors import SourceError, shown

# Timeout in seconds of the first request to the hub.
TIMEOUT = 5.0

# Errors with which the hub refuses a request. Other OSErrors have other causes, such as a full disk or no network.
REFUSALS = (HfHubHTTPError, EntryNotFoundError)
# The `errno` of each file system error that prevents a download from being written to the cache.
_LOCAL = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)

FOLDER_FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
                "chat_template.jinja", "*.safetensors", "*.safetensors.index.json"]  # fmt: skip


def download(repo: str, file: str | None) -> Path:
    """Download a GGUF file of `repo`, or its safetensors folder, unless it is cached. Return the path.

    `file` is the name of a file, or a type such as Q4_K_M, which selects the only GGUF file with this type in its name.
    Without `file`, choose the only GGUF file of the repository. If the repository has several GGUF files, choose the
    only Q8_0 file; if it has no GGUF file, choose the safetensors folder. If the hub does not answer, return the path
    of the model in the cache.

    Raises:
        SourceError: the hub does not answer and the model is not in the cache; there is no such repository or file, or
            the hub refuses access; several files match; or the cache cannot be written.
    """
    name = HubName(repo, file)
    _check_file_name(repo, file)
    try:
        # The list of files is requested even if `file` is given. Without a network, this request fails within
        # `TIMEOUT`, whereas a download by huggingface_hub fails only after it has retried for half a minute.
        files = _remote_files(repo)
        return _fetch(repo, _choose(repo, files, file), offline=False)
    except HFValidationError as error:
        raise SourceError(f"{name}: neither a file nor a hub id ({_first_line(error)})") from error
    except SourceError:
        raise
    except OSError as error:
        if isinstance(error, REFUSALS) and not isinstance(error, LocalEntryNotFoundError):
            raise SourceError(f"{name}: the hub refused: {_first_line(error)}; check the name, and HF_TOKEN") from error
        cached = _cached(repo, file)
        if cached is None and error.errno in _LOCAL:
            raise SourceError(
                f"{name}: the hub's cache folder cannot be written ({error.strerror}); free space, or choose another "
                "folder with HF_HOME"
            ) from error
        if cached is None:
            raise SourceError(
                f"{name}: the hub does not answer ({_first_line(error)}); "
                "check the network, or give the path of a file that is already here"
            ) from error
        return cached


def is_cached(repo: str, file: str | None) -> bool:
    """Return whether `download` would find the model in the cache if there were no network. Send no request."""
    try:
        _check_file_name(repo, file)
        return _cached(repo, file) is not None
    except (HFValidationError, SourceError):  # an invalid name, or several files: `download` raises the error
        return False


def _remote_files(repo: str) -> list[str]:
    with _network():
        info = HfApi().model_info(repo, timeout=TIMEOUT)
    return [sibling.rfilename for sibling in info.siblings or []]


@contextmanager
def _network() -> Iterator[None]:
    """Raise every connection failure as OSError."""
    try:
        yield
    except (OSError, HFValidationError):
        raise
    except Exception as error:
        # All other exceptions are connection failures. Their classes depend on huggingface_hub's HTTP library, which
        # has changed more than once.
        raise ConnectionError(_first_line(error)) from error


def _cached(repo: str, file: str | None) -> Path | None:
    try:
        if file is not None and not is_type(file):
            return _fetch(repo, file, offline=True)
        folder = Path(snapshot_download(repo, local_files_only=True))
        files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        if file is not None and not of_type(files, file):
            return None
        return _fetch(repo, _choose(repo, files, file), offline=True)
    except LocalEntryNotFoundError:
        return None


def _fetch(repo: str, file: str | None, *, offline: bool) -> Path:
    with _network():
        if file is None:
            return Path(snapshot_download(repo, allow_patterns=FOLDER_FILES, local_files_only=offline))
        # All parts of a split file are downloaded, and the path of the first is returned.
        paths = [Path(hf_hub_download(repo, name, local_files_only=offline)) for name in part_names(file)]
        return paths[0]


def _choose(repo: str, files: Sequence[str], wanted: str | None) -> str | None:
    """Return the GGUF file to download; None for the safetensors folder. `wanted` is the `file` that `download` got."""
    if wanted is not None and not is_type(wanted):
        return wanted
    # Leave out the later parts of split files, and files with encoders of images or audio (mmproj).
    ggufs = [name for name in files if name.lower().endswith(".gguf") and name == part_names(name)[0]]
    ggufs = [name for name in ggufs if not PurePosixPath(name).name.lower().startswith("mmproj")]
    if not ggufs:
        if "config.json" in files and wanted is None:
            return None
        others = "" if wanted else " and no config.json with safetensors"
        raise SourceError(f"{repo}: this repository has no GGUF files{others}")
    if wanted is None:
        likely = ggufs if len(ggufs) == 1 else [name for name in ggufs if "q8_0" in name.lower()]
        hint = f"name one of these files or its type, as {repo}:FILE or {repo}:Q4_K_M"
    else:
        likely = of_type(ggufs, wanted)
        hint = f"{'several files have' if likely else 'no file has'} {wanted} in the name; name a file, as {repo}:FILE"
    if len(likely) != 1:
        raise SourceError(f"{repo}: {hint}: {', '.join(sorted(likely or ggufs))}")
    return likely[0]


def _check_file_name(repo: str, file: str | None) -> None:
    """Raise SourceError if the name of a file leads out of its repository."""
    path = PureWindowsPath(file or "")  # PureWindowsPath recognises both separators, and drives
    if path.drive or path.root or ".." in path.parts:
        raise SourceError(
            f"{repo}:{file}: {shown(file)} leads out of the repository; name a file as the hub lists it, or give the "
            "path of a file that is here"
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
