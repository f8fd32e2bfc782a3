"""Conversations: one form for all APIs and `chat`, and the events of an answer's text."""

from mlx_engine.conversation.session import Conversation, Turn, asked, conversation_ids, plain_text

__all__ = ["Conversation", "Turn", "asked", "conversation_ids", "plain_text"]
