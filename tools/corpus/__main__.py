"""Print documents of the training text: ``python -m tools.corpus --seed 1 --documents 10``."""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.corpus import documents


def main() -> None:
    """Read the options and write the documents."""
    parser = argparse.ArgumentParser(prog="tools.corpus", description="Print training documents.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--documents", type=int, default=10)
    parser.add_argument("--out", type=Path, help="a file instead of the standard output")
    args = parser.parse_args()
    texts = documents(args.seed, args.documents)
    if args.out is None:
        for text in texts:
            print(text)
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", encoding="utf-8") as file:
        file.writelines(text + "\n" for text in texts)


if __name__ == "__main__":
    main()
