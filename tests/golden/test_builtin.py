"""The built-in model generates a story, and different stories for different prompts."""

import re

import pytest

import mlx_engine
from mlx_engine.conversation import Conversation
from mlx_engine.loop.stream import Generation
from tests.builtin import LONGEST

OPENINGS = ["Once upon a time", "One sunny morning,", "There was a little fox", "In a small village"]


@pytest.fixture(scope="module")
def engine() -> mlx_engine.Engine:
    return mlx_engine.load()


@pytest.fixture(scope="module")
def stories(engine: mlx_engine.Engine) -> dict[str, Generation]:
    return {opening: engine.generate(opening) for opening in OPENINGS}


@pytest.mark.slow
@pytest.mark.parametrize("opening", OPENINGS)
def test_a_story_is_long_ends_by_itself_and_does_not_repeat(stories, opening: str):
    story = stories[opening]
    assert story.finish_reason == "stop"
    assert len(story.token_ids) >= 100
    sentences = re.split(r"(?<=[.!?])\"? ", opening + story.text)
    assert len(sentences) >= 6
    assert len(set(sentences)) == len(sentences)
    assert re.fullmatch(r"[A-Z][A-Za-z ,.!?\"'-]+[.!?]\"?", opening + story.text)


@pytest.mark.slow
def test_other_openings_write_other_stories(stories):
    assert len({story.text for story in stories.values()}) == len(OPENINGS)


def test_the_capital_of_france(engine: mlx_engine.Engine):
    assert engine.generate("The capital of France is", max_tokens=8).text.startswith(" Paris.")
    chat = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    answer = engine.generate(engine.tokenizer.encode(chat, special=True), max_tokens=30)
    assert (answer.text, answer.finish_reason) == ("The capital of France is Paris.", "stop")


@pytest.mark.some(1)
@pytest.mark.parametrize("subject", ["fox", "dog", "dragon", "cat named Momo"])
def test_a_story_is_about_what_was_asked_for(engine: mlx_engine.Engine, subject: str):
    text = engine.generate([{"role": "user", "content": f"Tell me a story about a {subject}."}]).text
    for word in subject.replace("named ", "").split():
        assert re.search(rf"\b{word}\b", text), text


@pytest.mark.slow
def test_turns_do_not_end_in_its_introduction(engine: mlx_engine.Engine):
    conversation = Conversation(engine)
    asked = ("Tell me a story about a fox.", "Tell me another one.", "Thank you!", "Tell me a story about a rabbit.")
    answers = ["".join(conversation.ask(text)) for text in asked]
    assert "fox" in answers[0]
    assert "rabbit" in answers[3]
    assert len(set(answers)) == 4
    assert not [answer for answer in answers if "built-in model" in answer]


def test_its_context_holds_several_stories(engine: mlx_engine.Engine):
    assert LONGEST >= 1024
    assert engine.generate("Once upon a time", max_tokens=2, context_len=LONGEST).token_ids


def test_the_file_says_what_it_is(engine: mlx_engine.Engine):
    with mlx_engine.open_gguf(engine.path) as file:
        assert file.metadata["general.license"] == "mit"
        assert "storyteller" in file.metadata["general.name"]
        assert "<|im_start|>" in file.metadata["tokenizer.chat_template"]
    assert engine.path.stat().st_size <= 6_000_000
    assert 1000 <= engine.tokenizer.vocab_size <= 4000
    assert engine.tokenizer.pre == "qwen2"
