"""Prefixes on disk: what is written, read, marked, removed and refused."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("numba")

import mlx_engine
from mlx_engine.cache import disk
from mlx_engine.cache.disk import DiskPrefixes, Key, PrefixFolder, SavedPrefixes, chains, files_in
from mlx_engine.cache.prefix import PrefixCache
from mlx_engine.checkpoint import identity
from mlx_engine.checkpoint.sources import BUILTIN
from mlx_engine.commands import app
from mlx_engine.commands.chat import resume
from mlx_engine.conversation import Conversation
from mlx_engine.errors import FormatError, OptionError, SourceError
from mlx_engine.loop.logprobs import digest
from mlx_engine.loop.scheduler import Scheduler
from mlx_engine.observe import log
from mlx_engine.options import Options
from mlx_engine.serve.prometheus import Metrics
from mlx_engine.serve.worker import Load
from tests.golden.goldens import DATA
from tests.golden.test_prefix_disk import OPTIONS, PAGE, answers, model, opened
from tests.patience import PATIENCE
from tests.properties.prefix_damage import Cases
from tests.streams import request_of

PROMPT = [(7 * i) % 300 for i in range(4 * PAGE + 5)]
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(log, "warn", found.append)
    return found


def folder_of(path: Path, max_nbytes: int = 1 << 30) -> PrefixFolder:
    folder = PrefixFolder(path, max_nbytes, "a model", lambda _: {"model": "x"})
    assert folder.wait()
    return folder


def kept(folder: PrefixFolder, i: int, nbytes: int = 1000) -> Key:
    key = Key(bytes([i]) * 32, "0")
    assert folder.claim(key)
    folder.keep(key, np.full(nbytes, i, dtype=np.uint8), time.time_ns() + i)
    return key


def test_damaged_files_are_removed_and_computed(tmp_path: Path):
    cases = Cases(tmp_path)
    for seed in range(60):
        cases.run(seed)
    assert min(cases.used.values()) >= 10
    assert set(cases.used) == {"from files", "computed", "damaged"}


def test_the_chain_depends_on_every_token_before_and_on_the_page():
    ids = np.arange(40)
    other = ids.copy()
    other[3] = 99
    found, changed = chains(ids, 8), chains(other, 8)
    assert len(found) == 5
    assert not set(found) & set(changed)
    assert chains(ids[:39], 8) == found[:4]
    assert chains(np.arange(40), 4)[1] != found[0]


def test_only_this_user_can_read_the_files_and_the_folder_says_what_it_is(tmp_path: Path):
    folder = folder_of(tmp_path / "new" / "prefixes")
    kept(folder, 1)
    assert folder.ours is not None
    for path in (folder.path, folder.ours, folder.ours / "drafts", folder.path / disk.DIGESTS):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert "Prompts can be recovered" in (folder.path / disk.README).read_text()
    assert (folder.ours / disk.ABOUT).read_text() == "model: x\n"
    assert list((folder.ours / "drafts").iterdir()) == []
    folder.close()


def test_the_least_recently_used_files_are_removed_and_a_prefix_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(disk, "STEP_NS", 1)
    folder = folder_of(tmp_path, 6100)
    keys = [kept(folder, i) for i in range(4)]
    folder.use([key.chain for key in keys[:2]], ["0"])
    for i in range(4, 6):
        keys.append(kept(folder, i))
    assert [folder.has(key) for key in keys] == [True, True, False, True, True, True]
    folder.close()
    again = folder_of(tmp_path, 6100)
    assert again.stats.nbytes == sum(size for _, size, _ in files_in(tmp_path)) <= 6100
    ends = [
        time for time, _, path in sorted(files_in(tmp_path), reverse=True) if path.name in {k.name for k in keys[:2]}
    ]
    assert ends[0] - ends[1] == disk.STEP_NS
    again.close()


def test_a_folder_that_was_cleaned_up_is_still_bounded(tmp_path: Path, warnings: list[str]):
    """Some systems remove files and empty folders that have not been used for days."""
    folder = folder_of(tmp_path, 6100)
    assert folder.ours is not None
    (folder.ours / disk.ABOUT).unlink()
    (folder.ours / "drafts").rmdir()
    keys = [kept(folder, i) for i in range(20)]
    assert folder.has(keys[-1])
    assert sum(path.stat().st_size for path in folder.ours.glob(f"*{disk.ENDING}")) <= 6100
    assert (folder.ours / disk.ABOUT).read_text() == "model: x\n"
    assert not warnings
    folder.close()


def test_a_full_disk_leaves_no_empty_description(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]):
    def full(self: Path, *_: object, **__: object) -> None:
        self.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        assert not PrefixFolder(tmp_path, 1 << 30, "a model", lambda _: {"model": "x"}).wait()
    assert len(warnings) == 1
    folder = folder_of(tmp_path)
    assert (tmp_path / disk.README).read_text() == disk.TEXT
    folder.close()


def test_a_full_disk_costs_one_warning_and_the_oldest_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
):
    folder = folder_of(tmp_path)
    first, *newer = (kept(folder, i) for i in range(10, 18))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(disk.os, "utime", full)
        others = [kept(folder, i) for i in (2, 3)]
    assert [folder.has(key) for key in (first, *newer)] == [False, *[True] * 7]
    assert not any(map(folder.has, others))
    assert warnings == [f"{tmp_path}: prefixes are not kept there (No space left on device); prompts are computed"]
    folder._paused_until = 0.0
    assert folder.has(kept(folder, 2))
    folder.close()


def test_a_removed_folder_and_one_of_another_user_cost_one_warning_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
):
    of = model("qwen3", "simd", "f32")
    cold, _ = answers(of, [PROMPT], prefix=False)
    folder = opened(of, tmp_path / "a")
    answers(of, [PROMPT], folder)
    for path in sorted((tmp_path / "a").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert answers(of, [PROMPT, PROMPT[:40]], folder)[0][:1] == cold
    folder.close()
    monkeypatch.setattr(disk.os, "getuid", lambda: os.geteuid() + 1)
    other = PrefixFolder(tmp_path / "b", 1 << 30, "model", lambda _: {})
    assert not other.wait()
    assert answers(of, [PROMPT], other)[0] == cold
    other.close()
    assert len(warnings) == 2
    assert "not a folder that this user alone can read" in warnings[1]


def test_pages_that_are_evicted_before_they_are_written_are_dropped(tmp_path: Path):
    of = model("gemma3", "simd", "f32")
    folder = opened(of, tmp_path)
    hold, go = disk.threading.Event(), disk.threading.Event()
    folder.do(lambda: (hold.set(), go.wait(10)))  # type: ignore[func-returns-value,arg-type,return-value]
    hold.wait(10)
    flush, folder.flush = folder.flush, go.set  # type: ignore[method-assign,assignment]
    prompts = [[i, *PROMPT[1:]] for i in range(6)]
    cold, _ = answers(of, prompts, prefix=False)
    found, _ = answers(of, prompts, folder, n_tokens=2 * len(PROMPT))
    flush()
    assert found == cold
    assert folder.stats.dropped > 10
    assert folder.stats.written > 0
    folder.close()
    again = opened(of, tmp_path)
    assert answers(of, prompts, again)[0] == cold
    assert again.stats.read > 0 == again.stats.damaged
    again.close()


def test_files_of_another_process_are_found(tmp_path: Path):
    of = model("qwen3", "simd", "f32")
    first, second = opened(of, tmp_path), opened(of, tmp_path)
    answers(of, [PROMPT], first)
    _, (request,) = answers(of, [PROMPT], second)
    assert request.n_from_disk == 4 * PAGE
    first.close()
    second.close()


@pytest.mark.parametrize("ending", ["-s.kv", "-0.kv"])
def test_files_that_another_process_has_removed_are_looked_up_once(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    of, prompt = model("qwen35", "simd", "f32"), [(7 * i) % 300 for i in range(20 * PAGE + 5)]
    cold, _ = answers(of, [prompt], prefix=False)
    first = opened(of, tmp_path)
    assert answers(of, [prompt], first)[0] == cold
    first.close()
    second, read = opened(of, tmp_path), Counter[str]()
    paths = [path for _, _, path in files_in(tmp_path) if path.name.endswith(ending)]
    assert len(paths) > 5
    for path in paths:
        path.unlink()

    def counted(path: Path, buffer: memoryview, at: int = 0) -> int:
        read[path.name] += 1
        return read_into(path, buffer, at)

    read_into = disk.read_into
    monkeypatch.setattr(disk, "read_into", counted)
    found, (request,) = answers(of, [prompt], second)
    assert found == cold
    assert request.n_from_disk == second.stats.damaged == 0
    assert max(read.values()) == 1
    second.close()


CHILD = """
import sys, mlx_engine
from pathlib import Path
from mlx_engine.cache import pool
with mlx_engine.load("builtin", "simd", prefix_dir=sys.argv[1]) as engine:
    print("ready", flush=True)
    for i in range(1000):
        engine.generate([i % 500 + 5] + list(range(10, 500)), 1)
"""


def killed_while_writing(path: Path, rng: random.Random) -> None:
    """Kill a process that writes, after 0 to 0.3 s of writing."""
    with subprocess.Popen([sys.executable, "-c", CHILD, str(path)], cwd=ROOT, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        time.sleep(rng.uniform(0, 0.3))
        child.send_signal(signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, pytest.param(200, marks=pytest.mark.slow)])
def test_a_process_that_is_killed_leaves_no_wrong_file(tmp_path: Path, n: int):
    rng, prompts = random.Random(0), [[i + 5, *range(10, 500)] for i in range(3)]
    with mlx_engine.load("builtin", "simd") as engine:
        cold = [engine.generate(ids, 3, logprobs=0).digest for ids in prompts]
    for _ in range(n):
        killed_while_writing(tmp_path, rng)
        with mlx_engine.load("builtin", "simd", prefix_dir=tmp_path) as engine:
            assert [engine.generate(ids, 3, logprobs=0).digest for ids in prompts] == cold
            assert engine._prefixes is not None
            assert engine._prefixes.stats.damaged == 0
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.slow
def test_an_engine_reads_what_an_earlier_one_wrote_and_refuses_what_it_cannot_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(disk, "BRIEFLY", PATIENCE)  # a busy machine opens the folder late
    ids = list(range(10, 300))
    for kv_type in ("f32", "q8_0"):
        for n_disk in (0, 256):
            with mlx_engine.load("builtin", "simd", kv_type=kv_type, prefix_dir=tmp_path) as engine:
                stream = engine.run(ids, Options.of(2), scheduler=engine.scheduler(kv_memory=64 << 20))
                assert "".join(stream) == stream.generation.text
                assert stream.request.n_from_disk == n_disk
    assert len({path.parent for _, _, path in files_in(tmp_path)}) == 2
    with mlx_engine.load("builtin", "simd") as engine, pytest.raises(OptionError, match="prefix_disk must be"):
        engine.keep_prefixes(tmp_path, -1)
    with pytest.raises(OptionError, match="prefix_dir needs another backend than scalar"):
        mlx_engine.load("builtin", "scalar", prefix_dir=tmp_path)


def test_a_changed_model_file_has_another_digest(tmp_path: Path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"a" * 1000)
    first = identity.kept_digest(file, tmp_path)
    assert first == identity.kept_digest(file, tmp_path) == identity.digest(file)
    (kept_in,) = tmp_path.glob("*.sha256")
    kept_in.write_text("damaged")
    assert identity.kept_digest(file, tmp_path) == first
    status = file.stat()
    file.write_bytes(b"a" * 999 + b"b")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert identity.kept_digest(file, tmp_path) != first


def test_a_model_file_that_is_replaced_after_it_was_loaded_has_no_identity(tmp_path: Path, warnings: list[str]):
    file, ids = tmp_path / "model.gguf", list(range(10, 250))
    shutil.copy(BUILTIN, file)
    with mlx_engine.load(file, "simd") as engine:
        shutil.copy(file, tmp_path / "new.gguf")
        (tmp_path / "new.gguf").replace(file)
        conversation = Conversation(engine)
        assert conversation.state()["model"] is None
        with pytest.raises(SourceError, match="changed since they were loaded"):
            engine.save_prefix(tmp_path / "prefix.kv", ids)
        engine.keep_prefixes(tmp_path / "prefixes")
        assert isinstance(engine._prefixes, PrefixFolder)
        assert not engine._prefixes.wait()
    assert len(warnings) == 1
    assert not files_in(tmp_path / "prefixes")


def test_a_second_folder_keeps_its_own_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def opened_at_once(*given: Any) -> PrefixFolder:
        folder = PrefixFolder(*given)
        assert folder.wait()
        return folder

    monkeypatch.setattr("mlx_engine.engine.PrefixFolder", opened_at_once)
    with mlx_engine.load("builtin", "simd") as engine:
        engine._prefixes = SavedPrefixes()  # as an earlier folder that is not open yet
        engine.keep_prefixes(tmp_path)
        assert engine._prefixes.identity == engine.prefix_identity()


def test_a_saved_prefix_is_used_and_its_damage_is_computed(tmp_path: Path):
    file, ids = tmp_path / "prefix.kv", list(range(10, 250))
    with mlx_engine.load("builtin", "simd") as engine:
        cold = engine.generate([*ids, 9], 4, logprobs=0).digest
        assert engine.save_prefix(file, ids) == 192
    for n in (192, 64):
        with mlx_engine.load("builtin", "simd") as engine:
            assert engine.load_prefix(file) == ids
            found = engine.generate([*ids, 9], 4, logprobs=0)
            assert (found.n_cached, found.digest) == (n, cold)
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with (
        mlx_engine.load("builtin", "simd", kv_type="f16") as engine,
        pytest.raises(FormatError, match="of another type of keys and values"),
    ):
        engine.load_prefix(file)
    for damaged in (b"", b"x" * 500, content[:60], content[:100] + b"x" + content[101:]):
        file.write_bytes(damaged)
        with mlx_engine.load("builtin", "simd") as engine, pytest.raises(FormatError):
            engine.load_prefix(file)


@pytest.mark.some(2)
@pytest.mark.parametrize("architecture", ["gemma3-micro", "gemma4e-micro", "qwen3_5-micro", "lfm2-micro"])
def test_a_saved_prefix_of_models_with_windows_states_and_shared_layers(architecture: str, tmp_path: Path):
    file, ids = tmp_path / "prefix.kv", [(3 * i) % 50 + 4 for i in range(130)]

    def run(engine: mlx_engine.Engine) -> tuple[str, int, Scheduler]:
        request = request_of(ids, Options.of(logprobs=0), max_tokens=5)
        scheduler = engine.scheduler_for([request], keeps=True)
        scheduler.submit(request)
        while scheduler.has_work:
            scheduler.step()
        logprobs = [token.logprob for token in request.output.logprobs or ()]
        return digest(request.output.token_ids, logprobs), request.n_from_disk, scheduler

    with mlx_engine.load(DATA / architecture / "hf", "simd") as engine:
        cold, _, scheduler = run(engine)
        assert engine.save_prefix(file, ids, scheduler=scheduler) == 128
    with mlx_engine.load(DATA / architecture / "hf", "simd") as engine:
        engine.load_prefix(file)
        assert run(engine)[:2] == (cold, 128)


def test_a_conversation_goes_on_after_a_restart(tmp_path: Path):
    texts = ["Tell me a story about a fox.", "And then?", "What did the fox say? " * 5, "And now?"]
    options = Options.of(40)
    with mlx_engine.load("builtin", "simd") as engine:
        whole = Conversation(engine, options, kv_memory=64 << 20)
        for text in texts:
            "".join(whole.ask(text))
    with mlx_engine.load("builtin", "simd") as engine:
        first = Conversation(engine, options, kv_memory=64 << 20)
        for text in texts[:3]:
            "".join(first.ask(text))
        assert first.save_prefix(tmp_path / "a.kv") >= 128
        state = json.loads(json.dumps(first.state()))
    with mlx_engine.load("builtin", "simd") as engine:
        engine.load_prefix(tmp_path / "a.kv")
        second = Conversation(engine, options, kv_memory=64 << 20)
        second.restore(state)
        "".join(second.ask(texts[3]))
        assert second.messages == whole.messages
        assert second.generation is not None
        assert whole.generation is not None
        assert second.generation.prompt_ids == whole.generation.prompt_ids
        assert second.generation.n_cached >= 128
        second.undo()
        assert second.messages == state["messages"]
        second.restore({**state, "model": "another"})
        assert second.messages == state["messages"]
        assert not second.turns  # their token ids are those of another model


def test_a_long_prefix_is_read_in_pieces_while_others_are_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    of = model("qwen3", "simd", "f32")
    long = [(7 * i) % 300 for i in range(8 * PAGE + 3)]
    cold, _ = answers(of, [long], prefix=False)
    folder = opened(of, tmp_path)
    answers(of, [long], folder)
    monkeypatch.setattr(disk, "MOST_READ", 1)
    pool = of.new_pool(2000, n_sequences=2, page=PAGE)
    scheduler = Scheduler(of, pool, slots=2, prefix=PrefixCache(pool, disk=DiskPrefixes(pool, folder)))
    other, request = request_of([5, 6], max_tokens=30), request_of(long, OPTIONS, max_tokens=1 + len(long) % 7)
    scheduler.submit(other)
    scheduler.step()
    scheduler.submit(request)
    n_read = []
    while scheduler.has_work:
        n_read.append(request.n_from_disk)
        scheduler.step()
    assert n_read[:9] == [PAGE * n for n in range(9)]
    assert other.metrics.passes[1:10]
    assert [digest(request.output.token_ids, [t.logprob for t in request.output.logprobs or ()])] == cold
    folder.close()


def test_a_page_that_changes_while_it_is_read_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    of, copied = model("qwen3", "simd", "f32"), DiskPrefixes.copied
    folder = opened(of, tmp_path)
    pool = of.new_pool(500, page=PAGE)
    cache = PrefixCache(pool, disk=DiskPrefixes(pool, folder))
    scheduler = Scheduler(of, pool, prefix=cache)

    def changed(self: DiskPrefixes, part: str, slot: int) -> np.ndarray:
        content = copied(self, part, slot)
        if slot == 2 * PAGE:
            cache._tree.held.generations[0][2] += 1
        return content

    monkeypatch.setattr(DiskPrefixes, "copied", changed)
    scheduler.submit(request_of(PROMPT, max_tokens=1))
    scheduler.step()
    folder.flush()
    assert folder.stats.written == 3
    assert folder.stats.dropped >= 1  # it is offered again at the end of the answer, if it has been dropped by then
    folder.close()


def cli(*args: str, stdin: str | None = None) -> tuple[str, str]:
    result = CliRunner().invoke(app, args, input=stdin)
    assert result.exit_code == 0, result.stderr
    return result.stdout, result.stderr


def test_a_session_goes_on_with_its_text_on_the_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    how = ("-b", "simd", "-n", "60", "--temp", "0")
    both, _ = cli("chat", *how, stdin="Tell me a story about a fox.\nAnd then?\n")
    first, _ = cli("chat", *how, "--session", "fox", stdin="Tell me a story about a fox.\n")
    second, said = cli("chat", *how, "--session", "fox", stdin="And then?\n/stats\n")
    assert first + second == both
    assert f"> Tell me a story about a fox.\n{first}" in said
    assert "(64 of them cached)" in said
    _, said = cli("chat", *how, "--session", "fox", "--kv-type", "f16", stdin="And then?\n")
    assert "the keys and values of the session are computed again" in said
    assert "--session must be at most 100 letters" in CliRunner().invoke(app, ["chat", "--session", "../x"]).stderr
    monkeypatch.setenv("XDG_STATE_HOME", str(ROOT / "cli.py"))
    refused = CliRunner().invoke(app, ["chat", "--session", "fox"], input="And then?\n")
    assert (refused.exit_code, "a session cannot be kept there: Not a directory" in refused.stderr) == (1, True)
    assert not refused.stdout
    for file in (tmp_path / "mlx_engine" / "sessions").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    file = tmp_path / "mlx_engine" / "sessions" / "fox.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "turns": None}))
    refused = CliRunner().invoke(app, ["chat", *how, "--session", "fox", "--kv-type", "f16"], input="And then?\n")
    assert (refused.exit_code, f"{file} has no session; remove it" in refused.stderr) == (2, True)


@pytest.mark.slow
def test_a_session_keeps_its_text_if_the_disk_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def is_full(self: Conversation, path: Path) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(Conversation, "save_prefix", is_full)
    how = ("chat", "-b", "simd", "-n", "5", "--session", "fox")
    answer, said = cli(*how, stdin="Tell me a story about a fox.\n")
    assert "the keys and values of the session are not kept (No space left on device)" in said
    assert f"> Tell me a story about a fox.\n{answer}" in cli(*how, stdin="")[1]


def test_a_session_with_calls_and_parts_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    calls = [{"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "What time is it?"}]},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "noon"},
    ]
    file = tmp_path / "fox.json"
    file.write_text(json.dumps({"messages": messages}))
    with mlx_engine.load("builtin", "simd") as engine:
        resume(Conversation(engine), file)
    assert capsys.readouterr().err.endswith("> What time is it?\ntool: noon\n")


@pytest.mark.slow
def test_generate_reads_and_writes_a_prompt_cache(tmp_path: Path):
    how = ("generate", "Once upon a time there was a fox. " * 10, "-b", "simd", "-n", "5", "--json")
    cold = json.loads(cli(*how)[0])
    for _ in range(2):
        found = json.loads(cli(*how, "--prompt-cache", str(tmp_path / "a.kv"))[0])
        assert found["token_ids"] == cold["token_ids"]
        with mlx_engine.load("builtin", "simd") as engine:
            assert engine.load_prefix(tmp_path / "a.kv")[:-5] == cold["prompt_ids"]
            assert engine.generate(cold["prompt_ids"], 1).n_cached == 64
    refused = CliRunner().invoke(app, [*how, "--no-kv", "--prompt-cache", str(tmp_path / "a.kv")])
    assert "cannot be combined with --no-kv" in refused.stderr
    refused = CliRunner().invoke(app, ["generate", "a", "-b", "scalar", "-n", "1", "--prompt-cache", "a.kv"])
    assert refused.stderr == "error: --prompt-cache needs another backend than scalar\n"
    assert not refused.stdout  # nothing was generated before


@pytest.mark.slow
def test_prefixes_are_listed_and_removed(tmp_path: Path):
    (tmp_path / "other.txt").write_text("not ours")
    folder = folder_of(tmp_path)
    kept(folder, 1)
    folder.close()
    assert re.search(rf"prefixes .*{tmp_path}", cli("cache", "list", "--prefix-dir", str(tmp_path))[0])
    cli("cache", "remove", "prefixes", "--yes", "--prefix-dir", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["other.txt"]
    assert f"{tmp_path}: no prefixes are kept there" in cli("cache", "list", "--prefix-dir", str(tmp_path))[1]
    for command in (["cache", "list"], ["chat"], ["serve"]):
        refused = CliRunner().invoke(app, [*command, "--prefix-dir", str(tmp_path / "other.txt")])
        said = " ".join(refused.stderr.replace("│", " ").split())  # a long path wraps the line anywhere
        assert (refused.exit_code, "is a file" in said) == (2, True)


def test_files_of_the_user_beside_prefixes_are_left_alone(tmp_path: Path):
    for name in ("project/about.txt", "project/notes.kv", "README.txt", "digests/mine.txt"):
        (tmp_path / name).parent.mkdir(mode=0o700, exist_ok=True)
        (tmp_path / name).write_text("mine")
    folder = folder_of(tmp_path, 2000)
    for i in range(4):
        kept(folder, i)
    folder.close()
    assert (tmp_path / "project" / "notes.kv").exists()
    assert disk.parts_of(tmp_path) == [folder.ours]


def test_a_server_without_a_prefix_cache_refuses_a_folder(tmp_path: Path):
    refused = CliRunner().invoke(app, ["serve", "--no-prefix-cache", "--prefix-dir", str(tmp_path)])
    assert "--prefix-dir cannot be combined with --no-prefix-cache" in refused.stderr


@pytest.mark.parametrize("command", ["chat", "serve"])
def test_a_size_without_a_folder_is_refused(command: str):
    refused = CliRunner().invoke(app, [command, "--prefix-disk", "1GiB"])
    assert (refused.exit_code, "--prefix-disk needs --prefix-dir" in refused.stderr) == (2, True)


def test_metrics_count_files_and_tokens():
    text = Metrics().text(Load(disk=disk.DiskStats(written=3, nbytes=70)))
    assert "mlx_engine:prefix_disk_written 3\n" in text
    assert "mlx_engine:prefix_disk_nbytes 70\n" in text
    assert "prefix_disk_nbytes" not in Metrics().text(Load())


def test_a_cache_that_is_collected_first_opens_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    is_open = threading.Event()
    disk._opened(lambda: None, is_open, "model", lambda folder: {})  # type: ignore[arg-type]
    assert is_open.is_set()
    assert list(tmp_path.iterdir()) == []
