"""Reasoning, told from the answer: markers, any cutting of the text, and what `chat` and a conversation do with it."""

import random
from functools import cache
from types import SimpleNamespace

import pytest

import mlx_engine
from mlx_engine.commands.chat import AnswerPrinter
from mlx_engine.conversation import Conversation, delimiters
from mlx_engine.conversation.answer import AnswerReader, message_of
from mlx_engine.conversation.delimiters import MARKERS, Delimiter, ThinkMarkers, think_markers
from mlx_engine.conversation.events import ReasoningDelta, TextDelta
from mlx_engine.conversation.formats import AnswerFormat, Form, Region
from mlx_engine.options import Options
from mlx_engine.serve.call import Progress
from mlx_engine.serve.replies import ChatReply
from tests.unit.test_command_generate import cli
from tests.unit.test_tokenizer import build, byte_level

THINK = MARKERS[-1]
THINKS = "{{ messages[0].content }}{% if enable_thinking %}<think>\n{% endif %}{# </think> #}"


@cache
def story() -> tuple[str, ThinkMarkers]:
    """Return the beginning of the built-in model's story, and its first word and first comma or stop as markers."""
    text = mlx_engine.load(backend="simd").generate([{"role": "user", "content": "Tell me a story."}], 24).text
    return text, ThinkMarkers(text.split()[0], next(character for character in text if character in ",."), "message")


def test_known_templates_have_their_markers():
    assert think_markers(None) is think_markers("{{ messages }}") is None
    assert think_markers("x.split('</think>')") == THINK
    assert think_markers("'<|channel|>analysis<|message|>'").closing.endswith("final<|message|>")
    assert think_markers("{{ '[THINK]' ~ t ~ '[/THINK]' }}").opening == "[THINK]"


CASES = [
    ("<think>\nSo.\n\nYes \n</think>\n\nIt is 4. ", False, "So.\n\nYes", "It is 4. "),
    ("\n<think></think>Hi", False, "", "Hi"),
    ("  Hello <think>x</think>", False, "", "  Hello <think>x</think>"),
    ("So.</think>Four", True, "So.", "Four"),
    (" So. <b>\n", True, "So. <b>", ""),
    ("<think>never </thin", False, "never </thin", ""),
    ("<thin", False, "", "<thin"),
    ("  ", False, "", "  "),
    ("", False, "", ""),
]


FREE = AnswerFormat(Form(), Form())
THINKING = AnswerFormat(*[Form((Region(True, Delimiter(THINK.opening), Delimiter(THINK.closing)),))] * 2)


def split(pieces, reader):
    """Return the reasoning and the answer of a whole text."""
    message = message_of([event for piece in pieces for event in reader.add(piece)] + reader.finish())
    return message.get("reasoning_content", ""), message["content"]


@pytest.mark.parametrize(("text", "is_open", "thought", "said"), CASES)
def test_the_pieces_do_not_depend_on_how_the_text_is_cut(text, is_open, thought, said):
    draw = random.Random(1)
    for n_cuts in (0, 1, 2, 5, len(text)):
        cuts = sorted(draw.choices(range(len(text) + 1), k=n_cuts))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert split(pieces, AnswerReader(THINKING, is_thinking=is_open)) == (thought, said)
    assert split(list(text), AnswerReader(THINKING, is_thinking=is_open)) == (thought, said)
    assert split(list(text), AnswerReader(FREE)) == ("", text)


def test_the_template_may_open_the_reasoning():
    tokenizer = build(byte_level(chat_template=THINKS))
    for prompt, thought in (("a<think>\n", "x"), ("a<think>\n\n</think>\n\n", ""), ("a", "")):
        found = split(["x</think>y"], AnswerReader.after(tokenizer, tokenizer.encode(prompt)))
        assert found == ((thought, "y") if thought else ("", "x</think>y"))


class FakeCall:
    def __init__(self, *texts):
        self.outputs = [
            (SimpleNamespace(pieces=[], token_ids=[], logprobs=None, marks=None, stop=None), Progress()) for _ in texts
        ]
        self.requests = [SimpleNamespace(prompt_ids=[1], outputs=[output for output, _ in self.outputs])]

    def add(self, i, text, finish_reason=None):
        output, _ = self.outputs[i]
        output.pieces.append(text)
        output.token_ids.append(1)
        self.outputs[i] = output, Progress(len(output.token_ids), len(output.pieces), finish_reason)


def test_chunks_and_the_whole_reply_have_the_reasoning_in_its_own_field():
    call = FakeCall("")
    reply = ChatReply(
        call,
        build(byte_level(chat_template=THINKS)),
        model="m",
        fingerprint="f",
        types={"activations": "f32", "kv_type": "f32"},
    )
    deltas = []
    for text, reason in (("<thi", None), ("nk>So", None), (" it ", None), ("is</think>\n\nFo", None), ("ur", "stop")):
        call.add(0, text, reason)
        deltas += [chunk["choices"][0]["delta"] for chunk in reply.chunks()]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "So it is"
    assert "".join(delta.get("content", "") for delta in deltas) == "Four"
    message = reply._choice(0, "".join(call.outputs[0][0].pieces), None, call.outputs[0][1])["message"]
    assert message == {"role": "assistant", "content": "Four", "refusal": None, "reasoning_content": "So it is"}


def test_reasoning_that_is_held_back_at_the_end_of_an_answer_is_sent():
    call = FakeCall("")
    reply = ChatReply(
        call,
        build(byte_level(chat_template=THINKS)),
        model="m",
        fingerprint="f",
        types={"activations": "f32", "kv_type": "f32"},
    )
    call.add(0, "<think>So </thi", "length")
    choices = [chunk["choices"][0] for chunk in reply.chunks()]
    assert [choice["delta"].get("reasoning_content") for choice in choices] == [None, "So", " </thi", None]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "length"]


@pytest.fixture
def storyteller(monkeypatch):
    """The built-in model, whose stories begin with reasoning: from the first word to the first comma."""
    monkeypatch.setattr(delimiters, "MARKERS", (story()[1],))
    return mlx_engine.load(backend="simd")


def told(storyteller, **more):
    conversation = Conversation(storyteller, Options.of(24), **more)
    return conversation, "".join(conversation.ask("Tell me a story."))


@pytest.mark.slow
def test_a_template_that_reads_the_reasoning_gets_it_as_a_field(storyteller):
    conversation, text = told(storyteller)
    assert text == story()[0]
    assert conversation.messages[-1] == {"role": "assistant", "content": text}  # which this template does not read
    vocabulary = storyteller.tokenizer._vocabulary
    object.__setattr__(vocabulary, "chat_template", vocabulary.chat_template + "{# reasoning_content #}")
    conversation, _ = told(storyteller)
    markers = story()[1]
    thought, _, said = text.lstrip().removeprefix(markers.opening).partition(markers.closing)
    message = {"role": "assistant", "content": said.lstrip(), "reasoning_content": thought.strip()}
    assert conversation.messages[-1] == message
    assert list(conversation.ask("Thank you!"))


@pytest.mark.slow
def test_chat_prints_the_reasoning_on_stderr_and_quiet_drops_it(monkeypatch):
    text, markers = story()
    monkeypatch.setattr(delimiters, "MARKERS", (markers,))
    asked = ("chat", "--backend", "simd", "-n", 24)
    loud, quiet = (cli(*asked, *more, stdin="Tell me a story.\n") for more in ((), ("--quiet",)))
    assert loud.out == quiet.out
    thought, _, said = text.lstrip().removeprefix(markers.opening).partition(markers.closing)
    assert markers.opening not in loud.out
    assert said.strip() in loud.out
    assert thought.strip() in loud.err
    assert quiet.err == ""


def test_a_terminal_shows_the_reasoning_dimmed(monkeypatch, capsys):
    monkeypatch.setattr("mlx_engine.commands.console.is_plain", lambda _: False)
    printer = AnswerPrinter(quiet=True)
    printer.print([ReasoningDelta("So")])
    printer.print([ReasoningDelta(" it is"), TextDelta("4")])
    assert capsys.readouterr().out == "\x1b[2mSo\x1b[0m\x1b[2m it is\x1b[0m\x1b[2m\n\n\x1b[0m4"


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_a_model_that_cannot_switch_its_thinking_says_so(command):
    run = cli(command, "--backend", "simd", *(["--chat", "Hi"] if command == "generate" else []), "--no-think")
    assert run.code != 0
    assert "--think needs a chat template that reads enable_thinking or thinking" in run.err.replace("\n", " ")


def test_think_needs_chat():
    assert "--think needs --chat" in cli("generate", "Hi", "--think").err
