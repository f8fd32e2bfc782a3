"""Mutants of runs on several ranks: stages, messages, passes under way, split, agreement and signs of life."""

from tests.mutants.plant import Mutant

GROUP, MIRROR, PIPELINE = (f"mlx_engine/distributed/{name}.py" for name in ("group", "mirror", "pipeline"))
SPLIT, AGREEMENT, LIVENESS = (f"mlx_engine/distributed/{name}.py" for name in ("split", "agreement", "liveness"))
SEARCH = "mlx_engine/distributed/search.py"
STAGE, PASSES, SCHEDULER = (
    "mlx_engine/models/stage.py",
    "mlx_engine/decode/passes.py",
    "mlx_engine/schedule/scheduler.py",
)

MUTANTS = [
    Mutant("ranks are added in the reverse order", GROUP, "Group.sum",
           "gathered[rank]", "gathered[self.size - rank]"),
    Mutant("a rank reads the layer after its own", STAGE, "Stage.reads",
           "self.first <= int(match[1]) < self.end", "self.first <= int(match[1]) <= self.end"),
    Mutant("every rank reads the head", STAGE, "Stage.reads", "return self.is_last", "return True"),
    Mutant("the last rank lacks the table of a tied head", STAGE, "Stage.reads",
           'is_tied and self.is_last and name.startswith("token_embd.")', "False"),
    Mutant("a shared layer is counted from the model's first layer", STAGE, "Stage._moved",
           "layer.shares - self.first", "layer.shares"),
    Mutant("inputs of layers are counted from the model's first layer", STAGE, "Stage._moved",
           "self.first * (end - first)", "0"),
    Mutant("a copied page is copied by nobody", MIRROR, "Replica._copy", "held.layers_of.get(number, [])[:1]", "[]"),
    Mutant("the stores are those of the model's first layers", MIRROR, "Replica._made",
           "layers[self._first : self._first + len(self._layers)]", "layers[: len(self._layers)]"),
    Mutant("a rank uses the pages of another group of layers", MIRROR, "_batch",
           'message["pages"][number]', 'message["pages"][0]'),
    Mutant("pools are never dropped", MIRROR, "Replica.apply", 'del self._pools[pool]', "pass"),
    Mutant("a rank before the last one runs the wanted tokens alone", PIPELINE, "StageRunner.run",
           "replace(batch, wanted=batch.lengths)", "batch"),
    Mutant("logits of passes are taken in another order", PIPELINE, "Pipeline._receive",
           "self._flight[0]", "self._flight[-1]"),
    Mutant("one pass at a time is under way", PASSES, "Passes.__init__",
           "self._staged.n_stages if self._staged is not None else 2 if self.overlaps else 1",
           "2 if self.overlaps else 1"),
    Mutant("a pass has all answers", SCHEDULER, "Scheduler._plan", "-(-len(self.running) // n_passes)", "None"),
    Mutant("rows of logits are taken by the parts that are left", PASSES, "Passes._choose",
           "rows != list(range(len(submitted.asked)))", "len(rows) > len(submitted.asked)"),
    Mutant("the head takes no time", SPLIT, "best_split", "head * is_last", "0"),
    Mutant("memory is not looked at", SPLIT, "best_split",
           "nbytes + embedding * (rank == 0) > machine.memory", "False"),
    Mutant("layers are cut from those whose keys they share", SPLIT, "stages_of", "end > latest", "False"),
    Mutant("ranks that differ are accepted", AGREEMENT, "agree", "first.get(name) != of.get(name)", "False"),
    Mutant("a rank without signs of life is waited for", LIVENESS, "_line",
           "peer.settimeout(limit)", "peer.settimeout(None)"),
    Mutant("the other ranks are not told who is gone", LIVENESS, "Liveness._give_up",
           'self._tell_all(f"gone {ranks}\\n")', "pass"),
    Mutant("every rank prints who is gone", LIVENESS, "Liveness._give_up",
           "line if self.rank == 0 or (0 in ranks and self.rank == 1) else None", "line"),
    Mutant("all logits travel", PIPELINE, "Pipeline._best", "batch.best", "None"),
    Mutant("the first fault is that of the last rank", SEARCH, "Search.end", "min(faults)", "max(faults)"),
    Mutant("layers of a fault are counted from the stage", SEARCH, "Search._counted",
           "what in COUNTED", "False"),
    Mutant("a pass that fails on rank 0 is one request's fault", SCHEDULER, "Scheduler._run",
           "isinstance(error, DistributedError)", "False"),
    Mutant("all ranks must join at once", LIVENESS, "Liveness._admit",
           "self._listen(rank, peer)\ndeadline = time.monotonic() + self._joining",
           "self._listen(rank, peer)"),
    Mutant("whoever connects is a rank", LIVENESS, "Liveness._admit", "rank not in missing", "rank is None"),
    Mutant("the error of a rank is printed by nobody", LIVENESS, "Liveness._listen_to", 'word == "failed"', "False"),
]  # fmt: skip
