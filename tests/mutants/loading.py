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
        "_give_back",
        "-(-start // mmap.PAGESIZE) * mmap.PAGESIZE",
        "start // mmap.PAGESIZE * mmap.PAGESIZE",
    ),
    Mutant(
        "pages of views are given back",
        "mlx_engine/backends/mapped_pages.py",
        "release",
        "file is not None and not is_view(prepared, read)",
        "file is not None",
    ),
    Mutant(
        "reading ahead gives back the end of a view",
        "mlx_engine/backends/mapped_pages.py",
        "read_ahead",
        "max(end, stop)",
        "stop",
    ),
    Mutant(
        "only the first page of a row is given back",
        "mlx_engine/backends/mapped_pages.py",
        "release_rows",
        "(0, row_bytes - 1)",
        "(0,)",
    ),
    Mutant(
        "a token drops pages of the head",
        "mlx_engine/backends/mapped_pages.py",
        "release_rows",
        "_give_back(file, start, min(stop, kept[0]))",
        "_give_back(file, start, stop)",
    ),
    Mutant(
        "rows of a table stay in memory",
        "mlx_engine/models/table_in_file.py",
        "TableInFile.rows",
        "release_rows(self.data, map(int, ids), self.type.bytes_for(self.shape[1]), but=self.kept)",
        "pass",
    ),
    Mutant(
        "a request forgets the seconds of loading",
        "mlx_engine/engine.py",
        "Engine.run_requests",
        "{**self.phases, **request.metrics.phases}",
        "request.metrics.phases",
    ),
]
