"""The typer application with all commands."""

from __future__ import annotations

import typer

from mlx_engine.commands.backends import backends
from mlx_engine.commands.bench import bench
from mlx_engine.commands.cache import cache
from mlx_engine.commands.chat import chat
from mlx_engine.commands.generate import generate
from mlx_engine.commands.inspect import inspect
from mlx_engine.commands.kernels import kernels
from mlx_engine.commands.models import models
from mlx_engine.commands.plan import plan
from mlx_engine.commands.quantize import quantize
from mlx_engine.commands.replay import replay
from mlx_engine.commands.report import report
from mlx_engine.commands.root import root
from mlx_engine.commands.serve import serve
from mlx_engine.commands.tokenize import tokenize

app = typer.Typer(
    name="mlx-engine",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.callback()(root)
app.command()(generate)
app.command()(chat)
app.command()(serve)
app.command()(replay)
app.command()(bench)
app.command()(report)
app.command()(quantize)
app.command()(inspect)
app.command()(models)
app.command()(plan)
app.add_typer(tokenize, name="tokenize")
app.command()(backends)
app.add_typer(cache, name="cache")
app.add_typer(kernels, name="kernels")
