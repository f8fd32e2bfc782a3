"""Pages of a mapped file that are given back: of converted weights, between weights, and around rows of a table."""

import gc
import mmap
import os
import platform
import sys
import weakref
from pathlib import Path

import numpy as np
import psutil
import pytest

import mlx_engine
from mlx_engine.checkpoint.gguf import open_gguf
from mlx_engine.checkpoint.gguf_writer import write_gguf
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.distributed.tensor import sliced
from mlx_engine.machine import memory as mapped_pages
from mlx_engine.machine.memory import give_back_freed, is_view, read_ahead, release, release_rows
from mlx_engine.quant.group_weight import GroupWeight
from mlx_engine.quant.types import Q8_0
from mlx_engine.quant.weight import Weight
from mlx_engine.weights import parameters as parameters_module
from mlx_engine.weights.conversion import Conversion
from mlx_engine.weights.model import plan_model
from mlx_engine.weights.outline import outlined
from mlx_engine.weights.parameters import TableInFile
from tests.random_models import random_checkpoint
from tests.unit.test_command_generate import DATA

HF, Q8 = DATA / "hf", DATA / "model-q8_0.gguf"
PAGE = mmap.PAGESIZE
reads_proc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def rows_of(path: Path) -> list[str]:
    """Return the rows of /proc/self/smaps about a mapped file."""
    found, inside = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            inside = line.endswith(str(path))
        elif inside:
            found.append(line)
    return found


def resident(path: Path) -> int:
    """Return the bytes of a mapped file that are in this process's memory."""
    return 1024 * sum(int(row.split()[1]) for row in rows_of(path) if row.startswith("Rss:"))


def mapped(path: Path, nbytes: int) -> np.ndarray:
    """Return the bytes of a new file, all of which are in memory."""
    path.write_bytes(os.urandom(nbytes))
    with path.open("rb") as file:
        whole = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    whole.max()
    return whole


@reads_proc
def test_the_pages_of_a_converted_weight_are_given_back_and_those_of_a_view_are_not(tmp_path):
    path = tmp_path / "weights"
    whole = mapped(path, 64 * PAGE)
    total, part = int(whole.sum()), whole[100 : 60 * PAGE]
    assert resident(path) == 64 * PAGE
    release(part, part[5:9])
    assert resident(path) == 64 * PAGE
    release(part, part.copy())
    # The first page has bytes that are not of the part.
    assert resident(path) == 5 * PAGE
    assert int(whole.sum()) == total
    release(np.zeros(4, np.uint8), None)


@pytest.mark.slow
@reads_proc
def test_reading_ahead_leaves_the_pages_of_the_views_alone(tmp_path):
    path = tmp_path / "weights"
    whole = mapped(path, 300 * PAGE)
    assert resident(path) == 300 * PAGE
    read_ahead([whole[100 * PAGE : 105 * PAGE], np.zeros(9), whole[5 * PAGE + 100 : 6 * PAGE + 1]])
    assert resident(path) == 7 * PAGE
    # A view inside of another one gives none of its pages back.
    whole.max()
    read_ahead([whole[: 99 * PAGE], whole[PAGE : 2 * PAGE]])
    assert resident(path) == 99 * PAGE


@pytest.mark.slow
@reads_proc
def test_pages_around_rows_are_given_back(tmp_path, monkeypatch):
    # Small windows: the system drops a mapping of 2 MiB as a whole.
    path, n, around = tmp_path / "table", 16, 16 * PAGE
    monkeypatch.setattr(mapped_pages, "AROUND", around)
    whole = mapped(path, 4 * around)
    table = whole[PAGE:]
    release_rows(table, [0], row_bytes=PAGE)
    assert resident(path) == 3 * around + PAGE
    # A row on both sides of a border.
    release_rows(table, [n - 2], row_bytes=PAGE + 1)
    assert resident(path) == 2 * around + PAGE
    release_rows(np.zeros((2, 4), np.uint8), [1], row_bytes=4)


@pytest.mark.slow
@reads_proc
def test_the_rows_that_passes_read_of_a_table_do_not_stay_in_memory(tmp_path):
    values, path = np.random.default_rng(0).standard_normal((8192, 512), dtype=np.float32), tmp_path / "table.gguf"
    weight = Weight.pack("token_embd.weight", values, Q8_0)
    write_gguf(path, {}, [weight])
    read = open_gguf(path).weight("token_embd.weight")
    table = TableInFile(read.name, read.shape, read.type, read.data)
    before = resident(path)
    ids = [8191, 0, 4000, 4000, 17]
    assert np.array_equal(table.rows(np.array(ids)), weight.rows(ids))
    assert np.array_equal(table.rows(ids), weight.rows(ids))
    assert resident(path) <= before


@pytest.mark.slow
@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a system without large pages")
def test_a_rank_that_cuts_matrices_maps_small_pages_of_the_file(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(Q8.read_bytes())
    planned, backend = plan_model(open_checkpoint(path), Conversion()), mlx_engine.create_backend("simd")
    planned.build(backend)
    assert not any(row.startswith("VmFlags:") and " nh" in row for row in rows_of(path))
    sliced(planned, 0, 2).build(backend)
    assert any(row.startswith("VmFlags:") and " nh" in row for row in rows_of(path))


def test_cutting_a_matrix_of_groups_does_not_join_its_bytes(monkeypatch):
    def joined(self):
        raise AssertionError(self.name)

    monkeypatch.setattr(GroupWeight, "data", property(joined))
    planned = plan_model(open_checkpoint(DATA.parent / "mlx-4bit" / "hf"), Conversion())
    outlined(sliced(planned, 0, 2), mlx_engine.create_backend("mlx"))
    sliced(planned, 0, 2).build(mlx_engine.create_backend("mlx"))


def test_the_slices_of_a_rank_do_not_keep_the_files_open():
    checkpoint = random_checkpoint("qwen3", "F32")
    alive = weakref.ref(checkpoint)
    gc.disable()  # a cycle of references would keep the metadata until the collector runs
    try:
        planned = sliced(plan_model(checkpoint, Conversion()), 0, 2)
        assert alive() is not None
        del planned, checkpoint
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_memory_that_was_freed_goes_back_to_the_system():
    blocks = [bytearray(100_000) for _ in range(500)]
    process = psutil.Process()
    del blocks[:-1]  # the last one is above all others, so that glibc keeps them
    before = process.memory_info().rss
    give_back_freed()
    assert process.memory_info().rss < before - 30_000_000


@pytest.mark.parametrize(("path", "quant"), [(HF, "keep"), (HF, "q8_0"), (Q8, "q4_0")])
def test_every_converted_matrix_gives_its_pages_back(monkeypatch, path, quant):
    given = []
    monkeypatch.setattr(
        parameters_module, "release", lambda read, made: given.append((read.nbytes, is_view(made, read)))
    )
    mlx_engine.load(path, "simd", quant)
    stored = [tensor for tensor in open_checkpoint(path).shapes if "norm" not in tensor and "emb" not in tensor]
    assert sum(not view for _, view in given) >= len(stored)
