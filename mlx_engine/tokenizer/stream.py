"""Token ids to text, one at a time, without ever showing half of a character."""

from __future__ import annotations

import codecs

from mlx_engine.tokenizer.vocabulary import SpacePrefix, Vocabulary


class StreamDecoder:
    """The text of a growing sequence of ids: what `add` and `finish` return, joined, is `decode` of all ids.

    A character whose bytes are spread over several tokens comes with the last of them; bytes that can never become
    a character come as U+FFFD. Nothing is looked at twice, so a stream of n ids costs n steps.
    """

    def __init__(self, vocabulary: Vocabulary, *, skip_special: bool = False, at_start: bool = True) -> None:
        self._vocabulary = vocabulary
        self._skip_special = skip_special
        self._drop_space = at_start and vocabulary.space_prefix is not SpacePrefix.NEVER
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id: int) -> str:
        """The text that this token completes; often empty.

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
        """What is left when no more ids come: U+FFFD for a character that was never completed, else nothing."""
        return self._utf8.decode(b"", final=True)
