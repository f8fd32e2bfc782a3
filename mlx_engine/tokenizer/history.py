"""The token ids of earlier prompts and answers, so that a conversation continues with the ids that the model generated.

Encoding the text of an answer again may give other ids than the model generated for it. The next turn would then differ
from the tokens whose keys and values are cached. A `History` keeps the ids with their text; `chat_ids` uses them where
the next prompt begins with the same text.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from mlx_engine.machine.forks import kept_over_forks
from mlx_engine.tokenizer.markers import MARK, Markers
from mlx_engine.tokenizer.tokenizer import Tokenizer

ITEM_BYTES = array("I").itemsize


class History:
    """Texts of conversations and their token ids, the least recently used dropped first. Thread-safe.

    Texts are marked (see `markers`): a message that spells a control token differs from a template that wrote it.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_entries: int = 1024, max_tokens: int = 1 << 20) -> None:
        """Make an empty history.

        Args:
            tokenizer: the tokenizer of all its ids.
            max_entries: the largest number of texts.
            max_tokens: the largest number of ids of all texts together; an id takes four bytes.
        """
        self._markers = Markers.of(tokenizer)
        self._max_entries, self._max_tokens = max_entries, max_tokens
        self._texts: OrderedDict[bytes, str] = OrderedDict()  # by ids, the most recently used last
        self._n_bytes = 0
        self._lock = kept_over_forks(threading.Lock())

    def __len__(self) -> int:
        return len(self._texts)

    def add_prompt(self, ids: Sequence[int], marked: str) -> None:
        """Remember the ids of a rendered conversation; `marked` is its marked text."""
        with self._lock:
            self._add(_packed(ids), marked)

    def add_answer(self, prompt_ids: Sequence[int], generated_ids: Sequence[int]) -> None:
        """Remember the ids of an answer; do nothing if its prompt has been dropped.

        The end-of-turn token is left out: the template writes it, and so decides which one follows.
        """
        generated = list(generated_ids)
        while generated and generated[-1] in self._markers.tokenizer.eog_ids:
            generated.pop()
        prompt = _packed(prompt_ids)
        answer = self._marked(generated)
        with self._lock:
            if (text := self._texts.get(prompt)) is not None:
                self._add(prompt + _packed(generated), text + answer)

    def beginnings(self, marked: str) -> Iterator[tuple[str, list[int]]]:
        """Yield the remembered texts with which a marked text begins, and their ids; the longest text first.

        Only texts after which a marker of the template follows. Text on both sides of a marker is encoded separately,
        so the rest may be encoded alone. Anywhere else the encoding of the rest would depend on the text before it.
        """
        with self._lock:
            found = [
                (text, ids)
                for ids, text in self._texts.items()
                if marked.startswith(text) and marked.startswith(MARK, len(text))
            ]
        for text, ids in sorted(found, key=lambda entry: len(entry[0]), reverse=True):
            with self._lock:
                if ids in self._texts:
                    self._texts.move_to_end(ids)
            yield text, array("I", ids).tolist()

    def _add(self, ids: bytes, text: str) -> None:
        self._n_bytes += 0 if ids in self._texts else len(ids)
        self._texts[ids] = text
        self._texts.move_to_end(ids)
        while len(self._texts) > self._max_entries or self._n_bytes > self._max_tokens * ITEM_BYTES:
            dropped, _ = self._texts.popitem(last=False)
            self._n_bytes -= len(dropped)

    def _marked(self, ids: Sequence[int]) -> str:
        """Return the text of generated ids, with the markers among them marked."""
        stream, values, pieces = self._markers.tokenizer.stream(at_start=False), self._markers.values, []
        for i in ids:
            # A marker ends an incomplete character; the stream returns both, the marker last.
            piece = stream.add(i)
            marker = self._markers.tokenizer.token(i) if i in values else ""
            pieces.append(piece.removesuffix(marker) + MARK + marker if marker else piece)
        return "".join([*pieces, stream.finish()])


def _packed(ids: Sequence[int]) -> bytes:
    return array("I", ids).tobytes()
