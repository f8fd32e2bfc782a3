"""`python cli.py ...` runs the command line from a checkout; all of it lives in mlx_engine.commands."""

from mlx_engine.commands import main

if __name__ == "__main__":
    main()
