"""The parts of a run on several ranks: agreement, heartbeat, time line; and the command line."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from benchmarks.relay import connected
from mlx_engine.commands.console import reports_errors
from mlx_engine.distributed import heartbeat, shard
from mlx_engine.distributed.group import Group, gather_values
from mlx_engine.distributed.heartbeat import Beat, Heartbeat, Report
from mlx_engine.distributed.leader import Span, busy, drawing
from mlx_engine.distributed.shard import agree
from mlx_engine.errors import DistributedError
from tests import ranks
from tests.builtin import N_LAYERS
from tests.local_ranks import run_ranks
from tests.patience import PATIENCE, wait_for
from tests.unit.test_command_generate import generate


def test_ranks_that_differ_are_named():
    def run(group: Group) -> None:
        assert gather_values(group, "x" * group.rank) == ["", "x", "xx"]
        agree(group, {"version": "1", "files": "a" if group.rank < 2 else "b"})

    with pytest.raises(DistributedError, match="rank 2: differs from rank 0 in files: 'b', and rank 0 has 'a'; start"):
        run_ranks(3, run)


def heartbeat_of(rank: int, hosts: Sequence[str], end: Callable[[int, str | None], None], **settings: float):
    """Return a heartbeat that beats often, and whose end is recorded in place of ending the process."""
    made = Heartbeat(rank, hosts)
    made.interval, made.limit, made.end = 0.02, PATIENCE, end
    vars(made).update(settings)
    return made


class Ends:
    """Three ranks whose ends are recorded in place of ending the process; those that are missing never join."""

    def __init__(
        self, *, joining: float = PATIENCE, missing: tuple[int, ...] = (),
        pause: Callable[[Ends, int], None] = lambda ends, rank: None,
    ) -> None:  # fmt: skip
        self.found: dict[int, tuple[int, str | None]] = {}
        self.raised: dict[int, DistributedError] = {}
        hosts = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
        self.ranks = [heartbeat_of(rank, hosts, self.end_of(rank), joining=joining) for rank in range(len(hosts))]
        port = ranks.free_port()
        self.there = [rank for rank in self.ranks if rank.rank not in missing]
        threads = [threading.Thread(target=self.join, args=(rank, port)) for rank in self.there]
        for rank, thread in zip(self.there, threads, strict=True):
            thread.start()
            pause(self, rank.rank)
        for thread in threads:
            thread.join()

    def join(self, rank: Heartbeat, port: int) -> None:
        """Join; note the error."""
        try:
            rank.join(port)
        except DistributedError as error:
            self.raised[rank.rank] = error

    def end_of(self, rank: int):
        return lambda code, line: self.found.update({rank: (code, line)})

    def wait(self, *expected: int) -> dict[int, tuple[int, str | None]]:
        """Wait until these ranks have ended."""
        wait_for(lambda: set(self.found) >= set(expected))
        return self.found

    def cut(self, rank: int) -> None:
        """Let a rank die: its connections end."""
        self.ranks[rank]._is_ending = True
        for peer in list(self.ranks[rank]._peers.values()):
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End all ranks, and their threads."""
        for rank in range(3):
            self.cut(rank)
        closed(self.ranks)


def closed(ended: Sequence[Heartbeat]) -> None:
    """Wait for the threads of ranks that have ended, and close their connections."""
    for thread in threading.enumerate():
        if thread.name.startswith(("rank ", "heartbeat")):
            thread.join(PATIENCE)
    for rank in ended:
        for peer in rank._peers.values():
            peer.close()


def end(pair: Sequence[Heartbeat]) -> None:
    """End connected ranks. All are ending before a connection ends: a rank that is not would report a lost peer."""
    for rank in pair:
        rank._is_ending = True
    for peer in [peer for rank in pair for peer in rank._peers.values()]:
        with contextlib.suppress(OSError):  # the other side may have closed it
            peer.shutdown(socket.SHUT_RDWR)
    closed(pair)


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
    assert line == ("error: rank 2 (127.0.0.3) exited; all ranks end, start them again")


def test_rank_0_that_ends_is_named_by_rank_1(ends: Ends):
    ends.cut(0)
    found = ends.wait(1, 2)
    assert found[2] == (1, None)
    assert "rank 0 (127.0.0.1) exited" in str(found[1][1])


def stop(ends: Ends, rank: int) -> None:
    """Stop a rank, for which rank 0 waits shortly. It waits for others as long as tests do: the machine may be busy."""
    ends.ranks[0]._peers[rank].settimeout(0.2)
    before = ends.ranks[0]._heard[rank]
    wait_for(lambda: ends.ranks[0]._heard[rank] is not before)  # the next beat is waited for shortly
    ends.ranks[rank]._say = lambda **changes: None  # type: ignore[method-assign]


class Clock:
    """The clock of ranks that join. It stands still, or every reading puts it forward."""

    def __init__(self) -> None:
        self.now, self.step, self.n_readings, self.sleep = 0.0, 0.0, 0, time.sleep

    def monotonic(self) -> float:
        if not threading.current_thread().name.startswith("rank "):  # that listens to a rank
            self.n_readings += 1
            self.now += self.step
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(heartbeat, "time", made)
    return made


def test_a_rank_without_signs_of_life_is_named(ends: Ends):
    stop(ends, 2)
    found = ends.wait(0, 1)
    assert "rank 2 (127.0.0.3) gave no sign of life for" in str(found[0][1])
    assert found[1] == (1, None)


@pytest.mark.parametrize(("missing", "printing"), [((1,), 0), ((1, 2), 0), ((0,), 1)])
def test_ranks_that_do_not_join_are_named(clock: Clock, missing: tuple[int, ...], printing: int):
    def pause(ends: Ends, rank: int) -> None:
        if rank == ends.there[-1].rank:
            wait_for(lambda: 0 in missing or len(ends.ranks[0]._peers) == len(ends.there) - 1)
            clock.step = 0.1

    ends = Ends(joining=0.2, missing=missing, pause=pause)
    there = {0, 1, 2} - set(missing)
    assert set(ends.raised) == there
    found = ends.wait(*there)
    named = ", ".join(f"rank {rank} (127.0.0.{rank + 1})" for rank in missing)
    line = f"error: {named} did not join within 0.2 s of the others; all ranks end, start them again"
    assert found == {rank: (1, line if rank == printing else None) for rank in there}
    ends.close()


@pytest.mark.slow
def test_each_rank_that_joins_gives_the_others_more_time(clock: Clock):
    def pause(ends: Ends, rank: int) -> None:
        wait_for(lambda: clock.n_readings > 1 and len(ends.ranks[0]._peers) == rank)
        n_readings = clock.n_readings
        clock.now += 0.3
        wait_for(lambda: rank == 2 or clock.n_readings > n_readings + 1 or ends.found)

    ends = Ends(joining=0.5, pause=pause)  # rank 2 is 0.6 s later than rank 0
    assert (ends.found, ends.raised) == ({}, {})
    ends.close()


def test_who_says_no_number_of_a_rank_is_none():
    port, hosts, found = ranks.free_port(), ["127.0.0.1"] * 2, []
    pair = [heartbeat_of(rank, hosts, lambda *of: found.append(of)) for rank in range(2)]
    joining = threading.Thread(target=pair[0].join, args=(port,))
    joining.start()
    for said in (b"GET / HTTP/1.1\n", b"7\n", b""):
        with connected(("127.0.0.1", port)) as stranger:
            stranger.sendall(said)
    pair[1].join(port)
    joining.join(PATIENCE)
    assert ([sorted(rank._peers) for rank in pair], found) == ([[1], [0]], [])
    end(pair)


def test_a_stranger_that_says_a_byte_at_a_time_does_not_keep_the_ranks_waiting():
    """It says one more often than the limit; the limit is that of the whole line."""
    port, hosts, found = ranks.free_port(), ["127.0.0.1"] * 2, []
    pair = [heartbeat_of(rank, hosts, lambda *of: found.append(of)) for rank in range(2)]
    pair[0].limit = 0.3
    joining = threading.Thread(target=pair[0].join, args=(port,))
    joining.start()
    with connected(("127.0.0.1", port)) as stranger:
        stranger.settimeout(0.1)
        with contextlib.suppress(ConnectionError):  # rank 0 hangs up
            for _ in range(100):
                stranger.sendall(b"1")
                with contextlib.suppress(TimeoutError):
                    assert stranger.recv(1) == b""
                    break
            else:
                pytest.fail("rank 0 listens to a line without an end")
        pair[0].limit = PATIENCE
        pair[1].join(port)
    joining.join(PATIENCE)
    assert ([sorted(rank._peers) for rank in pair], found) == ([[1], [0]], [])
    end(pair)


def test_a_port_that_is_taken_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        rank = heartbeat_of(0, ["127.0.0.1"] * 2, lambda code, line: None)
        with pytest.raises(DistributedError, match=r"rank 0: cannot listen at 127.0.0.1:.* Address already in use"):
            rank.join(taken.getsockname()[1])
        rank._is_ending = True


def test_an_error_of_no_system_call_is_a_bug():
    def load() -> None:
        raise OSError("Could not find/load shared object file")

    with pytest.raises(OSError, match="shared object file"):
        reports_errors(load)()


def connecting(ends: Ends, *rings: Callable[[], object]) -> dict[int, object]:
    """Connect all ranks, each with a ring of its own; return what they get, also as an error."""
    found: dict[int, object] = {}

    def connect(rank: Heartbeat, ring: Callable[[], object]) -> None:
        try:
            found[rank.rank] = rank.connected(ring)
        except DistributedError as error:
            found[rank.rank] = error

    threads = [
        threading.Thread(target=connect, args=(rank, ring)) for rank, ring in zip(ends.ranks, rings, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return found


def test_ranks_connect_together(ends: Ends):
    assert connecting(ends, lambda: "zero", lambda: "one", lambda: "two") == {0: "zero", 1: "one", 2: "two"}
    assert ends.found == {}


def test_a_rank_that_cannot_connect_names_itself_and_ends_all(ends: Ends, monkeypatch: pytest.MonkeyPatch):
    def fails() -> None:
        raise DistributedError("no port is free", where="ring", hint="see there")

    monkeypatch.setattr(heartbeat, "COURTESY", 0.1)
    found = connecting(ends, lambda: None, lambda: None, fails)
    assert all(isinstance(error, DistributedError) for error in found.values())
    named = "error: rank 2 (127.0.0.3): ring: no port is free; see there"
    line = f"{named}; {heartbeat.START_AGAIN}"
    assert ends.wait(0, 1, 2) == {0: (1, None), 1: (1, None), 2: (1, line)}


@pytest.mark.slow
def test_a_rank_without_a_beat_while_ranks_connect_may_wait_for_another(ends: Ends):
    def stops() -> None:
        stop(ends, 2)
        ends.wait(0, 1)
        raise DistributedError("no neighbour answers", where="ring", hint="see there")

    connecting(ends, lambda: None, lambda: None, stops)
    line = str(ends.found[0][1])
    assert line.startswith("error: rank 2 (127.0.0.3) gave no sign of life for")
    assert "while the ranks connected: it or a rank that it waits for has stopped, or cannot be reached" in line


@pytest.mark.slow
def test_a_rank_that_keeps_the_gil_while_it_connects_ends_in_time():
    code = (
        "import ctypes\nfrom mlx_engine.distributed.heartbeat import Heartbeat\n"
        "Heartbeat.limit = 0.1\nHeartbeat(0, ['127.0.0.1']).connected(lambda: ctypes.PyDLL(None).sleep(100))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ranks.ROOT)
    assert (found.returncode, found.stdout, found.stderr) == (1, "", f"error: {heartbeat.NOT_CONNECTED}\n")


def test_a_run_that_ends_starts_no_notice():
    rank, found = heartbeat_of(0, ["127.0.0.1"], lambda code, line: None), []
    rank.connected(lambda: found.append(rank._notice is not None))
    rank._is_ending = True  # another thread prints why
    rank.connected(lambda: found.append(rank._notice is not None))
    assert found == [True, False]


def test_rank_0_prints_the_error_of_another_rank(ends: Ends):
    ends.ranks[1]._say(error="memory: expected enough memory, found none")
    found = ends.wait(0, 2)
    assert found[0] == (
        1,
        "error: rank 1 (127.0.0.2): memory: expected enough memory, found none; all ranks end, start them again",
    )
    assert found[2] == (1, None)


class Reporting:
    """Rank 0 of some ranks that report, which gives a short message 1 s."""

    def __init__(self, size: int) -> None:
        self.size, self.lines = size, list[str]()
        hosts = [f"host {rank}" for rank in range(size)]
        self.rank = heartbeat_of(0, hosts, lambda code, line: self.lines.append(str(line)), interval=0.5, limit=1.0)

    def hear(self, *reports: Report | None) -> list[str]:
        """Have the ranks report once, or not; return the lines of lost messages, without their last part."""
        for rank, report in enumerate(reports):
            if report is not None:
                self.rank._hear(rank, Beat(report=report))
        self.rank._find_lost_messages()
        found, self.lines, self.rank._is_ending = self.lines, [], False
        return [line.removeprefix("error: ").partition(";")[0] for line in found]

    def first(self, n: int, *reports: Report | None) -> tuple[int, str] | None:
        """Have the ranks report n times; return when a message is found lost and the line, None if none is."""
        found = [(i, line) for i in range(1, n + 1) for line in self.hear(*reports)]
        return found[0] if found else None


def test_a_message_that_was_sent_and_does_not_arrive_is_lost():
    ranks, idle, waits = Reporting(3), Report(), Report(sent=4, awaited=6)
    line = "rank 1 (host 1): a message that was sent does not arrive at rank 2 (host 2)"
    assert ranks.first(9, idle, Report(sent=5), waits) is None  # rank 1 computes
    assert ranks.first(4, idle, Report(sent=6), waits) == (4, line)
    assert ranks.first(9, idle, Report(sent=6), Report(sent=4, awaited=7)) is None  # the message has arrived
    long = Report(sent=4, awaited=7, nbytes=1_000_000)
    assert ranks.first(6, idle, Report(sent=7), long) == (6, line)
    assert ranks.first(9, Report(sent=4, awaited=5), Report(sent=7), Report(sent=4)) is None  # rank 2 has sent four


def test_a_gather_that_all_have_begun_and_that_does_not_end_is_lost():
    ranks, inside, after = Reporting(3), Report(gathers=7, awaited_gather=7), Report(gathers=7)
    assert ranks.first(9, inside, Report(gathers=6), inside) is None  # rank 1 computes
    on = "a gather that all ranks have begun does not end on rank 1 (host 1), rank 2 (host 2)"
    assert ranks.first(4, after, inside, inside) == (4, f"rank 0 (host 0): {on}")
    following = Report(gathers=8, awaited_gather=8)
    assert ranks.first(3, following, following, following) is None  # it ended, and the next one may take as long
    assert ranks.first(9, following, after, following) is None


def test_a_rank_that_reports_nothing_loses_no_message():
    ranks, inside = Reporting(2), Report(gathers=1, awaited_gather=1)
    assert ranks.first(2, inside, inside) is None
    assert ranks.first(9, inside, None) is None
    assert ranks.first(3, inside, inside) is not None


def test_a_link_that_loses_messages_is_named():
    ends = Ends()
    ends.ranks[0].limit = 0.3  # of messages: that of silence was read when the ranks joined
    ends.ranks[1].report, ends.ranks[2].report = lambda: Report(sent=3), lambda: Report(awaited=3)
    found = ends.wait(0, 1, 2)
    assert found[0] == (
        1,
        "error: rank 1 (127.0.0.2): a message that was sent does not arrive at rank 2 (127.0.0.3); "
        "all ranks end, start them again",
    )
    assert (found[1], found[2]) == ((1, None), (1, None))
    ends.close()


IN, AFTER = Report(gathers=3, awaited_gather=3), Report(gathers=3)


@pytest.mark.parametrize(
    ("reports", "named", "waiting"),
    [
        ((IN, AFTER, IN), "rank 1 (127.0.0.2)", "rank 0 (127.0.0.1), rank 2 (127.0.0.3)"),
        ((AFTER, IN, AFTER), "rank 0 (127.0.0.1), rank 2 (127.0.0.3)", "rank 1 (127.0.0.2)"),
        ((IN,) * 3, *["rank 0 (127.0.0.1), rank 1 (127.0.0.2), rank 2 (127.0.0.3)"] * 2),
    ],
)
def test_ranks_whose_gather_has_ended_are_named_if_it_does_not_end_on_others(reports, named: str, waiting: str):
    ends = Ends()
    ends.ranks[0].limit = 0.3
    for rank, report in enumerate(reports):
        ends.ranks[rank].report = lambda report=report: report
    found = f"a gather that all ranks have begun does not end on {waiting}"
    line = f"error: {named}: {found}; all ranks end, start them again"
    assert line in [printed for _, printed in ends.wait(0, 1, 2).values()]
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
    sleeping.join(PATIENCE)
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
    (code, out, err), other = ranks.run(tmp_path, 2, [*command, "--shard", "pipeline", "--split", f"{N_LAYERS - 2},2"])
    assert (code, err) == (0, "")
    assert other == (0, "", "")
    keys = "token_ids", "text", "prompt_ids", "finish_reason"
    one, two = ranks.last_json(alone.out), ranks.last_json(out)
    assert [two[key] for key in keys] == [one[key] for key in keys]


@pytest.mark.slow
def test_a_process_without_shard_imports_nothing_of_it():
    code = (
        "import sys\nfrom mlx_engine.commands import main\n"
        "sys.argv = 'cli.py generate -p Once -n 2 -b simd'.split()\n"
        "try:\n    main()\nfinally:\n"
        "    print([name for name in sys.modules if name.startswith('mlx_engine.distributed')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ranks.ROOT)
    assert found.stdout.startswith("Once")
    assert found.stdout.splitlines()[-1] == "[]"


def test_a_process_alone_has_nobody_to_share_with(monkeypatch, capsys):
    from mlx_engine.commands import app

    monkeypatch.delenv("MLX_HOSTFILE", raising=False)
    for options, expected in (
        (["--shard", "pipeline"], "--shard needs mlx.launch: mlx.launch -n 2 --backend ring -- ..."),
        (["--shard", "rows"], "--shard: unknown kind 'rows'; choose pipeline or tensor"),
        (["--split", "1,2"], "--split needs --shard pipeline"),
        (["--timeline"], "--timeline needs --shard pipeline"),
        (["--shard", "tensor", "--timeline"], "--timeline needs --shard pipeline"),
    ):
        with pytest.raises(SystemExit) as ended:
            app(["generate", "-p", "x", *options])
        assert ended.value.code == 2
        assert expected in capsys.readouterr().err


def test_the_version_changes_with_the_source(tmp_path, monkeypatch):
    package, kernels = tmp_path / "package", tmp_path / "kernels"
    package.mkdir()
    kernels.mkdir()
    monkeypatch.setattr(shard, "PACKAGE", package)
    found = [shard.version()]
    for file in (package / "one.py", package / "kernels.py", kernels / "one.metal"):
        file.write_text("one = 1\n")
        found.append(shard.version())
    assert len(set(found)) == len(found)
    # The folder of another distribution that is called `kernels` is next to a package that was installed from a wheel.
    (package / "kernels.py").unlink()
    assert shard.version() == found[1]
    assert found[0].startswith("MLX 0.")
