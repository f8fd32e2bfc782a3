"""The state of a scheduler as plain data: slots, queue, pages by owner, the prefix tree and the last steps.

The server's page shows this state. `Monitor` reads it on the thread that runs the steps. A `Status` is immutable and
contains no time of day, so that two readings of an idle scheduler are equal.
"""

from __future__ import annotations

import time
from collections import abc, deque
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import numpy as np

from mlx_engine.loop.request import Sequence
from mlx_engine.loop.scheduler import Scheduler, StepOutput

# The most steps, waiting answers and nodes of the prefix tree that a status shows.
N_STEPS, N_WAITING, N_NODES = 120, 32, 48
# The least seconds between two statuses, and between two readings of the prefix tree, which take longer.
INTERVAL, TREE_INTERVAL = 0.2, 1.0

Phase = Literal["waiting", "prefill", "decode", "recompute"]


class AnswerStatus(msgspec.Struct, frozen=True):
    """An answer that runs or waits.

    Attributes:
        number: the number of the answer's request, in the order of arrival.
        index: the index of the answer among the answers to the request.
        phase: "waiting" for a slot; "prefill"; "decode"; "recompute" while tokens are computed again after a
            preemption.
        n_read: tokens of the prompt that are in the KV cache.
        n_cached: tokens of the prompt that were taken from the prefix cache.
        n_written: tokens of the answer so far.
        n_pages: pages that the answer holds, alone or shared, summed over all groups of layers (`PageGroup`).
        n_preemptions: how often an answer to the request has lost its pages, so that its tokens were computed again.
    """

    number: int
    index: int
    phase: Phase
    n_prompt: int
    n_read: int
    n_cached: int
    n_written: int
    max_tokens: int
    n_pages: int
    n_preemptions: int


class PageGroup(msgspec.Struct, frozen=True):
    """The numbers of pages of a group of layers. A group is all layers with the same attention window.

    Each page is counted in exactly one of `free`, `cached`, `shared` and `owned`.

    Attributes:
        window: the window in tokens; None for layers that attend to every token.
        free: the number of pages that neither an answer nor the prefix cache holds.
        cached: the number of pages that only the prefix cache holds; they can be reclaimed.
        shared: the number of pages that an answer holds with another answer or with the prefix cache.
        owned: for each running answer, the number of pages that it holds alone.
    """

    window: int | None
    free: int
    cached: int
    shared: int
    owned: tuple[int, ...]


class PrefixNode(msgspec.Struct, frozen=True):
    """A node of the prefix tree.

    Attributes:
        parent: the index of the parent in `PrefixStatus.nodes`, or -1 if the parent is the root.
        start: position of the node's first token.
        text: the text of the node's first tokens, with an ellipsis if the node has more; None if texts are not shown.
        n_pages: number of the node's pages, summed over all groups of layers.
        in_use: number of these pages that answers also hold.
        references: the largest reference count of these pages.
        last_use: the value of the cache's use counter when the node was last used.
    """

    parent: int
    start: int
    n_tokens: int
    text: str | None
    n_pages: int
    in_use: int
    references: int
    last_use: int


class PrefixStatus(msgspec.Struct, frozen=True):
    """The prefix cache: the most recently used nodes, each after its parent, and the counters of `PrefixStats`.

    A cache that shares only whole pages hides where the prompts of different clients begin to differ. `nodes`,
    `n_nodes` and `n_tokens` would reveal this, so they are None for such a cache.
    """

    nodes: tuple[PrefixNode, ...] | None
    n_nodes: int | None
    n_tokens: int | None
    queries: int
    hits: int
    queried_tokens: int
    cached_tokens: int
    evicted_pages: int


class StepStatus(msgspec.Struct, frozen=True, array_like=True):
    """A step: its numbers of decode and prefill tokens, and its seconds.

    `limit` is the least time of the step in seconds: the bytes that it reads, divided by the memory bandwidth. `limit`
    is None if the bandwidth is unknown.
    """

    n_decode: int
    n_prefill: int
    seconds: float
    limit: float | None


class Status(msgspec.Struct, frozen=True):
    """The state of a scheduler.

    Attributes:
        slots: the largest number of answers that run at the same time.
        page: tokens per page.
        running: the answers with a slot, in the order of arrival.
        waiting: the first answers in the queue, at most N_WAITING.
        n_waiting: the number of all answers in the queue.
        steps: the last steps, oldest first.
        n_steps: the number of all steps so far.
    """

    slots: int
    page: int
    running: tuple[AnswerStatus, ...]
    waiting: tuple[AnswerStatus, ...]
    n_waiting: int
    pages: tuple[PageGroup, ...]
    prefix: PrefixStatus | None
    steps: tuple[StepStatus, ...]
    n_steps: int


class Monitor:
    """Records the steps of a scheduler, and reads its status. Use it on the thread that runs the steps."""

    def __init__(
        self,
        *,
        bandwidth: Callable[[], float | None] = lambda: None,
        text_of: Callable[[abc.Sequence[int]], str] | None = None,
        interval: float = INTERVAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a monitor.

        Args:
            bandwidth: returns the memory bandwidth in bytes per second, or None as long as it is unknown.
            text_of: decodes token ids of the prefix tree. None keeps the texts of requests out of the status.
            interval: the least number of seconds between two statuses that `after` returns while there is work.
            clock: returns seconds, for `interval` and TREE_INTERVAL.
        """
        self._bandwidth, self._text_of, self._interval, self._clock = bandwidth, text_of, interval, clock
        self._steps: deque[StepStatus] = deque(maxlen=N_STEPS)
        self._n_steps = 0
        self._read_at = self._tree_read_at = -float("inf")
        self._tree: PrefixStatus | None = None

    def after(self, scheduler: Scheduler, report: StepOutput) -> Status | None:
        """Record a step. Return the status if the last one is at least `interval` old or no work is left, else None."""
        if report.n_decode + report.n_prefill:
            self._n_steps += 1
            bandwidth = self._bandwidth()
            limit = None if bandwidth is None else round(report.nbytes / bandwidth, 6)
            self._steps.append(StepStatus(report.n_decode, report.n_prefill, round(report.seconds, 6), limit))
        is_due = self._clock() - self._read_at >= self._interval or not scheduler.has_work
        return self.read(scheduler) if is_due else None

    def read(self, scheduler: Scheduler) -> Status:
        """Return the status."""
        self._read_at = self._clock()
        return Status(
            slots=scheduler.slots,
            page=scheduler.pool.page,
            running=tuple(_answer_status(answer, is_running=True) for answer in scheduler.running),
            waiting=tuple(_answer_status(answer, is_running=False) for answer in scheduler.waiting[:N_WAITING]),
            n_waiting=len(scheduler.waiting),
            pages=tuple(_page_group(scheduler, group) for group in range(len(scheduler.pool.windows))),
            prefix=self._prefix(scheduler),
            steps=tuple(self._steps),
            n_steps=self._n_steps,
        )

    def _prefix(self, scheduler: Scheduler) -> PrefixStatus | None:
        """Return the prefix cache's status, at most TREE_INTERVAL old while there is work; None without a cache."""
        cache, now = scheduler.prefix, self._clock()
        if cache is None or (now - self._tree_read_at < TREE_INTERVAL and scheduler.has_work):
            return self._tree
        self._tree_read_at = now
        if cache.whole_pages:
            self._tree = PrefixStatus(None, None, None, **vars(cache.stats))
        else:
            nodes = tuple(_prefix_node(node, self._text_of) for node in cache.snapshot(N_NODES))
            self._tree = PrefixStatus(nodes, cache.n_nodes, cache.n_tokens, **vars(cache.stats))
        return self._tree


def _prefix_node(node: dict[str, Any], text_of: Callable[[abc.Sequence[int]], str] | None) -> PrefixNode:
    more = "…" if node["n_tokens"] > len(node["ids"]) else ""
    return PrefixNode(
        parent=node["parent"],
        start=node["start"],
        n_tokens=node["n_tokens"],
        text=None if text_of is None else text_of(node["ids"]) + more,
        n_pages=sum(node["pages"]),
        in_use=sum(node["in_use"]),
        references=node["references"],
        last_use=node["last_use"],
    )


def _answer_status(answer: Sequence, *, is_running: bool) -> AnswerStatus:
    request, output = answer.request, answer.output
    n_prompt, n_written = len(request.prompt_ids), len(output.token_ids)
    phase: Phase = "decode"
    if not is_running:
        phase = "waiting"
    elif len(answer.unread) > 1 or not n_written:
        phase = "recompute" if n_written else "prefill"
    return AnswerStatus(
        number=request.number,
        index=answer.index,
        phase=phase,
        n_prompt=n_prompt,
        n_read=min(n_prompt, answer.kv.length),
        n_cached=request.n_cached,
        n_written=n_written,
        max_tokens=output.max_tokens,
        n_pages=answer.kv.n_pages,
        n_preemptions=request.n_preemptions,
    )


def _page_group(scheduler: Scheduler, group: int) -> PageGroup:
    """Count the pages of a group by holder."""
    pool, tables = scheduler.pool, [answer.kv.pages(group) for answer in scheduler.running]
    # A page that an answer holds alone has one reference.
    owned = tuple(int((pool.references(group, table) == 1).sum()) for table in tables)
    held = len(np.unique(np.concatenate(tables))) if tables else 0
    free = pool.free_pages(group)
    return PageGroup(
        window=abs(pool.windows[group] or 0) or None,
        free=free,
        cached=pool.n_pages[group] - free - held,
        shared=held - sum(owned),
        owned=owned,
    )
