"""The characters, things and places of the stories in the training text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tools.corpus import subjects

GIRLS = [
    "Lily", "Mia", "Anna", "Rosa", "Ella", "Nora", "Zoe", "Ida", "Clara", "Lucy", "Amy", "Ruby", "Maya",
    "Sara", "Molly", "Hana", "Tess", "Ivy", "Leila", "Greta",
]  # fmt: skip
BOYS = [
    "Tom", "Ben", "Max", "Leo", "Sam", "Finn", "Jack", "Noah", "Oscar", "Theo", "Hugo", "Adam", "Omar",
    "Eli", "Nico", "Otto", "Paul", "Jonas", "Ravi", "Milo",
]  # fmt: skip
SHE_ANIMALS = [
    "Bramble", "Hazel", "Poppy", "Daisy", "Clover", "Pepper", "Willow", "Maple", "Ginger", "Fern", "Luna",
    "Pearl",
]  # fmt: skip
HE_ANIMALS = [
    "Pip", "Rusty", "Biscuit", "Moss", "Button", "Acorn", "Bruno", "Dusty", "Sunny", "Barley", "Patch",
    "Toby",
]  # fmt: skip

KIND_ADJECTIVES = [
    "little", "little", "little", "little", "small", "small", "kind", "cheerful", "curious", "brave", "shy",
    "clever", "gentle", "happy", "young",
]  # fmt: skip
# Adjectives of characters that the main character meets. Many of these characters are in trouble, so they are not happy
# or brave.
MET_ADJECTIVES = [
    "little", "little", "little", "little", "small", "small", "young", "shy", "gentle", "kind",
]  # fmt: skip

# By animal: the word for its home, and phrases that say where it lives.
ANIMALS: dict[str, tuple[str, tuple[str, ...]]] = {
    "fox": ("den", ("in a cozy den under an old oak tree", "in a warm den at the edge of the forest")),
    "rabbit": ("burrow", ("in a snug burrow under the hill", "in a small burrow beside a meadow")),
    "bear": ("cave", ("in a warm cave in the mountains", "in a big cave near a waterfall")),
    "mouse": ("hole", ("in a tiny hole under the stairs", "in a small hole behind the mill")),
    "hedgehog": ("nest", ("in a nest of dry leaves", "in a leafy nest under a hedge")),
    "squirrel": ("tree", ("in a hollow tree in the forest", "high up in an old chestnut tree")),
    "badger": ("burrow", ("in a deep burrow under the pine trees", "in a tidy burrow near the stream")),
    "mole": ("tunnel", ("in a long tunnel under the garden", "in a dark tunnel below the meadow")),
    "raccoon": ("den", ("in a round den inside a fallen tree", "in a little den by the lake")),
    "beaver": ("lodge", ("in a wooden lodge on the river", "in a strong lodge at the end of the lake")),
    "otter": ("den", ("in a den on the river bank", "in a dry den beside the lake")),
    "puppy": ("basket", ("in a red house with a big yard", "on a small farm near the woods")),
    "kitten": ("basket", ("in an old mill by the river", "in a white house with a blue door")),
    "lamb": ("barn", ("in a barn on a green hill", "on a quiet farm in the valley")),
    "duck": ("nest", ("in a nest by the pond", "among the reeds of a quiet lake")),
    "frog": ("pond", ("in a green pond near the forest", "by a pond full of water lilies")),
    "goat": ("barn", ("on a farm at the foot of a mountain", "in a little barn beside an orchard")),
    "cat": ("basket", ("in a bookshop with a big window", "on the roof of an old house")),
    "dog": ("basket", ("on a farm with a red barn", "in a little house by the road")),
    "pony": ("barn", ("in a green meadow behind the mill", "on a farm by the sea")),
    "pig": ("barn", ("on a muddy farm near the river", "in a barn with a blue roof")),
    "monkey": ("tree", ("in a tall palm tree", "in the jungle beside a wide river")),
    "penguin": ("nest", ("on a snowy island far away", "on a rocky shore by the cold sea")),
    "dragon": ("cave", ("in a warm cave high in the mountains", "in a ruined castle on a hill")),
    "hamster": ("nest", ("in a nest of soft straw", "in a cozy nest under a haystack")),
}

CHILD_HOMES = (
    "in a small house near the sea",
    "in a little village by the river",
    "at the edge of a quiet town",
    "in a yellow house on a hill",
    "on a small farm",
    "in a tall house beside the park",
    "in a village at the foot of a mountain",
    "in a white cottage near the woods",
    "in a busy town with a big clock tower",
    "on an island with a lighthouse",
)

CASTLES = ("in a castle with seven towers", "in a small castle by the lake", "in a palace with a golden gate")

GROWN_UPS = (
    "the baker", "the gardener", "the old farmer", "the kind teacher", "the postman", "the shopkeeper",
    "the old fisherman", "the librarian", "the doctor", "the painter", "the carpenter", "the shepherd",
)  # fmt: skip
WISE_ANIMALS = (
    "the wise old owl", "the old turtle", "the gray goose", "the tall heron", "the old toad",
    "the gentle deer", "the big brown horse", "the friendly crow",
)  # fmt: skip
FAMILY = {"she": ("mother", "grandmother", "aunt"), "he": ("father", "grandfather", "uncle")}

COLORS = [
    "red", "blue", "yellow", "green", "white", "purple", "orange", "golden", "silver",
]  # fmt: skip
THINGS = (
    "ball", "kite", "scarf", "hat", "drum", "bell", "button", "book", "lantern", "key", "ring", "whistle",
    "basket", "ribbon", "spoon", "marble", "umbrella", "cup", "shell", "flute", "notebook",
    "toy boat", "wooden horse", "paper crown", "teddy bear", "toy train",
)  # fmt: skip

HOBBIES = (
    "sing", "dance", "read stories", "watch the clouds", "collect smooth stones", "run in the tall grass",
    "tell stories", "count the stars", "pick flowers", "listen to the birds", "draw pictures",
    "ask questions", "jump over puddles", "look for shells", "make new friends", "laugh", "explore",
)  # fmt: skip

FOODS = (
    "a loaf of warm bread", "a basket of berries", "a bag of nuts", "a plate of cookies", "a jar of honey",
    "a bowl of strawberries", "an apple pie", "a big chocolate cake", "a basket of plums",
    "a pot of vegetable soup", "a plate of pancakes", "a box of sweet buns",
)  # fmt: skip

# By place: its preposition, and five spots where a thing can be. In a story, a lost thing is searched for at one of the
# first two spots, then at the third, and is found at one of the last two.
PLACES: dict[str, tuple[str, tuple[str, ...]]] = {
    "garden": ("in", ("under the rose bush", "behind the watering can", "among the tall sunflowers",
                      "beside the old stone wall", "next to the pumpkins")),
    "park": ("in", ("under a wooden bench", "behind the big oak tree", "near the fountain",
                    "in a pile of leaves", "beside the swings")),
    "forest": ("in", ("under a green fern", "behind a mossy log", "between two roots",
                      "beside a ring of mushrooms", "under a pine tree")),
    "meadow": ("in", ("in the tall grass", "behind a gray rock", "among the daisies",
                      "under a lonely apple tree", "beside the fence")),
    "beach": ("on", ("behind a big rock", "beside a sandcastle", "under an old boat",
                     "in a bed of seaweed", "between two shells")),
    "river bank": ("on", ("among the reeds", "between two smooth stones", "under the wooden bridge",
                          "behind a willow tree", "beside a fallen log")),
    "hill": ("on", ("under a thorn bush", "behind a flat stone", "beside the winding path",
                    "among the purple flowers", "at the foot of a birch tree")),
    "orchard": ("in", ("under a pear tree", "behind a wooden ladder", "inside an empty basket",
                       "beside the gate", "among the fallen apples")),
    "farmyard": ("in", ("behind the hay", "under the old cart", "beside the well",
                        "next to the chicken house", "between two buckets")),
}  # fmt: skip


@dataclass(frozen=True)
class Character:
    """A character of a story. The properties are the phrases by which templates refer to the character."""

    name: str
    kind: str
    adjective: str
    she: bool
    home: str
    lives: str

    def __str__(self) -> str:
        """Return the name, or "the fox" for a character without a name; a template's `{a}` prints this."""
        return self.name or f"the {self.noun}"

    @property
    def noun(self) -> str:
        """The kind without its adjectives: "robot" for "brave robot"."""
        return self.kind.split(" ")[-1]

    @property
    def he(self) -> str:
        """The subject pronoun."""
        return "she" if self.she else "he"

    @property
    def him(self) -> str:
        """The object pronoun."""
        return "her" if self.she else "him"

    @property
    def his(self) -> str:
        """The possessive pronoun."""
        return "her" if self.she else "his"

    @property
    def himself(self) -> str:
        """The reflexive pronoun."""
        return "herself" if self.she else "himself"

    @property
    def intro(self) -> str:
        """The phrase that introduces the character: "a little fox named Momo"."""
        return f"{self.described} named {self.name}" if self.name else self.described

    @property
    def described(self) -> str:
        """The kind with its adjectives: "a little fox"."""
        return f"a {self.adjective} {self.kind}" if self.adjective else f"a {self.kind}"

    @property
    def full(self) -> str:
        """The name, and the kind if the character is not a child: "Momo the fox"."""
        if self.home == "house":
            return str(self)
        return f"{self.name} the {self.noun}" if self.name else f"the {self.noun}"


@dataclass(frozen=True)
class Place:
    """A place where a story happens."""

    name: str
    preposition: str

    def __str__(self) -> str:
        """Return the name with its article: "the garden"."""
        return f"the {self.name}"

    @property
    def at(self) -> str:
        """The place with its preposition: "in the garden"."""
        return f"{self.preposition} the {self.name}"


def make_child(rng: random.Random, *, she: bool, met: bool = False) -> Character:
    """Make a girl or a boy."""
    name = rng.choice(GIRLS if she else BOYS)
    adjective = rng.choice(MET_ADJECTIVES if met else KIND_ADJECTIVES)
    royal = rng.random() < 0.1
    kind = ("princess" if royal else "girl") if she else ("prince" if royal else "boy")
    return Character(name, kind, adjective, she, "house", rng.choice(CASTLES if royal else CHILD_HOMES))


def make_animal(rng: random.Random, *, she: bool, kinds: Sequence[str], met: bool = False) -> Character:
    """Make a named animal of one of the kinds."""
    kind = rng.choice(kinds)
    home, lives = ANIMALS[kind]
    own, children = (SHE_ANIMALS, GIRLS) if she else (HE_ANIMALS, BOYS)
    name = rng.choice(own if rng.random() < 0.6 else children)
    adjective = rng.choice(MET_ADJECTIVES if met else KIND_ADJECTIVES)
    return Character(name, kind, adjective, she, home, rng.choice(lives))


HOMES = (
    *CHILD_HOMES, "in a quiet valley", "in the middle of a forest", "at the end of a long road", "by a blue lake",
    "behind a green hill", "near an old mill", "in a garden full of flowers", "under a tall oak tree",
    "in the attic of an old house", "at the edge of a meadow",
)  # fmt: skip


# Nouns that determine the pronoun; for other nouns the name determines it.
SHE_NOUNS = {"queen", "lady", "mermaid", "hen", "cow", "fairy", "witch"}
HE_NOUNS = {"king", "lord", "duke", "emperor", "monk", "bull", "ram", "rooster", "wizard", "warlock", "snowman"}


def suits(noun: str, *, she: bool) -> bool:
    """Return whether a character with this noun can be "she" (or "he", if `she` is False)."""
    return noun not in (HE_NOUNS if she else SHE_NOUNS)


def names_for(noun: str) -> tuple[str, ...]:
    """Return the names that suit a noun."""
    she, he = () if noun in HE_NOUNS else SHE_ANIMALS, () if noun in SHE_NOUNS else HE_ANIMALS
    return (*she, *he)


def make_anyone(rng: random.Random, *, noun: str, adjectives: str, name: str, met: bool = False) -> Character:
    """Return a character with this noun. `adjectives` and `name` may be "".

    `met` is for a character whom the main character meets in the story.
    """
    kind = f"{adjectives} {noun}" if adjectives else noun
    adjective = "" if adjectives or rng.random() < 0.4 else rng.choice(MET_ADJECTIVES if met else KIND_ADJECTIVES)
    home, lives = ANIMALS.get(noun, ("home", HOMES))
    she = name in (*GIRLS, *SHE_ANIMALS) or (name not in (*BOYS, *HE_ANIMALS) and rng.random() < 0.5)
    she = (she or noun in SHE_NOUNS) and noun not in HE_NOUNS
    return Character(name, kind, adjective, she, home, rng.choice(lives))


def any_name(rng: random.Random) -> str:
    """Return a random name; half of the names are invented."""
    if rng.random() < 0.5:
        return subjects.short_name(rng) if rng.random() < 0.25 else subjects.rare_name(rng)
    return rng.choice(rng.choice((GIRLS, BOYS, SHE_ANIMALS, HE_ANIMALS)))
