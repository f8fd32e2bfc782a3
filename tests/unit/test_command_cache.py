"""`cache`: what is kept on disk is listed with its sizes, and only what was named is removed."""

import json
import sys
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from kernels import files as kernels_folder
from kernels.files import draft
from mlx_engine.commands import app


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """A cache with a model of the hub, a shape, kernels, and files of other programs in the same folders."""
    constants = pytest.importorskip("huggingface_hub.constants")
    hub, ours = tmp_path / "hub", tmp_path / "mlx_engine"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))
    kernels_folder._first.cache_clear()
    files = {
        hub / "models--org--repo" / "blobs" / "1234": 1000,
        hub / "models--org--repo" / "refs" / "main": 24,
        hub / "datasets--org--data" / "blobs" / "1234": 7,
        ours / "gpt2-f32" / "model.safetensors": 2000,
        ours / "notes.txt": 7,
        ours / "emulator" / "kernels.so": 300,
        tmp_path / "numba" / ("0" * 16) / "cpu-products.code": 50,
        tmp_path / "numba" / "others" / "index.nbi": 7,
    }
    for path, n in files.items():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(bytes(n))
    snapshot = hub / "models--org--repo" / "snapshots" / "5678"
    snapshot.mkdir(parents=True)
    (snapshot / "model.gguf").symlink_to("../../blobs/1234")
    yield tmp_path
    kernels_folder._first.cache_clear()


class Terminal:
    def isatty(self):
        return True


def cache(*args, **options):
    result = CliRunner().invoke(app, ["cache", *args], **options)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def left(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and not path.is_symlink()}


def test_the_list_has_every_size_and_path(disk):
    found = json.loads(cache("list", "--json").stdout)
    assert found == {
        "items": [
            {"name": "org/repo", "kind": "download", "bytes": 1024,
             "path": str(disk / "hub" / "models--org--repo")},
            {"name": "shape:gpt2", "kind": "made", "bytes": 2000, "path": str(disk / "mlx_engine" / "gpt2-f32")},
            {"name": "kernels", "kind": "made", "bytes": 50, "path": str(disk / "numba")},
            {"name": "emulator", "kind": "made", "bytes": 300, "path": str(disk / "mlx_engine" / "emulator")},
        ],
        "bytes": 3374,
    }  # fmt: skip
    lines = cache("list").stdout.splitlines()
    assert lines[0].split() == ["org/repo", "1.0", "KiB", "downloaded", found["items"][0]["path"]]
    assert lines[-1] == "4 items, 3.3 KiB (3,374 bytes)"


def test_only_what_is_named_is_removed(disk):
    before = left(disk)
    result = cache("remove", "shape:gpt2", "kernels", "--yes")
    assert (result.exit_code, result.stdout) == (0, "")
    assert before - left(disk) == {"mlx_engine/gpt2-f32/model.safetensors", f"numba/{'0' * 16}/cpu-products.code"}
    assert "removed 2.0 KiB" in result.stderr


def test_everything_is_what_the_list_has(disk):
    assert cache("remove", "--all", "--yes").exit_code == 0
    assert left(disk) == {"hub/datasets--org--data/blobs/1234", "mlx_engine/notes.txt", "numba/others/index.nbi"}
    assert cache("list").stdout == "0 items, 0 B (0 bytes)\n"
    assert cache("remove", "--all", "--yes").stderr == "nothing was removed\n"


@pytest.mark.parametrize(("answer", "removes"), [("y\n", True), ("n\n", False), ("\n", False)])
def test_a_terminal_is_asked(disk, monkeypatch, answer, removes):
    asked = []

    def confirm(question, **_):
        asked.append(question)
        return answer == "y\n"

    monkeypatch.setattr(typer, "confirm", confirm)
    monkeypatch.setattr(sys.modules["mlx_engine.commands.cache"], "sys", SimpleNamespace(stdin=Terminal()))
    assert cache("remove", "org/repo").exit_code == 0
    assert asked == ["Remove it, 1.0 KiB in all?"]
    assert (disk / "hub" / "models--org--repo").exists() != removes


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("remove",), "cache remove needs names or --all"),
        (("remove", "kernels", "--all", "--yes"), "give either names or --all, not both"),
        (
            ("remove", "org/other", "--yes"),
            "no cache entry 'org/other'; cache list shows: org/repo, shape:gpt2, kernels, emulator",
        ),
        (("remove", "../hub", "--yes"), "no cache entry '../hub'"),
        (("remove", "kernels"), "cache remove needs --yes where there is no terminal"),
    ],
)
def test_wrong_use_removes_nothing(disk, args, message):
    before = left(disk)
    result = cache(*args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert left(disk) == before


def test_what_is_being_written_is_left_alone(disk):
    with draft(disk / "mlx_engine" / "gpt2-f32") as one, draft(disk / "mlx_engine" / "emulator" / "new.so") as other:
        assert cache("remove", "--all", "--yes").exit_code == 0
        assert one.exists()
        assert other.exists()


def test_what_cannot_be_removed_is_named(disk, monkeypatch):
    def refused(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("mlx_engine.commands.cache.shutil.rmtree", refused)
    result = cache("remove", "shape:gpt2", "--yes")
    assert result.exit_code == 1
    assert f"{disk / 'mlx_engine' / 'gpt2-f32'}: cannot be removed (Permission denied)" in result.stderr
