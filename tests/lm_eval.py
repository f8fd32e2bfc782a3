"""Run two tasks of lm-eval on the server and on transformers, and compare: `python -m tests.lm_eval FOLDER`.

FOLDER gets the environment of lm-eval, which is installed unless it is there (`--python` names another one), the tasks
with their data, and the results. lm-eval asks the server over HTTP (`local-completions`), once with the server's
tokenizer and once with that of transformers, and runs transformers itself in float64. All figures and the
log-likelihood of every sample must agree to 1e-4. `--model` takes a folder, or a GGUF file that transformers reads.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.clients.environments import python
from tests.clients.server import API_KEY, ROOT, running

PACKAGES = ("lm-eval[api]==0.4.13", "torch", "transformers", "accelerate", "gguf")
MICRO = ROOT / "tests" / "data" / "qwen3-micro" / "hf"
TASKS = ("our_choice", "our_rolling")
TOLERANCE = 1e-4
MOST_TOKENS = 400

CHOICES = [
    ("The capital of France is", ["Paris", "a green apple", "seven"], 0),
    ("Two and two are", ["five", "four", "a river"], 1),
    ("Water freezes at", ["night", "zero degrees", "the office"], 1),
    ("In the morning the sun", ["rises", "is a number", "reads"], 0),
    ("Dogs \u2013 unlike caf\u00e9s \u2013", ["bark", "open at nine", "\u65e5\u672c"], 0),
]
CHOICE = """task: our_choice
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ROLLING = """task: our_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
"""


def write_tasks(folder: Path) -> Path:
    """Write both tasks and their data; return their folder."""
    tasks = folder / "tasks"
    tasks.mkdir(parents=True, exist_ok=True)
    rows = [{"question": text, "choices": [f" {c}" for c in choices], "answer": i} for text, choices, i in CHOICES]
    texts = [{"text": part} for part in (ROOT / "LICENSE").read_text().split("\n\n")]
    for name, form, data in (("our_choice", CHOICE, rows), ("our_rolling", ROLLING, texts)):
        file = tasks / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in data))
        (tasks / f"{name}.yaml").write_text(form % file)
    return tasks


def for_transformers(model: Path, folder: Path) -> dict[str, str]:
    """Return the arguments by which transformers loads a model; a folder is copied, with what its tokenizer needs."""
    if model.is_file():
        return {"pretrained": str(model.parent), "gguf_file": model.name}
    copy = folder / "model"
    shutil.copytree(model, copy, dirs_exist_ok=True)
    about, config = copy / "tokenizer_config.json", json.loads((copy / "config.json").read_text())
    if not about.exists():
        end = json.loads((copy / "tokenizer.json").read_text())["added_tokens"][0]
        about.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end["content"]}))
        ids = {"bos_token_id": None, "eos_token_id": end["id"]}
        (copy / "config.json").write_text(json.dumps({**config, **ids}))
    return {"pretrained": str(copy)}


def evaluate(program: Path, tasks: Path, out: Path, kind: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Run lm-eval; return its figures by task and metric, and the log-likelihoods of all samples.

    Raises:
        RuntimeError: it failed; the message has what it printed.
    """
    shutil.rmtree(out, ignore_errors=True)
    given = ",".join(f"{name}={value}" for name, value in arguments.items())
    command = [str(program), "-m", "lm_eval", "--model", kind, "--model_args", given, "--tasks", ",".join(TASKS)]
    command += ["--include_path", str(tasks), "--output_path", str(out), "--log_samples", "--device", "cpu"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": API_KEY}
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | offline
    done = subprocess.run(command, cwd=out.parent, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: status {done.returncode}\n{done.stdout}{done.stderr}")
    (results,) = out.rglob("results_*.json")
    found: dict[str, Any] = {}
    for task, figures in json.loads(results.read_text())["results"].items():
        named = {name: value for name, value in figures.items() if isinstance(value, float)}
        found |= {f"{task}: {name}": value for name, value in named.items()}
        (samples,) = out.rglob(f"samples_{task}_*.jsonl")
        rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda row: row["doc_id"])
        found[f"{task}: log-likelihoods"] = [_number(value) for row in rows for value in _flat(row["filtered_resps"])]
    return found


def _flat(value: Any) -> list[Any]:
    return [one for part in value for one in _flat(part)] if isinstance(value, list) else [value]


def _number(value: object) -> float:
    """Return a log-likelihood, or whether the answer was the greedy one, which samples have as text."""
    return float({"True": 1, "False": 0}.get(str(value), value))  # type: ignore[arg-type]


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Print all figures; return the names of those that do not agree."""
    wrong = [] if found.keys() == wanted.keys() else [f"{sorted(found)} instead of {sorted(wanted)}"]
    for name in wanted.keys() & found.keys():
        ours, theirs = _flat(found[name]), _flat(wanted[name])
        same = len(ours) == len(theirs)
        worst = max((abs(a - b) for a, b in zip(ours, theirs, strict=True)), default=0) if same else float("inf")
        relative = max((abs(a - b) / max(1, abs(b)) for a, b in zip(ours, theirs, strict=same)), default=0)
        shown = f"{ours[0]:.7g}, transformers {theirs[0]:.7g}" if len(ours) == 1 else f"{len(ours)} values"
        print(f"  {name}: {shown}; largest difference {worst:.1e}, relative {relative:.1e}", flush=True)
        wrong += [name] if not same or relative > TOLERANCE else []
    return wrong


def main(words: Sequence[str] | None = None) -> int:
    """Run both, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", type=Path, help="an interpreter that has lm-eval, torch and transformers")
    parser.add_argument("--model", type=Path, default=MICRO)
    parser.add_argument("--backend", default="auto")
    given, wrong = parser.parse_args(words), list[str]()
    folder = given.folder.resolve()
    tasks = write_tasks(folder)
    program = given.python or python(folder / "environment", PACKAGES)
    known = for_transformers(given.model.resolve(), folder)
    limits = {"max_length": MOST_TOKENS}
    wanted = evaluate(program, tasks, folder / "transformers", "hf", {**known, "dtype": "float64", **limits})
    served = given.model if "gguf_file" in known else known["pretrained"]
    with running("-m", str(served), "-b", given.backend, "--name", "served", "--slots", "8") as url:
        asked = {"base_url": f"{url}/v1/completions", "model": "served", "auth_token": API_KEY, "num_concurrent": 4}
        backends: dict[str, dict[str, Any]] = {"remote": {"tokenizer_backend": "auto"}}
        if "gguf_file" not in known:
            backends["huggingface"] = {"tokenizer_backend": "huggingface", "tokenizer": known["pretrained"]}
        for name, more in backends.items():
            print(f"local-completions, tokenizer {name}:", flush=True)
            # Its windows are 2 tokens shorter than its length says: for the token that is generated, and the first.
            longer = {"max_length": MOST_TOKENS + 2}
            found = evaluate(program, tasks, folder / name, "local-completions", {**asked, **more, **longer})
            wrong += differences(found, wanted)
    print("all agree" if not wrong else f"not within {TOLERANCE}: {wrong}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
