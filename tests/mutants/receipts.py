"""Mutants of what a reply says about itself: the next turn, the cache, the times, the journal and its replay."""

from tests.mutants.plant import Mutant

RADIX, JOURNAL, REPLAY = "mlx_engine/cache/radix.py", "mlx_engine/serve/journal.py", "mlx_engine/serve/replay.py"

MUTANTS = [
    Mutant(
        "an evicted token counts as new",
        "mlx_engine/cache/prefix.py",
        "PrefixCache._was_evicted",
        "node.evicted == token",
        "False",
    ),
    Mutant(
        "an evicted node leaves no trace",
        RADIX,
        "RadixTree.cut",
        "leaf.parent.evicted, leaf.parent = first, None",
        "leaf.parent = None",
    ),
    Mutant(
        "an eviction is remembered at another place",
        RADIX,
        "RadixTree._extend",
        "leaf.ids, leaf.evicted = np.concatenate((leaf.ids, more)), None",
        "leaf.ids = np.concatenate((leaf.ids, more))",
    ),
    Mutant(
        "tokens of others are shown to everybody",
        "mlx_engine/serve/replies.py",
        "Reply.receipt",
        'explained(request, self._tokenizer) if self._explains_cache else {"cached_tokens": request.n_cached}',
        "explained(request, self._tokenizer)",
    ),
    Mutant(
        "a step counts for each answer of a request",
        "mlx_engine/schedule/accounting.py",
        "_account_requests",
        "dict.fromkeys(answer_of(part).request for part in step.parts)",
        "[answer_of(part).request for part in step.parts]",
    ),
    Mutant(
        "waiting for the engine thread is nobody's time",
        "mlx_engine/serve/replies.py",
        "timings",
        "_seconds(tokenized, times.admitted)",
        "_seconds(times.submitted, times.admitted)",
    ),
    Mutant(
        "a window reads all keys",
        "mlx_engine/schedule/traffic.py",
        "Traffic.nbytes",
        "length if window is None else min(length, window - 1 + n)",
        "length",
    ),
    Mutant(
        "a slow disk holds up answers", JOURNAL, "Journal.add", "self._queue.put_nowait(line)", "self._queue.put(line)"
    ),
    Mutant(
        "a line is appended to a part of another",
        JOURNAL,
        "Journal._write",
        'b"\\n" + line if self._is_torn else line',
        "line",
    ),
    Mutant("every lost line is reported", JOURNAL, "Journal._warn_once", "not self._has_warned", "True"),
    Mutant("a changed digest is overlooked", REPLAY, "_difference", "digest(ids, values) != choice.digest", "False"),
    Mutant(
        "log-probabilities are compared as text",
        REPLAY,
        "_difference",
        "np.float32(before).tobytes() != np.float32(now).tobytes()",
        'f"{before:.3f}" != f"{now:.3f}"',
    ),
]
