"""Run the command line from a checkout: `python cli.py ...`. The implementation is in mlx_engine.commands."""

from mlx_engine.commands import main

if __name__ == "__main__":
    main()
