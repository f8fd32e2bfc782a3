"""The parts of a run on several ranks: split, agreement, signs of life, time line; and the command line."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest

from mlx_engine.backends import create_backend
from mlx_engine.backends.parameters import Linear
from mlx_engine.cache.size import pool_nbytes
from mlx_engine.distributed import agreement, split
from mlx_engine.distributed.agreement import agree, gather_values
from mlx_engine.distributed.group import Group
from mlx_engine.distributed.liveness import Liveness
from mlx_engine.distributed.local import run_ranks
from mlx_engine.distributed.model_parts import held, model_parts
from mlx_engine.distributed.split import Machine, best_split, latest_cut, layer_bytes, machines_of, parsed, stages_of
from mlx_engine.distributed.timeline import Span, busy, drawing
from mlx_engine.errors import DistributedError, NotEnoughMemoryError, OptionError
from mlx_engine.models.outline import outlined
from mlx_engine.quant.types import Q8_0
from mlx_engine.quant.weight import Weight
from tests import ranks
from tests.unit.test_command_generate import generate
from tests.unit.test_distributed_pipeline import DATA, planned_of

PLENTY = 1 << 40
EQUAL = [Machine(1e9, PLENTY)] * 2


def test_the_slowest_rank_is_as_fast_as_can_be():
    anywhere = range(1, 8)
    assert best_split([10] * 8, 0, EQUAL, anywhere) == [4, 4]
    assert best_split([10] * 8, 40, EQUAL, anywhere) == [6, 2]  # the head takes time
    assert best_split([10] * 8, 0, [Machine(1e9, PLENTY), Machine(3e9, PLENTY)], anywhere) == [2, 6]
    assert best_split([10] * 8, 0, [Machine(1e9, PLENTY), Machine(1.1e9, PLENTY)], anywhere) == [4, 4]
    assert best_split([30, 10, 10, 10], 0, [EQUAL[0]] * 3, range(1, 4)) in ([1, 1, 2], [1, 2, 1])
    assert best_split([10] * 8, 0, [EQUAL[0], Machine(1e9, 25)], anywhere) == [6, 2]
    assert best_split([10] * 8, 5, [EQUAL[0], Machine(1e9, 24)], anywhere) == [7, 1]  # and memory
    assert best_split([10] * 8, 0, EQUAL, [1, 2]) == [2, 6]


def test_ranks_of_one_computer_are_equal():
    found = machines_of([("a", 1e9, 100), ("b", 2e9, 50), ("a", 3e9, 90)])
    assert found == [Machine(2e9, 50), Machine(2e9, 50), Machine(2e9, 45)]


def test_a_split_that_is_not_possible_is_refused():
    with pytest.raises(NotEnoughMemoryError, match="--split: expected"):
        best_split([1 << 30] * 8, 0, [Machine(1e9, 3 << 30)] * 2, range(1, 8))
    with pytest.raises(OptionError, match="at most 2 ranks, found 3 ranks"):
        best_split([10] * 8, 0, [EQUAL[0]] * 3, [1])
    for text in ("", "20,", "20;8", "0,28", "-1,3"):
        with pytest.raises(OptionError, match="such as 20,8"):
            parsed(text)
    assert parsed("20,8") == (20, 8)
    config = planned_of(DATA / "llama-micro").config
    with pytest.raises(OptionError, match="2 numbers, one for each rank, that add up to 3 layers, found 1,1,1"):
        stages_of([1, 1, 1], 2, config)
    with pytest.raises(OptionError, match="add up to 3 layers, found 2,2"):
        stages_of([2, 2], 2, config)
    assert latest_cut(config) == 3


@pytest.mark.parametrize("name", ["llama-micro", "gemma4e-micro"])
def test_bytes_are_those_of_the_weights_and_of_keys_and_values(name: str):
    planned, backend = planned_of(DATA / name), create_backend("parallel", threads=1)
    outline = outlined(planned, backend)
    parts, kept = model_parts(outline), outline.model.kv_layers
    (empty, head), (filled, same_head) = (layer_bytes(parts, n) for n in (64, 128))
    assert head == same_head > 0
    assert sum(empty) - pool_nbytes(kept, 64) == sum(held([part]) for part in parts.layers)
    assert sum(filled) - sum(empty) == pool_nbytes(kept, 128) - pool_nbytes(kept, 64) > 0


def test_the_matrix_of_the_speed_test_is_not_kept(monkeypatch):
    monkeypatch.setattr(split, "SECONDS", 0.0)
    backend = create_backend("parallel", threads=1)
    prepare, found = backend.prepare, list[weakref.ref[np.ndarray]]()

    def prepared(weight: Weight) -> Any:
        matrix = prepare(weight)
        found.append(weakref.ref(matrix.data))
        return matrix

    monkeypatch.setattr(backend, "prepare", prepared)
    assert split.measured_speed(backend) > 0
    assert [data() for data in found] == [None]


def test_nothing_is_kept_of_a_discarded_matrix_that_would_be_read_ahead():
    backend = create_backend("parallel", threads=1)
    linear = Linear("x", backend.prepare(Weight.pack("x", np.ones((32, 64)), Q8_0)))
    with backend.session():
        backend.linear(backend.array(np.ones((1, 64), dtype=np.float32)), linear)
    data = weakref.ref(linear.weight.data)
    backend.discard(linear)
    del linear
    assert data() is None


def test_ranks_that_differ_are_named():
    def run(group: Group) -> None:
        assert gather_values(group, "x" * group.rank) == ["", "x", "xx"]
        agree(group, {"version": "1", "files": "a" if group.rank < 2 else "b"})

    with pytest.raises(DistributedError, match="rank 2: expected files of rank 0, 'a', found 'b'; start all ranks"):
        run_ranks(3, run)


class Ends:
    """Three ranks whose ends are recorded in place of ending the process."""

    def __init__(self, limit: float = 5.0) -> None:
        self.found: dict[int, tuple[int, str | None]] = {}
        hosts = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
        self.ranks = [
            Liveness(rank, hosts, end=self.end_of(rank), interval=0.02, limit=limit) for rank in range(len(hosts))
        ]
        port = self.ranks[0].listen()
        threads = [threading.Thread(target=rank.start, args=(port,)) for rank in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def end_of(self, rank: int):
        return lambda code, line: self.found.update({rank: (code, line)})

    def wait(self, *expected: int) -> dict[int, tuple[int, str | None]]:
        """Wait until these ranks have ended."""
        deadline = time.monotonic() + 5
        while set(expected) - set(self.found) and time.monotonic() < deadline:
            time.sleep(0.005)
        return self.found

    def cut(self, rank: int) -> None:
        """Let a rank die: its connections end."""
        self.ranks[rank]._is_ending = True
        for peer in self.ranks[rank]._peers.values():
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End all ranks, and their threads."""
        for rank in range(3):
            self.cut(rank)
        for thread in threading.enumerate():
            if thread.name.startswith(("rank ", "signs of life")):
                thread.join(5)
        for rank in self.ranks:
            for peer in rank._peers.values():
                peer.close()


@pytest.fixture
def ends():
    made = Ends()
    yield made
    made.close()


def test_a_rank_that_ends_is_named_by_rank_0_and_all_end(ends: Ends):
    ends.cut(2)
    found = ends.wait(0, 1)
    assert found[1] == (1, None)
    code, line = found[0]
    assert code == 1
    assert line == (
        "error: rank 2 (127.0.0.3): expected to run until the end, found that it has ended; all ranks end, "
        "start them again"
    )


def test_rank_0_that_ends_is_named_by_rank_1(ends: Ends):
    ends.cut(0)
    found = ends.wait(1, 2)
    assert found[2] == (1, None)
    assert "rank 0 (127.0.0.1)" in str(found[1][1])


def test_a_rank_without_signs_of_life_is_named():
    ends = Ends(limit=0.3)
    ends.ranks[2]._tell_all = lambda text: None  # as if it was stopped
    found = ends.wait(0, 1)
    assert "rank 2 (127.0.0.3): expected to run until the end, found that it has given no sign" in str(found[0][1])
    assert found[1] == (1, None)
    ends.close()


def test_all_ranks_end_with_the_code_of_rank_0(ends: Ends):
    closing = threading.Thread(target=ends.ranks[0].close, args=(130,))
    closing.start()
    assert ends.wait(1, 2) == {1: (130, None), 2: (130, None)}
    for rank in (1, 2):
        ends.cut(rank)
    closing.join()
    assert 0 not in ends.found


def test_ranks_sleep_until_they_are_woken_and_end_quietly(ends: Ends):
    sleeping = threading.Thread(target=ends.ranks[1].sleep)
    sleeping.start()
    time.sleep(0.05)
    assert sleeping.is_alive()
    ends.ranks[0].wake()
    sleeping.join(5)
    assert not sleeping.is_alive()
    closing = threading.Thread(target=ends.ranks[0].close, args=(0,))
    closing.start()
    for rank in (1, 2):
        ends.cut(rank)
    closing.join()
    assert ends.found == {}


def test_a_time_line_shows_who_computed_when():
    first = [Span(i, 4, 2.0 * i, 2.0 * i + 2) for i in range(4)]
    second = [Span(i, 4, 2.0 * i + 2, 2.0 * i + 3) for i in range(4)]
    title, one, two = drawing([first, second], latest=3)
    assert title == "passes from 1 on, 7000.0 ms:"
    assert (one[7:11], one[-5:]) == ("1111", ". 86%")
    assert (two[7:11], two[-5:]) == ("....", "3 43%")
    assert [line[:-4].count("2") for line in (one[7:], two[7:])] == [27, 15]
    assert busy(second, 0.0, 9.0) == 4 / 9
    assert drawing([first, []]) == []


def test_processes_generate_what_one_process_does(tmp_path):
    alone = generate("-p", "Once upon", "-n", "12", "--json", model="builtin")
    command = ["cli.py", "generate", "-p", "Once upon", "-n", "12", "-b", "simd", "--json"]
    (code, out, err), other = ranks.run(tmp_path, 2, [*command, "--shard", "pipeline", "--split", "4,2"])
    assert (code, err) == (0, "")
    assert other == (0, "", "")
    keys = "token_ids", "text", "prompt_ids", "finish_reason"
    one, two = ranks.last_json(alone.out), ranks.last_json(out)
    assert [two[key] for key in keys] == [one[key] for key in keys]


def test_a_process_alone_has_nobody_to_share_with(monkeypatch, capsys):
    from mlx_engine.commands.app import app

    monkeypatch.delenv("MLX_HOSTFILE", raising=False)
    for options, expected in (
        (["--shard", "pipeline"], "found a process alone"),
        (["--shard", "rows"], "--shard: expected pipeline or tensor, found 'rows'"),
        (["--split", "1,2"], "--split: expected --shard"),
        (["--timeline"], "--timeline: expected --shard"),
        (["--shard", "tensor", "--timeline"], "--timeline: expected --shard pipeline with it, found 'tensor'"),
    ):
        with pytest.raises(SystemExit) as ended:
            app(["generate", "-p", "x", *options])
        assert ended.value.code == 2
        assert expected in capsys.readouterr().err


def test_the_version_changes_with_the_source(tmp_path, monkeypatch):
    monkeypatch.setattr(agreement, "PACKAGE", tmp_path)
    (tmp_path / "one.py").write_text("one = 1\n")
    before = agreement.version()
    (tmp_path / "one.py").write_text("one = 2\n")
    assert agreement.version() != before
    assert before.startswith("MLX 0.")
