"""Bugs that the default tests must catch, a module per part of the project: `python -m tests.mutants` plants them."""

from tests.mutants import (
    backends,
    chat,
    connection,
    experts,
    gpu,
    kernels,
    mlx_folders,
    model,
    page,
    prefix,
    products,
    receipts,
    schedule,
    serve,
    text,
    tools,
)

MUTANTS = [
    *model.MUTANTS,
    *prefix.MUTANTS,
    *backends.MUTANTS,
    *kernels.MUTANTS,
    *products.MUTANTS,
    *experts.MUTANTS,
    *mlx_folders.MUTANTS,
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
