"""A conversation from Python: messages, the ids that are kept, and what an answer that fails or is stopped leaves."""

import pytest

import mlx_engine
from mlx_engine.conversation import Conversation, plain_text
from mlx_engine.errors import ContextLengthError, EngineError, OptionError
from mlx_engine.options import Options
from tests.unit.test_chat import MICRO

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def builtin():
    return mlx_engine.load(backend="simd")


def said(pieces):
    return "".join(pieces)


def roles(conversation):
    return [message["role"] for message in conversation.messages]


def test_an_answer_reads_all_messages_before_it(builtin):
    conversation = Conversation(builtin, system="You are a helpful assistant.")
    first = said(conversation.ask(QUESTION))
    assert "Paris" in first
    second = said(conversation.ask("Who are you?"))
    assert roles(conversation) == ["system", "user", "assistant", "user", "assistant"]
    assert conversation.messages[-1]["content"] == second
    alone = builtin.generate(conversation.messages[:-1])
    assert conversation.generation.token_ids == alone.token_ids
    assert [turn.n_generated for turn in conversation.turns][-1] == len(alone.token_ids)
    assert conversation.n_tokens == len(alone.prompt_ids) + len(alone.token_ids)


def test_the_next_prompt_begins_with_the_ids_of_the_turn_before(builtin):
    for seed in range(20):  # until words are not encoded as they were generated
        conversation = Conversation(builtin, Options.of(24, temperature=1.8, seed=seed))
        said(conversation.ask("Tell me a story."))
        before = conversation.generation
        kept = before.prompt_ids + before.token_ids
        encoded = builtin.tokenizer.encode(before.text)
        is_other = encoded != [i for i in before.token_ids if i not in builtin.tokenizer.eog_ids]
        if is_other and "<|" not in before.text:
            break
    else:
        pytest.fail("every answer was encoded as it was generated, so this tests nothing")
    said(conversation.ask("More."))
    assert conversation.generation.prompt_ids[: len(kept)] == kept
    # The last token of an answer is chosen and never run.
    assert conversation.turns[-1].n_cached == len(kept) - 1
    assert builtin.chat_prompt(conversation.messages[:-1])[: len(kept)] != kept


def test_an_answer_that_is_closed_keeps_what_was_said(builtin):
    conversation = Conversation(builtin)
    pieces = conversation.ask("Tell me a story.")
    text = next(pieces) + next(pieces)
    pieces.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": text}
    assert conversation.generation.finish_reason is None
    ids = conversation.generation.prompt_ids + conversation.generation.token_ids
    said(conversation.ask("Thank you!"))
    assert conversation.generation.prompt_ids[: len(ids)] == ids


def test_a_question_without_an_answer_is_replaced_by_the_next():
    conversation = Conversation(mlx_engine.load(MICRO, backend="simd"), Options.of(2, ignore_eos=True))

    def stop(done, total):
        if 0 < done < total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        said(conversation.ask("a b " * 600, progress=stop))
    assert roles(conversation) == ["user"]
    assert conversation.turns == []
    said(conversation.ask(QUESTION))
    assert roles(conversation) == ["user", "assistant"]
    assert conversation.messages[0]["content"] == QUESTION


def test_retry_answers_again_and_clear_keeps_the_system_message(builtin):
    conversation = Conversation(builtin, system="s")
    with pytest.raises(OptionError, match="there is no question to"):
        conversation.retry()
    first = said(conversation.ask(QUESTION))
    conversation.options = Options.of(4)
    assert first.startswith(said(conversation.retry()))
    assert roles(conversation) == ["system", "user", "assistant"]
    conversation.clear()
    assert (conversation.messages, conversation.n_tokens) == ([{"role": "system", "content": "s"}], 0)
    conversation.system = "t"
    assert conversation.messages == [{"role": "system", "content": "t"}]
    conversation.system = None
    assert conversation.messages == []


@pytest.mark.some(1)
@pytest.mark.parametrize("dropped", [1, 2])
def test_after_undo_the_bits_are_those_of_a_conversation_without_the_turn(builtin, dropped):
    options = Options.of(24, temperature=1.8, seed=8, logprobs=2)
    undone, never = (Conversation(builtin, options, system="s") for _ in range(2))
    for conversation in (undone, never):
        said(conversation.ask("Tell me a story."))
    for _ in range(dropped):
        said(undone.ask("More."))
    said(undone.retry())
    questions = [undone.undo() for _ in range(dropped)]
    assert questions == ["More."] * dropped
    assert (undone.messages, undone.n_tokens) == (never.messages, never.n_tokens)
    assert undone._history._texts == never._history._texts
    undone.options = never.options = Options.of(24, temperature=1.5, seed=9, logprobs=2)
    for text in ("More.", "Thank you!"):
        assert said(undone.ask(text)) == said(never.ask(text))
        ours, theirs = undone.generation, never.generation
        assert (ours.prompt_ids, ours.token_ids) == (theirs.prompt_ids, theirs.token_ids)
        assert ours.logprobs == theirs.logprobs
    assert [turn.n_generated for turn in undone.turns] == [turn.n_generated for turn in never.turns]


def test_undo_drops_a_question_without_an_answer_and_refuses_where_there_is_none(builtin):
    conversation = Conversation(builtin, system="s")
    conversation.ask("Hello")
    assert conversation.undo() == "Hello"
    with pytest.raises(OptionError, match="there is no question to"):
        conversation.undo()
    assert roles(conversation) == ["system"]


def test_a_full_context_leaves_the_conversation_as_it_was(builtin):
    conversation = Conversation(builtin, Options.of(context_len=40))
    said(conversation.ask("Hello"))
    before = conversation.messages
    with pytest.raises(ContextLengthError):
        conversation.ask("Tell me a story about a fox and a bird and a house. " * 3)
    assert conversation.messages == before
    conversation.clear()
    assert said(conversation.ask("Hello"))


def test_messages_are_loaded_if_the_template_can_render_them(builtin):
    conversation = Conversation(builtin)
    said(conversation.ask(QUESTION))
    messages = conversation.messages
    for wrong in ([{"role": "user"}], [{"role": "user", "content": 3}], [3]):
        with pytest.raises(EngineError):
            conversation.load(wrong)
        assert conversation.messages == messages
    other = Conversation(builtin)
    other.load(messages)
    assert said(other.retry()) == messages[-1]["content"]
    other.load([])
    assert other.messages == []


def test_without_a_template_the_text_goes_on():
    messages = [("system", "S"), ("user", "a"), ("assistant", " b"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": content} for role, content in messages]
    assert plain_text(messages) == "S\n\na b\ncd"
    assert plain_text(messages[1:3]) == "a b"
