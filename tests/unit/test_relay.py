"""The relay that simulates links, and the table of their benchmark."""

import contextlib
import json
import socket
import threading
import time

import numpy as np
import pytest

from benchmarks import links
from benchmarks import relay as relayed
from benchmarks.links import Trip, links_of, promised, table, worker
from benchmarks.relay import Relay, connected
from tests.local_ranks import run_ranks


def through(rate, latency, messages, answer=4):
    """Send each message through a relay to a server that answers; return what arrived and the seconds of each."""
    arrived, seconds, ends = [], [], threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        relay = Relay({0: server.getsockname()[1]}, rate, latency)

        def serve():
            with server.accept()[0] as end:
                for message in messages:
                    arrived.append(end.recv(len(message), socket.MSG_WAITALL))
                    end.sendall(bytes(answer))

        def run():
            while not ends.is_set():
                relay.step(0.01)

        threads = [threading.Thread(target=each) for each in (serve, run)]
        for thread in threads:
            thread.start()
        with connected(("127.0.0.1", relay.ports[0])) as near:
            for message in messages:
                start = time.perf_counter()
                near.sendall(message)
                near.recv(answer, socket.MSG_WAITALL)
                seconds.append(time.perf_counter() - start)
        ends.set()
        for thread in threads:
            thread.join()
        relay.close()
    return arrived, seconds


def test_bytes_arrive_in_order_and_not_before_the_link_allows():
    rng = np.random.default_rng(0)
    messages = [rng.bytes(n) for n in (1, 4096, 300_000, 10)]
    rate, latency = 1e8, 0.005
    arrived, seconds = through(rate, latency, messages)
    assert arrived == messages
    for message, found in zip(messages, seconds, strict=True):
        least = 2 * latency + 8 * (len(message) + 4) / rate
        # Not earlier than promised; how much later depends on what else runs on this machine.
        assert least <= found


def test_a_connection_that_both_ends_have_closed_is_closed():
    with socket.create_server(("127.0.0.1", 0)) as server:
        relay = Relay({0: server.getsockname()[1]}, 1e8, 0.0)
        with connected(("127.0.0.1", relay.ports[0])):
            relay.step(10.0)
            server.accept()[0].close()
        ends = {end for wire in relay.wires for end in (wire.source, wire.sink)}
        for _ in range(100):
            relay.step(0.1)
            if not relay.wires:
                break
        relay.close()
    assert [end.fileno() for end in ends] == [-1, -1]
    assert relay.wires == []


def test_a_connection_ends_whose_target_no_longer_reads():
    with socket.create_server(("127.0.0.1", 0)) as server:
        relay = Relay({0: server.getsockname()[1]}, 1e12, 0.0)
        with connected(("127.0.0.1", relay.ports[0])) as near:
            relay.step(10.0)
            server.accept()[0].close()
            for _ in range(50):
                relay.step(0.0)
                near.setblocking(False)
                with contextlib.suppress(BlockingIOError, OSError):
                    near.send(bytes(200_000))
        for _ in range(100):
            relay.step(0.1)
            if not relay.wires:
                break
        relay.close()
    assert relay.wires == []


def test_a_worker_measures_each_size(monkeypatch):
    monkeypatch.setattr(links, "SECONDS", 0.0)
    found = run_ranks(2, lambda group: worker([4096, 65536], group))
    assert [trip.nbytes for trip in found[0]] == [4096, 65536]
    assert all(trip.seconds > 0 for trip in found[0])
    assert found[1] == []


def test_the_table_compares_with_what_is_promised():
    plain = Trip(125_000, 0.001)
    assert promised(plain, 1e9, 0.002) == pytest.approx(0.001 + 0.004 + 0.001, rel=1e-4)
    (_, _, row) = table([plain], [(1e9, 0.002)], [[Trip(125_000, 0.0066)]])
    assert row == "| 125,000 | 1.00 ms | 6.60 ms (1.10) |"
    assert links_of("1e9:0.001,1e10:0") == [(1e9, 0.001), (1e10, 0.0)]


def test_each_rank_connects_to_the_relay_in_place_of_the_next_rank(monkeypatch):
    # The file of addresses of rank r has rank r's own port, and the relay's in the place of rank r + 1.
    program = (
        "import json, os\n"
        "hosts, rank = json.load(open(os.environ['MLX_HOSTFILE'])), int(os.environ['MLX_RANK'])\n"
        "print(json.dumps([rank, [int(h[0].split(':')[1]) for h in hosts]]))"
    )
    made = []

    def relay(target, rate, latency):
        made.append((target, target + 10_000))
        return contextlib.nullcontext(target + 10_000)

    monkeypatch.setattr(relayed, "relay", relay)
    with relayed.ranks(["-c", program], 3, (1e9, 0.001)) as started:
        found = dict(json.loads(process.communicate()[0]) for process in started)
    ports = [port for port, _ in made]
    for rank, seen in found.items():
        expected = list(ports)
        expected[(rank + 1) % 3] += 10_000
        assert seen == expected
