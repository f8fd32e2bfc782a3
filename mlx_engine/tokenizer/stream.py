"""Decode token ids one at a time, returning whole characters only."""

from __future__ import annotations

import codecs

from mlx_engine.tokenizer.vocabulary import SpacePrefix, Vocabulary


class StreamDecoder:
    """Incremental decoder: the concatenated results of `add` and `finish` equal `decode` of all ids.

    A character whose bytes are spread over several tokens is returned with the last of them; invalid bytes are returned
    as U+FFFD. No id is decoded twice, so a stream of n ids takes O(n) time.
    """

    def __init__(self, vocabulary: Vocabulary, *, skip_special: bool = False, at_start: bool = True) -> None:
        self._vocabulary = vocabulary
        self._skip_special = skip_special
        self._drop_space = at_start and vocabulary.space_prefix is not SpacePrefix.NEVER
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id: int) -> str:
        """Add a token and return the text that it completes; often empty.

        Raises:
            TokenizerError: the vocabulary has no such id.
        """
        vocabulary = self._vocabulary
        vocabulary.check(token_id)
        piece = vocabulary.piece(token_id)
        if token_id in vocabulary.literal_ids:
            skipped = self._skip_special and token_id in vocabulary.control_ids
            piece = b"" if skipped else piece
            self._drop_space = vocabulary.space_prefix is SpacePrefix.SECTION or (skipped and self._drop_space)
        elif self._drop_space:
            self._drop_space = False
            piece = piece.removeprefix(b" ")
        return self._utf8.decode(piece)

    def finish(self) -> str:
        """End the stream: return U+FFFD for an incomplete character, else an empty text."""
        return self._utf8.decode(b"", final=True)
