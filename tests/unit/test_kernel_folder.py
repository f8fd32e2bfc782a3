"""Compiled code is kept where nobody else could have put it: whoever can write there could have us run theirs."""

import os
import tempfile
from pathlib import Path

import pytest

from kernels.files import cache_folder

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="this system does not say whose a folder is")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


def test_the_first_that_can_be_written_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert cache_folder("name", given=str(tmp_path / "given")) == tmp_path / "given"
    assert cache_folder("name") == tmp_path / "xdg" / "mlx_engine" / "name"
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cache_folder("name").parent == tmp_path / "temporary"


def test_a_folder_that_is_not_absolute_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder("name").parent == tmp_path / "temporary"
    assert not (tmp_path / "relative").exists()


def test_a_folder_that_somebody_else_made_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "getuid", lambda: 12345678)
    folder = cache_folder("name", given=str(tmp_path / "given"))
    assert folder.parent == tmp_path / "temporary"
    assert folder.name.startswith("mlx_engine-name-")
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path):
    (tmp_path / "given").mkdir()
    (tmp_path / "given").chmod(0o777)
    assert cache_folder("name", given=str(tmp_path / "given")) == tmp_path / "xdg" / "mlx_engine" / "name"


def test_a_link_to_a_folder_is_not_used(tmp_path: Path):
    """Whoever made it can let it lead elsewhere tomorrow."""
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "given").symlink_to(tmp_path / "mine")
    assert cache_folder("name", given=str(tmp_path / "given")) == tmp_path / "xdg" / "mlx_engine" / "name"


def test_a_folder_that_can_be_written_needs_no_temporary_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def none() -> str:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    assert cache_folder("name", given=str(tmp_path)) == tmp_path
