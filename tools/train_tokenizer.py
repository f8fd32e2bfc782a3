"""Train the tokenizer of the built-in model: byte-level BPE with Qwen's pre-tokenizer.

``python -m tools.train_tokenizer --out build/tokenizer.json``
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.corpus import SPECIAL_TOKENS, documents

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def plain(text: str) -> str:
    """Remove special tokens, so that no merge is learned from their letters."""
    for token in SPECIAL_TOKENS:
        text = text.replace(token, "")
    return text


def train(seed: int, count: int, size: int) -> Tokenizer:
    """Train on `count` documents; `size` is the number of tokens, including the special tokens, which come last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((plain(text) for text in documents(seed, count)), trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def main() -> None:
    """Read the options, train and save."""
    parser = argparse.ArgumentParser(prog="tools.train_tokenizer", description="Learn the vocabulary.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--documents", type=int, default=12_000)
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--out", type=Path, default=Path("build/tokenizer.json"))
    args = parser.parse_args()
    tokenizer = train(args.seed, args.documents, args.size)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.out))
    print(f"{tokenizer.get_vocab_size()} tokens in {args.out}")


if __name__ == "__main__":
    main()
