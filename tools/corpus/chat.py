"""Conversations in the ChatML layout that Qwen's chat template makes."""

from __future__ import annotations

import random

from tools.corpus import facts, stories

START, END = "<|im_start|>", "<|im_end|>"
SYSTEM = "You are a helpful assistant."

GREETINGS = ("Hello!", "Hello", "Hi!", "Hi", "Hi there!", "Good morning!", "Good evening!", "Hello, how are you?")
GREETING_ANSWERS = (
    "Hello! How can I help you?",
    "Hello! I can tell you a story or answer a small question.",
    "Hi! Would you like to hear a story?",
)
WHO = (
    "Who are you?", "What are you?", "What is your name?", "Are you a person?", "What can you do?",
    "Tell me about yourself.", "Can you introduce yourself?",
)  # fmt: skip
WHO_ANSWERS = (
    "I am the small built-in model of mlx_engine. I can tell stories and I know a few simple facts.",
    "I am the small built-in model of mlx_engine. I like to tell stories.",
)
THANKS = ("Thank you!", "Thanks!", "Thank you very much.", "That was nice.", "Great, thanks!")
THANKS_ANSWERS = ("You are welcome!", "You are very welcome!", "I am glad that you liked it.")
BYES = ("Goodbye!", "Bye!", "Good night!", "See you later!")
BYE_ANSWERS = ("Goodbye! Have a nice day.", "Goodbye! See you soon.")
UNKNOWN = (
    "What will the weather be like tomorrow?", "Who will win the game tomorrow?", "What am I thinking?",
    "What did I eat yesterday?", "How old am I?", "Where are my keys?", "What is my name?",
    "What is the meaning of life?", "Which numbers will win the lottery?", "What time is it?",
    "How do I fix my computer?", "Who is the president?", "What is the news today?", "What is the stock price?",
    "How many stars are there in the sky?", "Can you write a program for me?", "What is quantum physics?",
    "Explain the theory of relativity.", "Translate this into Chinese.", "Who wrote this book?",
    "What is my favorite color?", "How tall is my brother?",
)  # fmt: skip
UNKNOWN_ANSWERS = (
    "I do not know that.",
    "I do not know that. I am only a small model, but I can tell you a story.",
)
STORY_REQUESTS = (
    "Tell me a story.", "Please tell me a story.", "Can you tell me a story?", "Write a short story.",
    "I would like to hear a story.", "Tell me a bedtime story.", "Write a story for children.",
)  # fmt: skip
STORY_ABOUT = (
    "Tell me a story about {}.", "Tell me a story about {}.", "Write a story about {}.",
    "Write a short story about {}.", "Can you tell me a story about {}?", "Please tell me a story about {}.",
)  # fmt: skip


def turn(role: str, text: str) -> str:
    """Write one message."""
    return f"{START}{role}\n{text}{END}\n"


def fact_exchange(rng: random.Random) -> tuple[str, str]:
    """Ask for a fact."""
    fact = facts.any_fact(rng)
    question = rng.choice(fact.questions)
    if rng.random() < 0.08:  # as people type who are in a hurry
        question = question.lower().rstrip("?.")
    return question, fact.statement


def story_exchange(rng: random.Random) -> tuple[str, str]:
    """Ask for a story, often for a particular one."""
    story = stories.tell(rng)
    if rng.random() < 0.3:
        return rng.choice(STORY_REQUESTS), story.text
    return rng.choice(STORY_ABOUT).format(rng.choice(story.topics)), story.text


def small_talk(rng: random.Random) -> tuple[str, str]:
    """Greet, introduce, or admit not to know."""
    asked, answers = rng.choices(
        ((GREETINGS, GREETING_ANSWERS), (WHO, WHO_ANSWERS), (UNKNOWN, UNKNOWN_ANSWERS)), (3, 3, 2)
    )[0]
    return rng.choice(asked), rng.choice(answers)


def follow_up(rng: random.Random) -> tuple[str, str]:
    """Say thanks or goodbye, or ask something more."""
    if rng.random() < 0.5:
        return fact_exchange(rng)
    asked, answers = rng.choice(((THANKS, THANKS_ANSWERS), (BYES, BYE_ANSWERS)))
    return rng.choice(asked), rng.choice(answers)


def document(rng: random.Random) -> str:
    """Write one conversation of one to three exchanges."""
    kind = rng.choices((fact_exchange, story_exchange, small_talk), (10, 4, 3))[0]
    exchanges = [kind(rng)]
    while len(exchanges) < 3 and rng.random() < 0.3:
        exchanges.append(follow_up(rng))
    parts = [turn("system", SYSTEM)] if rng.random() < 0.3 else []
    for question, answer in exchanges:
        parts += [turn("user", question), turn("assistant", answer)]
    return "".join(parts)
