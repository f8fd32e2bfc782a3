"""Ranks that die or hang: every other rank ends within 10 s, and one line names the rank. Slow: real processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from mlx_engine.distributed.heartbeat import NOT_CONNECTED
from tests import faulty_ring, ranks
from tests.patience import PATIENCE
from tests.watched import LIMIT, MOMENTS, SHARED, SIZE, SLACK, Watched, generate, running_at

pytestmark = pytest.mark.slow

# `cli.py`, with ranks that must join within the limit of this test, and do not connect before it is over: while MLX
# connects them, no rank is named.
JOIN_SOON = f"""
import sys, time
from mlx_engine.commands import main
from mlx_engine.distributed.heartbeat import Heartbeat
Heartbeat.joining, join = {LIMIT}, Heartbeat.join
Heartbeat.join = lambda self, port: (print("joins", file=sys.stderr), join(self, port))
Heartbeat.connected = lambda self, ring: time.sleep({LIMIT + SLACK})
sys.argv[0] = "cli.py"
main()
"""


@pytest.mark.parametrize("victim", range(SIZE))
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_all_ranks_end_and_one_line_names_the_rank(tmp_path, moment: str, number: signal.Signals, victim: int):
    watched = running_at(moment, tmp_path, victim)
    try:
        os.kill(watched.processes[victim].pid, number)
        assert watched.wait(LIMIT + SLACK, but=victim) == [1, 1]
        lines = watched.error_lines(but=victim)
        assert len(lines) == 1, watched.err
        found = "exited" if number == signal.SIGKILL else "gave no sign of life for 8 s"
        assert lines[0] == f"error: rank {victim} (127.0.0.1) {found}; all ranks end, start them again"
        assert "Traceback" not in watched.errors(but=victim)
    finally:
        watched.close()


@pytest.mark.parametrize("victim", range(SIZE))
@pytest.mark.parametrize("after", [0.0, 0.2, 0.4, 0.6, 0.8])
def test_a_rank_that_stops_while_ranks_join_is_named(tmp_path, victim: int, after: float):
    # The first argument of `generate` is the program, which gives ranks less time to join here.
    watched = Watched(ranks.start(tmp_path, SIZE, ["-c", JOIN_SOON, *generate("Once upon", 300)[1:], *SHARED]))
    try:
        time.sleep(after)
        os.kill(watched.processes[victim].pid, signal.SIGSTOP)
        watched.wait_for(lambda: watched.errors(but=victim).count("joins") == SIZE - 1)
        assert watched.wait(LIMIT + SLACK, but=victim) == [1, 1]
        (line,) = watched.error_lines(but=victim)
        assert line.startswith(f"error: rank {victim} (127.0.0.1) "), line
    finally:
        watched.close()


@pytest.mark.parametrize("victim", range(SIZE))
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize("moment", faulty_ring.MOMENTS)
def test_all_ranks_end_if_one_ends_or_stops_while_ranks_connect(tmp_path, moment: str, number: int, victim: int):
    watched = connecting(tmp_path, moment, number, victim)
    try:
        watched.wait_until_struck(victim)
        assert watched.wait(LIMIT + SLACK, but=victim) == [1, 1]
        lines = watched.error_lines(but=None if number == signal.SIGKILL else victim)
        assert watched.errors(but=victim).count("\n") <= 1, watched.err
        if moment == "connected" or (moment == "after" and number == signal.SIGKILL and victim):
            assert any(line.startswith(f"error: rank {victim} (127.0.0.1) ") for line in lines), watched.err
        elif (victim, number) != (0, signal.SIGSTOP):  # otherwise a line says so when rank 0 ends
            assert lines, watched.err
    finally:
        watched.close()


@pytest.mark.parametrize("victim", range(1, SIZE))
def test_a_rank_that_ends_is_named_before_those_whose_connections_break(tmp_path, victim: int):
    watched = connecting(tmp_path, faulty_ring.BREAKS, signal.SIGKILL, victim)
    try:
        watched.wait_until_struck(victim)
        assert watched.wait(LIMIT + SLACK, but=victim) == [1, 1]
        assert watched.errors(but=victim).count("\n") == 1, watched.err
        (line,) = watched.error_lines(but=victim)
        assert line.startswith(f"error: rank {victim} (127.0.0.1) exited")
    finally:
        watched.close()


def test_ranks_that_are_terminated_while_they_connect_print_one_line(tmp_path):
    watched = connecting(tmp_path, "before", signal.SIGKILL, 2)
    try:
        watched.processes[2].wait(PATIENCE)
        time.sleep(1.0)
        for process in watched.processes[:2]:
            process.terminate()  # as mlx.launch does
        assert 0 not in watched.wait(LIMIT + SLACK, but=2)
        (line,) = watched.error_lines(but=2)
        assert line.startswith("error: rank 2 (127.0.0.1) exited")
    finally:
        watched.close()


@pytest.mark.parametrize("victim", range(SIZE))
def test_a_rank_that_cannot_connect_is_named(tmp_path, victim: int):
    watched = connecting(tmp_path, faulty_ring.FAILS, 0, victim)
    try:
        watched.wait_until_struck(victim)
        assert watched.wait(LIMIT + SLACK) == [1] * SIZE
        first = f"error: rank {victim} (127.0.0.1): ring: no neighbour answers"
        assert any(line.startswith(first) for line in watched.error_lines()), watched.err
        assert "Traceback" not in watched.errors()
    finally:
        watched.close()


def test_ranks_that_live_and_cannot_reach_each_other_end(tmp_path):
    ports = [ranks.free_port() for _ in range(SIZE)]
    wrong = [ports[0], ranks.free_port(), ports[2]]
    command = [*generate("Once upon", 300), *SHARED]
    watched = Watched([ranks.start_rank(tmp_path, i, ports if i else wrong, command) for i in range(SIZE)])
    try:
        watched.wait_until_struck(0)
        assert watched.wait(LIMIT + SLACK) == [1] * SIZE
        assert watched.errors() == f"error: {NOT_CONNECTED}\n"
    finally:
        watched.close()


def connecting(folder: Path, moment: str, number: int, victim: int) -> Watched:
    """Start ranks of which one is killed or stopped, or fails, at a moment of connecting."""
    program = ["-m", "tests.faulty_ring", moment, str(int(number)), str(victim)]
    return Watched(ranks.start(folder, SIZE, [*program, *generate("Once upon", 300)[1:], *SHARED]))


def test_ctrl_c_ends_all_ranks(tmp_path):
    watched = running_at("decode", tmp_path, 0)
    try:
        for process in watched.processes:
            process.send_signal(signal.SIGINT)
        assert watched.wait(LIMIT + SLACK) == [130] * SIZE
        assert ["interrupted" in "".join(pieces) for pieces in watched.err] == [True, False, False]
        assert "error" not in watched.errors()
    finally:
        watched.close()
