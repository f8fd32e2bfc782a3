"""Rewrite messages to the forms that a chat template supports, and parse answers into events.

All APIs of the server and the command `chat` use this package.
"""

from mlx_engine.conversation.session import Conversation, Turn, asked, conversation_ids, plain_text

__all__ = ["Conversation", "Turn", "asked", "conversation_ids", "plain_text"]
