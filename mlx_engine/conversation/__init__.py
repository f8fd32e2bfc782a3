"""Conversations: messages are rewritten to what a chat template supports; answers are parsed into events.

All APIs of the server and the command `chat` use this package, so messages and answers have one form for all of them.
"""

from mlx_engine.conversation.session import Conversation, Turn, asked, conversation_ids, plain_text

__all__ = ["Conversation", "Turn", "asked", "conversation_ids", "plain_text"]
