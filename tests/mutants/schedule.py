"""Mutants of the scheduler: slots, order, budgets, memory, faults, and what is kept of prefixes."""

from tests.mutants.plant import Mutant

FILE = "mlx_engine/schedule/scheduler.py"

MUTANTS = [
    Mutant(
        "forks take no slots until they are made",
        FILE,
        "Scheduler._admit",
        "sum(1 + len(answer.forks) for answer in (first, *self.running))",
        "1 + len(first.forks) + len(self.running)",
    ),
    Mutant("the last request is admitted first", FILE, "Scheduler._admit", "self.waiting[0]", "self.waiting[-1]"),
    Mutant("the oldest is preempted", FILE, "Scheduler._run_with_room", "self.running[-1]", "self.running[0]"),
    Mutant(
        "a preempted answer goes to the end of the queue",
        FILE,
        "Scheduler._preempt",
        "insort(self.waiting, answer, key=Answer.arrival)",
        "self.waiting.append(answer)",
    ),
    Mutant(
        "prompts fill the pass while others are answered",
        FILE,
        "Scheduler._plan",
        "self._shared_budget if parts else self._budget",
        "self._budget",
    ),
    Mutant(
        "a pass beyond the last token",
        FILE,
        "Scheduler._can_go_on",
        "len(answer.output.token_ids) + n_pending < most",
        "len(answer.output.token_ids) < most",
    ),
    Mutant(
        "the last token of the prompt is taken from the cache",
        FILE,
        "Scheduler._attach",
        "ids[:-1]",
        "ids",
    ),
    Mutant(
        "a cancelled answer keeps its pages",
        FILE,
        "Scheduler._remove",
        "answer.kv.close()",
        "pass",
    ),
    Mutant(
        "a fault ends all requests",
        FILE,
        "Scheduler._run",
        "not self._passes.is_idle",
        "True",
    ),
    Mutant(
        "everybody pays the whole pass",
        "mlx_engine/schedule/accounting.py",
        "account",
        "step.seconds * part.n / n_rows",
        "step.seconds",
    ),
    Mutant(
        "tokens after the last committed one are kept as a prefix",
        FILE,
        "Scheduler._finish",
        "answer.ids[: answer.kv.length]",
        "answer.ids",
    ),
    Mutant(
        "forks draw the same numbers",
        "mlx_engine/schedule/answer.py",
        "Answer.of",
        "pick.fork(choice)",
        "pick.fork(0)",
    ),
    Mutant(
        "an answer that is computed again forgets its tokens",
        "mlx_engine/schedule/answer.py",
        "Answer.rewind",
        "list(self.ids)",
        "list(self.request.prompt_ids)",
    ),
    Mutant("forks reserve no pages", FILE, "Scheduler._plan", "self._reserve_forks(parts)", "pass"),
    Mutant("a refused answer waits for all others", FILE, "Scheduler._remove", "self._refused = None", "pass"),
    Mutant("an interrupted scheduler continues", FILE, "Scheduler.step", "self._is_broken = True", "pass"),
    Mutant(
        "a stream leaves within a step",
        FILE,
        "Scheduler.leave",
        "not self._is_stepping",
        "True",
    ),
]
