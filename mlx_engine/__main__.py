"""`python -m mlx_engine ...`: the command line."""

from mlx_engine.commands import main

if __name__ == "__main__":
    main()
