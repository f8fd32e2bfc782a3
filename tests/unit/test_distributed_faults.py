"""Ranks that die or hang: every other rank ends within 10 s, and one line names the rank. Slow: real processes."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests import ranks
from tests.watched import LIMIT, MOMENTS, SHARED, SIZE, SLACK, Watched, generate, running_at

pytestmark = pytest.mark.slow

# Seconds from the start of a process until it has joined the others, on a busy machine.
STARTING = 5.0


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
        assert lines[0].startswith(
            f"error: rank {victim} (127.0.0.1): expected to run until the end, found that it has"
        )
        assert "Traceback" not in watched.errors(but=victim)
    finally:
        watched.close()


@pytest.mark.parametrize("victim", range(SIZE))
@pytest.mark.parametrize("after", [0.0, 0.2, 0.4, 0.6, 0.8])
def test_a_rank_that_stops_while_ranks_join_is_named(tmp_path, victim: int, after: float):
    watched = Watched(ranks.start(tmp_path, SIZE, [*generate("Once upon", 300), *SHARED]))
    try:
        time.sleep(after)
        os.kill(watched.processes[victim].pid, signal.SIGSTOP)
        assert watched.wait(STARTING + LIMIT + SLACK, but=victim) == [1, 1]
        (line,) = watched.error_lines(but=victim)
        assert line.startswith(f"error: rank {victim} (127.0.0.1): expected to "), line
    finally:
        watched.close()


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
