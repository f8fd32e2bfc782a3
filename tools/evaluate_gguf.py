"""Evaluate the built-in model: how often its stories have the requested subject, and its perplexity on new documents.

    python -m tools.evaluate_gguf --model build/storyteller-q8_0.gguf --tokenizer build/tokenizer.json

The engine generates the answers, with greedy sampling, which is the default of `chat`. The perplexity is computed in
PyTorch.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import torch
from tokenizers import Tokenizer

import mlx_engine
from mlx_engine.conversation import Conversation
from mlx_engine.options import Options
from tools.corpus import subjects
from tools.corpus.stories import with_articles
from tools.dataset import rows
from tools.export_gguf import model_keys, tensor_name
from tools.qwen3_torch import Config, Qwen3
from tools.train import HELD_OUT_SEED, perplexity

PROMPTS = (
    "Once upon a time", "One sunny morning,", "There was a little fox", "Tom", "In a small village",
    "The capital of France is",
)  # fmt: skip
SUBJECT_SEED = 31
# Conversations for a person to judge. A line is one conversation: "SYSTEM | first question | second | third".
CONVERSATIONS = """
 | Tell me a story about a penguin. | Tell me another one. | Thanks!
 | Tell me a story about a mole named Teno. | And then? | What was the name of the mole?
 | Hello! | Tell me a story about a prince. | Now one about a hen.
 | Tell me a story about a monkey who lost a lantern. | What happened next? | Thank you!
Be brief. | Tell me a story about a lizard. | Another one, please. | Goodbye!
 | Tell me a short story about a kitten. | Go on. | Who was the story about?
 | What can you do? | Tell me a story. | Tell me another story.
 | My name is Clara. | Tell me a story about a proud little rooster. | What is my name?
 | Tell me a story about a weasel named Kiro. | What happened then? | Now one about a baker.
 | What is the capital of Greece? | Tell me a story about a wolf. | Another one, please.
You are a storyteller. | Tell me a story about a dinosaur. | Tell me more. | Thank you very much.
 | List three vegetables. | Tell me a story about a spider. | What happened next?
 | Write a Python program that says hello. | Thank you! | Tell me a story about a leopard.
 | Tell me a story about a princess who lost a doll. | And then? | Tell me one about a gardener.
 | Tell me a story about a rabbit and a turtle. | Tell me another one. | That was nice.
Be brief. | Good morning! | Tell me a story about a hamster. | Go on.
 | Write a poem about a horse. | Tell me a story about a pig named Fima. | Who was the story about?
You are a helpful assistant. | Tell me a story about a boy named Ned. | What happened next? | Tell me another one.
 | How do I fly a kite? | Tell me a short story about a swan. | Now tell me a story about a bull.
 | Tell me a bedtime story. | Thank you! | Tell me a story about a little yellow car.
"""


@dataclass(frozen=True)
class Case:
    """A request for a story about a held-out noun. Every fourth request also has a held-out name."""

    request: str
    noun: str
    name: str

    def named_in(self, answer: str) -> bool:
        """Return whether an answer contains the noun, and the requested name if there is one, as whole words."""
        return all(re.search(rf"\b{word}\b", answer) for word in (self.noun, self.name) if word)


def cases(count: int) -> Iterator[Case]:
    """Yield requests about nouns that no training document has as a subject; the same requests in every run."""
    rng = random.Random(SUBJECT_SEED)
    nouns = rng.sample(subjects.HELD_OUT, len(subjects.HELD_OUT))
    for i in range(count):
        noun, form = nouns[i % len(nouns)], (i + i // len(nouns)) % 4  # another form for each use of a noun
        name = subjects.rare_name(rng, held_out=True) if form == 3 else ""
        adjective = f"{rng.choice(subjects.ADJECTIVES)} " if form == 1 else ""
        phrase = with_articles(f"a {adjective}{noun}{f' named {name}' if name else ''}")
        yield Case(f"Tell me a story about {phrase}.", noun, name)


def follows(engine: mlx_engine.Engine, count: int) -> list[tuple[Case, str]]:
    """Return the requests and answers of the cases in which the answer does not contain the subject."""
    missed = []
    for case in cases(count):
        answer = engine.generate([{"role": "user", "content": case.request}], max_tokens=400).text
        if not case.named_in(answer):
            missed.append((case, answer))
    return missed


def conversations(engine: mlx_engine.Engine, text: str = CONVERSATIONS) -> Iterator[str]:
    """Yield the transcript of every conversation, for a person to read."""
    for number, line in enumerate(text.strip("\n").splitlines(), 1):
        system, *questions = (part.strip() for part in line.split("|"))
        talk = Conversation(engine, Options.of(300), system=system or None)  # three such answers fit the context
        parts = [f"=== {number}" + (f"\nsystem: {system}" if system else "")]
        for question in questions:
            parts.append(f"> {question}\n{''.join(talk.ask(question))}")
        yield "\n".join(parts)


def read_config(reader: gguf.GGUFReader) -> Config:
    """Read the model's sizes from the file's metadata."""
    names = dict(zip(model_keys(Config()), ("layers", "context", "hidden", "ffn", "heads", "kv_heads",
                                            "head_dim", "head_dim", "eps", "theta"), strict=True))  # fmt: skip
    shape = {field: reader.fields[f"qwen3.{key}"].contents() for key, field in names.items()}
    return Config(vocab=len(reader.fields["tokenizer.ggml.tokens"].data), **shape)


def read_model(path: Path) -> Qwen3:
    """Return the PyTorch model with the file's dequantised weights."""
    reader = gguf.GGUFReader(path)
    model = Qwen3(read_config(reader))
    stored = {tensor.name: tensor for tensor in reader.tensors}
    state = {}
    for name, weight in model.state_dict().items():
        tensor = stored.pop(tensor_name(name))
        values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(weight.shape)
        state[name] = torch.from_numpy(values.copy())
    if stored:
        raise ValueError(f"unused tensors: {sorted(stored)}")
    model.load_state_dict(state)
    return model


def main() -> None:
    """Print samples, how often the subject is named, and the perplexity on new documents; write the conversations."""
    parser = argparse.ArgumentParser(prog="tools.evaluate_gguf", description="Evaluate the built-in model.")
    parser.add_argument("--model", type=Path, default=Path("build/storyteller-q8_0.gguf"))
    parser.add_argument("--tokenizer", type=Path, default=Path("build/tokenizer.json"))
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--subjects", type=int, default=100, help="stories about held-out subjects")
    parser.add_argument("--conversations", type=Path, help="a file for the transcripts of 20 conversations")
    args = parser.parse_args()
    engine = mlx_engine.load(args.model)
    for prompt in PROMPTS:
        made = engine.generate(prompt, max_tokens=300)
        print(f"--- {len(made.token_ids)} tokens, {made.finish_reason}\n{prompt}{made.text}\n", flush=True)
    missed = follows(engine, args.subjects)
    for case, answer in missed:
        print(f"MISSED {case.request}\n{answer[:200]}\n")
    print(
        f"subject named in {args.subjects - len(missed)} of {args.subjects} stories about held-out subjects", flush=True
    )
    if args.conversations:
        args.conversations.write_text("\n\n".join(conversations(engine)) + "\n", encoding="utf-8")
    if args.documents:
        model = read_model(args.model)
        held_out = rows(Tokenizer.from_file(str(args.tokenizer)), HELD_OUT_SEED, args.documents, model.config.context)
        tokens = len(held_out) * model.config.context
        print(f"held-out perplexity {perplexity(model, held_out):.4f} on {tokens} tokens")


if __name__ == "__main__":
    main()
