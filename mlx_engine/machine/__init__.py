"""The machine that this process runs on: memory, cores, mapped pages, and forks."""
