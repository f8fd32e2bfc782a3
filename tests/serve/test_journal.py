"""`--journal` and `replay`: every request can be run again to the same bits, and no disk holds up an answer."""

from __future__ import annotations

import base64
import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

import mlx_engine
from mlx_engine.checkpoint.identity import identity
from mlx_engine.commands import app
from mlx_engine.errors import OptionError
from mlx_engine.loop.sampler import Sampler
from mlx_engine.serve.journal import Entry, Journal, ModelId, Recorder, parse_entry
from tests.patience import PATIENCE
from tests.serve.served import HTTP, MICRO, Served, chat_body, served, wait_for

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@contextmanager
def journaled(path: Path, warnings: list[str] | None = None, **options: Any) -> Iterator[Served]:
    warned = [] if warnings is None else warnings
    journal = Journal(path, warn=warned.append, **options)
    about = ModelId("micro", str(MICRO), identity(MICRO), {"quant": "keep"})
    recorder = Recorder(journal, about, backend="parallel", slots=4)
    with served(recorder=recorder, prefix_cache=True) as server:
        yield server
    assert not journal._thread.is_alive()


def entries(path: Path) -> list[Entry]:
    return [parse_entry(line, "journal") for line in path.read_bytes().splitlines()]


def mixed(server: Served) -> None:
    """Requests of every kind, several at a time; some clients leave."""
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT, chat_body("one", temperature=1.3, seed=5)),
        (CHAT, chat_body("two", temperature=1, seed=-1, n=2, max_tokens=12)),
        (CHAT, chat_body("three", temperature=1, n=3, stream=True, top_p=0.9, presence_penalty=0.5)),
        (CHAT, chat_body("four", logit_bias={"40": 5, "41": -100}, repetition_penalty=1.1)),
        (CHAT, chat_body("five", stop=list("abcdefghijklmnop"), max_tokens=60, temperature=1, seed=3)),
        (CHAT, chat_body("six", ignore_eos=False, max_tokens=60, temperature=1.5, seed=3)),
        (TEXT, {"prompt": ["seven", "7"], "n": 2, "max_tokens": 9, "seed": 1, "logprobs": 3}),
        ("/v1/responses", {"input": "ten", "max_output_tokens": 9, "ignore_eos": True}),
        ("/v1/messages", {**chat_body("eleven", temperature=1), "stop_sequences": ["e"], "stream": True}),
    ]
    with ThreadPoolExecutor(4) as clients:
        replies = list(clients.map(lambda body: server.post(*body), bodies))
    assert {reply.status_code for reply in replies} == {200}
    server.gate.hold()
    for body in (
        chat_body("eight", max_tokens=300, temperature=1, n=2),
        chat_body("nine", max_tokens=300, stream=True),
    ):
        with server.connect(CHAT, body):
            server.gate.run(7)
        wait_for(lambda: server.worker.n_open == 0)
    server.gate.allow()


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("journal") / "requests.jsonl"
    with journaled(path) as server:
        mixed(server)
    return path


def replay(path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["replay", str(path), "-b", "parallel", "-t", "1", *arguments])


def edited(journal: Path, tmp_path: Path, change: Callable[[int, dict[str, Any]], None]) -> Path:
    """Return a copy of a journal whose lines were changed; `change` gets each one's number."""
    found, lines = tmp_path / "edited.jsonl", []
    for number, line in enumerate(journal.read_text().splitlines(), start=1):
        entry = json.loads(line)
        change(number, entry)
        lines.append(json.dumps(entry))
    found.write_text("\n".join(lines) + "\n")
    return found


def test_a_line_has_what_the_reply_had(tmp_path: Path):
    path = tmp_path / "journal.jsonl"
    with journaled(path) as server:
        headers = {"X-Client-Request-Id": "mine"}
        reply = server.post(CHAT, chat_body("hello", temperature=1, n=2), headers=headers).json()
        server.post(CHAT, chat_body(max_tokens="x"))  # an error has no line
        server.chat("other")
    first, second = entries(path)
    assert (first.id, first.client_id, first.ended, second.client_id) == (reply["id"], "mine", "finished", None)
    assert [choice.digest for choice in first.choices] == reply["mlx_engine"]["digests"]
    assert first.options["seed"] == reply["mlx_engine"]["seed"]
    assert [len(choice.token_ids) for choice in first.choices] == [8, 8]
    assert len(first.prompt_ids) == reply["usage"]["prompt_tokens"]
    assert first.timings["prompt_n"] == reply["mlx_engine"]["timings"]["prompt_n"]
    assert abs(first.received - reply["created"]) < 60
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_all_bits_are_the_same_at_other_batch_sizes(journal: Path):
    found = entries(journal)
    assert len(found) == 12
    assert {len(entry.choices) for entry in found} == {1, 2, 3}
    cut = [entry for entry in found if entry.ended == "cancelled"]
    assert [len(entry.choices) for entry in cut] == [2, 1]
    assert all(0 < entry.n_tokens < 300 for entry in cut)
    assert "stop" in {choice.finish_reason for entry in found for choice in entry.choices}
    result = replay(journal)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [f"slots {n}: 12 of 12 requests agree" for n in (1, 4, 16)]


@pytest.mark.slow
def test_activations_in_fixed_point_have_the_same_bits_in_any_batch_and_others_than_float32(tmp_path: Path):
    path = tmp_path / "fixed.jsonl"
    about = ModelId("micro", str(MICRO), identity(MICRO), {"activations": "i16"})
    recorder = Recorder(Journal(path, warn=print), about, backend="parallel", slots=4)
    engine = mlx_engine.load(MICRO, "parallel", activations="i16")
    with served(engine=engine, recorder=recorder, prefix_cache=True) as server:
        mixed(server)
    assert replay(path).stdout.splitlines() == [f"slots {n}: 12 of 12 requests agree" for n in (1, 4, 16)]
    exact = edited(path, tmp_path, lambda number, entry: entry["model"].update(options={}))
    assert "slots 1: 0 of 12 requests agree" in replay(exact, "--slots", "1").stdout


def test_what_differs_is_named(journal: Path, tmp_path: Path):
    changed = list[int]()

    def change(number: int, entry: dict[str, Any]) -> None:
        choice = entry["choices"][-1]
        if len(choice["token_ids"]) < 5 or len(changed) == 5:
            return
        changed.append(number)
        if len(changed) == 1:
            choice["digest"] = "0" * 64
        elif len(changed) == 2:
            choice["token_ids"][3] += 1
        elif len(changed) == 3:
            choice["token_ids"].pop()
            choice["logprobs"] = base64.b64encode(base64.b64decode(choice["logprobs"])[:-4]).decode()
        elif len(changed) == 4:
            entry["prompt_ids"] = entry["prompt_ids"][:-1]
        else:
            entry["prompt_ids"] = [10**6]

    result = replay(edited(journal, tmp_path, change), "--slots", "2")
    assert result.exit_code == 1
    first, *lines = result.stdout.splitlines()
    assert first == "slots 2: 7 of 12 requests agree"
    texts = [line.split(": with 2 slots: ") for line in lines]
    assert list(dict.fromkeys(int(head.rpartition(":")[2]) for head, _ in texts)) == changed
    said = "\n".join(text for _, text in texts)
    assert "but the digest in the journal differs" in said
    assert "token 3: expected" in said
    assert "expected the end, found" in said
    assert "cannot be run: the prompt must be a sequence of token ids" in said


def test_a_log_probability_that_differs_by_a_bit_is_found(journal: Path, monkeypatch: pytest.MonkeyPatch):
    whole = Sampler.logprobs

    def nudged(self: Sampler, n: int) -> Any:
        found = whole(self, n)
        if len(self._recent) == self._n_prompt + 1:
            object.__setattr__(found, "logprob", float(np.nextafter(np.float32(found.logprob), np.float32(0))))
        return found

    monkeypatch.setattr(Sampler, "logprobs", nudged)
    result = replay(journal, "--slots", "4", "--limit", "3")
    assert result.exit_code == 1
    assert result.stdout.startswith("slots 4: 0 of 3 requests agree")
    assert ": token 0: expected the log-probability -" in result.stdout


def test_damaged_lines_are_skipped_and_counted(journal: Path, tmp_path: Path):
    lines = journal.read_bytes().splitlines()[:2]
    damaged = [
        b"{",
        lines[0],
        lines[0][:-30],
        b"",
        lines[1],
        lines[1].replace(b'"format":1', b'"format":2'),
        b"\xff",
        lines[1].replace(b'"quant":', b'"path":'),
    ]
    path = tmp_path / "damaged.jsonl"
    path.write_bytes(b"\n".join(damaged))
    result = replay(path, "--slots", "4")
    assert result.exit_code == 1
    assert result.stdout == "slots 4: 2 of 2 requests agree\n"
    reported = [line.partition(": expected a line of a journal")[0] for line in result.stderr.splitlines()]
    assert reported == [f"error: {path}:{number}" for number in (1, 3, 6, 7, 8)]


def test_another_model_is_an_error(journal: Path, tmp_path: Path):
    result = replay(journal, "-m", "builtin")
    assert result.exit_code == 2
    assert f"builtin has other weights than the model of the journal, micro from {MICRO}" in result.stderr
    two = edited(journal, tmp_path, lambda n, entry: entry["model"].update(digest="0") if n == 2 else None)
    result = replay(two, "--slots", "4")
    assert result.exit_code == 1
    assert "slots 4: 11 of 11 requests agree" in result.stdout
    assert "1 requests have another model or other options: lines 2" in result.stderr
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert replay(empty).exit_code == 2
    assert "has no requests that serve --journal has written: it is empty" in replay(empty).output
    assert replay(tmp_path / "none.jsonl").exit_code == 1


# ---- disks ----


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_stops_no_answer():
    warnings = list[str]()
    with journaled(Path("/dev/full"), warnings) as server, ThreadPoolExecutor(8) as clients:
        replies = list(clients.map(lambda i: server.chat(f"{i}", max_tokens=4), range(24)))
        assert {reply.status_code for reply in replies} == {200}
        wait_for(lambda: 'journal_lost_total{reason="disk"} 24' in HTTP.get(server.url + "/metrics").text)
        assert "mlx_engine:journal_lines_total 0\n" in HTTP.get(server.url + "/metrics").text
    assert len(warnings) == 1
    assert "/dev/full cannot be written: No space left on device" in warnings[0]


def test_the_journal_goes_on_when_there_is_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, warnings, room = tmp_path / "journal.jsonl", list[str](), [10]
    write = os.write

    def limited(file: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        n = write(file, data[: room[0]])
        room[0] -= n
        return n

    journal = Journal(path, warn=warnings.append)
    monkeypatch.setattr("mlx_engine.serve.journal.os.write", limited)
    for i in range(3):
        journal.add(lambda i=i: b"line %d" % i)  # type: ignore[misc]
    wait_for(lambda: 'reason="disk"} 2' in "\n".join(journal.lines()))
    room[0] = 1000
    journal.add(lambda: b"line 3")
    journal.close()
    # The part of a line is ended before the next one.
    assert path.read_bytes() == b"line 0\nlin\nline 3\n"
    assert len(warnings) == 1
    assert next(line for line in journal.lines() if "lines_total " in line and "#" not in line).endswith(" 2")


def test_a_slow_disk_loses_lines_and_not_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    free, warnings, write = threading.Event(), list[str](), os.write

    def slow(file: int, data: bytes) -> int:
        assert free.wait(PATIENCE)
        return write(file, data)

    monkeypatch.setattr("mlx_engine.serve.journal.os.write", slow)
    path = tmp_path / "journal.jsonl"
    with journaled(path, warnings, queue=3) as server:
        for i in range(8):
            assert server.chat(f"{i}", max_tokens=2).status_code == 200
        assert 'journal_lost_total{reason="queue"} 4' in HTTP.get(server.url + "/metrics").text
        free.set()
    assert len(entries(path)) == 4
    assert len(warnings) == 1


def test_a_line_that_cannot_be_made_does_not_end_the_journal(tmp_path: Path):
    journal = Journal(tmp_path / "journal.jsonl", warn=lambda text: None)

    def fault() -> bytes:
        raise RuntimeError("planted")

    journal.add(fault)
    journal.add(lambda: b"line")
    journal.close()
    assert (tmp_path / "journal.jsonl").read_bytes() == b"line\n"
    assert 'mlx_engine:journal_lost_total{reason="error"} 1' in journal.lines()


def test_a_journal_goes_on_after_a_line_that_was_cut_off(tmp_path: Path):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"whole\nhal")
    journal = Journal(path, warn=lambda text: None)
    journal.add(lambda: b"next")
    journal.close()
    assert path.read_bytes() == b"whole\nhal\nnext\n"


def test_files_that_cannot_be_a_journal_are_refused(tmp_path: Path):
    with pytest.raises(OptionError, match=r"--journal: .* cannot be written"):
        Journal(tmp_path, warn=lambda text: None)
    result = CliRunner().invoke(app, ["serve", "--port", "0", "--journal", "-"])
    assert result.exit_code == 2
    assert "--journal needs a file" in result.stderr


def test_the_identity_of_a_checkpoint(tmp_path: Path):
    copy = tmp_path / "other-name.gguf"
    data = bytearray(MICRO.read_bytes())
    copy.write_bytes(data)
    assert identity(copy) == identity(MICRO)
    data[-1] ^= 1
    copy.write_bytes(data)
    assert identity(copy) != identity(MICRO)
    folder = MICRO.parent / "hf"
    assert identity(folder) == identity(folder) != identity(MICRO)
