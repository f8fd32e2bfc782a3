"""Bugs that the default tests must catch, a module per part of the project: `python -m tests.mutants` plants them."""

from tests.mutants import backends, gpu, kernels, model, page, products, text, tools

MUTANTS = [
    *model.MUTANTS,
    *backends.MUTANTS,
    *kernels.MUTANTS,
    *products.MUTANTS,
    *gpu.MUTANTS,
    *text.MUTANTS,
    *page.MUTANTS,
    *tools.MUTANTS,
]
