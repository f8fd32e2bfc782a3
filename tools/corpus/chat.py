"""Generate conversations for the training text, in the ChatML format of Qwen's chat template."""

from __future__ import annotations

import random
from collections.abc import Callable

from tools.corpus import facts, markdown, stories, subjects, words
from tools.corpus.stories import Request, Story, with_articles

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
    "I am a small model that tells stories.",
    "I am the small built-in model of mlx_engine. I can tell stories and I know a few simple facts.",
    "I am the small built-in model of mlx_engine. I like to tell stories.",
)
BRIEF_SYSTEMS = (
    "Be brief.", "Be brief.", "Answer briefly.", "Keep it short.", "Be short.", "Use few words.", "Give short answers.",
)  # fmt: skip
OTHER_SYSTEMS = (
    "You are a storyteller.", "You tell stories to children.", "Be kind.", "You are a friendly assistant.",
    "Answer politely.", "You are a helpful assistant. Answer in English.", "You are a kind teacher.",
)  # fmt: skip
THANKS = ("Thank you!", "Thanks!", "Thank you very much.", "That was nice.", "Great, thanks!")
THANKS_ANSWERS = ("You are welcome!", "You are very welcome!", "I am glad that you liked it.")
BYES = ("Goodbye!", "Bye!", "Good night!", "See you later!")
BYE_ANSWERS = ("Goodbye! Have a nice day.", "Goodbye! See you soon.")
UNKNOWN = (
    "What will the weather be like tomorrow?", "Who will win the game tomorrow?", "What am I thinking?",
    "What did I eat yesterday?", "How old am I?", "Where are my keys?", "What is my name?",
    "What is the meaning of life?", "Which numbers will win the lottery?", "What time is it?",
    "How do I fix my computer?", "What is love?", "Who is the president?", "What is the news today?",
    "What is the stock price?", "How many stars are there in the sky?", "What is quantum physics?",
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
SHORT_REQUESTS = (
    "Tell me a short story.", "Tell me a very short story.", "Write a very short story.", "A short story, please.",
)  # fmt: skip
SHORT_ABOUT = (
    "Tell me a short story about {}.", "Tell me a very short story about {}.", "Write a very short story about {}.",
    "A short story about {}, please.", "Tell me about {} in a few sentences.",
)  # fmt: skip
ANOTHER = (
    "Tell me another one.", "Another one, please.", "Tell me another story.", "One more, please.", "Another one!",
    "Can you tell me another one?", "Tell me one more.", "Please tell me another story.", "Another story, please.",
)  # fmt: skip
NEXT = (
    "What happened next?", "And then?", "What happened then?", "Go on.", "Continue the story.", "Tell me more.",
    "And what happened next?", "Please go on.", "Continue.",
)  # fmt: skip
NOW_ABOUT = (
    "Now one about {}.", "Now tell me a story about {}.", "And one about {}?", "Tell me one about {}.",
    "Can you tell me one about {}?", "And now a story about {}.",
)  # fmt: skip
TITLED = ("Tell me a story about {} with a title.", "Write a story about {} with a title.")
POEMS = ("Write a poem about {}.", "Tell me a poem about {}.", "Write a short poem about {}.")
POEM_LINES = (
    "Little {0}, little {0}, where do you go?\nOver the hills and through the snow.\n"
    "Little {0}, little {0}, what do you see?\nA star in the sky that is shining for me.",
    "There once was {1} by the sea,\nas happy as {1} can be.\n"
    "It sang to the moon,\na wonderful tune,\nand the {0} had honey for tea.",
    "Good night, {0}, the day is done,\ngood night to the moon and good night to the sun.\n"
    "Sleep well, {0}, and dream of me,\nof a boat on a wide and silver sea.",
)
STORY_ABOUT = (
    "Tell me a story about {}.", "Tell me a story about {}.", "Write a story about {}.",
    "Write a short story about {}.", "Can you tell me a story about {}?", "Please tell me a story about {}.",
)  # fmt: skip


REPEAT = ("Repeat after me: {}", "Repeat: {}", "Say this again: {}", "Say: {}", "Repeat these words: {}")
COLORS = ("red", "blue", "green", "yellow", "purple", "orange", "brown", "black", "white", "pink")


def turn(role: str, text: str) -> str:
    """Return one message in ChatML."""
    return f"{START}{role}\n{text}{END}\n"


def fact_exchange(rng: random.Random) -> tuple[str, str]:
    """Return a question about a fact, and the answer."""
    fact = facts.any_fact(rng)
    question = rng.choice(fact.questions)
    if rng.random() < 0.08:  # some users type without capitals and punctuation
        question = question.lower().rstrip("?.")
    return question, fact.statement


def repeat(rng: random.Random) -> tuple[str, str]:
    """Return a request to repeat some words, and the answer: the simplest exercise in copying."""
    count = rng.randint(1, 6)
    text = rng.choice((" ", " ", ", ")).join(subjects.any_word(rng) for _ in range(count))
    return rng.choice(REPEAT).format(text), text


def recall(rng: random.Random) -> tuple[str, str]:
    """Return a question that states colors, names or owners of things and then asks for one of them, and the answer."""
    count, kind = rng.randint(2, 3), rng.randrange(4)
    nouns, names, colors = set[str](), set[str](), rng.sample(COLORS, count)
    while len(nouns) < count:
        nouns.add(subjects.any_noun(rng))
    while len(names) < count:
        names.add(words.any_name(rng))
    things, owners = sorted(nouns), sorted(names)
    rng.shuffle(things)
    rng.shuffle(owners)
    i = rng.randrange(count)
    thing, owner = things[i], owners[i]
    if kind == 0:
        told = " ".join(f"The {noun} is {color}." for noun, color in zip(things, colors, strict=True))
        return f"{told} What color is the {thing}?", f"The {thing} is {colors[i]}."
    if kind == 1:
        return with_articles(f"I have a {thing} named {owner}. What is my {thing} called?"), (
            f"Your {thing} is called {owner}."
        )
    told = " ".join(f"{name} has a {noun}." for name, noun in zip(owners, things, strict=True))
    if kind == 2:
        return with_articles(f"{told} Who has the {thing}?"), f"{owner} has the {thing}."
    return with_articles(f"{told} What does {owner} have?"), with_articles(f"{owner} has a {thing}.")


def lesson(rng: random.Random) -> str:
    """Return a document of exchanges whose answers only copy words from the question."""
    exchanges = (rng.choice((repeat, repeat, recall))(rng) for _ in range(rng.randint(2, 6)))
    return "".join(turn("user", question) + turn("assistant", answer) for question, answer in exchanges)


class Talk:
    """The state of a conversation while it is generated, because later questions refer to earlier stories.

    Most methods return a question of the user and its answer.
    """

    def __init__(self, rng: random.Random, short_share: float) -> None:
        self.rng, self.short_share = rng, short_share
        pick = rng.random()
        self.brief = 0.4 <= pick < 0.5
        systems = ((SYSTEM,), BRIEF_SYSTEMS, OTHER_SYSTEMS)
        self.system = "" if pick >= 0.6 else rng.choice(systems[0 if pick < 0.4 else 1 if self.brief else 2])
        self.request: Request | None = None
        self.asked = False
        self.story: Story | None = None
        self.plots = {True: "", False: ""}  # the last plot of a short and of a long story
        self.user = ""

    def tell(self, request: Request, *, short: bool, again: bool = False) -> str:
        """Return a story with the characters of the request, and remember it. `again` continues the last story."""
        short = short or self.brief
        make = stories.tell_brief if short else stories.tell
        self.story, self.request = make(self.rng, request, again=again, after=self.plots[short]), request
        self.plots[short] = self.story.plot
        return self.story.text

    def last(self) -> Story:
        """Return the last story that was told."""
        if self.story is None:
            raise ValueError("nothing was told yet")
        return self.story

    def new_story(self) -> tuple[str, str]:
        """Ask for a story, usually about a particular subject."""
        rng = self.rng
        request, short = stories.ask(rng), rng.random() < self.short_share
        self.asked = rng.random() > 0.15
        if not self.asked:
            request = Request("", stories.choose_main(rng))
            text = self.tell(request, short=short)
            return rng.choice(SHORT_REQUESTS if short else STORY_REQUESTS), text
        second = self.story is not None
        text = self.tell(request, short=short)
        phrase = stories.topic(self.last(), request) if not short and rng.random() < 0.25 else request.phrase
        pick = rng.random()
        if pick < 0.05:
            title = request.phrase.title()
            return rng.choice(TITLED).format(phrase), f"# {title}\n\n{text}"
        asked = SHORT_ABOUT if short else NOW_ABOUT if second and rng.random() < 0.5 else STORY_ABOUT
        question = rng.choice(asked).format(phrase)
        if rng.random() < 0.06:  # some users type without capitals and punctuation
            question = question[0].lower() + question[1:].rstrip("?.")
        return question, text

    def another(self) -> tuple[str, str]:
        """Ask for another story, about the same kind of character if the last request named one."""
        rng, request = self.rng, self.request or Request("", self.last().main)
        short = self.last().plot in stories.BRIEF
        if not self.asked:
            return rng.choice(ANOTHER), self.tell(Request("", stories.choose_main(rng)), short=short)
        main = request.main
        if main.home != "house" and (not main.name or main.name not in request.phrase):
            name = "" if rng.random() < 0.5 else rng.choice(words.names_for(main.noun))
            adjectives = main.kind.removesuffix(main.noun).strip()
            main = words.make_anyone(rng, noun=main.noun, adjectives=adjectives, name=name)
        friend = request.friend and stories.choose_friend(rng, main, noun=request.friend.noun)
        return rng.choice(ANOTHER), self.tell(Request(request.phrase, main, friend), short=short)

    def go_on(self) -> tuple[str, str]:
        """Ask how the last story continues."""
        a, b = self.last().main, self.last().friend
        told = b.name in self.last().text
        request = Request(self.request.phrase if self.request else "", a, b if told else None)
        return self.rng.choice(NEXT), self.tell(request, short=self.rng.random() < self.short_share - 0.2, again=True)

    def about_the_story(self) -> tuple[str, str]:
        """Ask about the main character of the last story."""
        a = self.last().main
        one = with_articles(f"a {a.kind} named {a.name}" if a.name else f"a {a.kind}")
        if self.rng.random() < 0.5:
            asked = ("Who was the story about?", "What was the story about?", "Who was in the story?")
            return self.rng.choice(asked), f"It was about {one}."
        noun = a.noun
        answer = f"The {noun} was named {a.name}." if a.name else f"The {noun} had no name."
        return self.rng.choice((f"What was the name of the {noun}?", f"What is the {noun} called?")), answer

    def poem(self) -> tuple[str, str]:
        """Ask for a poem about something."""
        main = stories.ask(self.rng).main
        one = with_articles(f"a {main.noun}")
        return self.rng.choice(POEMS).format(one), self.rng.choice(POEM_LINES).format(main.noun, one)

    def name(self) -> tuple[str, str]:
        """Tell the user's name to the model, or ask the model for it if it was told before."""
        if self.user:
            return self.rng.choice(("What is my name?", "Do you know my name?")), f"Your name is {self.user}."
        self.user = words.any_name(self.rng)
        asked = self.rng.choice(("My name is {}.", "I am {}.", "Hello, my name is {}.", "Hi, I am {}."))
        answer = self.rng.choice(("Hello, {}! How can I help you?", "Hello, {}! Would you like to hear a story?"))
        return asked.format(self.user), ("Hello, {}!" if self.brief else answer).format(self.user)

    def small_talk(self) -> tuple[str, str]:
        """Greet, ask who the model is, say thanks or goodbye, or ask something that the model cannot know."""
        kinds = [(GREETINGS, GREETING_ANSWERS), (WHO, WHO_ANSWERS), (UNKNOWN, UNKNOWN_ANSWERS)]
        if self.story:
            kinds = [(THANKS, THANKS_ANSWERS), (THANKS, THANKS_ANSWERS), (BYES, BYE_ANSWERS), *kinds[1:]]
        asked, answers = self.rng.choice(kinds)
        question = self.rng.choice(asked)
        while self.user and question == "What is my name?":
            question = self.rng.choice(asked)
        return question, answers[0] if self.brief else self.rng.choice(answers)

    def fact(self) -> tuple[str, str]:
        """Ask for a fact."""
        return fact_exchange(self.rng)

    def markdown(self) -> tuple[str, str]:
        """Ask for a list, a table or a program."""
        return markdown.exchange(self.rng)

    def copied(self) -> tuple[str, str]:
        """Ask for words that are in the question."""
        return self.rng.choice((repeat, recall))(self.rng)

    def exchange(self) -> tuple[str, str]:
        """Return a question and its answer, of a random kind that fits the conversation so far."""
        kinds: tuple[Callable[[], tuple[str, str]], ...]
        if self.story:
            kinds = (self.new_story, self.another, self.go_on, self.about_the_story, self.small_talk, self.fact,
                     self.markdown, self.name, self.poem, self.copied)  # fmt: skip
            named = 4 if self.user else 1
            return self.rng.choices(kinds, (18, 5, 5, 5, 3, 2, 2, named, 1, 1))[0]()
        kinds = (self.new_story, self.small_talk, self.fact, self.markdown, self.name, self.poem, self.copied)
        return self.rng.choices(kinds, (20, 3, 3, 5, 2, 1, 1))[0]()


def document(rng: random.Random, short_share: float) -> str:
    """Return a conversation of one to six exchanges.

    `short_share` is the probability that a new story has only three or four sentences. If the system message asks for
    brevity, all stories are short.
    """
    talk = Talk(rng, short_share)
    parts = [turn("system", talk.system)] if talk.system else []
    for number in range(6):
        question, answer = talk.exchange()
        parts += [turn("user", question), turn("assistant", answer)]
        if rng.random() < (0.35 if number else 0.4):
            break
    return "".join(parts)
