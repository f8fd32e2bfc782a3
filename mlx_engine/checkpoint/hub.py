"""Models by hub id, through huggingface_hub: its cache, token and progress bars, as its users know them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from mlx_engine.errors import SourceError

# Seconds for the first question to the hub. Its own downloads retry for half a minute before they give up, which is
# too long to learn that there is no network.
TIMEOUT = 5.0

# The hub answered, and said no. All are OSErrors, as are a full disk and, with its older versions, a missing network.
REFUSALS = (HfHubHTTPError, EntryNotFoundError)

FOLDER_FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
                "chat_template.jinja", "*.safetensors", "*.safetensors.index.json"]  # fmt: skip


def download(repo: str, file: str | None) -> Path:
    """A GGUF file of `repo`, or its folder of safetensors, downloaded unless the hub's cache has it.

    Without `file` a repository of GGUF files gives its only one, or its only Q8_0.

    Raises:
        SourceError: no network, no such repository or file, or no way to tell which file is meant.
    """
    name = f"{repo}:{file}" if file else repo
    try:
        # Asked even where the file is known: this fails at once without a network, and a download does not.
        files = _remote_files(repo)
        return _fetch(repo, file or _choose(repo, files), offline=False)
    except HFValidationError as error:
        raise SourceError(f"{name}: expected a file here or a hub id, found neither: {_first_line(error)}") from error
    except SourceError:
        raise
    except OSError as error:
        if isinstance(error, REFUSALS) and not isinstance(error, LocalEntryNotFoundError):
            raise SourceError(f"{name}: the hub refused: {_first_line(error)}; check the name, and HF_TOKEN") from error
        cached = _cached(repo, file)
        if cached is None:
            raise SourceError(
                f"{name}: expected the hub to answer, found {_first_line(error)}; "
                "check the network, or give the path of a file that is already here"
            ) from error
        return cached


def is_cached(repo: str, file: str | None) -> bool:
    """Whether `download` would find it here; nothing asks the network."""
    try:
        return _cached(repo, file) is not None
    except (HFValidationError, SourceError):  # no such name, or several files: `download` says so
        return False


def _remote_files(repo: str) -> list[str]:
    with _network():
        info = HfApi().model_info(repo, timeout=TIMEOUT)
    return [sibling.rfilename for sibling in info.siblings or []]


@contextmanager
def _network() -> Iterator[None]:
    """Every failure to connect is an OSError."""
    try:
        yield
    except (OSError, HFValidationError):
        raise
    except Exception as error:
        # What is left are failures to connect, whose classes belong to an HTTP library that huggingface_hub has
        # replaced more than once.
        raise ConnectionError(_first_line(error)) from error


def _cached(repo: str, file: str | None) -> Path | None:
    try:
        if file is not None:
            return _fetch(repo, file, offline=True)
        folder = Path(snapshot_download(repo, local_files_only=True))
        files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        return _fetch(repo, _choose(repo, files), offline=True)
    except LocalEntryNotFoundError:
        return None


def _fetch(repo: str, file: str | None, *, offline: bool) -> Path:
    with _network():
        if file is None:
            return Path(snapshot_download(repo, allow_patterns=FOLDER_FILES, local_files_only=offline))
        return Path(hf_hub_download(repo, file, local_files_only=offline))


def _choose(repo: str, files: Sequence[str]) -> str | None:
    """The GGUF file to take, or None for the folder."""
    ggufs = [name for name in files if name.lower().endswith(".gguf")]
    if not ggufs:
        if "config.json" in files:
            return None
        raise SourceError(f"{repo}: expected GGUF files or a config.json with safetensors, found neither")
    likely = ggufs if len(ggufs) == 1 else [name for name in ggufs if "q8_0" in name.lower()]
    if len(likely) != 1:
        raise SourceError(f"{repo}: expected to be told which file, as {repo}:FILE; found {', '.join(sorted(ggufs))}")
    return likely[0]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
