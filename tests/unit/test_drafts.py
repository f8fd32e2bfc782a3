"""Drafts: nothing is left of them, however the process ends that wrote them, and those of others are left alone."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kernels.files import ENDING, draft, drafts_in, remove_dead
from mlx_engine.checkpoint import shapes
from mlx_engine.checkpoint.gguf_writer import write_gguf
from tests.patience import PATIENCE, wait_for

ROOT = Path(__file__).parents[2]
WRITE = """
import sys, time
from pathlib import Path
from kernels.files import draft
with draft(Path(sys.argv[1]), is_folder=sys.argv[2] == "folder") as path:
    (path / "weights" if path.is_dir() else path).write_bytes(bytes(1000))
    print("begun", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def writing(tmp_path):
    """Start processes that write drafts of tmp_path/model, and never end by themselves."""
    started = []

    def start(kind):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITE, tmp_path / "model", kind], cwd=ROOT, stdout=subprocess.PIPE
        )
        started.append(process)
        assert process.stdout.readline() == b"begun\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_the_draft_of_a_killed_process_is_removed_and_that_of_a_living_one_is_not(tmp_path, writing, kind):
    dead, _ = writing(kind), writing(kind)
    both = drafts_in(tmp_path)
    assert len(both) == 2
    remove_dead(tmp_path)
    assert drafts_in(tmp_path) == both
    dead.kill()
    dead.wait()
    with draft(tmp_path / "another") as path:
        assert len(drafts_in(tmp_path)) == 2
        assert path in drafts_in(tmp_path)
    assert len(drafts_in(tmp_path)) == 1


def test_files_of_other_programs_are_left_alone(tmp_path):
    names = [".film.mkv.part", ".model.gguf.1234.part", f"model{ENDING}", "model.part"]
    for name in names:
        (tmp_path / name).write_bytes(b"")
    (tmp_path / f".link{ENDING}").symlink_to(tmp_path / "model.part")
    os.mkfifo(tmp_path / f".pipe{ENDING}")
    remove_dead(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {*names, f".link{ENDING}"}


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_draft_is_hidden_until_it_is_moved_and_gone_after_an_error(tmp_path, is_folder):
    with draft(tmp_path / "model", is_folder=is_folder) as path:
        assert (path.parent, path.name[0], path.is_dir()) == (tmp_path, ".", is_folder)
        path.rename(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    with pytest.raises(KeyboardInterrupt), draft(tmp_path / "other", is_folder=is_folder) as path:  # noqa: PT012
        if is_folder:
            (path / "weights").write_bytes(b"1")
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_first_draft_of_two_does_not_take_the_second_for_a_dead_one(tmp_path):
    with draft(tmp_path / "model") as one, draft(tmp_path / "model") as other:
        assert one != other
        assert drafts_in(tmp_path) == sorted([one, other])


def test_a_draft_that_was_taken_for_a_dead_one_before_its_lock_is_made_again(tmp_path, monkeypatch):
    from kernels import files as drafts

    taken = []

    def locked(descriptor):
        if not taken:
            taken.extend(drafts_in(tmp_path))
            taken[0].unlink()
        return real(descriptor)

    real = drafts._locked
    monkeypatch.setattr(drafts, "_locked", locked)
    with draft(tmp_path / "model") as path:
        assert path.exists()
        assert [path] == drafts_in(tmp_path) != taken


def test_the_next_start_removes_what_a_killed_one_left_in_the_cache(tmp_path, monkeypatch, writing):
    monkeypatch.setattr(shapes, "cache_folder", lambda: tmp_path)
    (tmp_path / "gpt2-f32").mkdir()
    writing("folder").kill()
    wait_for(lambda: shapes.shape_path("gpt2") and not drafts_in(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["gpt2-f32"]


def test_writing_a_file_removes_what_a_killed_process_left(tmp_path, writing):
    process = writing("file")
    process.kill()
    process.wait()
    write_gguf(tmp_path / "other.gguf", {"key": np.uint8(1)}, [])
    assert [path.name for path in tmp_path.iterdir()] == ["other.gguf"]


# ---- signals ----

# A writer that never ends: it reports when it has begun.
QUANTIZE = """
import sys, time
import mlx_engine.checkpoint.gguf_writer as writer
def write(stream, data, alignment):
    stream.write(data)
    stream.flush()
    print("begun", flush=True)
    time.sleep(60)
writer._write_padded = write
sys.argv[1:] = ["quantize", "builtin", sys.argv[1]]
from mlx_engine.commands import main
main()
"""


def as_in_a_terminal():
    """Reset the signals that nohup, or a shell that starts a job in the background, tells its jobs to ignore."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_removes_the_draft_and_ends_with_its_number(tmp_path, number):
    command = [sys.executable, "-c", QUANTIZE, tmp_path / "out.gguf"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=as_in_a_terminal
    )
    with process:
        assert process.stdout.readline() == b"begun\n"
        assert len(drafts_in(tmp_path)) == 1
        process.send_signal(number)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + number
    assert list(tmp_path.iterdir()) == []
    name = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    assert errors.decode().split("\n") == ["", name, ""]


@pytest.mark.slow
def test_a_signal_that_is_ignored_stays_ignored(tmp_path):
    """As after nohup; other signals end the process."""
    command = [sys.executable, "-c", QUANTIZE, tmp_path / "out.gguf"]
    ignore = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # noqa: E731
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, preexec_fn=ignore) as process:
        assert process.stdout.readline() == b"begun\n"
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.terminate()
        assert process.wait(PATIENCE) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
