"""Plant bugs, one at a time, and expect the default tests to fail: `python -m tests.mutants [NAME ...]`.

Each bug is a replacement of text in a copy of the checkout; the tests that run are the default ones, stopped at the
first failure. Exits with 1 if a bug survives. `test_mutants.py` checks that every replacement still finds its text.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_COPIED = (".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")


@dataclass(frozen=True)
class Mutant:
    """A bug: in `file`, `old` becomes `new` wherever it stands."""

    name: str
    file: str
    old: str
    new: str


Q8_0_DOT = "../kernels/cpu/q8_0.py"
QWEN3, SIMD, SCALAR = "models/qwen3.py", "backends/simd.py", "backends/scalar.py"
MUTANTS = [
    Mutant("values projected with attn_k", QWEN3, "(w.attn_q, w.attn_k, w.attn_v)", "(w.attn_q, w.attn_k, w.attn_k)"),
    Mutant("attention scale forgotten", QWEN3, "cfg.head_dim**-0.5", "1.0"),
    Mutant("query and key norm forgotten", QWEN3, "(w.attn_q_norm, w.attn_k_norm)", "None"),
    Mutant("query norm used for keys", QWEN3, "(w.attn_q_norm, w.attn_k_norm)", "(w.attn_q_norm, w.attn_q_norm)"),
    Mutant("rope at position 0 always", QWEN3, "self.rope, offset", "self.rope, 0"),
    Mutant("gate and up exchanged", QWEN3, "w.ffn_gate, w.ffn_up", "w.ffn_up, w.ffn_gate"),
    Mutant("gelu for silu", QWEN3, 'w.ffn_up, "silu"', 'w.ffn_up, "gelu"'),
    Mutant("residual of the attention dropped", QWEN3, "be.project_add(h, w.ffn_down, x)", "be.linear(h, w.ffn_down)"),
    Mutant("untied head ignored", QWEN3, '"output" if "output.weight" in parameters else "token_embd"', '"token_embd"'),
    Mutant("head of the first row", SIMD, "return x[-1:]", "return x[:1]"),
    Mutant("rope interleaved", SIMD, "a, b = np.split(x, 2, axis=-1)", "a, b = x[..., ::2], x[..., 1::2]"),
    Mutant("mask off by one", SIMD, "hidden = key > position", "hidden = key > position + 1"),
    Mutant("heads dealt in turn", SCALAR, "h // group", "h % len(keys[0])"),
    Mutant("eps inside out", SIMD, "np.sqrt(mean + np.float32(eps))", "(np.sqrt(mean) + np.float32(eps))"),
    Mutant("growing loses the old slots", SIMD, "grown[:, :, :slots] = store", "pass"),
    Mutant("greedy takes the last of equals", SIMD, "return int(np.argmax(logits))",
           "return int(logits.size - 1 - np.argmax(logits[0][::-1]))"),
    Mutant("first scale used for a whole row", "quant/q8_0.py", 'block["d"].astype(np.float32)[:, None]',
           'block["d"].astype(np.float32)[:1, None]'),
    Mutant("odd block forgotten", Q8_0_DOT, "if n_blocks % 2:", "if False:"),
    Mutant("scale of the neighbour", Q8_0_DOT, "load_half(blocks, at + 34)", "load_half(blocks, at)"),
    Mutant("one row too few", Q8_0_DOT, "for r in range(first, last):", "for r in range(first, last - 1):"),
    Mutant("last rows not expanded", "backends/matrices.py", "last = min(first + ROWS, N)", "last = first + ROWS"),
    Mutant("Q4_0 halves exchanged", "quant/packing.py",
           "codes[:, :16] | codes[:, 16:]", "codes[:, 16:] | codes[:, :16]"),
    Mutant("trim undone", "cache/full.py", "self._length -= forgotten", "pass"),
    Mutant("BLAS limit lifted too early", "backends/blas.py",
           "if _held == 0:\n                _limit.", "if True:\n                _limit."),
    Mutant("an unfinished pass counts", "cache/full.py", "return self._length\n\n    def append",
           "self._length += n\n        return self._length - n\n\n    def append"),
    Mutant("cache overflows silently", "cache/full.py",
           "if wanted > self._capacity:", "if wanted > self._capacity + 1:"),
    Mutant("eos ignored", "decode/stream.py", "ended = token in self._end_ids", "ended = False"),
    Mutant("end token left in the text", "decode/stream.py", '"" if ended else self._text.add(token)',
           "self._text.add(token)"),
    Mutant("stop string leaks", "decode/stops.py", "keep = max(", "keep = 0 * max("),
    Mutant("first token counted in the decode rate", "decode/metrics.py", "(len(self.passes) - 1) / rest",
           "len(self.passes) / rest"),
    Mutant("prompt fits one token too many", "engine.py", "room < (max_tokens or 1)", "room + 1 < (max_tokens or 1)"),
    Mutant("top-p drops the token that reaches p", "backends/sampling.py", "reached = np.cumsum(likely) - likely",
           "reached = np.cumsum(likely)"),
    Mutant("penalty divides negative logits too", "backends/sampling.py", "hit * penalty", "hit / penalty"),
    Mutant("a prompt can forge a turn", "tokenizer/tokenizer.py", "encode_special_tokens = not special",
           "encode_special_tokens = False"),
    Mutant("half characters are shown", "tokenizer/stream.py", "return self._utf8.decode(piece)",
           'return piece.decode("utf-8", "replace")'),
    Mutant("BOS forgotten", "engine.py", "self.tokenizer.bos_id if self.tokenizer.add_bos else None", "None"),
    Mutant("dimensions not reversed", "checkpoint/gguf_tensors.py", "tuple(reversed(dims))", "tuple(dims)"),
    Mutant("length of a string trusted", "checkpoint/gguf_values.py", "if n * bytes_each > self.size - self.at:",
           "if False:"),
    Mutant("unknown settings ignored", "models/settings.py", "if key not in self._read and key not in harmless:",
           "if False:"),
    Mutant("unexpected tensors ignored", "models/parameters.py",
           "unexpected = sorted(set(checkpoint.shapes) - set(names.values()) - set(plan.unused))", "unexpected = []"),
]  # fmt: skip


def apply(mutant: Mutant, root: Path) -> None:
    """Plant the bug in a copy of the checkout."""
    path = root / "mlx_engine" / mutant.file
    text = path.read_text()
    if mutant.old not in text:
        raise SystemExit(f"{mutant.name}: {mutant.file} no longer has {mutant.old!r}")
    path.write_text(text.replace(mutant.old, mutant.new))


def first_failure(mutant: Mutant | None) -> str | None:
    """The test that catches the bug, or None; without a mutant, what is wrong with the tests themselves."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "copy"
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(*NOT_COPIED))
        if mutant is not None:
            apply(mutant, root)
        # The copy comes first on the path, also in tests that start a process of their own.
        environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "--tb=no"]
        # It looks for the text that the bug has replaced, and would catch every one of them.
        command.append("--ignore=tests/test_mutants.py")
        result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
        if result.returncode == 0:
            return None
        lines = [line for line in result.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return lines[0].split(" - ")[0] if lines else f"pytest ended with {result.returncode}"


def main(names: list[str]) -> int:
    """Run the chosen mutants, or all."""
    chosen = [m for m in MUTANTS if not names or any(name in m.name for name in names)]
    wrong = first_failure(None)
    if wrong is not None:
        print(f"without any bug the tests already fail: {wrong}")
        return 2
    survivors = []
    for mutant in chosen:
        start = time.monotonic()
        caught = first_failure(mutant)
        survivors += [] if caught else [mutant.name]
        print(f"{mutant.name:<45}{caught or 'SURVIVES':<90}{time.monotonic() - start:6.1f} s", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
