"""What a measurement belongs to."""

import hashlib
import os
import platform
import subprocess

import numpy as np
import pytest

import mlx_engine
from mlx_engine.bench import origin
from mlx_engine.checkpoint import identity
from mlx_engine.machine.memory import usable_cores


def sha256(*contents):
    return hashlib.sha256(b"".join(contents)).hexdigest()


# ---- the model's bytes ----


@pytest.mark.some(2)
@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 << 20])
def test_a_files_digest_is_that_of_its_bytes(tmp_path, size):
    content = np.random.default_rng(size).bytes(size)
    (tmp_path / "model.gguf").write_bytes(content)
    assert identity.digest(tmp_path / "model.gguf") == sha256(content)


def test_a_folders_digest_is_that_of_its_weights_by_name(tmp_path):
    # Written in an order that is not that of their names, nor its reverse.
    for i in (3, 7, 1, 0, 9, 5, 2, 8, 6, 4):
        (tmp_path / f"{i}.safetensors").write_bytes(b"shard %d" % i)
    (tmp_path / "README.md").write_bytes(b"nothing that is measured")
    assert identity.digest(tmp_path) == sha256(*(b"shard %d" % i for i in range(10)))


def test_one_changed_byte_is_another_model(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"\0" * 100)
    before = identity.digest(path)
    path.write_bytes(b"\0" * 99 + b"\1")
    assert identity.digest(path) != before


# ---- the machine ----


def test_memory_is_pages_times_their_size(monkeypatch):
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}.__getitem__)
    assert origin.memory_bytes() == 4_096_000


@pytest.mark.parametrize("error", [ValueError, OSError])
def test_memory_that_cannot_be_asked_for_is_unknown(monkeypatch, error):
    def fail(name):
        raise error

    monkeypatch.setattr(os, "sysconf", fail)
    assert origin.memory_bytes() is None


@pytest.mark.parametrize(
    ("sizes", "largest"),
    [(["32K", "1024K", "512K"], 1 << 20), (["48K", "2M", "1536K"], 2 << 20), (["junk"], None), ([], None)],
)
def test_the_largest_cache_is_told(monkeypatch, tmp_path, sizes, largest):
    for i, size in enumerate(sizes):
        (tmp_path / f"index{i}").mkdir()
        (tmp_path / f"index{i}" / "size").write_text(f"{size}\n")
    monkeypatch.setattr(origin, "Path", lambda path: tmp_path)
    monkeypatch.setattr(origin.platform, "system", lambda: "Linux")
    assert origin.cache_bytes() == largest


def test_where_the_system_must_be_asked_for_its_caches_unknown_ones_are_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(origin, "Path", lambda path: tmp_path)
    monkeypatch.setattr(origin.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(
        origin, "output_of", lambda *command: {"hw.perflevel0.l2cachesize": "16777216"}.get(command[-1])
    )
    assert origin.cache_bytes() == 16 << 20


def test_the_machine_is_told_in_five_parts():
    told = origin.machine()
    assert told.keys() == {"processor", "cores", "memory_bytes", "cache_bytes", "system"}
    assert told["cores"] == usable_cores() >= 1
    assert platform.system() in told["system"]
    assert platform.machine() in told["system"]


@pytest.mark.parametrize(
    ("flags", "widest"),
    [
        ("fpu avx2 avx512f", "Fast CPU, AVX-512"),
        ("fpu avx2", "Fast CPU, AVX2"),
        ("fpu", "Fast CPU"),
        ("xavx2", "Fast CPU"),
    ],
)
def test_the_processor_has_a_name_and_its_widest_instructions(monkeypatch, tmp_path, flags, widest):
    (tmp_path / "cpuinfo").write_text(f"model name\t: Fast CPU\nflags\t\t: {flags}\n\nno colon here\n")
    monkeypatch.setattr(origin, "Path", lambda path: tmp_path / "cpuinfo")
    assert origin.processor() == widest


def test_versions_are_of_python_and_of_what_is_installed(monkeypatch):
    def version(name):
        if name != "numpy":
            raise origin.metadata.PackageNotFoundError(name)
        return "2.9"

    monkeypatch.setattr(origin.metadata, "version", version)
    ours = {"mlx-engine": mlx_engine.__version__, "python": platform.python_version()}
    assert origin.versions() == {**ours, "numpy": "2.9"}


# ---- the commit ----


def git(folder, *args):
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *identity, *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A folder in which the package seems to lie."""
    file = tmp_path / "mlx_engine" / "bench" / "machine.py"
    file.parent.mkdir(parents=True)
    file.write_text("one\n")
    monkeypatch.setattr(origin, "__file__", str(file))
    return tmp_path


def test_outside_a_checkout_there_is_no_commit(installed):
    assert origin.commit() is None


def test_a_folder_inside_of_somebody_elses_checkout_is_none(installed, monkeypatch):
    git(installed, "init", "-q")
    git(installed, "add", ".")
    git(installed, "commit", "-qm", "one")
    inner = installed / "lib" / "mlx_engine" / "bench" / "machine.py"
    inner.parent.mkdir(parents=True)
    monkeypatch.setattr(origin, "__file__", str(inner))
    assert origin.commit() is None


def test_a_checkout_has_a_commit_and_a_plus_once_a_file_has_changed(installed):
    git(installed, "init", "-q")
    git(installed, "add", ".")
    git(installed, "commit", "-qm", "one")
    head = git(installed, "rev-parse", "HEAD")
    assert origin.commit() == head[:12]
    (installed / "notes.txt").write_text("not of the checkout\n")
    assert origin.commit() == head[:12]
    (installed / "mlx_engine" / "bench" / "machine.py").write_text("two\n")
    assert origin.commit() == head[:12] + "+"


def test_results_of_benchmarks_are_no_changes(installed):
    page, rows = installed / "BENCHMARKS.md", installed / "benchmarks" / "results" / "rows.jsonl"
    rows.parent.mkdir(parents=True)
    for file in (page, rows):
        file.write_text("one\n")
    git(installed, "init", "-q")
    git(installed, "add", ".")
    git(installed, "commit", "-qm", "one")
    for file in (page, rows):
        file.write_text("two\n")
    assert origin.commit() == git(installed, "rev-parse", "HEAD")[:12]


def test_a_checkout_without_a_commit_has_none(installed):
    git(installed, "init", "-q")
    assert origin.commit() is None


def test_without_git_there_is_no_commit(installed, monkeypatch):
    git(installed, "init", "-q")
    monkeypatch.setenv("PATH", str(installed))
    assert origin.commit() is None
