"""Generate questions and answers in Markdown for the training text: lists, bold words, tables and code."""

from __future__ import annotations

import random

from tools.corpus import facts, subjects, words

# A list has the first members of its group, in this order. If lists had random members, the small model would repeat
# members.
GROUPS = {
    "animals": ["dog", "cat", "horse", "cow", "rabbit", "fox"],
    "colors": ["red", "blue", "green", "yellow", "purple", "orange"],
    "fruits": ["apple", "pear", "plum", "cherry", "lemon", "grape"],
    "vegetables": ["carrot", "potato", "cabbage", "bean", "pea", "radish"],
    "days": facts.DAYS, "months": facts.MONTHS, "seasons": facts.SEASONS,
    "countries": list(facts.FAMILIAR),
    "things in a kitchen": ["spoon", "pan", "plate", "knife", "kettle", "bowl"],
    "names": [*words.GIRLS[:3], *words.BOYS[:3]],
}  # fmt: skip
STEPS = {
    "make tea": ["Boil some water.", "Put the tea into a cup.", "Pour the water over it.", "Wait for three minutes."],
    "plant a seed": ["Dig a small hole.", "Put the seed inside.", "Cover it with earth.", "Give it some water."],
    "make a sandwich": ["Take two slices of bread.", "Put butter on them.", "Add some cheese.", "Put them together."],
    "build a snowman": ["Roll a big ball of snow.", "Put a smaller one on top.", "Add a carrot for the nose."],
    "wash my hands": ["Wet your hands.", "Take some soap.", "Rub them well.", "Rinse and dry them."],
    "draw a cat": ["Draw a circle for the head.", "Add two pointed ears.", "Draw eyes and a nose.", "Add whiskers."],
    "bake a cake": ["Mix flour, eggs and sugar.", "Pour it into a pan.", "Bake it until it is brown.", "Let it cool."],
    "fly a kite": ["Find a windy hill.", "Hold the kite up high.", "Run and let the string go slowly."],
}
LANGUAGES = {
    "Python": ("python", 'print("{}")'),
    "JavaScript": ("javascript", 'console.log("{}");'),
    "Bash": ("bash", 'echo "{}"'),
    "Ruby": ("ruby", 'puts "{}"'),
}


def listing(rng: random.Random) -> tuple[str, str]:
    """Ask for a list of things."""
    group = rng.choice(list(GROUPS))
    members = GROUPS[group]
    count = rng.randint(3, min(6, len(members)))
    chosen = members[:count]
    how_many = facts.NUMBERS[count] if rng.random() < 0.6 else str(count)
    asked = rng.choice(("List {} {}.", "Give me a list of {} {}.", "Name {} {}.", "Write a list of {} {}."))
    numbered = rng.random() < 0.3
    question = asked.format(how_many, group)
    if numbered:
        question = question.removesuffix(".") + rng.choice((" as a numbered list.", " with numbers."))
    marks = [f"{i}." for i in range(1, count + 1)] if numbered else ["-"] * count
    lines = "\n".join(f"{mark} {item}" for mark, item in zip(marks, chosen, strict=True))
    return question, f"Here are {facts.NUMBERS[count]} {group}:\n\n{lines}"


def steps(rng: random.Random) -> tuple[str, str]:
    """Ask how something is done."""
    task = rng.choice(list(STEPS))
    asked = rng.choice(("How do I {}?", "How can I {}?", "Tell me how to {}.", "Give me the steps to {}."))
    lines = "\n".join(f"{i}. {line}" for i, line in enumerate(STEPS[task], 1))
    return asked.format(task), f"**How to {task.replace('my', 'your')}**\n\n{lines}"


def code(rng: random.Random) -> tuple[str, str]:
    """Ask for a tiny program."""
    language = "Python" if rng.random() < 0.5 else rng.choice(list(LANGUAGES))
    tag, line = LANGUAGES[language]
    pick = rng.random()
    if pick < 0.4:
        text, what = "Hello, world!", rng.choice(("says hello", "prints hello world", "prints Hello, world!"))
        question = rng.choice((f"Write a {language} program that {what}.", f"Show me hello world in {language}.",
                               f"Write hello world in {language}.", "Write a program that says hello."))  # fmt: skip
        if question.startswith("Write a program"):
            language, (tag, line) = "Python", LANGUAGES["Python"]
    elif pick < 0.7:
        name = words.any_name(rng)
        text, question = f"Hello, {name}!", f"Write a {language} program that greets {name}."
    else:
        count = rng.randint(3, 12)
        written = facts.NUMBERS[count] if rng.random() < 0.5 else count
        body = f"for number in range({count}):\n    print(number + 1)"
        return f"Write a Python program that counts to {written}.", f"Here it is:\n\n```python\n{body}\n```"
    return question, f"Here is a small {language} program:\n\n```{tag}\n{line.format(text)}\n```"


def bold(rng: random.Random) -> tuple[str, str]:
    """Ask for a capital with the answer in bold."""
    land = rng.choice(facts.FAMILIAR)
    asked = rng.choice(("What is the capital of {}? Use bold.", "What is the capital of {}? Write it in bold."))
    return asked.format(land), f"The capital of {land} is **{facts.CAPITALS[land]}**."


def table(rng: random.Random) -> tuple[str, str]:
    """Ask for a small table."""
    title, data = rng.choice((
        (("Animal", "Sound"), facts.SOUNDS), (("Animal", "Young"), facts.YOUNG),
        (("Country", "Capital"), {land: facts.CAPITALS[land] for land in facts.FAMILIAR}),
    ))  # fmt: skip
    chosen = rng.sample([key for key in data if not subjects.is_held_out(key)], 3)
    names = f"{title[0].lower()}s".replace("countrys", "countries"), f"{title[1].lower()}s".replace("youngs", "young")
    asked = rng.choice(("Make a table of {} and their {}.", "Show me a table of {} and their {}."))
    lines = "\n".join(f"| {key} | {data[key]} |" for key in chosen)
    return asked.format(*names), f"| {title[0]} | {title[1]} |\n| --- | --- |\n{lines}"


def exchange(rng: random.Random) -> tuple[str, str]:
    """Ask for something that is answered in Markdown."""
    return rng.choices((listing, steps, code, bold, table), (5, 3, 4, 1, 2))[0](rng)
