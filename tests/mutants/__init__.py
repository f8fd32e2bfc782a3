"""Bugs that the default tests must catch, a module per part of the project: `python -m tests.mutants` plants them."""

from tests.mutants import (
    backends,
    chat,
    connection,
    gpu,
    kernels,
    model,
    page,
    prefix,
    products,
    receipts,
    schedule,
    serve,
    states,
    text,
    tools,
)

MUTANTS = [
    *model.MUTANTS,
    *prefix.MUTANTS,
    *states.MUTANTS,
    *backends.MUTANTS,
    *kernels.MUTANTS,
    *products.MUTANTS,
    *gpu.MUTANTS,
    *schedule.MUTANTS,
    *text.MUTANTS,
    *chat.MUTANTS,
    *page.MUTANTS,
    *serve.MUTANTS,
    *receipts.MUTANTS,
    *connection.MUTANTS,
    *tools.MUTANTS,
]
