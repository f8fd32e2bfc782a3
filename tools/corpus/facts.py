"""Generate true facts for the training text, as sentences and as questions with answers."""

from __future__ import annotations

import random
from dataclasses import dataclass

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "England": "London", "Ireland": "Dublin", "Scotland": "Edinburgh", "Wales": "Cardiff",
    "Belgium": "Brussels", "Austria": "Vienna", "Poland": "Warsaw", "Denmark": "Copenhagen",
    "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki", "Iceland": "Reykjavik",
    "Greece": "Athens", "Hungary": "Budapest", "Romania": "Bucharest", "Bulgaria": "Sofia",
    "Croatia": "Zagreb", "Serbia": "Belgrade", "Slovenia": "Ljubljana", "Slovakia": "Bratislava",
    "Ukraine": "Kyiv", "Russia": "Moscow", "Turkey": "Ankara", "Estonia": "Tallinn", "Latvia": "Riga",
    "Lithuania": "Vilnius", "Luxembourg": "Luxembourg", "Albania": "Tirana", "Malta": "Valletta",
    "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi", "South Korea": "Seoul",
    "Thailand": "Bangkok", "Vietnam": "Hanoi", "Nepal": "Kathmandu", "Pakistan": "Islamabad",
    "Mongolia": "Ulaanbaatar", "Iran": "Tehran", "Iraq": "Baghdad", "Jordan": "Amman",
    "Lebanon": "Beirut", "Saudi Arabia": "Riyadh", "Qatar": "Doha", "Egypt": "Cairo",
    "Morocco": "Rabat", "Tunisia": "Tunis", "Algeria": "Algiers", "Kenya": "Nairobi",
    "Ethiopia": "Addis Ababa", "Ghana": "Accra", "Nigeria": "Abuja", "Senegal": "Dakar",
    "Uganda": "Kampala", "Zambia": "Lusaka", "Canada": "Ottawa", "the United States": "Washington",
    "Mexico": "Mexico City", "Cuba": "Havana", "Jamaica": "Kingston", "Panama": "Panama City",
    "Brazil": "Brasilia", "Argentina": "Buenos Aires", "Chile": "Santiago", "Peru": "Lima",
    "Colombia": "Bogota", "Ecuador": "Quito", "Uruguay": "Montevideo", "Venezuela": "Caracas",
    "the Netherlands": "Amsterdam", "the Czech Republic": "Prague", "Switzerland": "Bern",
    "the Philippines": "Manila", "Cambodia": "Phnom Penh", "Australia": "Canberra", "New Zealand": "Wellington",
    "Fiji": "Suva",
}  # fmt: skip
FAMILIAR = ("France", "Germany", "Italy", "Spain", "England", "Japan", "China", "India", "Egypt", "Canada")

OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "fast": "slow", "day": "night", "happy": "sad",
    "light": "dark", "old": "young", "wet": "dry", "high": "low", "open": "closed", "full": "empty",
    "hard": "soft", "loud": "quiet", "left": "right", "early": "late", "rich": "poor", "near": "far",
    "inside": "outside", "strong": "weak", "clean": "dirty", "long": "short", "thick": "thin",
    "sweet": "sour", "first": "last", "start": "finish", "true": "false", "wide": "narrow",
    "heavy": "light", "deep": "shallow", "summer": "winter", "yes": "no", "black": "white",
}  # fmt: skip

NUMBERS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
]  # fmt: skip
DAYS = [
    "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday",
]  # fmt: skip
MONTHS = [
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December",
]  # fmt: skip
SEASONS = [
    "spring", "summer", "autumn", "winter",
]  # fmt: skip

COLORS = {
    "the clear sky": "blue", "grass": "green", "snow": "white", "a ripe banana": "yellow",
    "a lemon": "yellow", "coal": "black", "milk": "white", "a carrot": "orange", "a frog": "green",
    "a strawberry": "red", "a raven": "black", "a flamingo": "pink", "a swan": "white",
    "a ripe tomato": "red", "an eggplant": "purple", "chocolate": "brown", "a fire truck": "red",
}  # fmt: skip
SOUNDS = {
    "dog": "woof", "cat": "meow", "cow": "moo", "sheep": "baa", "duck": "quack", "pig": "oink",
    "horse": "neigh", "lion": "roar", "owl": "hoot", "bee": "buzz", "frog": "croak", "mouse": "squeak",
    "rooster": "cock-a-doodle-doo", "snake": "hiss",
}  # fmt: skip
HOMES = {
    "bird": "in a nest", "bee": "in a hive", "fox": "in a den", "rabbit": "in a burrow",
    "horse": "in a stable", "fish": "in the water", "spider": "in a web", "beaver": "in a lodge",
    "penguin": "near the cold sea", "camel": "in the desert", "monkey": "in the jungle",
}  # fmt: skip
YOUNG = {
    "dog": "puppy", "cat": "kitten", "cow": "calf", "sheep": "lamb", "horse": "foal", "duck": "duckling",
    "bear": "cub", "goat": "kid", "hen": "chick", "frog": "tadpole", "swan": "cygnet", "deer": "fawn",
    "pig": "piglet", "kangaroo": "joey", "goose": "gosling",
}  # fmt: skip
LEGS = {
    "dog": "four", "cat": "four", "bird": "two", "spider": "eight", "bee": "six", "horse": "four",
    "ant": "six", "snake": "no", "fish": "no", "elephant": "four", "duck": "two", "beetle": "six",
}  # fmt: skip
OTHERS = (
    ("How many days are there in a week?", "There are seven days in a week."),
    ("How many months are there in a year?", "There are twelve months in a year."),
    ("How many hours are there in a day?", "There are twenty-four hours in a day."),
    ("How many minutes are there in an hour?", "There are sixty minutes in an hour."),
    ("How many sides does a triangle have?", "A triangle has three sides."),
    ("How many sides does a square have?", "A square has four sides."),
    ("Where does the sun rise?", "The sun rises in the east."),
    ("Where does the sun set?", "The sun sets in the west."),
    ("What is frozen water called?", "Frozen water is called ice."),
    ("What do bees make?", "Bees make honey."),
    ("What do cows give us?", "Cows give us milk."),
    ("What do plants need to grow?", "Plants need water, air and light to grow."),
    ("What is the largest ocean?", "The Pacific Ocean is the largest ocean."),
    ("What is the tallest animal?", "The giraffe is the tallest animal."),
    ("What is the largest animal?", "The blue whale is the largest animal."),
    ("What is the fastest land animal?", "The cheetah is the fastest land animal."),
    ("What goes around the Earth?", "The moon goes around the Earth."),
    ("What does the Earth go around?", "The Earth goes around the sun."),
    ("What comes from a hen?", "A hen lays eggs."),
    ("How many legs does an insect have?", "An insect has six legs."),
)


@dataclass(frozen=True)
class Fact:
    """One true sentence and the questions that it answers."""

    topic: str
    statement: str
    questions: tuple[str, ...]


def article(noun: str) -> str:
    """Put "a" or "an" before a noun."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def capital(rng: random.Random) -> Fact:
    """Return the capital of a country."""
    land = rng.choice(FAMILIAR if rng.random() < 0.25 else list(CAPITALS))
    questions = (
        f"What is the capital of {land}?",
        f"What is the capital of {land}?",
        f"What's the capital of {land}?",
        f"What is the capital city of {land}?",
        f"Which city is the capital of {land}?",
        f"Tell me the capital of {land}.",
        f"Do you know the capital of {land}?",
    )
    return Fact("capital", f"The capital of {land} is {CAPITALS[land]}.", questions)


def opposite(rng: random.Random) -> Fact:
    """Return the opposite of a word."""
    word = rng.choice(list(OPPOSITES))
    other = OPPOSITES[word]
    if word != "heavy" and rng.random() < 0.3 and other != "light":
        word, other = other, word
    questions = (f"What is the opposite of {word}?", f"Tell me the opposite of {word}.")
    return Fact("opposite", f"The opposite of {word} is {other}.", questions)


def counting(rng: random.Random) -> Fact:
    """Count up or down."""
    low, high = sorted(rng.sample(range(1, 21), 2))
    if rng.random() < 0.5:
        low, high = 1, rng.choice((3, 5, 10, 10, 10, 12, 20))
    step = rng.choice((1, 1, -1))
    start, end = (low, high) if step > 0 else (high, low)
    as_words = high <= 10 and rng.random() < 0.4
    names = [NUMBERS[n] if as_words else str(n) for n in range(start, end + step, step)]
    listed = ", ".join(names)
    questions = (f"Count from {start} to {end}.", f"Can you count from {start} to {end}?")
    if as_words:
        return Fact("counting", f"{listed[0].upper()}{listed[1:]}.", questions)
    return Fact("counting", f"{listed}.", questions)


def sequence(rng: random.Random) -> Fact:
    """Return which day, month or season comes before or after another."""
    name, items = rng.choice((("day", DAYS), ("month", MONTHS), ("season", SEASONS)))
    index = rng.randrange(len(items))
    first, second = items[index], items[(index + 1) % len(items)]
    if rng.random() < 0.6:
        text = f"After {first} comes {second}."
        return Fact("sequence", text, (f"Which {name} comes after {first}?", f"What comes after {first}?"))
    text = f"Before {second} comes {first}."
    return Fact("sequence", text, (f"Which {name} comes before {second}?", f"What comes before {second}?"))


def arithmetic(rng: random.Random) -> Fact:
    """Add or subtract small numbers."""
    if rng.random() < 0.6:
        left, right = rng.randint(0, 10), rng.randint(0, 10)
        sign, word, result = "+", "plus", left + right
    else:
        left = rng.randint(1, 20)
        right = rng.randint(0, left)
        sign, word, result = "-", "minus", left - right
    questions = (
        f"What is {left} {sign} {right}?",
        f"What is {left}{sign}{right}?",
        f"What is {left} {word} {right}?",
        f"How much is {left} {word} {right}?",
    )
    if rng.random() < 0.5:
        return Fact("arithmetic", f"{left} {word} {right} is {result}.", questions)
    return Fact("arithmetic", f"{left} {sign} {right} = {result}.", questions)


def color(rng: random.Random) -> Fact:
    """Return the color of a thing."""
    thing = rng.choice(list(COLORS))
    text = f"{thing[0].upper()}{thing[1:]} is {COLORS[thing]}."
    return Fact("color", text, (f"What color is {thing}?", f"What colour is {thing}?"))


def animal(rng: random.Random) -> Fact:
    """Return a fact about an animal: its sound, home, young or number of legs."""
    table = rng.choice((SOUNDS, HOMES, YOUNG, LEGS))
    name = rng.choice(list(table))
    one, value = article(name), table[name]
    the_one = f"{one[0].upper()}{one[1:]}"
    if table is SOUNDS:
        return Fact("sound", f"{the_one} says {value}.", (f"What does {one} say?", f"What sound does {one} make?"))
    if table is HOMES:
        return Fact("home", f"{the_one} lives {value}.", (f"Where does {one} live?",))
    if table is YOUNG:
        questions = (f"What is a young {name} called?", f"What is a baby {name} called?")
        return Fact("young", f"A young {name} is called {article(value)}.", questions)
    return Fact("legs", f"{the_one} has {value} legs.", (f"How many legs does {one} have?",))


def other(rng: random.Random) -> Fact:
    """Return a fact from the list OTHERS."""
    question, statement = rng.choice(OTHERS)
    return Fact("other", statement, (question,))


KINDS = (capital, opposite, counting, sequence, arithmetic, color, animal, other)
WEIGHTS = (8, 3, 2, 2, 3, 1, 3, 1)


def any_fact(rng: random.Random) -> Fact:
    """Choose a fact of any kind."""
    return rng.choices(KINDS, WEIGHTS)[0](rng)


def document(rng: random.Random) -> str:
    """Return one to six different facts, of one kind or mixed."""
    kind = rng.choices(KINDS, WEIGHTS)[0] if rng.random() < 0.6 else any_fact
    statements = dict.fromkeys(kind(rng).statement for _ in range(rng.choice((1, 1, 2, 3, 4, 5, 6))))
    return " ".join(statements)
