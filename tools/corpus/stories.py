"""Generate stories for the training text: choose a plot and a cast of characters, and fill the plot's templates.

A plot is a text file in `plots/`. Its lines are:
- `topic`: the end of a phrase that asks for this story, such as "who planted a seed" after "a fox";
- `when`: possible beginnings of the first step, separated by `/`;
- `case`: values of placeholders that belong together; a story uses one of these lines;
- `*` or `?`: the beginning of a step. Steps with `*` are in every story, steps with `?` only in some. The lines below
  are alternatives, templates with placeholders such as `{a}`, of which a story uses one. `|` separates the sentences of
  a line. The first step names the main character by `{who}`, because it may be the step that introduces the character.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from tools.corpus import subjects, words
from tools.corpus.words import Character, Place

OPTIONAL_SHARE = 0.55
ONCE_SHARE = 0.5
FULL_SHARE = 0.3
MIN_SENTENCES, MAX_SENTENCES = 9, 15
MIN_WORDS, MAX_WORDS = 100, 200

WHENS = (
    "One sunny morning,", "One sunny day,", "One bright morning,", "One warm afternoon,", "One windy day,",
    "One day,", "One quiet afternoon,", "One spring morning,", "One summer day,", "One cool morning,",
    "One Saturday morning,", "Early one morning,",
)  # fmt: skip


LATER = ("The next day,", "The next morning,", "A few days later,", "One week later,", "After that,")


@dataclass(frozen=True)
class Step:
    """A step of a plot: alternative templates, of which a story uses one."""

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

    @property
    def meets(self) -> bool:
        """Whether the characters `a` and `b` meet for the first time in this plot."""
        return any("{b.intro}" in option for step in self.steps for option in step.options)


def character(cast: dict[str, object], role: str) -> Character:
    """Return the character in a role of the cast."""
    found = cast[role]
    if not isinstance(found, Character):
        raise TypeError(f"{role} is no character: {found}")
    return found


@dataclass(frozen=True)
class Story:
    """A finished story with its cast."""

    plot: str
    sentences: list[str]
    cast: dict[str, object]

    @property
    def main(self) -> Character:
        """The main character."""
        return character(self.cast, "a")

    @property
    def friend(self) -> Character:
        """The main character's friend, who does not appear in every story."""
        return character(self.cast, "b")

    @property
    def text(self) -> str:
        """The story as one paragraph."""
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


def with_articles(text: str) -> str:
    """Turn "a" into "an" where the next word begins with a vowel."""
    return re.sub(r"\b([Aa]) (?=[aeiou](?!ne\b|seful|ni))", r"\1n ", text)


def fill(template: str, cast: dict[str, object]) -> str:
    """Replace the placeholders of a template by the cast; then correct articles and the first letter."""
    text = template
    while "{" in text:
        text = text.format(**cast)
    text = with_articles(text)
    # A character without a name is called "the fox", which is wrong in "my name is the fox" and "dear the fox".
    text = text.replace("my name is the ", "I am the ").replace("dear the ", "dear ")
    start = re.search(r"[A-Za-z]", text)
    if start is None:
        return text
    return text[: start.start()] + text[start.start()].upper() + text[start.end() :]


def choose_main(rng: random.Random) -> Character:
    """Return a main character for a story whose request names none."""
    pick, she = rng.random(), rng.random() < 0.5
    if pick < 0.35:
        return words.make_child(rng, she=she)
    if pick < 0.5:
        kept = [kind for kind in words.ANIMALS if not subjects.is_held_out(kind)]
        return words.make_animal(rng, she=she, kinds=kept)
    return ask(rng).main


def choose_friend(rng: random.Random, a: Character, noun: str = "") -> Character:
    """Return a friend with another pronoun than `a`, so that pronouns are unambiguous.

    `noun` is the kind of friend that was requested, or "".
    """
    if a.home == "house" and not noun:
        return words.make_child(rng, she=not a.she, met=True)
    while not noun or noun == a.noun or not words.suits(noun, she=not a.she):
        noun = subjects.any_noun(rng)
    pools = (words.HE_ANIMALS, words.BOYS) if a.she else (words.SHE_ANIMALS, words.GIRLS)
    name = rng.choice([name for name in rng.choice(pools) if name != a.name])
    return words.make_anyone(rng, noun=noun, adjectives="", name=name, met=True)


@dataclass(frozen=True)
class Request:
    """A request for a story: the phrase that names its subject, and the characters of the story."""

    phrase: str
    main: Character
    friend: Character | None = None


def ask(rng: random.Random) -> Request:
    """Return a request for a story with a random subject, such as "a brave fox named Momo"."""
    noun, name, adjectives, friend = subjects.any_noun(rng), "", "", None
    form = rng.choices(("noun", "adjective", "name", "both", "child", "the", "plural", "two"),
                       (36, 18, 17, 6, 14, 3, 3, 5))[0]  # fmt: skip
    if form in ("adjective", "both"):
        count = 1 if rng.random() < 0.75 else 2
        adjectives = " ".join(rng.sample(subjects.ADJECTIVES, count))
    if form in ("name", "both"):
        name = words.any_name(rng)
    if form == "child":
        name = words.any_name(rng)
        main = words.make_child(rng, she=rng.random() < 0.5)
        main = replace(main, name=name, kind="girl" if main.she else "boy", lives=rng.choice(words.CHILD_HOMES))
        if (name in words.GIRLS and not main.she) or (name in words.BOYS and main.she):
            main = replace(main, she=not main.she, kind="boy" if main.she else "girl")
        return Request(name if rng.random() < 0.4 else f"a {main.kind} named {name}", main)
    own_name = name
    if not name and rng.random() < 0.45:
        own_name = words.any_name(rng) if rng.random() < 0.3 else rng.choice(words.names_for(noun))
    main = words.make_anyone(rng, noun=noun, adjectives=adjectives, name=own_name)
    phrase = f"the {noun}" if form == "the" else f"{noun}s" if form == "plural" else f"a {main.kind}"
    if name:
        phrase += f" {rng.choice(('named', 'named', 'called'))} {name}"
    if form == "two":
        friend = choose_friend(rng, main, noun=rng.choice([n for n in subjects.TRAINED if n != noun]))
        phrase += f" and a {friend.kind}"
    return Request(with_articles(phrase), main, friend)


def choose_cast(
    rng: random.Random, plot: Plot, main: Character | None = None, friend: Character | None = None
) -> dict[str, object]:
    """Return the values of all placeholders; characters that were not requested are chosen at random."""
    a = main or choose_main(rng)
    b = friend or choose_friend(rng, a)
    she = a.she
    helper = rng.choice(words.GROWN_UPS if a.home == "house" else words.WISE_ANIMALS)
    place_name = rng.choice(list(words.PLACES))
    preposition, spots = words.PLACES[place_name]
    # The first search, the second search and the place where a lost thing is found have different spots. Without this,
    # the model writes stories that search a spot twice, or find a thing at a spot that was already searched.
    spot, spot2, spot3 = rng.choice(spots[:2]), spots[2], rng.choice(spots[3:])
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
    "There was {a.intro} who lived {a.lives}.",
    "There was {a.intro} who loved to {hobby}.",
    "There was once {a.intro} who lived {a.lives}.",
    "Long ago, {a.intro} lived {a.lives}.",
    "Long ago, there was {a.intro} who loved to {hobby}.",
    "{a} was {a.described} who lived {a.lives}.",
    "{a} was {a.described} who loved to {hobby}.",
    "{a} lived {a.lives}.|{a.he} was {a.described} who loved to {hobby}.",
    "Far away, {a.lives}, there lived {a.intro}.",
    "In a small village, there lived {a.intro} who loved to {hobby}.",
    "In a small village near {land}, there lived {a.intro}.",
    "In a quiet valley, there lived {a.intro}.",
    "{a.intro} lived {a.lives}.",
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
BRIEF_INTROS = (
    "Once upon a time, there was {a.intro}.",
    "Once upon a time, there was {a.intro}.",
    "Once upon a time, {a.intro} lived {a.lives}.",
    "Once upon a time, there was {a.intro} who loved to {hobby}.",
    "There was once {a.intro} who lived {a.lives}.",
)
BRIEF = {
    "brief a": "{a} lost a {thing} {place.at}.|{a.full} looked everywhere and found the {thing_n} {spot}.",
    "brief b": "{a} lost a {thing}.|Then {b.intro} came by and found it {spot}.",
    "brief c": "{a} met {b.intro} {place.at}.|{a.full} and {b} played until the sun went down.",
    "brief d": "{a} found a {thing} {spot}.|{a.full} gave the {thing_n} back to {h}.",
    "brief e": "{a} wanted to {hobby}, but it rained.|So {a} stayed at home and shared {food} with {b.intro}.",
    "brief f": "{a} was hungry and found {food}.|{a.full} shared it with {b.intro}.",
    "brief g": "{a} walked to {place} to {hobby}.|There {a} met {b.intro}, and they became friends.",
    "brief h": "{a} got lost {place.at}.|{h} showed {a.him} the way, and {a} was home before dark.",
    "brief i": "{a} made a {thing} for {a.his} {g}.|It was the best gift of all.",
    "brief j": "{a} could not sleep.|{a.his} {g} told {a.him} a story about {b.intro}, and {a} fell asleep.",
    "brief k": "{a} heard a noise {spot}.|It was only {b.intro}, who was looking for a {thing}.",
    "brief l": "{a} wished for a {thing}.|{h} had one, and gave it to {a}.",
}
CLOSINGS = (
    "{a} was very happy.",
    "{a} smiled for a long time.",
    "And so everything ended well.",
    "{a} never forgot it.",
    "And that is the end of the story.",
)
# Plots whose last step already ends the story, with sleep or years later; they get no closing line.
OWN_CLOSINGS = ("night", "star")


def split_steps(option: str) -> list[str]:
    """Split an alternative into its sentences."""
    return [part.strip() for part in option.split("|")]


def opening(rng: random.Random, plot: Plot, cast: dict[str, object], *, again: bool) -> Iterator[str]:
    """Yield the templates that introduce the main character and begin the plot.

    With `again`, the character is known from the story before, and is not introduced.
    """
    if again:
        cast["who"] = "{a}"
        first = split_steps(rng.choice(plot.steps[0].options))
        yield f"{rng.choice(LATER)} {first[0]}"
        yield from first[1:]
        return
    when = rng.choice(plot.whens or list(WHENS))
    first = split_steps(rng.choice(plot.steps[0].options))
    if cast["both"]:
        cast["who"] = "{a}"
        yield "Once upon a time, there were {a.intro} and {b.intro}."
        yield f"{when} {first[0]}"
        yield from first[1:]
        return
    once = rng.random() < ONCE_SHARE
    if not once and rng.random() < 0.35:
        cast["who"] = "{a.intro}" if rng.random() < 0.7 else "{a.full}"
        yield f"{when} {first[0]}"
    else:
        cast["who"], cast["land"] = "{a}", rng.choice(LANDS)
        is_named = not str(cast["a"]).startswith("the ")
        intros = INTROS_ONCE if once else INTROS
        intro = rng.choice([line for line in intros if is_named or not line.startswith("{a} ")])
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
    """Yield the templates, some with a pronoun in place of a repeated name, and one with the friend's kind."""
    told_kind, previous = rng.random() < 0.5, ""
    for template in templates:
        line = template
        if not told_kind and "friend {b}" in line:
            line = line.replace("friend {b}", "friend {b.full}", 1)
            told_kind = True
        named = "{a}" in previous or "{who}" in previous
        if pronouns and named and line.startswith("{a} ") and rng.random() < 0.5:
            line = "{a.he} " + line.removeprefix("{a} ")
        elif line.startswith("{a} ") and rng.random() < FULL_SHARE:
            line = "{a.full} " + line.removeprefix("{a} ")
        yield line
        previous = line


def outline(rng: random.Random, plot: Plot, cast: dict[str, object], *, again: bool = False) -> Iterator[str]:
    """Yield the templates of a whole story in their order."""
    yield from opening(rng, plot, cast, again=again)
    for step in plot.steps[1:]:
        if not step.optional or rng.random() < OPTIONAL_SHARE:
            yield from split_steps(rng.choice(step.options))
    if plot.name not in OWN_CLOSINGS and rng.random() < 0.2:
        yield rng.choice(CLOSINGS)


def acceptable(sentences: list[str], *, shorter: bool = False) -> bool:
    """Return whether a story's length is within the limits and no sentence occurs twice.

    With `shorter`, the limits are lower, because the story has no introduction.
    """
    length = sum(len(sentence.split()) for sentence in sentences) + 15 * shorter
    return (
        MIN_SENTENCES <= len(sentences) + 2 * shorter <= MAX_SENTENCES
        and MIN_WORDS <= length <= MAX_WORDS
        and len(set(sentences)) == len(sentences)
    )


def following(names: list[str], after: str) -> str:
    """Return the name that follows `after`, cyclically, so that the stories of a conversation have different plots."""
    return next((name for name in names if name > after), names[0])


def tell(rng: random.Random, request: Request | None = None, *, again: bool = False, after: str = "") -> Story:
    """Return a new story.

    `request` has the characters. With `again`, the story continues the story before. `after` is the plot of the
    conversation's last long story; the new story has the next plot.
    """
    main, friend = (request.main, request.friend) if request else (None, None)
    plots = {plot.name: plot for plot in load_plots() if not ((again or friend) and plot.meets)}
    while True:
        plot = plots[following(list(plots), after) if after else rng.choice(list(plots))]
        cast = choose_cast(rng, plot, main, friend)
        cast["both"] = friend is not None
        templates = list(outline(rng, plot, cast, again=again))
        # In the plot "snow" the snowman is "he", too, so pronouns for the main character would be ambiguous.
        lines = polished(rng, templates, pronouns=plot.name != "snow")
        sentences = [fill(line, cast) for line in lines]
        if acceptable(sentences, shorter=again):
            return Story(plot.name, sentences, cast)
        # If a plot cannot give an acceptable story for these characters, go on to the next plot after some attempts.
        after = after and plot.name if rng.random() < 0.05 else after


def tell_brief(rng: random.Random, request: Request | None = None, *, again: bool = False, after: str = "") -> Story:
    """Return a story of three or four sentences, with `again` of two or three; the arguments are those of `tell`.

    `after` is the plot of the conversation's last short story.
    """
    main, friend = (request.main, request.friend) if request else (None, None)
    cast = choose_cast(rng, load_plots()[0], main, friend)
    cast["who"], cast["land"] = "{a}", rng.choice(LANDS)
    name = following(list(BRIEF), after) if after else rng.choice(list(BRIEF))
    if again:
        lines = [f"{rng.choice(LATER)} {BRIEF[name]}"]
    else:
        with_friend = "Once upon a time, there were {a.intro} and {b.intro}."
        intro = with_friend if friend else rng.choice(BRIEF_INTROS)
        lines = [intro, f"{rng.choice(WHENS)} {BRIEF[name]}"]
    if rng.random() < 0.5:
        lines.append(rng.choice(CLOSINGS[:-1]))
    lines = [part for line in lines for part in split_steps(line)]
    return Story(name, [fill(line, cast) for line in lines], cast)


def topic(story: Story, request: Request) -> str:
    """Return the phrase that asks for exactly this story: "a fox who lost her ball"."""
    plot = next((plot for plot in load_plots() if plot.name == story.plot), None)
    if plot is None or not plot.topic or request.friend:
        return request.phrase
    phrase = fill(f"x {plot.topic}", story.cast).removeprefix("X ")
    return f"{request.phrase} {phrase}"
