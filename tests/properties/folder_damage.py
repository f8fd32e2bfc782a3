"""Fuzz Hugging Face folders: a randomly damaged file loads or raises one EngineError, in bounded time and memory.

usage: python -m tests.properties.folder_damage [--kind config template ...] [--count 20000] [--seed 0] [--workers 1]
       python -m tests.properties.folder_damage --kind template --seed 0 --only 17   one file again, with its traceback

Each file is loaded and used in a worker process. CPU time is that of the worker and of its sandbox processes, of which
each is used for several files. Memory is the peak of the worker beyond what it had before the file (/proc, Linux), or
the peak of a sandbox process in all, whichever is more. A worker that dies or hangs is replaced.
"""

import argparse
import copy
import faulthandler
import json
import multiprocessing
import os
import random
import resource
import shutil
import struct
import tempfile
import time
import tracemalloc
import warnings
from collections import Counter
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import numpy as np

import mlx_engine
from mlx_engine.checkpoint.hf_folder import INDEX
from mlx_engine.commands.options.suggested import suggested_sampling
from mlx_engine.errors import EngineError
from mlx_engine.tokenizer import Tokenizer, hf, sandbox_process
from mlx_engine.tokenizer.chat import chat_ids
from tests.properties import tokenizer_damage
from tests.published import PUBLISHED, write_folder
from tests.unit.test_tokenizer_json import llama_json

DATA = Path(__file__).parents[1] / "data"
MODELS = ("openai-community/gpt2", "meta-llama/Llama-3.2-1B", "google/gemma-3-4b-it", "Qwen/Qwen3-0.6B")
SHARD = "model-00001-of-00002.safetensors"
# The damaged file of each kind.
KINDS = {
    "config": "config.json", "index": INDEX, "safetensors": "model.safetensors", "tokenizer": "tokenizer.json",
    "tokenizer_config": "tokenizer_config.json", "generation_config": "generation_config.json",
    "template": "chat_template.jinja",
}  # fmt: skip
# Kinds whose files are read for a tokenizer and its chats.
OF_TEXT = {
    "tokenizer": tokenizer_damage.change_tokenizer,
    "tokenizer_config": tokenizer_damage.change_config,
    "generation_config": tokenizer_damage.change_config,
}
TEXTS = ("", "I'LL 123\n\n\t x  hé 😀 ﷺ e\u0301 <|im_start|>user</s>", " " * 1500 + "a" * 2500 + "\n" + "aé1 .," * 100)
MESSAGES = [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello <|im_end|>"},
    {"role": "assistant", "content": "<think>x</think>Hi"}, {"role": "user", "content": "1 + 1"},
]  # fmt: skip
# Bounds of one file: seconds of CPU time, bytes, and seconds on the clock of a busy machine.
SECONDS, NBYTES, PATIENCE = 2.0, 500 << 20, 120.0
# A message may have the names of several tensors, as long as they are.
LONGEST_MESSAGE = 30_000
VALUES = [
    None, True, False, 0, 1, -1, 2, 3, 2**31, 2**63, 2**64, 10**400, -1e-30, 1e-300, 1e308, float("nan"), float("inf"),
    "", "x", "../x.safetensors", "F16", "\ud800", "x" * 5000, [], [0], [-1, 2**62], {}, {"a": 1}, [[[[]]]], {"": None},
]  # fmt: skip


def folders(kind, folder):
    """Write sound folders for a kind into `folder`, and return their paths."""
    if kind in OF_TEXT or kind == "template":
        return text_folders(folder)
    made = [write_folder(folder / str(i), PUBLISHED[name]) for i, name in enumerate(MODELS)]
    if kind == "index":
        for path in made:
            shutil.move(path / "model.safetensors", path / SHARD)
            (length,) = struct.unpack("<Q", (path / SHARD).read_bytes()[:8])
            names = [n for n in json.loads((path / SHARD).read_bytes()[8 : 8 + length]) if n != "__metadata__"]
            empty = struct.pack("<Q", 2) + b"{}"
            (path / SHARD.replace("00001", "00002", 1)).write_bytes(empty)
            (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, SHARD)}))
    return made


def text_folders(folder):
    """Write folders with a tokenizer, its configuration and a chat template, and return their paths."""
    data = json.loads((DATA / "chat-templates.json").read_text(encoding="utf-8"))
    sources = [DATA / name / "hf" / "tokenizer.json" for name in ("qwen3-micro", "gpt2-micro", "gemma3-micro")]
    texts = [*(path.read_text(encoding="utf-8") for path in sources), json.dumps(llama_json())]
    made = []
    for i, template in enumerate(data["templates"].values()):
        path = folder / str(i)
        path.mkdir(parents=True)
        text = texts[i % len(texts)]
        tokens = [added["content"] for added in json.loads(text)["added_tokens"]]
        config = {"bos_token": tokens[0], "eos_token": {"content": tokens[-1]}, "add_bos_token": True}
        (path / "tokenizer.json").write_text(text, encoding="utf-8")
        (path / "tokenizer_config.json").write_text(json.dumps(config))
        (path / "generation_config.json").write_text(
            json.dumps({"eos_token_id": [2, 3], "top_k": 20, "temperature": 0.6})
        )
        (path / "config.json").write_text(json.dumps({"bos_token_id": 1, "vocab_size": 512}))
        (path / "chat_template.jinja").write_text(template, encoding="utf-8")
        made.append(path)
    return made


def damaged(good, kind, rng):
    """Return the bytes of a file with one to three random changes, of its JSON or of its bytes."""
    if kind == "template" and rng.random() < 0.9:
        return tokenizer_damage.damaged_template(good, rng)
    if kind in OF_TEXT and rng.random() < 0.6:
        return tokenizer_damage.damaged_value(good, OF_TEXT[kind], rng)
    if kind == "template":
        return damaged_bytes(bytearray(good), rng)
    if kind != "safetensors":
        return damaged_text(good, rng)
    (length,) = struct.unpack("<Q", good[:8])
    choice = rng.random()
    if choice < 0.1:
        return good[: rng.randrange(len(good))]
    if choice < 0.2:
        return struct.pack("<Q", rng.choice([0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1])) + good[8:]
    text = damaged_text(good[8 : 8 + length], rng)
    return struct.pack("<Q", len(text)) + text + good[8 + length :]


def damaged_text(good, rng):
    if rng.random() < 0.3:
        return damaged_bytes(bytearray(good), rng)
    value = json.loads(good)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        change(value, rng)
    text = json.dumps(value)
    if rng.random() < 0.02:
        text = text.replace(":", ":" + rng.choice(["[" * 100_000, '{"a":' * 50_000, "9" * 5000]), 1)
    return text.encode("utf-8", "surrogatepass")


def change(value, rng):
    """Replace, remove, add or double a random element of a JSON value."""
    while isinstance(value, dict | list) and value:
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        inner = value[key]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.8:
            value = inner
            continue
        kind = rng.randrange(4)
        if kind == 0:
            del value[key]
        elif kind == 1 and isinstance(value, dict):
            value[str(key) + rng.choice(["x", ".", "_config"])] = inner
        elif kind == 2 and isinstance(inner, int | float) and abs(inner) < 1e300 and not isinstance(inner, bool):
            value[key] = rng.choice([inner + 1, inner - 1, inner * 2, inner // 2, -inner, float(inner), str(inner)])
        else:
            value[key] = copy.deepcopy(rng.choice(VALUES))  # which later changes may change
        return


def damaged_bytes(data, rng):
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(5)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.randrange(1, 20))
        elif kind == 3:
            data[at:at] = data[at : at + rng.randrange(1, 64)]
        else:
            del data[at : at + rng.randrange(1, 20)]
        if not data:
            break
    return bytes(data)


def outcome(path, kind):
    """Load the folder and use it; return the outcome. Errors other than EngineError are raised."""
    try:
        if kind in OF_TEXT or kind == "template":
            use_tokenizer(path)
        else:
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # damaged scales overflow
                mlx_engine.load(path, "simd", jit=False).logits([1, 2, 3])
    except EngineError as error:
        if len(str(error)) > LONGEST_MESSAGE:
            raise AssertionError(f"a message of {len(str(error)):,} characters") from error
        if not str(error).isprintable() and (kind in OF_TEXT or kind == "template"):
            raise AssertionError(f"a message that no terminal can show: {error!r:.300}") from error
        return type(error).__name__
    return "loaded"


def use_tokenizer(path):
    """Load a tokenizer, encode and decode texts, and render a chat."""
    tokenizer = mlx_engine.load_tokenizer(path)
    for i, text in enumerate(TEXTS):
        tokenizer.decode(tokenizer.encode(text, special=i == 1))
    suggested_sampling(path)
    if tokenizer.chat_template is not None:
        tokenizer.decode(chat_ids(tokenizer, MESSAGES))


@contextmanager
def shared_processes():
    """Let all tokenizers share a sandbox process, and all templates another: it takes 20 to 100 ms to start."""
    for_files, for_templates = sandbox_process.SandboxProcess(), sandbox_process.SandboxProcess()
    with (
        mock.patch.object(hf, "SandboxProcess", return_value=for_files),
        mock.patch.object(Tokenizer, "sandbox", for_templates),
    ):
        yield


class Cases:
    """The damaged files of a kind and a seed, each from its number alone."""

    def __init__(self, kind, seed, folder):
        self.kind, self.seed, self.paths = kind, seed, folders(kind, Path(folder))
        self.goods = {path: (path / KINDS[kind]).read_bytes() for path in self.paths}

    def write(self, number):
        """Write a damaged file, and return its folder."""
        rng = random.Random(f"{self.kind} {self.seed} {number}")
        path = rng.choice(self.paths)
        (path / KINDS[self.kind]).unlink()  # the old file may still be mapped
        (path / KINDS[self.kind]).write_bytes(damaged(self.goods[path], self.kind, rng))
        return path


def run(kind, count, seed, folder, *, measure=False):
    """Return the counts of outcomes of `count` files in this process, and the largest memory use of one in bytes."""
    cases, counts, most = Cases(kind, seed, folder), Counter(), 0
    with shared_processes():
        for i in range(count):
            path = cases.write(i)
            if measure:
                tracemalloc.start()
            try:
                counts[outcome(path, kind)] += 1
            except Exception as error:
                raise AssertionError(f"{kind} {i} of seed {seed}: {type(error).__name__}: {error}") from error
            finally:
                if measure:
                    most = max(most, tracemalloc.get_traced_memory()[1])
                    tracemalloc.stop()
    return counts, most


# ---- worker processes ----


def status(pid, name):
    """Return a size of a process in bytes, as /proc has it; 0 if it is not known."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:")), 0)


def sandboxes():
    return [each._process.pid for each in sandbox_process._ALL if each._process is not None]


def cpu_seconds():
    """Return the CPU time of this process and of its sandbox processes, ended or not."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + ended.ru_utime + ended.ru_stime
    for pid in sandboxes():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def work(kind, seed, numbers, connection: Connection):
    """Use files, and send (number,) before each and (number, outcome, CPU seconds, bytes) after it."""
    with tempfile.TemporaryDirectory() as folder, shared_processes():
        cases = Cases(kind, seed, folder)
        for number in numbers:
            path = cases.write(number)
            connection.send((number,))
            if Path("/proc/self/clear_refs").exists():
                Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            faulthandler.dump_traceback_later(PATIENCE / 2)
            rss, seconds = status(os.getpid(), "VmRSS"), cpu_seconds()
            largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
            try:
                found = outcome(path, kind)
            except BaseException as error:
                found = f"! {type(error).__name__}: {error}"[:300]
            seconds = cpu_seconds() - seconds
            peaks = [status(pid, "VmHWM") for pid in sandboxes()] + [status(os.getpid(), "VmHWM") - rss]
            if (ended := resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) > largest:
                peaks.append(ended << 10)
            connection.send((number, found, seconds, max(peaks)))


def in_workers(kind, count, seed, n_workers):
    """Yield (number, outcome, CPU seconds, bytes) of each file."""
    context = multiprocessing.get_context("spawn")
    left = [list(range(i, count, n_workers)) for i in range(n_workers)]
    running = [None] * n_workers
    while any(left):
        for i in (i for i in range(n_workers) if left[i]):
            if running[i] is None:
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=work, args=(kind, seed, left[i], theirs), daemon=True)
                process.start()
                theirs.close()
                running[i] = process, ours
            process, ours = running[i]
            try:
                row = ours.recv() if ours.poll(PATIENCE) else None
            except EOFError:
                process.join()
                row = None
            if row is None:
                found = "! the worker hung" if process.is_alive() else f"! the worker died, status {process.exitcode}"
                process.kill()
                process.join()
                running[i] = None
                yield left[i].pop(0), found, 0.0, 0
                continue
            if len(row) > 1:
                left[i].pop(0)
                yield row


def report(kind, count, seed, n_workers):
    """Use the files of a kind in workers, print what is wrong and a summary, and return whether all is well."""
    start, counts, slowest, largest, n_wrong = time.perf_counter(), Counter(), 0.0, 0, 0
    for number, found, seconds, nbytes in in_workers(kind, count, seed, n_workers):
        slowest, largest = max(slowest, seconds), max(largest, nbytes)
        counts[found if not found.startswith("!") else "wrong"] += 1
        if found.startswith("!") or seconds > SECONDS or nbytes > NBYTES:
            n_wrong += 1
            print(
                f"--kind {kind} --seed {seed} --only {number}: {found}, {seconds:.2f} s, {nbytes >> 20} MiB", flush=True
            )
        if sum(counts.values()) % 1000 == 0:
            print(f"{kind}: {sum(counts.values()):,} of {count:,}: {dict(counts)}", flush=True)
    shares = ", ".join(f"{n:,} {name}" for name, n in counts.most_common())
    print(
        f"{kind}: {count:,} files in {time.perf_counter() - start:.0f} s: {shares}; {n_wrong} wrong; "
        f"at most {slowest:.2f} s of CPU time and {largest >> 20} MiB",
        flush=True,
    )
    return n_wrong == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only", type=int, help="the number of one file")
    options = parser.parse_args()
    if options.only is not None:
        with tempfile.TemporaryDirectory() as folder:
            print(outcome(Cases(options.kind[0], options.seed, folder).write(options.only), options.kind[0]))
        return
    well = [report(kind, options.count, options.seed, options.workers) for kind in options.kind]
    raise SystemExit(0 if all(well) else 1)


if __name__ == "__main__":
    main()
