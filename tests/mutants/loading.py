"""Mutants of loading: what is checked before the weights are read, threads, and memory."""

from tests.mutants.plant import Mutant

MUTANTS = [
    Mutant(
        "chat finds out after loading that no answer fits the context",
        "mlx_engine/commands/chat.py",
        "chat",
        "check(opened.prompts, options, messages or shortest(system), variables)",
        "None",
    ),
    Mutant(
        "a conversation is rendered after loading only",
        "mlx_engine/commands/chat.py",
        "check",
        "conversation_ids(prompts, messages, variables)",
        "None",
    ),
    Mutant(
        "any number of threads",
        "mlx_engine/backends/cores.py",
        "bounded_threads",
        "threads is None or threads <= (cores := usable_cores())",
        "True",
    ),
    Mutant("waiting threads never sleep", "kernels/cpu/jobs.py", "_wait", "polls < control[SPINS]", "True"),
    Mutant(
        "pages of the file's cache are no free memory",
        "mlx_engine/backends/memory.py",
        "_left_in",
        "left + sum(int(row[1]) for row in rows if len(row) == 2 and row[0] in freed)",
        "left",
    ),
    Mutant(
        "a mapped file must fit into the memory",
        "mlx_engine/models/need.py",
        "Need.least",
        "self.total - self.mapped",
        "self.total",
    ),
    Mutant(
        "the cache of the requests is not counted",
        "mlx_engine/commands/generate.py",
        "generate",
        "longest_of(requests) if run.kv else 1",
        "1",
    ),
    Mutant(
        "pages of the neighbours are given back",
        "mlx_engine/backends/mapped_pages.py",
        "release",
        "-(-first // mmap.PAGESIZE) * mmap.PAGESIZE",
        "first // mmap.PAGESIZE * mmap.PAGESIZE",
    ),
    Mutant(
        "pages of views are given back",
        "mlx_engine/backends/mapped_pages.py",
        "release",
        "file is None or not hasattr(file, 'madvise') or is_view(prepared, read)",
        "file is None",
    ),
    Mutant(
        "a request forgets the seconds of loading",
        "mlx_engine/engine.py",
        "Engine.run_requests",
        "{**self.phases, **request.metrics.phases}",
        "request.metrics.phases",
    ),
]
