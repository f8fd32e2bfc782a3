"""Measure the speedup of each drafter: lookup, a draft model, MTP layers, recorded answers; and of llama.cpp's lookup.

    python -m benchmarks.speculation MODEL --python PATH      appends to benchmarks/results/speculation.jsonl
    python -m benchmarks.speculation shape:qwen3-0.6b --texts benchmarks/speculation_costs.jsonl
    python -m benchmarks.speculation shape:qwen3-0.6b --texts benchmarks/speculation_edits.jsonl    eight edits at once
    python -m benchmarks.speculation shape:qwen3.5-0.8b-mtp --texts benchmarks/speculation_mtp.jsonl
    python -m benchmarks.speculation MODEL --draft SMALL --texts FILE --rounds 3 --out new.jsonl

PATH is a Python interpreter that has llama-cpp-python; without it, only our engine is measured. The file of texts, by
default benchmarks/speculation.jsonl, has the form that `bench --speculate` reads; each text and drafter gets a row.
Each engine alternates between runs with and without proposals. In llama.cpp, logits depend on the number of tokens in
the pass, so proposals may change its answer; rows record whether they did.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.log import FOLDER, Log, Row
from mlx_engine import load
from mlx_engine.bench.speculation import markdown, prompts_of, rows, texts_of
from mlx_engine.bench.tables import aligned
from mlx_engine.machine.memory import usable_cores
from mlx_engine.options import LOOKUP

RESULTS, TEXTS = FOLDER / "speculation.jsonl", Path(__file__).with_suffix(".jsonl")

# Run by the other interpreter: answers each prompt without and with lookup in rounds + 1 rounds; the first is untimed.
CHILD = """
import json, sys, time
from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
given = json.load(sys.stdin)
how = dict(model_path=given["model"], n_ctx=given["n_ctx"], n_threads=given["threads"], verbose=False)
models = Llama(**how), Llama(**how, draft_model=LlamaPromptLookupDecoding(), logits_all=True)
for prompt, n in given["prompts"]:
    seconds, found = ([], []), [None, None]
    for round_ in range(given["rounds"] + 1):
        for i, model in enumerate(models):
            model.reset()
            ids = []
            for token in model.generate(prompt, temp=0.0):
                if not ids:
                    began = time.perf_counter()
                ids.append(token)
                if len(ids) == n:
                    break
            found[i] = ids
            if round_:
                seconds[i].append(time.perf_counter() - began)
    print(json.dumps({"off": seconds[0], "on": seconds[1], "is_same": found[0] == found[1]}), flush=True)
"""


def peers(python: str, model: Path, prompts: list[tuple[list[int], int]], threads: int, rounds: int) -> list[Row]:
    """Return the times of llama.cpp for prompts (ids, new tokens)."""
    longest = max(len(ids) + n for ids, n in prompts)
    given = {"model": str(model), "n_ctx": 2 * longest, "threads": threads, "rounds": rounds, "prompts": prompts}
    command = [python, "-c", CHILD]
    done = subprocess.run(command, input=json.dumps(given), stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def factor(row: Row) -> float:
    """Return the speedup by proposals: the median time without them, divided by the median time with them."""
    return float(statistics.median(row["off"]) / statistics.median(row["on"]))


def main() -> None:
    """Measure the texts, print a table, and append the rows."""
    parser = argparse.ArgumentParser(prog="benchmarks.speculation", description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a GGUF file, or shape:NAME")
    parser.add_argument("--draft", help="a draft model")
    parser.add_argument("--python", help="the interpreter that has llama-cpp-python")
    parser.add_argument("--texts", type=Path, default=TEXTS)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    log, texts = Log("speculation", options.out), texts_of(options.texts)
    found: list[Row] = []
    with load(options.model, "parallel", threads=options.threads, draft=options.draft) as engine:
        for text in texts:
            first, *more = prompts_of(text)
            prompt = engine.prompts.ids(first), text.get("max_tokens", 256)
            for row in rows(engine, [text], options.rounds):
                is_compared = options.python is not None and row["drafter"] == LOOKUP and not more
                others: list[Any] = [prompt] if is_compared else []
                theirs = peers(options.python, engine.path, others, options.threads, options.rounds) if others else []
                about = {"file": engine.path.name, "threads": options.threads, "draft": options.draft}
                found.append(log.append({**row, **about, "llama.cpp": theirs[0] if theirs else None}))
    print(markdown(found))
    if options.python is not None:
        table = [["text", "ours", "llama.cpp", "its answer"]]
        for row in found:
            theirs = row["llama.cpp"]
            if theirs is None:
                continue
            same = "the same" if theirs["is_same"] else "another one"
            table.append([row["text"], f"{row['factor']:.2f}", f"{factor(theirs):.2f}", same])
        print("\nThe speedup of each engine by its proposals:\n\n" + aligned(table))


if __name__ == "__main__":
    main()
