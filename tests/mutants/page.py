"""Mutants of the page of the server: the status of a scheduler, and the events that carry it."""

from tests.mutants.plant import Mutant

STATUS, PAGE = "mlx_engine/serve/status.py", "mlx_engine/serve/page.py"

MUTANTS = [
    Mutant(
        "a page that several hold is counted for each of them",
        STATUS,
        "_page_group",
        "len(np.unique(np.concatenate(tables)))",
        "len(np.concatenate(tables))",
    ),
    Mutant(
        "a shared page counts as an answer's own",
        STATUS,
        "_page_group",
        "pool.references(group, table) == 1",
        "table >= 0",
    ),
    Mutant(
        "recomputed tokens look like decode",
        STATUS,
        "_answer_status",
        "len(answer.unread) > 1 or not n_written",
        "not n_written",
    ),
    Mutant("the last status of a burst is lost", STATUS, "Monitor.after", "not scheduler.has_work", "False"),
    Mutant(
        "the report of a step forgets its bytes",
        "mlx_engine/schedule/accounting.py",
        "account",
        "return nbytes",
        "return 0.0",
    ),
    Mutant(
        "the tree stays as it was when no work is left",
        STATUS,
        "Monitor._prefix",
        "now - self._tree_read_at < TREE_INTERVAL and scheduler.has_work",
        "now - self._tree_read_at < TREE_INTERVAL",
    ),
    Mutant(
        "a window does not bound what a step reads",
        "mlx_engine/schedule/traffic.py",
        "Traffic.nbytes",
        "min(length, window - 1 + n)",
        "length",
    ),
    Mutant("equal statuses are sent again", PAGE, "statuses", "data != last", "True"),
    Mutant(
        "a heartbeat drops the status that is waited for",
        PAGE,
        "statuses",
        "waiting or asyncio.ensure_future(_next(snapshots))",
        "asyncio.ensure_future(_next(snapshots))",
    ),
    Mutant("a closed stream goes on to wait", PAGE, "statuses", "waiting.cancel()", "None"),
    Mutant(
        "the policy allows another script than the page's",
        PAGE,
        "_hashes",
        "hashlib.sha256(inner.encode())",
        "hashlib.sha256(text.encode())",
    ),
    Mutant(
        "the oldest nodes of the tree are shown",
        "mlx_engine/cache/prefix.py",
        "PrefixCache.snapshot",
        "reversed(self._nodes)",
        "list(self._nodes)",
    ),
]
