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


DECODER, SIMD, SCALAR = "models/decoder.py", "backends/simd.py", "backends/scalar.py"
LOWERING = "backends/lowering.py"
COMPILED, PARALLEL, CORES = "backends/compiled.py", "backends/parallel.py", "backends/cores.py"
MLX, MLX_WEIGHTS, MLX_SAMPLING = "backends/mlx.py", "backends/mlx_weights.py", "backends/mlx_sampling.py"
AHEAD, METRICS, STREAM = "decode/ahead.py", "decode/metrics.py", "decode/stream.py"
CHAT, SANDBOX = "tokenizer/chat.py", "tokenizer/sandbox.py"
METAL, METAL_KERNELS, TUNING = "backends/metal.py", "backends/metal_kernels.py", "backends/metal_tuning.py"
METAL_WEIGHTS = "backends/metal_weights.py"
CPU = "../kernels/cpu/"
JOBS = CPU + "jobs.py"
TILE, STORED_ROWS, FORMATS, Q4_K = CPU + "tile.py", CPU + "rows.py", CPU + "formats.py", CPU + "q4_k.py"
LINEAR, LINEAR_JOB, EPILOGUE = CPU + "linear.py", CPU + "linear_job.py", CPU + "epilogue.py"
GEMV, GEMM, SUMS = CPU + "gemv.py", CPU + "gemm.py", CPU + "sums.py"
ATTENTION, HEADS, POOL, LIBRARY = CPU + "attention.py", CPU + "heads.py", CPU + "pool.py", CPU + "library.py"
VECTORS = CPU + "vectors.py"
FULL_CACHE = "cache/full.py"
NORMS = CPU + "norms.py"
GPT2, GEMMA3, PARAMETERS, SLIDING = (
    "models/gpt2.py", "models/gemma3.py", "models/parameters.py", "cache/sliding.py",
)  # fmt: skip
GAINS, APART, ROUNDS = (f"bench/bottlenecks/{name}.py" for name in ("gains", "apart", "kinds"))
CONVERSION, REQUANTISE = "models/conversion.py", "models/requantise.py"
GGUF_FORM, TO_GGUF, SPM_SCORES = "models/gguf_form.py", "tokenizer/to_gguf.py", "tokenizer/spm_scores.py"
MUTANTS = [
    Mutant("heads are not dealt for GGUF", PARAMETERS, "return halves.transpose(0, 2, 1, 3).reshape(-1)",
           "return halves.reshape(-1)"),
    Mutant("a scale without a key is lost", GGUF_FORM, "dequantize() * np.float32(gain)", "dequantize()"),
    Mutant("what GGUF cannot say is dropped", GGUF_FORM, "if name not in said.in_tensors", "if False"),
    Mutant("the least urgent merge is last", SPM_SCORES, "rank, i = min(steps)", "rank, i = max(steps)"),
    Mutant("any scores will do", SPM_SCORES, "if rank is None and any(", "if False and any("),
    Mutant("spaces are looked for as a mark", TO_GGUF, "types[token_id] = TokenType.NORMAL", "pass"),
    Mutant("the weaker of two limits counts", GAINS, "1e3 * max(op.cost.nbytes", "1e3 * min(op.cost.nbytes"),
    Mutant("all of the time is a gain", GAINS, "max(0.0, self.ms - self.floor)", "self.ms"),
    Mutant("the share of the limit upside down", GAINS, "else self.floor / self.ms", "else self.ms / self.floor"),
    Mutant("a slow operation is taken for slow calls", GAINS, "min(off, UNUSUAL * _usual(beyond))", "off"),
    Mutant("operations below their limit", GAINS, "max(op.ms - off * op.calls, min(op.ms, floor))",
           "op.ms - off * op.calls"),
    Mutant("what takes longest is first", GAINS, 'row["ms"] if row["gain_ms"] is None else row["gain_ms"]',
           'row["ms"]'),
    Mutant("calls of all passes", APART, "self.n_calls / len(self.samples)", "self.n_calls"),
    Mutant("chance is a bottleneck", ROUNDS, 'if rest["q1"] > 0 else 0.0', ""),
    Mutant("the sum of operations is another round's", ROUNDS, "zip(self.plain, sums, strict=True)",
           "zip(self.plain, reversed(sums), strict=True)"),
    Mutant("blocks count what their primitives do", "observe/profiler.py", "cost.without(span.counted)", "cost"),
    Mutant("scores where nothing is visible", "backends/profiled.py", "- rest * (rest + 1) // 2", ""),
    Mutant("a factor of the new to the old", "bench/bottlenecks/against.py", "figure(before / after)",
           "figure(after / before)"),
    Mutant("keys and values of the fused layer exchanged", GPT2, '("attn_q", "attn_k", "attn_v")',
           '("attn_q", "attn_v", "attn_k")'),
    Mutant("learned positions begin anew in every pass", GPT2, "range(offset, offset + len(ids))", "range(len(ids))"),
    Mutant("biases forgotten", PARAMETERS, 'if f"{name}.bias" in self else None', "if False else None"),
    Mutant("gains without their 1", GEMMA3, "plus=1.0", "plus=0.0"),
    Mutant("one rotation for all layers", GEMMA3, "nearby if local else everywhere", "everywhere"),
    Mutant("local layers see everything", GEMMA3, "window=cfg.window)\n", "window=None)\n"),
    Mutant("embedding not scaled", GEMMA3, "self.config.hidden_size**0.5", "1.0"),
    Mutant("norm behind attention exchanged", DECODER,
           "w.attn_output, w.post_attention_norm", "w.attn_output, w.post_ffw_norm"),
    Mutant("the window slides one too far", SLIDING, "first = self._held - kept", "first = self._held - kept - 1"),
    Mutant("the window shows one too few", SLIDING, "self._held + 1 - self._window", "self._held + 2 - self._window"),
    Mutant("values projected with attn_k", DECODER, "(w.attn_q, w.attn_k, w.attn_v)", "(w.attn_q, w.attn_k, w.attn_k)"),
    Mutant("attention scale forgotten", "models/qwen3.py", "config.head_dim**-0.5", "1.0"),
    Mutant("the last layer for all tokens", DECODER, "last_only = not every and", "last_only = False and"),
    Mutant("the last layer for one token always", DECODER, "last_only = not every and", "last_only ="),
    Mutant("query and key norm forgotten", DECODER, "w.head_norms, w.rope", "None, w.rope"),
    Mutant("query norm used for keys", "backends/parameters.py", "k is None else (q, k)", "k is None else (q, q)"),
    Mutant("rope at position 0 always", DECODER, "w.rope, offset", "w.rope, 0"),
    Mutant("gate and up exchanged", DECODER, "w.ffn_gate, w.ffn_up", "w.ffn_up, w.ffn_gate"),
    Mutant("slots counted before they are there", "cache/full.py", "            self._slots = slots  # last",
           "            pass  # last"),
    Mutant("gelu for silu", DECODER, 'w.ffn_up, w.activation', 'w.ffn_up, "gelu"'),
    Mutant("residual of the attention dropped", DECODER, "be.project_add(h, w.ffn_down, x)",
           "be.linear(h, w.ffn_down)"),
    Mutant("untied head ignored", DECODER,
           '"output" if "output.weight" in parameters else "token_embd"', '"token_embd"'),
    Mutant("head of the first row", SIMD, "return x[-1:]", "return x[:1]"),
    Mutant("rope interleaved", SIMD, "a, b = x[..., :half], x[..., half:]", "a, b = x[..., ::2], x[..., 1::2]"),
    Mutant("mask off by one", SIMD, "hidden = key > position", "hidden = key > position + 1"),
    Mutant("heads dealt in turn", SCALAR, "h // group", "h % len(keys[0])"),
    Mutant("eps inside out", SIMD, "np.sqrt(mean + np.float32(eps))", "(np.sqrt(mean) + np.float32(eps))"),
    Mutant("growing loses the old slots", SIMD, "grown[:, :, :slots] = store", "pass"),
    Mutant("greedy takes the last of equals", SIMD, "return int(np.argmax(logits))",
           "return int(logits.size - 1 - np.argmax(logits[0][::-1]))"),
    Mutant("first scale used for a whole row", "quant/q8_0.py", 'block["d"].astype(np.float32)[:, None]',
           'block["d"].astype(np.float32)[:1, None]'),
    # Tiles, and rows as they are stored.
    Mutant("products of a tile rounded before they are added", TILE,
           'call_llvm(builder, f"llvm.fma.v{a.type.count}f32", a.type, [a, b, builder.load(place)])',
           "builder.fadd(builder.fmul(a, b), builder.load(place))"),
    Mutant("the last stretch of columns alone counts", TILE,
           "builder.fadd(_load(builder, place, 0, four.type), four) if expanded else four", "four"),
    Mutant("an odd step of columns forgotten", TILE, "if unrolled > 1:", "if False:"),
    Mutant("a row of a tile taken twice", TILE, "builder.mul(w_row, ir.Constant(_I64, r))",
           "builder.mul(w_row, ir.Constant(_I64, min(r, 2)))"),
    Mutant("weights of one query for all", TILE, "builder.mul(w_row, ir.Constant(_I64, q))",
           "builder.mul(w_row, ir.Constant(_I64, 0))"),
    Mutant("the last elements of weighted rows lost", TILE, "together, first = together // 2, stop",
           "together, first = 0, stop"),
    Mutant("longer stretches for stored rows", STORED_ROWS, "from kernels.cpu.memory import floats, hidden, raw",
           "from kernels.cpu.memory import floats, hidden, raw\n\nSTRETCH = 2 * STRETCH"),
    Mutant("scales of the first block for all", STORED_ROWS, "own = scales + 4 * LANES * n_rows * (p // 4)",
           "own = scales"),
    Mutant("a row behind the last one read", STORED_ROWS, "min(rows[3] + i, last[3])", "rows[3] + i"),
    Mutant("scales of the first row for all", SUMS, "4 * LANES * r", "0"),
    Mutant("products of a row in another order than a tile's", SUMS,
           "for w in range(n_weights):\n                for t",
           "for w in reversed(range(n_weights)):\n                for t"),
    Mutant("totals of another vector", CPU + "fold.py", "(folded, ir.Constant(_I32, i))",
           "(folded, ir.Constant(_I32, n - 1 - i))"),
    Mutant("the second panel's vectors are the first one's", GEMV, "t * n_columns + column * n_vectors",
           "column * n_vectors"),
    Mutant("a piece of the columns forgotten", GEMV, "columns, from_m = min(depth, n_columns - column)",
           "columns, from_m = min(depth, n_columns - column) // 512 * 256"),
    Mutant("scale of the neighbour", CPU + "q8_0.py", "scale = load_half_splat(blocks, at)",
           "scale = load_half_splat(blocks, max(at - BLOCK_BYTES, 0))"),
    Mutant("quants counted from 0", CPU + "q4_0.py", "splat(8.0)", "splat(0.0)"),
    Mutant("minima with the wrong sign", CPU + "q4_1.py", "less = sub(zeros(), load_half_splat(blocks, at + 2))",
           "less = load_half_splat(blocks, at + 2)"),
    Mutant("minima of the neighbouring group", Q4_K, "load_splat(scales, i + 5)", "load_splat(scales, i + 4)"),
    Mutant("scales of the first 128 weights for all", Q4_K, "i += 8 * (p // 2) + 2 * (p % 2)", "i += 2 * (p % 2)"),
    Mutant("high bits of the first half for both", CPU + "q6_k.py", "at + HIGH + 32 * half", "at + HIGH"),
    Mutant("columns behind the last vector forgotten", CPU + "float32.py", "for i in range(n - whole):",
           "for i in range(0):"),
    # Linear layers.
    Mutant("last row of a matrix not multiplied", GEMV, "min(n, job[m + ROWS] - row), products",
           "min(n, job[m + ROWS] - row - 1), products"),
    Mutant("rows behind the last one written", GEMV, "min(n, job[m + ROWS] - row), products", "n, products"),
    Mutant("the first stretches of a matrix twice", GEMV, "else (m, 2 * apart)", "else (m, 0)"),
    Mutant("a gate gates itself", GEMV, "(m + WIDTH, 0) if gates(job)", "(m, 0) if gates(job)"),
    Mutant("a gate in another format read as that of what it gates", "backends/matrices.py",
           " and not (gated and matrices[0].kind != matrices[1].kind)", ""),
    Mutant("second stretch of columns forgotten", GEMM, "for column in range(0, n_columns, STRETCH):",
           "for column in range(0, min(n_columns, STRETCH), STRETCH):"),
    Mutant("vectors of the first span for all", GEMM, "(t + i) * job[STRIDE] + column", "i * job[STRIDE] + column"),
    Mutant("the last vectors of a span lost", GEMM, "(g + 1) * n_tokens // groups", "n_tokens // groups * (g + 1)"),
    Mutant("norm of the first token for all", GEMM, "norm(x, t * n, n, job[GAIN]", "norm(x, 0, n, job[GAIN]"),
    Mutant("gate and up exchanged in the kernel", GEMM, "load(sums, r), load(sums, r + size)",
           "load(sums, r + size), load(sums, r)"),
    Mutant("bias of the first rows for all", EPILOGUE, "floats(job[m + BIAS] + 4 * first)", "floats(job[m + BIAS])"),
    Mutant("residual added twice", EPILOGUE, "get(products, at + r) + get(residual, r)",
           "get(products, at + r) + 2 * get(residual, r)"),
    Mutant("the last products not activated", EPILOGUE, "for r in range(at, at + n, LANES):",
           "for r in range(at, at + n - LANES, LANES):"),
    # Attention.
    Mutant("a token sees the next one", ATTENTION, "min(BLOCK, slot + 1 - start)", "min(BLOCK, slot + 2 - start)"),
    Mutant("window one too wide", ATTENTION, "max(job[START], slot + 1 - job[WINDOW])",
           "max(job[START], slot - job[WINDOW])"),
    Mutant("first slots seen", ATTENTION, "return job[START] if job[WINDOW] == 0", "return 0 if job[WINDOW] == 0"),
    Mutant("blocks of keys counted from slot 0", ATTENTION, "control = words(address)\n    if window",
           "first, control = 0, words(address)\n    if window"),
    Mutant("first block of keys alone", ATTENTION, "for block in range(1, n_blocks):", "for block in range(1, 1):"),
    Mutant("sums so far not scaled down", ATTENTION, "mul(load(sums, to + e), old_scale)", "load(sums, to + e)"),
    Mutant("the sum of weights rounded twice", ATTENTION, "fma(more, new_scale, mul(old, old_scale))",
           "add(mul(more, new_scale), mul(old, old_scale))"),
    Mutant("keys of an unfinished four not seen", ATTENTION, "while j < last:", "while j + 1 < last:"),
    Mutant("a block that no query of a tile sees counts", ATTENTION, "            if not seen:",
           "            if False:"),
    Mutant("the last queries of a group are lost", ATTENTION,
           "first, last = tile * rows // tiles, (tile + 1) * rows // tiles",
           "first, last = rows // tiles * tile, rows // tiles * (tile + 1)"),
    Mutant("expanded from the row's first column", FORMATS, "start, blocks = row * n_columns + column, raw(weights)",
           "start, blocks = row * n_columns, raw(weights)"),
    Mutant("only the first object file is loaded", LIBRARY, "at += _SIZE + size", "at += len(code)"),
    Mutant("the last rows of a stretch forgotten", LINEAR_JOB, "return (n + by - 1) // by",
           "return max(1, n // by)"),
    Mutant("weights are powers of 2 of scores for e", ATTENTION, "word(scale / math.log(2))", "word(scale)"),
    Mutant("a power of two too small for its exponent", CPU + "exponentials.py", "splat(-127.0)", "splat(-300.0)"),
    Mutant("all spans put where the first one goes", HEADS, "floats(job[OUT] + 4 * t * job[BY_TOKEN])",
           "floats(job[OUT])"),
    Mutant("values of rows that are apart are those of the keys", COMPILED, "address(v), v.strides[0] // 4, keys",
           "address(v), k.strides[0] // 4, keys"),
    Mutant("heads at the first position", HEADS, "row = (job[OFFSET] + t) * (width // 2)",
           "row = job[OFFSET] * (width // 2)"),
    Mutant("all new keys in the last slot", CPU + "program.py", "(kv[KV_STOP] - n_tokens)", "(kv[KV_STOP] - 1)"),
    Mutant("steps that copy take the first token for the last", CPU + "program.py",
           "n_tokens - 1 if step[FROM_LAST] != 0 else 0", "0"),
    Mutant("rotations of the first layer for all", "backends/compiled_program.py",
           "self._backend.rope_table(rope, length) for rope in self._of.ropes.values()",
           "self._backend.rope_table(list(self._of.ropes.values())[0], length) for _ in self._of.ropes"),
    Mutant("a program's rotations do not grow", "backends/compiled_program.py", "if self._positions < offset + n:",
           "if not self._positions:"),
    Mutant("the norm of what is added forgotten by the program", LOWERING,
           "(projection,), None, None, norm), residual", "(projection,), None, None, None), residual"),
    Mutant("the mean stays in a layer norm", NORMS, "sub(load(x, at + i), splat(mean))", "load(x, at + i)"),
    Mutant("the bias of a layer norm forgotten", NORMS, "splat(root)), load(bias, i))", "splat(root)), zeros())"),
    Mutant("the tail of a layer norm not centred", NORMS, "put(out, to + i, get(x, at + i) - mean)",
           "put(out, to + i, get(x, at + i))"),
    Mutant("every norm an RMS norm", NORMS, "if shift != 0:", "if False:"),
    Mutant("a norm behind a product of the first token alone", LINEAR, "norm(out, t * n, n, b[POST_GAIN]",
           "norm(out, 0, n, b[POST_GAIN]"),
    Mutant("the residual normed too", LINEAR, "added = residual if b[POST_GAIN] == 0 else 0", "added = residual"),
    Mutant("a place is used again too early", LOWERING, "if last_step[buffer] > i", "if last_step[buffer] > i + 1"),
    Mutant("room beside what is reserved", FULL_CACHE, "Visible(store, 0, self._length + n)", "Visible(store, 0, n)"),
    Mutant("table of rotations does not grow", "backends/compiled.py", "if found is None or len(found[0]) < length:",
           "if found is None:"),
    Mutant("keys written one slot early", SIMD, "store[0, :, at : at + len(k)]",
           "store[0, :, max(at - 1, 0) : max(at - 1, 0) + len(k)]"),
    Mutant("last rows of a product in chunks lost", PARALLEL, "n * i // n_chunks for i", "n // n_chunks * i for i"),
    Mutant("a chunk counts before it is done", JOBS,
           "call(control[TASK], control, JOB, _end(control, owner) - left, scratch_of(control, me))\n"
           "            done += 1",
           "fetch_add(control, DONE, 1)\n"
           "            call(control[TASK], control, JOB, _end(control, owner) - left, scratch_of(control, me))"),
    Mutant("two threads take one chunk", JOBS, "left = fetch_add(control, LEFT + LINE * owner, -1)",
           "left = read(control, LEFT + LINE * owner)\n            write(control, LEFT + LINE * owner, left - 1)"),
    Mutant("two threads share scratch memory", JOBS, "control[SCRATCH] + thread * SCRATCH_BYTES", "control[SCRATCH]"),
    Mutant("damaged machine code is run", LIBRARY, "if hashlib.sha256(code).digest() == content[:_CHECK] else None",
           ""),
    Mutant("machine code of another processor is run", LIBRARY, 'f"{processor}-{target}.code"', '"kernels.code"'),
    Mutant("a norm is found by the layers alone", "backends/compiled.py", "key = (activation, norm, post, *linears)",
           "key = (activation, *linears)"),
    Mutant("ids beyond the table are read", COMPILED, "if len(rows) and not 0 <=",
           "if False and not 0 <="),
    Mutant("helpers are never woken", COMPILED, "self.pool.shared.wake()", "pass"),
    Mutant("helpers fall asleep before a job", COMPILED, "self.pool.control[layout.ON] = 1", "pass"),
    Mutant("threads share a pool without turns", COMPILED, "with self._turn, super().session():",
           "with super().session():"),
    Mutant("kernels of an older source are run", LIBRARY, 'file.name.endswith((".py", ".pyc"))',
           'file.name == "library.py"'),
    Mutant("source in an archive is not seen", LIBRARY, 'resources.files("kernels.cpu").iterdir()',
           "Path(__file__).parent.glob('*')"),
    Mutant("one scale for all programs", LOWERING, "STEP_SCALE=np.float64(scale)", "STEP_SCALE=np.float64(0.25)"),
    Mutant("a compiling process is left behind", CPU + "machine_code.py", "stack.callback(children[-1].wait)", "pass"),
    Mutant("code for a processor that is too old is run", LIBRARY, "return not any(name in code for name in _CALLED)",
           "return True"),
    Mutant("a bundled application starts itself", CPU + "machine_code.py", 'getattr(sys, "frozen", False)', "False"),
    Mutant("what no backend gets is not counted", PARAMETERS, 'self._done(f"{name}.weight")\n        return values',
           "return values"),
    Mutant("limit of the innermost group alone", CORES, "range(len(parts), -1, -1)",
           "range(len(parts), len(parts) - 1, -1)"),
    Mutant("a pass under way counts", AHEAD, "    cache.trim(1)\n    return choice", "    return choice"),
    Mutant("a pass is begun without room", AHEAD, "if cache.length == cache.capacity:", "if False:"),
    Mutant("a pass counts that was interrupted behind another", AHEAD, "cache.trim(cache.length - length)", "pass"),
    Mutant("the pass under way is read instead", AHEAD, "pick.settle(chosen)", "pick.settle(ahead or chosen)"),
    Mutant("an id is remembered in the place of the next", "decode/sampler.py", "self._recent[choice.place] =",
           "self._recent[-1] ="),
    Mutant("the penalty forgets what is not known yet", MLX_SAMPLING, "ids = id_array(recent)",
           "ids = id_array(recent[:-1] or recent)"),
    Mutant("a prompt is one graph", "decode/loop.py", "model.backend.wait(logits)", "pass"),
    Mutant("a slow caller is charged to the device", METRICS, "max(inside, min(whole, self._waited_for))", "whole"),
    Mutant("what is hidden behind a caller is free", METRICS, "max(inside, min(whole, self._waited_for))", "inside"),
    Mutant("bias with the wrong sign", MLX_WEIGHTS, "np.float32(-128) * scales", "np.float32(128) * scales"),
    Mutant("infinite scales reinterpreted", MLX_WEIGHTS, "if not np.isfinite(scales).all():", "if False:"),
    Mutant("MLX's causal mask off", MLX, 'return "causal"', "return None"),
    Mutant("MLX's window ignored by a single query", MLX, "max(seen.start, seen.stop - n + 1 - seen.window)",
           "seen.start"),
    Mutant("MLX's store grows and loses the old slots", MLX,
           "mx.concatenate([store, self.kv_empty(K, E, capacity - slots)], axis=2)", "self.kv_empty(K, E, capacity)"),
    Mutant("sines without their sign", MLX, "np.concatenate((-sin, sin), axis=1)",
           "np.concatenate((sin, sin), axis=1)"),
    Mutant("MLX's table of rotations does not grow", "backends/mlx.py", "if found is None or len(found[0]) < length:",
           "if found is None:"),
    Mutant("a stream of the thread that made the backend", MLX, "mx.new_thread_unsafe_stream(", "mx.new_stream("),
    Mutant("top-k keeps all that are equal", MLX_SAMPLING,
           "above | (equal & (mx.cumsum(equal.astype(mx.int32)) <= n - above.sum()))", "above | equal"),
    Mutant("a choice is looked at before it is asked for", MLX, "return mx.argmax(logits.squeeze(0))",
           "return mx.array(mx.argmax(logits.squeeze(0)).item(), mx.uint32)"),
    Mutant("the lookup table is expanded", PARAMETERS, "if not self._backend.embeds_stored(weight):", "if True:"),
    Mutant("the head is no layer", CONVERSION, 'return HEAD if stem == "token_embd" else stem', "return stem"),
    Mutant("a group goes before its layer", CONVERSION,
           "self.layers.get(kind, groups[0] if groups else None)", "groups[0] if groups else self.layers.get(kind)"),
    Mutant("the narrowest side counts", CONVERSION, "max(shape) < least", "min(shape) < least"),
    Mutant("pieces of the first weights", "quant/__init__.py", "blocks[start // from_.block_size : (",
           "blocks[0 : ("),
    Mutant("magnitudes ordered by their sign", "quant/q4_0.py", "np.where(high > -low, high, low)", "high"),
    Mutant("positions are quantised too", REQUANTISE, "return kind if kind in LAYER_TYPES else None", "return kind"),
    Mutant("error of the first piece alone", REQUANTISE, "for start in range(0, math.prod(a.shape), PIECE):",
           "for start in range(0, PIECE, PIECE):"),
    Mutant("file type of the source stays", REQUANTISE, "FILE_TYPES[conversion.quant]", "0"),
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
    Mutant("keys and values written one slot early", METAL, "store[:, :, at : at + len(k)]",
           "store[:, :, max(at - 1, 0) : max(at - 1, 0) + len(k)]"),
    Mutant("keys taken for values on metal", METAL, "Half(both, 0), Half(both, 1)", "Half(both, 1), Half(both, 0)"),
    Mutant("heads at the first position on metal", METAL, "[offset : offset + len(q)]", "[: len(q)]"),
    Mutant("a bias forgotten on metal", METAL, "SplitMatrix) and linear.bias is None for", "SplitMatrix) for"),
    Mutant("no norm taken before a product of many", METAL_KERNELS, "if len(x) <= MOST_VECTORS:", "if True:"),
    Mutant("the order of MLX for floats on metal", METAL, "y = self.kernels.dense(x, linear.weight)", "y = None"),
    Mutant("attention tried on another pool", METAL_KERNELS, "store[:, :, :1]", "store"),
    Mutant("halves of two passes written as one", METAL_WEIGHTS, "k.both is v.both and ", ""),
    Mutant("scales that are no numbers are split", METAL_WEIGHTS,
           "if np.isfinite(np.asarray(matrix.ws)).all() else None", ""),
    Mutant("every kernel silently replaced", METAL_KERNELS, "if name in self.refused:", "if True:"),
    Mutant("a refusal is kept quiet", METAL_KERNELS, "LOGGER.log(logging.WARNING", "LOGGER.log(logging.DEBUG"),
    Mutant("a wrong kernel is taken for a refused one", METAL_KERNELS, "return (CompileError,)", "return (Exception,)"),
    Mutant("what is tried is the model's own graph", METAL_KERNELS, "tuple(map(zeros, args))", "args"),
    Mutant("tied head split twice", "models/parameters.py", "if key not in self._prepared:", "if True:"),
    Mutant("tuning of another chip used", TUNING, "self._read()[self.who][key]",
           "next(iter(self._read().values()))[key]"),
    Mutant("tuning by noise", TUNING, "medians[default] * (1 - MARGIN) <=", "medians[default] <="),
    Mutant("SIMD-groups that share a row torn apart", TUNING, "if tuning.simdgroups % split == 0", ""),
    Mutant("weights of a measurement stay in the cache", TUNING, "range(-(-COLD_BYTES // nbytes) - 1)", "range(0)"),
    Mutant("emulated metal chosen by itself", "backends/__init__.py",
           'not (name == "metal" and _emulated()) and ', ""),
    Mutant("what a message spells is a marker", CHAT,
           "if is_told and [i for i in ids if i in marked] == written:", "if True:"),
    Mutant("a message's marker stands for the template's", CHAT, "if is_told and [", "if ["),
    Mutant("a normaliser makes a marker of a message", CHAT, "if len(text) < 2 or not any(", "if True or not any("),
    Mutant("markers that are put together are a message's", CHAT, "return text in template or any(",
           "return text in template or False and any("),
    Mutant("a run that has ended holds its cache", STREAM, "self._ids = iter(())", "pass"),
    Mutant("half of a marker may be a message's", CHAT, "(text[0], text[-1])", "(text[0],)"),
    Mutant("markers that any text may have are a message's", CHAT, "tokenizer.special_tokens | always",
           "tokenizer.special_tokens"),
    Mutant("what a message hid stays hidden", CHAT, "if match else None].translate(show)", "if match else None]"),
    Mutant("BOS written twice", CHAT, "or ids[:1] == [bos_id]", ""),
    Mutant("a template writes without end", SANDBOX, "if size > characters:", "if False:"),
    Mutant("a namespace with Python's own names", SANDBOX, 'if name.startswith("_"):', "if False:"),
    Mutant("a run that is late goes on", STREAM, "elif self._is_late():", "elif False:"),
    Mutant("a run ends a token late", STREAM, "self._metrics.clock() >= self._deadline",
           "self._metrics.clock() > self._deadline"),
    Mutant("a prompt is read to its end, late or not", STREAM, "if done < total and self._is_late():", "if False:"),
    Mutant("the time begins with the making of a run", STREAM, "        self._pieces = self._run()",
           "        self._deadline = self._metrics.clock() + (self._timeout or 0)\n"
           "        self._pieces = self._decoded()"),
    Mutant("the context asked for ignored", "engine.py", "min(whole, context_len)", "whole"),
    Mutant("windows forgotten in the size of a cache", "cache/size.py",
           "slots_for(self.n_tokens, self.window, self.chunk)", "self.n_tokens"),
    Mutant("blank lines are prompts", "commands/prompts.py", " if line.strip()]", "]"),
    Mutant("a temperature of nearly nothing", "backends/sampling.py", "self.temperature < COLDEST",
           "self.temperature == 0"),
    Mutant("unexpected tensors ignored", "models/parameters.py",
           "unexpected = sorted(set(checkpoint.shapes) - names - set(plan.unused))", "unexpected = []"),
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
