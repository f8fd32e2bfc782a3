"""Make the goldens of embeddings and of a reranker with transformers in float64. The tests never run this.

    python tests/golden/make_embedding_goldens.py

For a folder of tests/data: the hidden states of some texts after the last norm, pooled as sentence-transformers does
(last token, mean, first token; divided by their length), and the softmax over two tokens after the last one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

DATA = Path(__file__).parents[1] / "data"
FOLDERS = ("qwen3-micro", "gemma3-micro")
LENGTHS = (1, 9, 70)
LABELS = (7, 300)


def main() -> None:
    """Write embeddings.npz beside each folder."""
    for name in FOLDERS:
        model = AutoModelForCausalLM.from_pretrained(DATA / name / "hf", attn_implementation="eager")
        model = model.to(torch.float64).eval()
        random, found = np.random.default_rng(11), dict[str, np.ndarray]()
        for n in LENGTHS:
            ids = random.integers(0, 400, n)
            with torch.no_grad():
                hidden = model.model(torch.tensor(ids[None])).last_hidden_state[0]
                logits = model.lm_head(hidden[-1])[list(LABELS)]
            pooled = {"last": hidden[-1], "mean": hidden.mean(0), "cls": hidden[0]}
            vectors = {f"{kind}_{n}": x / x.norm() for kind, x in pooled.items()}
            found |= {key: x.numpy() for key, x in vectors.items()}
            found |= {f"ids_{n}": ids, f"relevance_{n}": torch.softmax(logits, 0)[0].numpy()}
        np.savez_compressed(DATA / name / "embeddings.npz", labels=np.array(LABELS), **found)


if __name__ == "__main__":
    main()
