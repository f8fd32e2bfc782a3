"""The server's counters, gauges and histograms in the text format of Prometheus, for the route /metrics.

If vLLM has a metric, too, it is named as in vLLM, but with our prefix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from mlx_engine.loop.request import Request
from mlx_engine.serve.worker import Load, StepUpdate

PREFIX = "mlx_engine:"
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# The upper bounds of the buckets of histograms, in seconds, as in vLLM.
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
REQUEST = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class Counter:
    """A number that only grows; with a label, one such number for each value of the label."""

    def __init__(self, name: str, about: str, label: str | None = None) -> None:
        self._name, self._about, self._label = f"{PREFIX}{name}_total", about, label
        self._values: dict[str, float] = {} if label else {"": 0.0}

    def add(self, n: float = 1, value: str = "") -> None:
        """Add n to the counter; if it has a label, to the number for this value of the label."""
        self._values[value] = self._values.get(value, 0.0) + n

    def lines(self) -> Iterator[str]:
        """Yield the lines of the text format."""
        yield from _head(self._name, self._about, "counter")
        for value, n in self._values.items():
            label = f'{{{self._label}="{value}"}}' if self._label else ""
            yield f"{self._name}{label} {n:.17g}"


class Histogram:
    """A histogram: the number of values up to each bound, the number of all values, and their sum."""

    def __init__(self, name: str, about: str, bounds: Sequence[float]) -> None:
        self._name, self._about, self._bounds = PREFIX + name, about, (*bounds, math.inf)
        self._counts, self._sum = [0] * len(self._bounds), 0.0

    def observe(self, value: float | None) -> None:
        """Count a value; None is not counted."""
        if value is not None:
            self._counts[next(i for i, bound in enumerate(self._bounds) if value <= bound)] += 1
            self._sum += value

    def lines(self) -> Iterator[str]:
        """Yield the lines of the text format, with cumulative counts."""
        yield from _head(self._name, self._about, "histogram")
        total = 0
        for bound, n in zip(self._bounds, self._counts, strict=True):
            total += n
            yield f'{self._name}_bucket{{le="{"+Inf" if bound == math.inf else f"{bound:g}"}"}} {total}'
        yield f"{self._name}_sum {self._sum:.17g}"
        yield f"{self._name}_count {total}"


# Maps fields of `DiskStats` to descriptions of the gauges of the prefix cache on disk.
DISK = {
    "nbytes": "Bytes of files of prefixes.",
    "written": "Files of prefixes that were written.",
    "dropped": "Files of prefixes that were not written: the queue was full, the page was evicted, or the disk failed.",
    "damaged": "Files of prefixes that were removed because they were damaged.",
    "removed": "Files of prefixes that were removed because they exceeded --prefix-disk, or the disk was full.",
}


class Metrics:
    """The metrics of one model; used only in the event loop.

    With several models, the server has another `Metrics`, which counts errors and disconnected clients for all models.
    """

    def __init__(self) -> None:
        self.errors = Counter("http_errors", "Responses with an error, by HTTP status.", "status")
        self.cancelled = Counter("request_cancelled", "Requests whose client left before the end.")
        self._prompt = Counter("prompt_tokens", "Tokens of prompts, including those from the prefix cache.")
        self._generated = Counter("generation_tokens", "Tokens of answers.")
        self._queries = Counter("prefix_cache_queries", "Tokens of prompts that were looked up in the prefix cache.")
        self._hits = Counter("prefix_cache_hits", "Tokens of prompts that were found in the prefix cache.")
        self._from_disk = Counter("prefix_disk_hits", "Tokens of prompts that were read from files of prefixes.")
        self._success = Counter("request_success", "Answers that have ended, by reason.", "finished_reason")
        self._preemptions = Counter("num_preemptions", "How often an answer lost its pages and was computed again.")
        self._steps = Counter("engine_steps", "Forward passes.")
        self._step_seconds = Counter("engine_step_seconds", "Time of forward passes in seconds.")
        self._rows = Counter("engine_step_rows", "Tokens in forward passes.", "phase")
        about = "Proposals that passes have run; a pass may run one for each answer."
        self._drafts = Counter("spec_decode_num_drafts", about)
        self._proposed = Counter("spec_decode_num_draft_tokens", "Proposed tokens that passes have run.")
        self._accepted = Counter("spec_decode_num_accepted_tokens", "Proposed tokens that were right.")
        self._proposed_by = Counter("spec_decode_draft_tokens_by_drafter", "Proposed tokens by drafter.", "drafter")
        self._accepted_by = Counter("spec_decode_accepted_tokens_by_drafter", "Right tokens by drafter.", "drafter")
        self._accepted_at = Counter(
            "spec_decode_num_accepted_tokens_per_pos", "Proposed tokens that were right, by position.", "position"
        )
        self._first = Histogram("time_to_first_token_seconds", "From the submission to the first token.", FIRST_TOKEN)
        about = "Time of the passes between tokens of a request's first answer; tokens of one pass are counted once."
        self._between = Histogram("inter_token_latency_seconds", about, BETWEEN_TOKENS)
        self._whole = Histogram("e2e_request_latency_seconds", "From the submission to the last token.", REQUEST)
        self._queue = Histogram("request_queue_time_seconds", "From the submission to getting a slot.", REQUEST)
        self._prefill = Histogram("request_prefill_time_seconds", "From getting a slot to the first token.", REQUEST)
        self._decode = Histogram("request_decode_time_seconds", "From the first token to the last.", REQUEST)

    def add(self, update: StepUpdate) -> None:
        """Update the counters after a step."""
        report = update.report
        if report.requests:
            self._steps.add()
            self._step_seconds.add(report.seconds)
            self._rows.add(report.n_decode, "decode")
            self._rows.add(report.n_prefill, "prefill")
        for drafter, n_proposed, n_accepted in report.drafts:
            self._drafts.add()
            self._proposed.add(n_proposed)
            self._accepted.add(n_accepted)
            self._proposed_by.add(n_proposed, drafter)
            self._accepted_by.add(n_accepted, drafter)
            for i in range(n_accepted):
                self._accepted_at.add(1, str(i))
        for request in report.ended:
            self._add_end(request)

    def _add_end(self, request: Request) -> None:
        times, n_prompt = request.times, len(request.prompt_ids)
        self._prompt.add(n_prompt)
        self._queries.add(n_prompt)
        self._hits.add(request.n_cached)
        self._from_disk.add(request.n_from_disk)
        self._generated.add(sum(len(output.token_ids) for output in request.outputs))
        self._preemptions.add(request.n_preemptions)
        for output in request.outputs:
            self._success.add(1, output.finish_reason or "error")
        self._first.observe(since(times.submitted, times.first_token))
        self._whole.observe(since(times.submitted, times.ended))
        self._queue.observe(since(times.submitted, times.admitted))
        self._prefill.observe(since(times.admitted, times.first_token))
        self._decode.observe(since(times.first_token, times.ended))
        for seconds in request.metrics.passes[1:]:
            self._between.observe(seconds)

    def text(self, load: Load) -> str:
        """Return all metrics as text, including the current use of the engine."""
        return "".join(f"{line}\n" for lines in self.families(load) for line in lines)

    def families(self, load: Load) -> list[Iterator[str]]:
        """Return for each metric the lines of the text format: its description, its kind, and then its samples."""
        gauges = [
            _gauge("num_requests_running", "Answers that have a slot.", load.running),
            _gauge("num_requests_waiting", "Answers that wait for a slot.", load.waiting),
            _gauge("kv_cache_usage_perc", "Share of the pages of keys and values in use, 0 to 1.", load.kv_usage),
            _gauge("kv_cache_pages_in_use", "Pages of keys and values that answers hold.", load.pages),
        ]
        for name, about in DISK.items() if load.disk is not None else ():
            gauges.append(_gauge(f"prefix_disk_{name}", about, getattr(load.disk, name)))
        return gauges + [metric.lines() for metric in vars(self).values()]


def text_of_models(
    server: Metrics, models: Mapping[str, tuple[Metrics, Load]], loads: Mapping[str, tuple[int, bool]]
) -> str:
    """Return the metrics of a server with several models as text, with the label `model_name`, as in vLLM.

    Args:
        server: counts errors and disconnected clients, which are not counted per model.
        models: maps the name of each model to its metrics and the use of its engine.
        loads: maps the name of each model to a pair: how often it has been loaded, and whether it is loaded now.
    """
    families: dict[tuple[str, str], list[str]] = {}
    for name, (metrics, load) in models.items():
        n_loads, is_loaded = loads[name]
        loaded = Counter("model_loads", "How often the model was loaded.")
        loaded.add(n_loads)
        gauge = _gauge("model_loaded", "Whether the model is loaded.", is_loaded)
        for about, kind, *samples in [*metrics.families(load), gauge, loaded.lines()]:
            labeled = (_with_label(sample, "model_name", name) for sample in samples)
            families.setdefault((about, kind), []).extend(labeled)
    for about, kind, *samples in (server.errors.lines(), server.cancelled.lines()):
        families[about, kind] = samples
    return "".join(f"{line}\n" for head, samples in families.items() for line in (*head, *samples))


def _with_label(line: str, label: str, value: str) -> str:
    """Return the line of a sample with a label added before its other labels."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    name, rest = line.rsplit(" ", 1)
    name, brace, others = name.partition("{")
    return f'{name}{{{label}="{escaped}"{"," + others if brace else "}"} {rest}'


def since(start: float | None, end: float | None) -> float | None:
    """Return the time between two events; None if one of them has not happened."""
    return None if start is None or end is None else end - start


def _head(name: str, about: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"


def _gauge(name: str, about: str, value: float) -> Iterator[str]:
    yield from _head(PREFIX + name, about, "gauge")
    yield f"{PREFIX}{name} {value:.17g}"
