"""Tell stories: pick a plot, fill its steps with one cast, and keep everything consistent.

A plot is a small text file in ``plots/``.  ``topic`` ends the phrase "a fox ...", ``when`` gives openings of
its first sentence, ``case`` lines are sets of words that belong together (one set is used per story), ``*``
begins a step that every story takes and ``?`` one that only some do.  The lines below a mark are
alternatives; ``|`` splits a line into several sentences.  The first step brings in ``{who}``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tools.corpus import words
from tools.corpus.words import Character, Place

OPTIONAL_SHARE = 0.55
ONCE_SHARE = 0.36
MIN_SENTENCES, MAX_SENTENCES = 9, 15
MIN_WORDS, MAX_WORDS = 100, 200

WHENS = (
    "One sunny morning,", "One sunny day,", "One bright morning,", "One warm afternoon,", "One windy day,",
    "One day,", "One quiet afternoon,", "One spring morning,", "One summer day,", "One cool morning,",
    "One Saturday morning,", "Early one morning,",
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One thing that happens, in several wordings."""

    optional: bool
    options: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Plot:
    """A parsed plot file."""

    name: str
    topic: str
    whens: list[str]
    cases: list[dict[str, str]]
    steps: list[Step]


@dataclass(frozen=True)
class Story:
    """A finished story and what a reader could have asked for to get it."""

    plot: str
    sentences: list[str]
    cast: dict[str, object]
    topics: list[str]

    @property
    def text(self) -> str:
        """Give the story as one paragraph."""
        return " ".join(self.sentences)


def parse_plot(name: str, text: str) -> Plot:
    """Read one plot file."""
    plot = Plot(name, "", [], [], [])
    topic = ""
    for raw in text.splitlines():
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        head, _, rest = line.partition(" ")
        if head == "topic":
            topic = rest
        elif head == "when":
            plot.whens.extend(part.strip() for part in rest.split("/"))
        elif head == "case":
            pairs = (part.split("=", 1) for part in rest.split(";"))
            plot.cases.append({key.strip(): value.strip() for key, value in pairs})
        elif line in ("*", "?"):
            plot.steps.append(Step(line == "?"))
        else:
            plot.steps[-1].options.append(line)
    return Plot(name, topic, plot.whens, plot.cases, plot.steps)


@cache
def load_plots() -> tuple[Plot, ...]:
    """Read all plot files, in the order of their names."""
    folder = Path(__file__).parent / "plots"
    return tuple(parse_plot(path.stem, path.read_text("utf-8")) for path in sorted(folder.glob("*.txt")))


def fill(template: str, cast: dict[str, object]) -> str:
    """Put the cast into a template, then mend the articles and the first letter."""
    text = template
    while "{" in text:
        text = text.format(**cast)
    text = re.sub(r"\b([Aa]) (?=[aeiou](?!ne\b|seful))", r"\1n ", text)
    start = re.search(r"[A-Za-z]", text)
    if start is None:
        return text
    return text[: start.start()] + text[start.start()].upper() + text[start.end() :]


def choose_cast(rng: random.Random, plot: Plot) -> dict[str, object]:
    """Choose who and what the story is about; friends differ in pronoun so that each "she" is plain."""
    she = rng.random() < 0.5
    if rng.random() < 0.5:
        a = words.make_child(rng, she=she)
        b = words.make_child(rng, she=not she, met=True)
        helper = rng.choice(words.GROWN_UPS)
    else:
        a = words.make_animal(rng, she=she)
        b = words.make_animal(rng, she=not she, avoid_kind=a.kind, met=True)
        helper = rng.choice(words.WISE_ANIMALS)
    place_name = rng.choice(list(words.PLACES))
    preposition, spots = words.PLACES[place_name]
    spot, spot2, spot3 = rng.sample(spots, 3)
    food, food2 = rng.sample(words.FOODS, 2)
    cast: dict[str, object] = {
        "a": a, "b": b, "h": helper, "g": rng.choice(words.FAMILY["he" if she else "she"]),
        "g_he": b.he, "g_him": b.him, "g_his": b.his,
        "place": Place(place_name, preposition), "spot": spot, "spot2": spot2, "spot3": spot3,
        "thing": f"{rng.choice(words.COLORS)} {rng.choice(words.THINGS)}",
        "food": food, "food2": food2,
        "hobby": rng.choice(words.HOBBIES),
    }  # fmt: skip
    cast["thing_n"] = str(cast["thing"]).split(" ", 1)[1]
    if plot.cases:
        cast.update(rng.choice(plot.cases))
    for name in ("food", "pet", "make", "work", "keep"):
        cast[f"the_{name}"] = re.sub("^an? ", "the ", str(cast.get(name, "")))
    return cast


INTROS_ONCE = (
    "Once upon a time, there was {a.intro}.",
    "Once upon a time, there was {a.intro} who lived {a.lives}.",
    "Once upon a time, {a.intro} lived {a.lives}.",
    "Once upon a time, there lived {a.intro} who loved to {hobby}.",
    "Once upon a time, {a.intro} lived {a.lives} and loved to {hobby}.",
)
INTROS = (
    "There was a {a.adjective} {a.kind} named {a} who lived {a.lives}.",
    "There was a {a.adjective} {a.kind} named {a} who loved to {hobby}.",
    "There was once {a.intro} who lived {a.lives}.",
    "Long ago, {a.intro} lived {a.lives}.",
    "Long ago, there was {a.intro} who loved to {hobby}.",
    "{a} was a {a.adjective} {a.kind} who lived {a.lives}.",
    "{a} was a {a.adjective} {a.kind} who loved to {hobby}.",
    "{a} lived {a.lives}.|{a.he} was a {a.adjective} {a.kind} who loved to {hobby}.",
    "Far away, {a.lives}, there lived {a.intro}.",
    "In a small village, there lived {a.intro} who loved to {hobby}.",
    "In a small village near {land}, there lived {a.intro}.",
    "In a quiet valley, there lived {a.intro}.",
    "A {a.adjective} {a.kind} named {a} lived {a.lives}.",
)
TRAITS = (
    "{a.he} had bright eyes and a warm heart.",
    "Everyone liked {a.him} because {a.he} was always kind.",
    "{a.he} was small, but {a.he} had a big heart.",
    "Every day, {a.he} learned something new.",
    "{a.his} best friend was {b.intro}.",
)
HOBBY_TRAITS = (
    "{a.he} loved to {hobby}.",
    "{a.he} liked to {hobby} all day long.",
    "Most of all, {a.he} liked to {hobby}.",
)
LANDS = ("the sea", "the forest", "the mountains", "a wide river", "a blue lake", "the hills")
CLOSINGS = (
    "{a} was very happy.",
    "{a} smiled for a long time.",
    "And so everything ended well.",
    "{a} never forgot it.",
    "And that is the end of the story.",
)
# These stories end with sleep or years later, where a closing line would come too late.
OWN_CLOSINGS = ("night", "star")


def split_steps(option: str) -> list[str]:
    """Split an alternative into its sentences."""
    return [part.strip() for part in option.split("|")]


def opening(rng: random.Random, plot: Plot, cast: dict[str, object]) -> Iterator[str]:
    """Yield the templates that bring in the main character and begin the plot."""
    when = rng.choice(plot.whens or list(WHENS))
    first = split_steps(rng.choice(plot.steps[0].options))
    once = rng.random() < ONCE_SHARE
    if not once and rng.random() < 0.35:
        cast["who"] = "{a.intro}" if rng.random() < 0.7 else "{a.full}"
        yield f"{when} {first[0]}"
    else:
        cast["who"], cast["land"] = "{a}", rng.choice(LANDS)
        intro = rng.choice(INTROS_ONCE if once else INTROS)
        yield from split_steps(intro)
        words_used = " ".join(option for step in plot.steps for option in step.options)
        knows_friend = "{b}" in words_used and "{b.intro}" not in words_used
        traits = list(TRAITS if knows_friend else TRAITS[:-1])
        if "{hobby}" not in intro:
            traits += HOBBY_TRAITS
        if rng.random() < 0.5:
            yield rng.choice(traits)
        yield f"{when} {first[0]}"
    yield from first[1:]


def polished(rng: random.Random, templates: list[str], *, pronouns: bool) -> Iterator[str]:
    """Say "she" where the name was just said, and say once what kind of animal the friend is."""
    told_kind, previous = rng.random() < 0.5, ""
    for template in templates:
        line = template
        if not told_kind and "friend {b}" in line:
            line = line.replace("friend {b}", "friend {b.full}", 1)
            told_kind = True
        named = "{a}" in previous or "{who}" in previous
        if pronouns and named and line.startswith("{a} ") and rng.random() < 0.5:
            line = "{a.he} " + line.removeprefix("{a} ")
        yield line
        previous = line


def outline(rng: random.Random, plot: Plot, cast: dict[str, object]) -> Iterator[str]:
    """Yield the templates of a whole story in their order."""
    yield from opening(rng, plot, cast)
    for step in plot.steps[1:]:
        if not step.optional or rng.random() < OPTIONAL_SHARE:
            yield from split_steps(rng.choice(step.options))
    if plot.name not in OWN_CLOSINGS and rng.random() < 0.2:
        yield rng.choice(CLOSINGS)


def acceptable(sentences: list[str]) -> bool:
    """Say whether a story has a good length and never repeats itself."""
    length = sum(len(sentence.split()) for sentence in sentences)
    return (
        MIN_SENTENCES <= len(sentences) <= MAX_SENTENCES
        and MIN_WORDS <= length <= MAX_WORDS
        and len(set(sentences)) == len(sentences)
    )


def tell(rng: random.Random) -> Story:
    """Tell one new story."""
    plot = rng.choice(load_plots())
    while True:
        cast = choose_cast(rng, plot)
        templates = list(outline(rng, plot, cast))
        # The snowman is "he" as well, so that story keeps to the names.
        lines = polished(rng, templates, pronouns=plot.name != "snow")
        sentences = [fill(line, cast) for line in lines]
        if acceptable(sentences):
            return Story(plot.name, sentences, cast, topics(plot, cast))


def topics(plot: Plot, cast: dict[str, object]) -> list[str]:
    """List phrases that ask for just this story."""
    a = cast["a"]
    if not isinstance(a, Character):
        raise TypeError("the main character is missing")
    about = [f"a {a.kind}", f"a {a.adjective} {a.kind}", f"a {a.kind} named {a.name}"]
    if plot.topic:
        about += [f"a {a.kind} {plot.topic}"] * 3
    return [re.sub(r"^A", "a", fill(phrase, cast)) for phrase in about]
