"""The possible subjects of stories: so many that a model must copy the subject from the request.

A fixed fraction of the nouns and of the invented names is held out from training: no request asks for a story about
them, and no main character or friend has them. So an evaluation with these subjects shows whether the model copies, and
not what it has memorised.
"""

from __future__ import annotations

import random
import re
import zlib


def words_of(text: str) -> list[str]:
    """Return the words of a text."""
    return text.split()


ANIMALS = words_of("""
alligator ant anteater antelope armadillo baboon badger bat bear beaver bee beetle bison boar buffalo bug bull
bunny butterfly calf camel canary caterpillar cat cheetah chicken chipmunk cobra cockatoo cow coyote crab
crane cricket crocodile crow cub deer dog dolphin donkey dove dragonfly duck duckling eagle eel elephant elk
falcon ferret finch firefly fish flamingo fly foal fox frog gazelle gecko gerbil gibbon giraffe goat goldfish
goose gopher gorilla grasshopper hamster hare hawk hedgehog hen heron hippo hornet horse hyena iguana jackal
jaguar jay jellyfish kangaroo kid kitten kiwi koala ladybug lamb lark lemming lemur leopard lion lizard llama
lobster lynx magpie mammoth marmot meerkat mole mongoose monkey moose mosquito moth mouse mule newt
nightingale octopus opossum orangutan ostrich otter owl ox oyster panda panther parakeet parrot partridge
peacock pelican penguin pheasant pig pigeon piglet pony porcupine possum puffin puma pup puppy quail rabbit
raccoon ram rat raven reindeer rhino robin rooster salamander salmon scorpion seagull seahorse seal shark
sheep shrew shrimp skunk sloth slug snail snake sparrow spider squid squirrel starfish stork swallow swan
tadpole tiger toad tortoise toucan trout turkey turtle vole vulture walrus wasp weasel whale wolf wombat
woodpecker worm yak zebra
""")
PEOPLE = words_of("""
acrobat actor admiral artist astronaut baker barber beekeeper beggar blacksmith brewer builder butcher butler
captain carpenter chef clockmaker clown cobbler cook cowboy dancer dentist detective diver doctor driver duke
emperor engineer explorer farmer ferryman fiddler fireman fisherman florist gardener general guard hatter
hermit hunter inventor jester judge juggler king knight lady librarian locksmith lord magician mailman mayor
merchant miller miner minstrel monk musician nurse painter peasant pilot piper pirate plumber poet potter
printer queen ranger sailor scholar scientist scout sculptor shepherd shoemaker singer smith soldier spy
student surgeon tailor teacher thief toymaker traveler trumpeter waiter watchman weaver woodcutter writer
""")
CREATURES = words_of("""
angel centaur cyclops demon dinosaur dragon dwarf elf fairy genie ghost giant gnome goblin griffin imp kraken
leprechaun mermaid monster mummy ogre phantom phoenix pixie robot scarecrow snowman sorcerer spirit sprite
titan troll unicorn vampire warlock werewolf witch wizard yeti zombie
""")
THINGS = words_of("""
acorn airplane anchor apple balloon banana barrel basket bell bench boat book boot bottle box bread brick
bridge broom brush bucket bus button cactus cake camera candle cannon car carpet carrot cart castle chair
chimney clock cloud coat coin comet compass cookie crayon crown cucumber cup cupcake daisy dandelion desk doll
door doughnut drum fern flag flower flute fork fountain gate glove guitar hammer harp hat helmet island jar
kettle key kite ladder lamp lantern leaf lemon letter lighthouse lily locomotive mailbox map marble melon
mirror mitten moon mountain muffin mushroom nail needle notebook nut onion pancake pear pebble pen pencil
piano pie pillow planet plum pot potato pumpkin puppet puddle puzzle radish raindrop ribbon ring river rocket
rose rug sandcastle sandwich satellite saucepan scarf scissor seed shadow shell shoe shovel skateboard sled
snowflake soap sock spoon star stone stool strawberry submarine suitcase sun sunflower sweater sword table
taxi teacup teapot telescope tent thimble thread tomato toothbrush tower tractor train tree truck trumpet
tulip turnip tugboat umbrella vase violin volcano wagon walnut wave wheel whistle windmill window yoyo
""")
ADJECTIVES = words_of("""
ancient angry bashful big blue bold brave bright brown busy calm careful cheerful clever clumsy cold cozy
crooked curious dizzy dusty eager fancy fast fat fearless fluffy forgetful foolish friendly funny fuzzy gentle
giant glad gloomy golden grand gray greedy green grumpy handsome happy huge hungry jolly kind lazy little
lonely loud lucky mighty modest muddy naughty neat nervous noble noisy odd old orange patient pink playful
polite poor proud purple quick quiet red restless rich round rude rusty sad scared shiny shy silent silly
silver sleepy slow sly small smart sneaky spotted stormy strange striped strong stubborn sweet swift tall thin
thirsty tidy timid tiny tired tough ugly unlucky warm weak weary white wild wise witty wooden yellow young
""")

ONSETS = words_of("b br c ch cl d dr f fl fr g gl gr h j k kl l m n p pl pr qu r s sh sk sl sn sp st t tr v w wh y z")
VOWELS = words_of("a a a e e e i i o o o u oo ee ai")
CODAS = words_of("b ck d ff g l ll m mp n nd ng nk p r rn sh sk st t x zz")
NAME_ENDS = words_of("a a o o i y ie us is in el an ar er en on ette ila ara ino")

# An invented name must not be one of these pronouns. No invented word may contain one of the rude words below.
PRONOUNS = ("her", "hers", "him", "his")
RUDE = re.compile(
    "fuck|shit|dick|cock|slut|tit|prick|spick|coon|cunt|piss|dyk|nig|kik|sex|rap|ass|poo|pee|bum|crap|hor|gook|damn|hell"
)

NOUNS = sorted({*ANIMALS, *PEOPLE, *CREATURES, *THINGS})
# Common subjects of first requests; they are never held out.
USUAL = {"cat", "dog", "fox", "bear", "dragon", "robot", "mouse", "rabbit", "lion", "king", "queen", "pirate", "wizard"}


def _drawn(word: str, of: int) -> bool:
    """Return whether a hash selects the word: about 1 in `of` words, the same on every machine."""
    return zlib.crc32(f"held out {word}".encode()) % of == 0


def is_held_out(word: str) -> bool:
    """Return whether a noun or name is held out from training."""
    return word not in USUAL and _drawn(word, 5)


TRAINED = [noun for noun in NOUNS if not is_held_out(noun)]
HELD_OUT = [noun for noun in NOUNS if is_held_out(noun)]


def syllables(rng: random.Random, count: int) -> str:
    """Return a pronounceable word of random syllables."""
    return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(count))


def blend(rng: random.Random) -> str:
    """Return the beginning of one noun joined to the end of another: "pengaroo"."""
    first, second = rng.choice(TRAINED), rng.choice(TRAINED)
    return first[: rng.randint(2, min(5, len(first)))] + second[-rng.randint(2, min(5, len(second))) :]


def rare_noun(rng: random.Random) -> str:
    """Return an invented noun that is not held out: "glimbat"."""
    while True:
        word = blend(rng) if rng.random() < 0.5 else syllables(rng, rng.choice((1, 1, 1, 2, 2))) + rng.choice(CODAS)
        if len(word) > 3 and not is_held_out(word) and word not in NOUNS and not RUDE.search(word):
            return word


def rare_name(rng: random.Random, *, held_out: bool = False) -> str:
    """Return an invented name of 3 to 9 letters."""
    while True:
        word = syllables(rng, rng.choice((0, 1, 1, 1))) + rng.choice(ONSETS) + rng.choice(NAME_ENDS)
        if 3 <= len(word) <= 9 and is_held_out(word) == held_out and not RUDE.search(word) and word not in PRONOUNS:
            return word.capitalize()


def short_name(rng: random.Random) -> str:
    """Return a name of three letters, such as Kit. Without such names in training, the model makes them longer."""
    while True:
        word = rng.choice("bdfghjklmnprstvwz") + rng.choice("aeiou") + rng.choice("bdglmnpstx")
        if not is_held_out(word) and not RUDE.search(word) and word not in PRONOUNS:
            return word.capitalize()


def any_noun(rng: random.Random) -> str:
    """Return the subject of a story. Half of them are invented, because a model completes known nouns from memory."""
    pick = rng.random()
    if pick < 0.5:
        return rare_noun(rng)
    pool = ANIMALS if pick < 0.75 else TRAINED
    while is_held_out(noun := rng.choice(pool)):
        pass
    return noun


def any_word(rng: random.Random) -> str:
    """Return a word for the exercises in copying; most are invented."""
    pick = rng.random()
    if pick < 0.7:
        return rare_noun(rng) if pick < 0.45 else rare_name(rng)
    return rng.choice(TRAINED if pick < 0.85 else ADJECTIVES)
