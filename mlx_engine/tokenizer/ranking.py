"""The prompt of a reranker as token ids: query and document in the model's template."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mlx_engine.errors import TokenizerError
from mlx_engine.tokenizer.tokenizer import Tokenizer

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# The prompt in the model card of Qwen3-Reranker; INSTRUCTION is the default instruction.
TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
PLACES = re.compile(r"(\{(?:instruction|query|document)\})")


def ranking_ids(
    tokenizer: Tokenizer, template: str | None, query: str, document: str, instruction: str | None
) -> list[int]:
    """Return the token ids of a prompt.

    Only the template can write control tokens; control tokens spelled in other texts are encoded as plain text.

    Args:
        tokenizer: the model's tokenizer.
        template: a text with {query} and {document}; None for the template of Qwen3-Reranker. A template without
            {instruction} has a fixed instruction, and is replaced by Qwen3-Reranker's if an instruction is given.
        query: the query.
        document: the document.
        instruction: describes which documents are relevant; None is the instruction for a web search.
    """
    if template is None or (instruction is not None and "{instruction}" not in template):
        template = TEMPLATE
    texts = {"{query}": query, "{document}": document, "{instruction}": instruction or INSTRUCTION}
    control = sorted(tokenizer.special_tokens, key=len, reverse=True)
    cut = re.compile(f"({'|'.join(map(re.escape, control))})") if control else re.compile(r"((?!))")
    ids, run = list[int](), ""
    for piece in PLACES.split(template):
        if piece in texts:
            run += texts[piece]
            continue
        for i, part in enumerate(cut.split(piece)):
            if i % 2 == 0:
                run += part
            else:
                ids += [*(tokenizer.encode(run) if run else ()), tokenizer.special_tokens[part]]
                run = ""
    return [*ids, *(tokenizer.encode(run) if run else ())]


def label_ids(tokenizer: Tokenizer, labels: Sequence[str]) -> list[int]:
    """Return the token of each label.

    Raises:
        TokenizerError: a label is no single token.
    """
    found = [tokenizer.encode(label) for label in labels]
    for label, ids in zip(labels, found, strict=True):
        if len(ids) != 1:
            raise TokenizerError(f"{tokenizer.where}: expected the label {label!r} to be one token, found {len(ids)}")
    return [ids[0] for ids in found]
