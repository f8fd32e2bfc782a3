"""Requests become batches: the scheduler admits requests, forms the batch of each step, and hands out the tokens."""

from mlx_engine.schedule.request import Request
from mlx_engine.schedule.scheduler import Report, Scheduler

__all__ = ["Report", "Request", "Scheduler"]
