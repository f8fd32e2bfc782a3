"""Measure the error and the KL divergence of a model's logits with i16 activations, and for each --kv-type.

    python -m benchmarks.precision MODEL ...            appends to benchmarks/results/precision.jsonl
    python -m benchmarks.precision MODEL --only i16 q8_0 --out new.jsonl

Each row is a run of the command `perplexity`. The reference is the same file with float32 activations, keys and values.
The text is the first 7,000 bytes of the plots from which the training stories of the built-in model were made. Rows do
not depend on the load of the machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.log import FOLDER, Log

RESULTS = FOLDER / "precision.jsonl"
TEXT, N_BYTES = FOLDER.parent.parent / "tools" / "corpus" / "plots", 7000
SETTINGS = {
    "i16": ["--activations", "i16"], "f16": ["--kv-type", "f16"], "bf16": ["--kv-type", "bf16"],
    "q8_0": ["--kv-type", "q8_0"],
}  # fmt: skip


def main() -> None:
    """Measure each model in each setting."""
    parser = argparse.ArgumentParser(prog="benchmarks.precision", description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path, help="model files")
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--backend", default="parallel")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"append to this file instead of {RESULTS.name}")
    options = parser.parse_args()
    log = Log("precision", options.out)
    with TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_bytes(b"".join(path.read_bytes() for path in sorted(TEXT.glob("*.txt")))[:N_BYTES])
        for model in options.models:
            for name in options.only:
                command = [sys.executable, "-m", "mlx_engine", "perplexity", str(text), "-m", str(model), "--json"]
                how = ["-b", options.backend, "--reference", str(model), "--context", "1024", *SETTINGS[name]]
                done = subprocess.run([*command, *how], capture_output=True, text=True, check=False)
                if done.returncode:
                    raise SystemExit(f"{' '.join([*command, *how])} failed: {done.stderr.strip()}")
                found = {**json.loads(done.stdout), "model": model.name}
                log.append({"setting": " ".join(SETTINGS[name]).removeprefix("--"), **found})
                print(json.dumps({name: found}), flush=True)


if __name__ == "__main__":
    main()
