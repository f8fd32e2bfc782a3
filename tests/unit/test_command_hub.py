"""Hub ids on the command line: without a network, from the cache, and names that cannot be."""

import errno
import importlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_engine.checkpoint import hub
from tests.patience import PATIENCE
from tests.unit.test_command_generate import MODEL, ROOT, generate, only_line

# ---- hub ids ----


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty hub cache; `keep(name, data)` puts a file of org/repo into it, as the hub's own library lays it out."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--org--repo"

    def keep(name, data):
        snapshot = repo / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True, exist_ok=True)
        (snapshot / name).write_bytes(data)
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / "main").write_text("0" * 40)

    return SimpleNamespace(keep=keep)


def answering(monkeypatch, answer):
    """The hub's only remote call answers with these file names, or fails with this exception."""

    def model_info(self, repo, **_):
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in answer])

    monkeypatch.setattr(hub.HfApi, "model_info", model_info)
    offline_download(monkeypatch, answer)


def offline_download(monkeypatch, answer):
    real = {"hf_hub_download": hub.hf_hub_download, "snapshot_download": hub.snapshot_download}

    def wrap(name):
        def call(*args, local_files_only=False, **kwargs):
            if local_files_only:
                return real[name](*args, local_files_only=True, **kwargs)
            if isinstance(answer, Exception):
                raise answer
            raise ConnectionError("the test downloads nothing")

        return call

    for name in real:
        monkeypatch.setattr(hub, name, wrap(name))


def http_library():
    """The HTTP library of huggingface_hub, which has changed more than once."""
    return importlib.import_module(hub.HfHubHTTPError.__mro__[1].__module__.partition(".")[0])


NETWORK_ERRORS = {
    "dns": lambda: http_library().ConnectError("[Errno -2] Name or service not known"),
    "timeout": lambda: http_library().ConnectTimeout("timed out"),
    "read timeout": lambda: http_library().ReadTimeout("The read operation timed out"),
    "os": lambda: socket.gaierror(-2, "Name or service not known"),
    "built in": lambda: ConnectionError("refused\nsecond line"),
}


@pytest.mark.parametrize("file", ["", ":model.gguf"], ids=["repo", "file"])
@pytest.mark.parametrize("kind", NETWORK_ERRORS)
def test_without_a_network_a_hub_id_is_one_line(cache, monkeypatch, kind, file):
    answering(monkeypatch, NETWORK_ERRORS[kind]())
    result = generate("a", model=f"org/repo{file}")
    assert result.code == 1
    line = only_line(result)
    assert f"org/repo{file}" in line
    assert "network" in line


def test_a_download_without_space_is_not_a_missing_network(cache, monkeypatch):
    answering(monkeypatch, OSError(errno.ENOSPC, "No space left on device"))
    line = only_line(generate("a", model="org/repo"))
    assert "No space left on device" in line
    assert "HF_HOME" in line
    assert "network" not in line


@pytest.mark.parametrize("file", ["", ":model.gguf"], ids=["repo", "file"])
def test_without_a_network_the_cached_copy_is_used(cache, monkeypatch, file):
    cache.keep("model.gguf", Path(MODEL).read_bytes())
    answering(monkeypatch, NETWORK_ERRORS["dns"]())
    result = generate("a", "-n", 1, "--json", model=f"org/repo{file}")
    assert result.code == 0, result.err


def test_without_a_network_another_file_of_a_cached_repository_is_still_missing(cache, monkeypatch):
    cache.keep("model.gguf", Path(MODEL).read_bytes())
    answering(monkeypatch, NETWORK_ERRORS["dns"]())
    result = generate("a", model="org/repo:other.gguf")
    assert result.code == 1
    assert "other.gguf" in only_line(result)


def test_a_repository_that_is_not_there_is_one_line(cache, monkeypatch):
    errors = pytest.importorskip("huggingface_hub.errors")
    http = http_library()
    response = http.Response(404, request=http.Request("GET", "https://huggingface.co/api/models/org/repo"))
    answering(
        monkeypatch, errors.RepositoryNotFoundError("404 Client Error.\n\nRepository Not Found", response=response)
    )
    result = generate("a", model="org/repo")
    assert result.code == 1
    line = only_line(result)
    assert "404" in line
    assert "HF_TOKEN" in line


@pytest.mark.parametrize("names", [["a-q4_0.gguf", "b-q4_1.gguf"], ["a-q8_0.gguf", "b-Q8_0.gguf"]], ids=str)
def test_several_ggufs_are_named_and_none_is_guessed(cache, monkeypatch, names):
    answering(monkeypatch, [*names, "README.md"])
    result = generate("a", model="org/repo")
    assert result.code == 1
    assert all(name in only_line(result) for name in names)


def test_a_repository_without_a_model_is_one_line(cache, monkeypatch):
    answering(monkeypatch, ["README.md"])
    result = generate("a", model="org/repo")
    assert result.code == 1
    assert "org/repo" in only_line(result)


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        (["model.gguf", "config.json"], "model.gguf"),
        (["a-q4_0.gguf", "a-Q8_0.gguf", "a-f16.gguf"], "a-Q8_0.gguf"),
        (["config.json", "model.safetensors"], None),
    ],
)
def test_the_file_that_can_only_be_meant_is_taken(monkeypatch, names, taken):
    answering(monkeypatch, names)
    asked = []
    monkeypatch.setattr(hub, "_fetch", lambda repo, file, *, offline: asked.append((repo, file, offline)))
    hub.download("org/repo", None)
    assert asked == [("org/repo", taken, False)]


@pytest.mark.parametrize("name", ["org/--repo:a.gguf", "org/re..po:a.gguf", "org/repo.git:a.gguf", "-/x"])
def test_a_name_that_the_hub_would_never_have_is_one_line(cache, name):
    result = generate("a", model=name)
    assert result.code == 1
    assert name.partition(":")[0] in only_line(result)


EACH_MODEL = """
import socket, sys, time
from mlx_engine.commands import main
connect, asked, slept = socket.socket.connect, [], []
def counted(self, address):
    asked.append(address)
    return connect(self, address)
socket.socket.connect, time.sleep = counted, slept.append
for model in sys.argv[1:]:
    sys.argv = ["mlx-engine", "generate", "a", "-m", model, "-b", "simd"]
    try:
        main()
    except SystemExit as ended:
        print(model, ended.code)
print(len(asked), sum(slept))
"""


@pytest.mark.slow
def test_a_hub_that_refuses_connections_is_told_after_few_attempts(tmp_path):
    """The hub's library tries a download again and again, for half a minute."""
    pytest.importorskip("huggingface_hub")
    # Port 9 of this machine: nothing leaves it, and nothing answers.
    env = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", EACH_MODEL, "org/repo", "org/repo:model.gguf"]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE, check=True)
    *told, counts = run.stdout.splitlines()
    assert told == ["org/repo 1", "org/repo:model.gguf 1"]
    n_asked, slept = map(float, counts.split())
    assert n_asked <= 4
    assert slept < 5
    assert "Traceback" not in run.stderr
    assert len(run.stderr.splitlines()) == 2
