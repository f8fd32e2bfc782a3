"""The sections of BENCHMARKS.md: the rows of each benchmark as text and tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from benchmarks.bits import distinct
from benchmarks.concurrency import fastest as fastest_setting
from benchmarks.crossover import crossover
from benchmarks.log import Row
from benchmarks.peers.contests import (
    ENGINES,
    ERRORS,
    FORMATS,
    LLAMA,
    MEASURED,
    OPENVINO,
    OURS,
    PASSES,
    START,
    TRANSFORMERS,
)
from benchmarks.rows import DEPTH, limit
from benchmarks.server import N_ANSWERS, N_PROMPT, high
from mlx_engine.bench.ladder import EARLY, LATE, growth_of


def figure(value: float) -> str:
    """Return a number with three significant digits, or as a whole number from 100 on."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def spread(values: Sequence[float]) -> str:
    """Return the median, then the smallest and the largest value; for a single value, only this value."""
    median = figure(statistics.median(values))
    return f"{median} ({figure(min(values))} to {figure(max(values))})" if len(values) > 1 else median


def table(head: Sequence[str], lines: Iterable[Sequence[str]], *, n_words: int = 1) -> str:
    """Return a Markdown table; columns after the first `n_words` are numbers."""
    rule = "|" + "---|" * n_words + "--:|" * (len(head) - n_words)
    return "\n".join([_line(head), rule, *map(_line, lines)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def model(row: Row) -> str:
    """Return name and size of a row's model."""
    return f"{row['model_name']}: {row['model_n_params'] / 1e6:.2f} M parameters, {row['model_size'] / 1e6:.1f} MB"


def source(row: Row) -> str:
    """Return machine, versions and commit of a measurement."""
    machine, versions = row["machine"], row["versions"]
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB" if machine["memory_bytes"] else "unknown memory"
    return (
        f"{machine['processor']}, {machine['cores']} cores, {memory}, {machine['system']}; {packages}; "
        f"commit {row['commit']}, {row['time'][:10]}."
    )


PEERS_INTRO = """Every engine computes with the same weights, in its own process. Runs are interleaved: in each round,
every engine runs the test once, so that a machine that slows down slows all engines. Prompts are random ids; decode is
greedy. Tokenisation and a warm-up run are not timed. A rate is the median over the rounds, then the slowest and the
fastest; the factor is this engine over llama.cpp, then the smallest and the largest factor of a round. llama.cpp runs
with every listed setting in the first round, with those that were not much slower in the second, and then only with the
fastest one; in decode, also with its default. Slow engines run once, with a time budget: `~` marks figures extrapolated
from fewer tokens than the test has."""


def peers(rows: Sequence[Row]) -> str:
    """Return the whole section, without the parts that were not measured."""
    rows = latest(rows)
    # The errors are measured on a model of their own.
    main = next((row for row in rows if row["contest"] != ERRORS), rows[0])
    parts = [f"{model(main)}.\n\n{source(rows[0])}{later(rows)}", PEERS_INTRO, engines(rows)]
    for title, part in (
        ("Tokens per second", speeds),
        ("Decode and memory bandwidth", shares),
        ("A whole process", processes),
        ("Errors of the logits", errors),
        ("Formats, and late passes", ourselves),
    ):
        text = part(rows)
        parts += [f"### {title}", text] if text else []
    return "\n\n".join(parts) + "\n"


def latest(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of each contest's newest run: rows that were not interleaved are not compared."""
    newest: dict[str, str] = {}
    for row in rows:
        newest[row["contest"]] = max(row["time"], newest.get(row["contest"], ""))
    return [row for row in rows if row["time"] == newest[row["contest"]]]


def last_run(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the last measurement."""
    return [row for row in rows if row["time"] == rows[-1]["time"]]


def later(rows: Sequence[Row]) -> str:
    """Return the contests (tests) measured at another commit than the first row's, and the processor if it differs."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        if row["commit"] != rows[0]["commit"]:
            same = row["machine"]["processor"] == rows[0]["machine"]["processor"]
            place = "" if same else f"on {row['machine']['processor']}, "
            found.setdefault((place, row["commit"]), {})[row["contest"]] = None
    return "".join(
        f" Measured since, {place}at commit {commit}: {', '.join(of)}." for (place, commit), of in found.items()
    )


def tests_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return rows by test. Contests that compare something other than the speed of a test are left out."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["contest"] == row.get("test"):
            found.setdefault(row["test"], []).append(row)
    return found


def rates(row: Row) -> list[float]:
    """Return tokens per second, one per round."""
    return [(row["n_prompt"] + row["n_gen"]) / seconds for seconds in row["seconds"]]


def fastest(rows: Sequence[Row], engine: str) -> Row | None:
    """Return the engine's row with the best median among the settings that ran in most rounds."""
    measured = [row for row in rows if row["engine"] == engine and row["seconds"]]
    return max(measured, key=lambda row: (len(row["seconds"]), statistics.median(rates(row))), default=None)


def engines(rows: Sequence[Row]) -> str:
    """Return a table of the engines: versions and types of the computation, or why an engine is absent."""
    lines = []
    for name, engine in ENGINES.items():
        of = [row for row in rows if row.get("engine") == name]
        versions: dict[str, str] = next((row["facts"]["versions"] for row in of if row.get("facts")), {})
        absent = next((row["absent"] for row in of if row["absent"]), None)
        if of:
            packages = ", ".join(f"{package} {version}" for package, version in versions.items())
            lines.append([name, packages or f"absent: {absent}", engine.computes])
    return table(["engine", "versions", "computes with"], lines, n_words=3)


def speeds(rows: Sequence[Row]) -> str:
    """Return a table of the tests, and the settings that were tried."""
    others = [name for name in MEASURED if name not in (OURS, LLAMA)]
    lines, tried = [], []
    for test, of in tests_of(rows).items():
        ours, llama = fastest(of, OURS), fastest(of, LLAMA)
        default = fastest([row for row in of if row["default"]], LLAMA)
        cells = [rate(ours), rate(llama), factor(ours, llama), rate(default), factor(ours, default)]
        lines.append([test, *cells, *(rate(fastest(of, name)) for name in others)])
        tried += [
            f"- {test}, llama.cpp, {row['setting']}: {rate(row)} in {len(row['seconds'])} "
            f"round{'s' * (len(row['seconds']) > 1)}"
            for row in of
            if row["engine"] == LLAMA and row["seconds"]
        ]
    text = table(["test", OURS, f"{LLAMA}, fastest", "factor", f"{LLAMA}, default", "factor", *others], lines)
    notes = [
        f"- {row['test']}, {row['engine']}: {row['estimated'] or 'one run'}"
        for of in tests_of(rows).values()
        for row in of
        if row["engine"] in others and row["seconds"]
    ]
    return "\n\n".join(part for part in [text, "\n".join(tried), "\n".join(notes)] if part) if lines else ""


def rate(row: Row | None) -> str:
    """Return tokens per second as text."""
    return "-" if row is None else ("~" if row["estimated"] else "") + spread(rates(row))


def factor(ours: Row | None, theirs: Row | None) -> str:
    """Return the median of our rates divided by that of theirs, then the smallest and the largest ratio of a round."""
    if ours is None or theirs is None:
        return "-"
    mine, other = rates(ours), rates(theirs)
    single = [a / b for a, b in zip(mine, other, strict=False)]
    middle = figure(statistics.median(mine) / statistics.median(other))
    return f"{middle} ({figure(min(single))} to {figure(max(single))})"


def shares(rows: Sequence[Row]) -> str:
    """Return a table of the bandwidth that decode reaches, compared with the bandwidth measured between the rounds."""
    lines = []
    for test, of in tests_of(rows).items():
        ours = fastest(of, OURS)
        if ours is not None and ours["read_rates"]:
            n_tokens = ours["n_prompt"] + ours["n_gen"]
            reached = [ours["nbytes"] / seconds / 1e9 for seconds in ours["seconds"]]
            line = [test, figure(ours["nbytes"] / n_tokens / 1e6), spread(reached)]
            for rates_ in (ours["read_rates"], ours.get("fastest_read_rates")):
                if rates_:
                    limit = [found / 1e9 for found in rates_]
                    line += [spread(limit), f"{statistics.median(reached) / statistics.median(limit):.0%}"]
                else:
                    line += ["-", "-"]
            lines.append(line)
    if not lines:
        return ""
    head = ["test", "MB per token", "GB/s", "plain read, GB/s", "share", "eight streams, GB/s", "share"]
    return (
        "GB/s: the bytes of weights, keys and values that the test reads, divided by its time. The plain read is a "
        "kernel that only loads the same mapped bytes on the same threads, in one stream; it is measured after every "
        "round. Eight interleaved streams read faster, and give the highest bandwidth that we measured: the last two "
        "columns compare with it.\n\n" + table(head, lines)
    )


def processes(rows: Sequence[Row]) -> str:
    """Return a table of time to the first printed token and peak memory."""
    of = [row for row in rows if row["contest"] == START]
    if not of:
        return ""
    lines = [
        [row["engine"], spread(row["seconds"]), spread([peak / 1e6 for peak in row["peak_bytes"]])]
        if row["seconds"]
        else [row["engine"], row["absent"], "-"]
        for row in of
    ]
    measured = {row["engine"]: row for row in of if row["seconds"]}
    if OURS in measured and LLAMA in measured:
        ours, theirs = measured[OURS], measured[LLAMA]
        factors = [
            statistics.median(ours[what]) / statistics.median(theirs[what]) for what in ("seconds", "peak_bytes")
        ]
        lines.append(["mlx_engine over llama.cpp", *map(figure, factors)])
    head = ["engine", "seconds to the first printed token", "peak resident memory, MB"]
    return (
        f"From the start of the process: load the file, read {of[0]['prompt']!r} ({of[0]['n_tokens']} tokens), print "
        "the next token. The file is in the page cache; its mapped pages count as resident for both engines. "
        f"mlx_engine runs `python cli.py generate`, llama.cpp a script that does the same.\n\n{table(head, lines)}"
    )


def errors(rows: Sequence[Row]) -> str:
    """Return a table of relative errors."""
    of = [row for row in rows if row["contest"] == ERRORS]
    lines = [[row["engine"], row["absent"] or f"{row['together']:.1e}"] for row in of]
    if not lines:
        return ""
    return (
        "Relative error in the Frobenius norm against logits computed in float64 with the stored weights: a small "
        "Qwen3 with random Q8_0 weights, every position of three prompts, the same ids for all engines.\n\n"
        + table(["engine", "relative error"], lines)
    )


def ourselves(rows: Sequence[Row]) -> str:
    """Return two comparisons of this engine with itself: stored and expanded weights, late and early passes."""
    lines = []
    both = [row for row in rows if row["contest"] == FORMATS and row["seconds"]]
    if len(both) == 2:
        kept, expanded = both
        lines.append(
            f"- `{kept['test']}` with Q8_0 weights as stored, {rate(kept)}, against the same weights as float32, "
            f"{rate(expanded)}: factor {factor(kept, expanded)}."
        )
    for row in rows:
        if row["contest"] == PASSES and row["seconds"]:
            lines.append(
                f"- Passes {LATE[0]} to {LATE[1]} of a text take {spread(growths(row))} times as long as passes "
                f"{EARLY[0]} to {EARLY[1]}, medians of each run."
            )
    return "\n".join(lines)


def growths(row: Row) -> list[float]:
    """Return for every run the time of late passes, divided by the time of early ones."""
    found = (growth_of({"passes_s": [passes]}) for passes in row["passes_s"])
    return [growth for growth in found if growth is not None]


QUANTS_INTRO = """llama.cpp quantised these files from the first one; in `pure` files all matrices have one type. Each
contestant generates 64 tokens in a fresh process, interleaved; a rate is the median over the rounds, then the slowest
and the fastest. Factors are medians over rounds, relative to this engine's rate with Q8_0, and to llama.cpp with its
best number of threads. This engine multiplies the stored quants with float32 activations; llama.cpp rounds activations
to 8 bits. The error is that of our logits, relative to logits with the same weights in float32."""


ACTIVATIONS_INTRO = """A model with the shape of Qwen3 0.6B, quantised by llama.cpp. This engine with float32 and with
`--activations i16`, and llama.cpp with its fastest setting, are measured in the same rounds. The first factor is the
rate of `i16` divided by that of `f32`, the second is the rate of `i16` divided by llama.cpp's. On the same processor,
"haswell" is AVX2 code, and "alderlake" is AVX2 code with AVX-VNNI, which llama.cpp was built without. The column "its
code" has the instructions for which llama.cpp was built. `affine4` is MLX's format, which llama.cpp does not read.
OpenVINO rounds the weights again, to 8 bits (`q8_0`) or 4 bits (`q4_0`), and activations to 8 bits. If there are
several sequences, each has a prompt of 128 tokens, and the rate is that of all together."""


def activations(rows: Sequence[Row]) -> str:
    """Return for each machine the rates of float32, fixed point and other engines, by test, processor and file."""
    machines: dict[str, list[Row]] = {}
    for row in rows:
        machines.setdefault(row["machine"]["processor"], []).append(row)
    return "\n\n".join([ACTIVATIONS_INTRO, *map(_activations, machines.values())]) + "\n"


def _activations(rows: Sequence[Row]) -> str:
    cells: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        cells.setdefault((row["processor"], row["contest"], row["file"]), []).append(row)
    # Sorted by processor, then test, then file, each in the order in which they were first measured.
    ranks = [list(dict.fromkeys(names)) for names in zip(*cells, strict=True)]
    lines = []
    for key in sorted(cells, key=lambda key: [rank.index(name) for rank, name in zip(ranks, key, strict=True)]):
        (processor, test, file), of = key, last_run(cells[key])
        exact, rounded = (row for row in of if row["engine"] == OURS)
        theirs = fastest(of, LLAMA)
        factors = [factor(rounded, exact), rate(theirs), factor(rounded, theirs), built_for(theirs)]
        lines.append([file, test, processor, rate(exact), rate(rounded), *factors, rate(fastest(of, OPENVINO))])
    head = ["file", "test", "code for", "f32", "i16", "factor", f"{LLAMA}, fastest", "factor", "its code", OPENVINO]
    more = len({row["commit"] for row in rows}) > 1
    earlier = " Some rows are of earlier commits, which `activations.jsonl` names." if more else ""
    return f"{source(rows[-1])}{earlier}\n\n{table(head, lines, n_words=3)}"


def built_for(row: Row | None) -> str:
    """Return the widest vector instructions for which llama.cpp was built, as it reports them."""
    said = "" if row is None else row["facts"].get("built_for", "")
    return next((name for name in ("AVX512", "AVX2", "NEON") if f"{name} = 1" in said), "-").replace("X5", "X-5")


KV_TYPES_INTRO = """A model with the shape of Qwen3 0.6B in Q8_0 generates 64 tokens after a long text. Every
`--kv-type` runs once per round, and so does llama.cpp, whose keys and values are float16; after two rounds, llama.cpp
continues only with its faster setting. A factor is relative to `f32`."""


def kv_types(rows: Sequence[Row]) -> str:
    """Return the rates of each type of keys and values, and of llama.cpp, by processor and depth."""
    cells: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        cells.setdefault((row["processor"], row["contest"]), []).append(row)
    lines = []
    for (processor, test), of in cells.items():
        of = last_run(of)
        exact = next(row for row in of if row["engine"] == OURS)
        for row in of:
            what = row["setting"] if row["engine"] == OURS else f"{LLAMA}, {row['setting']}"
            lines.append([what, test, processor, rate(row), factor(row, exact)])
    head = ["type", "test", "code for", "tokens/s", "factor"]
    return f"{source(rows[-1])}\n\n{KV_TYPES_INTRO}\n\n{table(head, lines, n_words=3)}\n"


PRECISION_INTRO = """The error of the logits (in the Frobenius norm), the mean Kullback-Leibler divergence (KL), and how
often the most likely token is the same, relative to the same file with float32 activations, keys and values."""


def precision(rows: Sequence[Row]) -> str:
    """Return the errors of i16 activations, and of each type of keys and values, by model."""
    newest = {(row["model"], row["setting"]): row for row in rows}
    lines = []
    for (model, setting), row in newest.items():
        found = row["reference"]
        cells = [
            f"{found['logits_error']:.1e}",
            f"{found['kl']['mean']:.1e}",
            f"{100 * found['top_1_agreement']:.4g} %",
        ]
        lines.append([model, setting, f"{row['n_scored']:,}", *cells])
    head = ["file", "setting", "tokens", "error", "KL", "same token"]
    return f"{source(rows[-1])}\n\n{PRECISION_INTRO}\n\n{table(head, lines, n_words=2)}\n"


PREFIX_DISK_INTRO = """Seconds from the submission of a prompt to a new engine until its first token. The prompt is
computed, or its keys and values are read from files, one per page of 64 tokens, which are in the system's page cache or
on the disk. The last page was computed; later versions compute only its last token. The factor is relative to computing
the same prompt, in the same rounds; MB is the size of the files."""


def prefix_disk(rows: Sequence[Row]) -> str:
    """Return the time to the first token with and without files, by type of keys and values."""
    newest = {(row["model_name"], row["n_tokens"], row["kv_type"]): row for row in rows}
    lines = []
    for (name, n_tokens, kv_type), row in newest.items():
        cold = row["samples_s"]["cold"]
        cells = [spread(cold)]
        for way in ("page cache", "disk"):
            seconds = row["samples_s"][way]
            cells += [spread(seconds), figure(statistics.median(seconds) / statistics.median(cold))]
        about = [figure(row["nbytes"] / 1e6), figure(row["disk_gbs"])]
        lines.append([kv_type, f"{name.removeprefix('shape:')}, {n_tokens:,} tokens", *cells, *about])
    head = ["type", "prompt", "computed", "files in memory", "factor", "files on disk", "factor", "MB", "disk GB/s"]
    return f"{source(rows[-1])}\n\n{PREFIX_DISK_INTRO}\n\n{table(head, lines, n_words=2)}\n"


def llama_quants(rows: Sequence[Row]) -> str:
    """Return the newest measurement as text."""
    rows = last_run(rows)
    decode = [row for row in rows if row["what"] == "decode"]
    errors = {row["file"]: row["error"] for row in rows if row["what"] == "error"}
    ours = {row["file"]: row for row in decode if row["engine"] == OURS}
    theirs: dict[str, Row] = {}
    for row in decode:
        best = theirs.get(row["file"], row)
        if row["engine"] == LLAMA and statistics.median(row["seconds"]) <= statistics.median(best["seconds"]):
            theirs[row["file"]] = row
    base = next(iter(ours.values()))
    lines = []
    for name, row in ours.items():
        other = theirs.get(name)
        lines.append([
            name, figure(row["model_size"] / 1e6), quants_rate(row), quants_factor(row, base),
            quants_rate(other) if other else "-", quants_factor(row, other) if other else "-", f"{errors[name]:.1e}",
        ])  # fmt: skip
    head = ["file", "MB", "tokens/s", "over Q8_0", LLAMA, "factor", "error"]
    parts = [f"{model(base)}.", source(base), QUANTS_INTRO, table(head, lines), *quants_heads(rows, ours)]
    return "\n\n".join(parts) + "\n"


def quants_rate(row: Row) -> str:
    """Return tokens per second, and the setting."""
    setting = f", {row['setting']}" if row["setting"] else ""
    return spread([row["n_gen"] / seconds for seconds in row["seconds"]]) + setting


def quants_factor(row: Row, base: Row) -> str:
    """Return the speed relative to `base`, the median over rounds."""
    return figure(statistics.median(b / a for a, b in zip(row["seconds"], base["seconds"], strict=True)))


def quants_heads(rows: Sequence[Row], ours: dict[str, Row]) -> list[str]:
    """Return the time of the output head, the last product of a token."""
    lines = []
    for row in rows:
        if row["what"] == "head":
            took, token = statistics.median(row["seconds"]), statistics.median(ours[row["file"]]["seconds"])
            share = took / (token / ours[row["file"]]["n_gen"])
            rates = f"{row['nbytes'] / 1e6:,.0f} MB in {took * 1e3:.2f} ms, {row['nbytes'] / took / 1e9:.1f} GB/s"
            lines.append(f"- {row['file']}: a head of {row['type']} reads {rates}: {share:.0%} of a token.")
    return ["\n".join(lines)] if lines else []


EXPERTS_INTRO = """Decode of random tokens with the layers of Qwen3-30B-A3B and random weights, by a process that may
use all memory or half of it, everything counted. Routers prefer some experts, as was published for Qwen3-30B-A3B (65 of
128 experts have 90 % of the choices, the first 4.3 %). Tokens are independent, or choices repeat as was published for
text (45 % of a token's choices are choices of the token before, 80 % of one of the eight before). The factor is
relative to the same engine with all memory. The limit is the rate of tokens at which the disk would be busy all the
time; the disk's rate was measured with direct reads."""


def experts(rows: Sequence[Row]) -> str:
    """Return the newest measurement of each type as text."""
    newest = {row["type"]: row["time"] for row in rows}
    rows = [row for row in rows if row["time"] == newest[row["type"]]]
    lines, of_all, said = list[list[str]](), 0.0, dict[str, str]()
    for row in rows:
        rates = [run["rate"] for run in row["runs"]]
        rate = statistics.median(rates)
        of_all = of_all if row["is_limited"] else rate
        memory, read = (statistics.median(run[key] for run in row["runs"]) for key in ("memory", "read"))
        limit = figure(row["disk"] / read) if row["is_limited"] else ""
        lines.append([
            row["engine"], row["type"], row["text"], figure(memory / 1e9), spread(rates), figure(rate / of_all),
            figure(read / 1e6), limit, "yes" if row["has_same_bits"] else "no",
        ])  # fmt: skip
        said[f"{row['type']}, {row['text']}"] = experts_chosen(row)
    head = ["engine", "type", "tokens", "memory, GB", "tokens/s", "factor", "MB read per token", "limit", "same logits"]
    about = "\n".join(f"- {name}: {text}" for name, text in said.items())
    return f"{source(rows[-1])}\n\n{EXPERTS_INTRO}\n\n{table(head, lines, n_words=3)}\n\n{about}\n"


def experts_chosen(row: Row) -> str:
    """Return what is known about the choices of the routers, and the rate of the disk."""
    text = f"{row['experts_for_90_percent']:.0f} experts have 90 % of the choices, the first "
    text += f"{row['share_of_the_first']:.1%}; {row['guessed_by_the_layer_before']:.0%} are guessed by the layer before"
    text += f"; {row['chosen_by_the_token_before']:.0%} are choices of the token before, "
    text += f"{row['chosen_by_the_eight_before']:.0%} of one of the eight before"
    return f"{text}. The disk reads {row['disk'] / 1e9:.2f} GB/s."


STATES_INTRO = """\
Both engines are interleaved; a rate is the median over the rounds, then the slowest and the fastest. A factor
is relative to the fastest measured setting of llama.cpp, and is the median over the rounds. The bytes are those of this
engine's cache at the end of the test: the state has the same size at every depth, and only keys and values, or latents,
grow."""


def states(rows: Sequence[Row]) -> str:
    """Return the newest measurement of each model as text."""
    newest = {row["model_name"]: row["time"] for row in rows}
    tables = [states_of([row for row in rows if (row["model_name"], row["time"]) == one]) for one in newest.items()]
    return "\n\n".join([STATES_INTRO, *tables]) + "\n"


def states_of(rows: Sequence[Row]) -> str:
    """Return the measurement of one model as text."""
    lines = []
    for name in dict.fromkeys(row["what"] for row in rows):
        ours, *others = (row for row in rows if row["what"] == name)
        theirs = min(others, key=lambda row: statistics.median(row["seconds"]))
        factors = [b / a for a, b in zip(ours["seconds"], theirs["seconds"], strict=True)]
        cache = ours["cache"]
        lines.append([
            name, spread(rates(ours)), spread(rates(theirs)), figure(statistics.median(factors)),
            figure(cache["state_bytes"] / 1e6), figure(cache["kv_bytes"] / 1e6),
        ])  # fmt: skip
    head = ["test", "tokens/s", LLAMA, "factor", "state, MB", "keys and values, MB"]
    return "\n\n".join([f"{model(rows[0])}.", source(rows[0]), table(head, lines, n_words=1)])


def rows_in_one_pass(rows: Sequence[Row]) -> str:
    """Return the newest measurement as a table."""
    row = rows[-1]
    medians = row["medians_ts"]
    lines = [
        [n, spread(row["samples_ts"][n]), figure(limit(medians, int(n))), f"{rate / limit(medians, int(n)):.2f}"]
        for n, rate in medians.items()
    ]
    words = (
        f"{source(row)}\n\nOne forward pass of several tokens after {DEPTH} others, with the logits of every token: "
        f"{row['model_name']}, {row['threads']} threads. The limit is the smaller of rows x one row's rate (memory) "
        "and the rate of the longest pass (arithmetic).\n\n"
    )
    return words + table(["rows", "tokens/s", "limit", "share"], lines, n_words=1)


def batch(rows: Sequence[Row]) -> str:
    """Return the newest measurement of each depth as a table."""
    newest = {row["depth"]: row for row in rows}
    return "\n\n".join(_batch_table(newest[depth]) for depth in sorted(newest))


def _batch_table(row: Row) -> str:
    lines = []
    for n, rate in row["medians_ts"].items():
        limits = row["limits_ts"][n]
        lines.append([n, spread(row["samples_ts"][n]), *map(figure, limits), f"{rate / min(limits):.2f}"])
    words = (
        f"{source(row)}\n\nOne decode step reads a token of each sequence, after {row['depth']:,} tokens of its own: "
        f"{row['model_name']}, {row['threads']} threads. Limits: all weights, keys and values at {row['read_gbs']:.1f} "
        f"GB/s, and all multiplications at {row['peak_gflops']:.0f} GFLOP/s; the share is relative to the smaller "
        "limit.\n\n"
    )
    return words + table(["sequences", "tokens/s", "by memory", "by arithmetic", "share"], lines, n_words=1)


def concurrency(rows: Sequence[Row]) -> str:
    """Return the newest measurement of each depth as a table."""
    newest = {row["depth"]: row for row in rows}
    return "\n\n".join(_concurrency_table(newest[depth]) for depth in sorted(newest))


def _concurrency_table(row: Row) -> str:
    names, lines = list(row["samples_ts"]), []
    for n, rate in row["medians_ts"][OURS].items():
        theirs, smaller = fastest_setting(row, n), min(row["limits_ts"][n])
        factor = "-" if theirs is None else figure(rate / theirs)
        rates = [spread(row["samples_ts"][name][n]) for name in names]
        gain = figure(rate / row["medians_ts"][OURS]["1"])
        lines.append([n, *rates, gain, factor, f"{rate / smaller:.2f}"])
    words = (
        f"{source(row)}\n\nDecode steps that each compute one token of every sequence, after {row['depth']:,} tokens "
        f"of its own: {row['model_name']}, {row['threads']} threads. The gain is relative to one sequence, and the "
        f"factor to {LLAMA} with its fastest setting. The share is relative to the smaller of two limits: reading all "
        f"weights, keys and values at {row['read_gbs']:.1f} GB/s, and all arithmetic at {row['peak_gflops']:.0f} "
        "GFLOP/s.\n\n"
    )
    return words + table(["sequences", *names, "gain", "factor", "share"], lines, n_words=1)


def server(rows: Sequence[Row]) -> str:
    """Return the newest measurement."""
    row = rows[-1]
    resident, mapped = row["resident_bytes"] / 1e6, row["mapped_bytes"] / 1e6
    words = (
        f"{source(row)}\n\n{row['model_name']}: from the creation of the process to the first 200 of /health "
        f"{spread(row['starts_s'])} s. Idle, it holds {figure(resident)} MB, of which {figure(mapped)} MB are mapped "
        "files.\n\n"
    )
    names = {
        "health_s": f"/health while {N_ANSWERS} answers are generated",
        "gaps_alone_s": "gap between tokens",
        "gaps_beside_prompt_s": f"gap between tokens while a prompt of {N_PROMPT:,} tokens is read",
    }
    lines = [
        [name, figure(statistics.median(row[key]) * 1e3), figure(high(row[key]) * 1e3)] for key, name in names.items()
    ]
    return words + table(["milliseconds", "median", "p99"], lines, n_words=1)


def ways(rows: Sequence[Row]) -> str:
    """Return the newest measurement as a table."""
    newest = last_run(rows)
    lines = []
    for row in newest:
        in_order, interleaved = (row["samples_gbs"][way] for way in ("in_order", "in_turns"))
        single = statistics.median(b / a for a, b in zip(in_order, interleaved, strict=True))
        lines.append([row["what"], spread(in_order), spread(interleaved), figure(single)])
    words = (
        f"{source(newest[0])}\n\n{newest[0]['nbytes'] / 2**20:,.0f} MiB on {newest[0]['threads']} threads. The "
        "plain read compares one stream in order with eight interleaved streams. The products compare gemv row by row "
        "with gemv over four interleaved streams of rows. The factor is the median over rounds.\n\n"
    )
    return words + table(["", "in order, GB/s", "interleaved, GB/s", "factor"], lines)


def chunks(rows: Sequence[Row]) -> str:
    """Return the newest measurement as a table."""
    newest = last_run(rows)
    lines = [
        [f"{row['bytes'] / 1024:,.0f} KiB", figure(row["alone_us"]), figure(row["handed_out_us"]),
         figure(row["alone_us"] / row["handed_out_us"])]
        for row in newest
    ]  # fmt: skip
    words = (
        f"{source(newest[0])}\n\nOne gemv with a Q8_0 matrix that is in memory and not in a cache, on one thread and "
        f"on {newest[0]['threads']}, in microseconds. Up to {newest[0]['chunk_bytes'] // 1024} KiB the engine uses one "
        "thread.\n\n"
    )
    head = ["weights", "1 thread", f"{newest[0]['threads']} threads", "factor"]
    return words + table(head, lines, n_words=1)


SPECULATION_INTRO = """Each text is answered with and without proposed tokens, interleaved; the ids are the same. Rates
count the tokens after the first, and are medians of the rounds; the factor is relative to no proposals. The drafter
"recorded" proposes the tokens of the known answer, of which the given share is right; this shows the factor
at a given acceptance rate for models with random weights. Other drafters with a probability first run their own passes,
and their tokens are then replaced in the same way. llama.cpp's factor is its speed with LlamaPromptLookupDecoding
relative to its speed without, on the same file and text, interleaved. Its answer may change, because in llama.cpp the
bits of a row depend on the number of rows in the pass."""


def speculation(rows: Sequence[Row]) -> str:
    """Return a table for each file, from its newest rows."""
    newest = {(row["file"], row["draft"], row["text"], row["drafter"], row["copies"]): row for row in rows}
    parts = [SPECULATION_INTRO]
    for file in dict.fromkeys(row["file"] for row in rows):
        of = [row for row in newest.values() if row["file"] == file]
        lines = []
        for row in of:
            theirs, cells = row["llama.cpp"], ["", ""]
            if theirs is not None:
                factor = statistics.median(theirs["off"]) / statistics.median(theirs["on"])
                cells = [figure(factor), "the same" if theirs["is_same"] else "another"]
            lines.append([
                row["text"] if row["copies"] == 1 else f"{row['text']}, {row['copies']} at once",
                row["drafter"] if row["draft"] is None else f"{row['drafter']} ({row['draft']})",
                figure(row["off"]), figure(row["on"]), figure(row["factor"]),
                f"{row['accepted']:,} of {row['proposed']:,}", *cells,
            ])  # fmt: skip
        head = ["text", "drafter", "off, tokens/s", "on, tokens/s", "factor", "accepted", LLAMA, "its answer"]
        parts += [f"### {file}", source(of[-1]), table(head, lines, n_words=2)]
    return "\n\n".join(parts) + "\n"


def crossovers(rows: Sequence[Row]) -> str:
    """Return the newest measurement as a table."""
    rows = last_run(rows)
    types = list(rows[0]["medians_us"])
    lines = []
    for row in rows:
        medians = row["medians_us"]
        factors = [figure(medians["F32"] / medians[name]) for name in types if name != "F32"]
        lines.append([row["backend"], str(row["width"]), *(figure(medians[name]) for name in types), *factors])
    words = (
        f"{source(rows[0])}\n\nOne gemv with a square matrix that is in memory and not in a cache, in microseconds, "
        f"and the speed relative to F32. From a width of {crossover(rows)} on, Q8_0 is not slower on any backend; "
        "`--quant-min-dim auto` leaves narrower layers unquantised.\n\n"
    )
    head = ["backend", "width", *types, *(f"{name} factor" for name in types if name != "F32")]
    return words + table(head, lines, n_words=1)


BASE = "scalar"

CASES_INTRO = """The contract suite's cases. Their inputs have a few hundred numbers, so the times are the overhead of a
call: microseconds per call, medians, then the speed relative to `scalar`."""

SIZES_INTRO = """The operations of a Qwen3-0.6B-shaped model for one token (T=1) and for 512. Every call takes another
layer's weights, or another KV cache, so that they are read from memory. GB/s count the bytes that must at least be read
and written."""


def operations(rows: Sequence[Row]) -> str:
    """Return both tables, each of its newest run."""
    parts = []
    for kind, title, part in (
        ("sizes", "Operations of a model's size", operation_sizes),
        ("cases", "Overhead of a call", operation_cases),
    ):
        of = [row for row in rows if row["kind"] == kind]
        newest = max((row["time"] for row in of), default="")
        of = [row for row in of if row["time"] == newest]
        if of:
            parts += [f"### {title}", source(of[0]), part(of)]
    return "\n\n".join(parts) + "\n"


def operation_medians(row: Row, key: str) -> dict[str, float]:
    """Return median seconds by entry."""
    return {entry[key]: statistics.median(entry["seconds"]) for entry in row["found"]}


def operation_cases(rows: Sequence[Row]) -> str:
    """Return a line per backend over all cases, then every case in a folded table."""
    found = {row["backend"]: operation_medians(row, "id") for row in rows}
    base = found.get(BASE)
    short, long = [], []
    for name, times in found.items():
        factors = [base[case] / seconds for case, seconds in times.items()] if base else []
        short.append([
            name, figure(statistics.median(times.values()) * 1e6), figure(max(times.values()) * 1e6),
            figure(statistics.geometric_mean(factors)) if factors else "-",
        ])  # fmt: skip
    for case in next(iter(found.values())):
        long.append([case, *(_operation_cell(times[case], base[case] if base else None) for times in found.values())])
    head = ["backend", "median case, us", "slowest case, us", "speed relative to scalar (geometric mean)"]
    fold = f"<details><summary>Every case</summary>\n\n{table(['case', *found], long)}\n\n</details>"
    return f"{CASES_INTRO}\n\n{table(head, short)}\n\n{fold}"


def _operation_cell(seconds: float, base: float | None) -> str:
    factor = f" (x{figure(base / seconds)})" if base is not None and base != seconds else ""
    return f"{figure(seconds * 1e6)}{factor}"


def operation_sizes(rows: Sequence[Row]) -> str:
    """Return a line per operation: time and rates on every backend."""
    lines = []
    for i, entry in enumerate(rows[0]["found"]):
        cells = []
        for row in rows:
            same = row["found"][i]
            seconds = statistics.median(same["seconds"])
            cells += [
                f"{seconds * 1e6:,.0f}",
                figure(same["nbytes"] / seconds / 1e9),
                figure(same["flops"] / seconds / 1e9),
            ]
        lines.append([entry["label"], *cells])
    units = [f"{row['backend']}: {unit}" for row in rows for unit in ("us", "GB/s", "GFLOP/s")]
    return f"{SIZES_INTRO}\n\n{table(['operation', *units], lines)}"


FOLDERS_INTRO = """\
Decode in tokens per second after a prompt of 16 tokens, random weights of the real shapes: the median of all
runs, then the slowest and the fastest. Each engine runs in three processes, one after another; the runs of the
engines are interleaved. The factors are this engine, quantised on load, over transformers in float32 and over its own
float32."""


def folders(rows: Sequence[Row]) -> str:
    """Return the section of BENCHMARKS.md."""
    rows = latest(rows)
    lines = []
    for name in dict.fromkeys(row["contest"] for row in rows):
        quantized, plain, theirs = (
            next(
                (row for row in rows if row["seconds"] and (row["contest"], row["engine"], row["setting"]) == key), None
            )
            for key in ((name, OURS, "q8_0"), (name, OURS, "f32"), (name, TRANSFORMERS, ""))
        )
        cells = [rate(quantized), rate(plain), rate(theirs), factor(quantized, theirs), factor(quantized, plain)]
        lines.append([model(next(row for row in rows if row["contest"] == name)), *cells])
    head = ["model", "ours, Q8_0", "ours, float32", "transformers, float32", "over transformers", "over our float32"]
    return f"{source(rows[0])}\n\n{FOLDERS_INTRO}\n\n{table(head, lines)}\n"


def bits(rows: Sequence[Row]) -> str:
    """Return the newest measurement as a table."""
    rows = last_run(rows)
    lines = [
        [row["backend"], str(row["threads"] or "-"), str(len(row["found"])), str(len(distinct([row]))),
         str(len(distinct([rows[0], row]) - distinct([rows[0]])))]
        for row in rows
    ]  # fmt: skip
    ways = [(way["chunk"], way["page"], way["sequences"]) for way in rows[0]["found"]]
    chunks, pages, sequences = (", ".join(map(str, sorted(set(counts)))) for counts in zip(*ways, strict=True))
    words = (
        f"{source(rows[0])}\n\nLogits at all positions of a prompt of the model `{rows[0]['model_name']}`, "
        f"read in chunks of {chunks} tokens, with pages of {pages} tokens, and with {sequences} sequences in the pass. "
        "Two results differ if any bit differs.\n\n"
    )
    head = ["backend", "threads", "ways to read", "different results", f"not among those of {rows[0]['backend']}"]
    return words + table(head, lines)


def emulator(rows: Sequence[Row]) -> str:
    """Return the newest measurement as a table."""
    newest = list({row["build"]: row for row in rows}.values())
    n, k = newest[0]["shape"]
    words = (
        f"{source(newest[0])}\n\nThe kernel `{newest[0]['kernel']}` emulated on the CPU: a vector times a Q8_0 "
        f"matrix of {n:,} x {k:,}, in milliseconds, Python included. These times matter for tests; they "
        "do not predict the speed on a GPU.\n\n"
    )
    return words + table(
        ["build", "ms (fastest to slowest)"], [[row["build"], spread(row["samples_ms"])] for row in newest]
    )
