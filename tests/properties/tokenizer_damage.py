"""Mutations of tokenizer.json, its configuration files and chat templates, for `folder_damage`."""

import base64
import copy
import json

# Regular expressions that backtrack, are invalid, or match at every place.
REGEXES = [
    "(a+)+b",
    "(a|aa)+$",
    "(?:a|aa)+$",
    "a*a*a*a*b|[^b]*c",
    r"(x+x+)+y",
    r"(\w+\s?)*$",
    r"(.*)*\1b",
    "(?=(a+))*b",
    "(?<=a+)b",
    r"\s*\s*\s*x",
    ".*.*=.*",
    "",
    "(",
    "[",
    "(?<!a)",
    "a{1000000}",
    "(a{1000}){1000}",
    "(?:(?:(?:a?){99}){99}){99}",
    "(?i:" * 50 + ")" * 50,
    "(" * 5000 + ")" * 5000,
    r"\p{L}+|\p{Nowhere}",
    r"(?<n>a)\g<n>*",
    r"(?<n>\(\g<n>*\))",
    "|",
    "a||b",
    "[^" + "".join(map(chr, range(0x4E00, 0x5000))) + "]+",
    r"\x{10FFFF}+",
    r"(?m)^.*$",
    "\ud800",
]
NUMBERS = [
    -1,
    0,
    1,
    2,
    511,
    512,
    2**16,
    2**22,
    2**24,
    2**31,
    2**32 - 1,
    2**32,
    2**40,
    2**63,
    2**64,
    10**30,
    0.5,
    -0.0,
    1e308,
]
TEXTS = [
    "",
    " ",
    "a",
    "\u2581",
    "\u2581" * 1000,
    "x" * 100_000,
    "\0",
    "\ud800",
    "\ufdfa",
    "<|im_start|>",
    "e\u0301",
    "\U0001f600",
]


def pattern(rng):
    """Return a pattern of a normaliser or a pre-tokenizer."""
    return rng.choice([{"Regex": rng.choice(REGEXES)}, {"String": rng.choice(TEXTS)}])


def charsmap(rng):
    """Return the table of a `Precompiled` normaliser: four bytes with a size, a trie, and texts."""
    size = rng.choice([0, 4, 1024, 2**31, 2**32 - 4, 2**32 - 1]).to_bytes(4, "little")
    return base64.b64encode(size + rng.randbytes(rng.choice([0, 3, 64, 2048]))).decode()


def normalizer(rng, depth=0):
    """Return a normaliser that may be unsound."""
    if depth < 3 and rng.random() < 0.2:
        return {"type": "Sequence", "normalizers": [normalizer(rng, depth + 1) for _ in range(rng.randrange(4))]}
    text = rng.choice(TEXTS)
    return rng.choice(
        [
            *(
                {"type": name}
                for name in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "ByteLevel")
            ),
            {"type": "Strip", "strip_left": True, "strip_right": True},
            {"type": "Prepend", "prepend": text},
            {"type": "Replace", "pattern": pattern(rng), "content": text},
            {"type": "Replace", "pattern": {"String": ""}, "content": text},
            {"type": "Replace", "pattern": {"Regex": "."}, "content": "ab" * 20_000},
            {"type": "Precompiled", "precompiled_charsmap": charsmap(rng)},
            {
                "type": "BertNormalizer",
                "clean_text": True,
                "handle_chinese_chars": True,
                "strip_accents": None,
                "lowercase": True,
            },
            {
                "type": "Sequence",
                "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 30,
            },
        ]
    )


def pre_tokenizer(rng, depth=0):
    """Return a pre-tokenizer that may be unsound."""
    if depth < 3 and rng.random() < 0.2:
        return {"type": "Sequence", "pretokenizers": [pre_tokenizer(rng, depth + 1) for _ in range(rng.randrange(4))]}
    ways = ("Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous")
    split = {"type": "Split", "pattern": pattern(rng), "behavior": rng.choice(ways), "invert": rng.random() < 0.5}
    return rng.choice(
        [
            split,
            split,
            split,
            {
                "type": "ByteLevel",
                "add_prefix_space": rng.random() < 0.5,
                "trim_offsets": True,
                "use_regex": rng.random() < 0.5,
            },
            {
                "type": "Metaspace",
                "replacement": rng.choice(["\u2581", "ab", ""]),
                "prepend_scheme": "always",
                "split": True,
            },
            *({"type": name} for name in ("Whitespace", "WhitespaceSplit", "BertPreTokenizer", "UnicodeScripts")),
            {"type": "Digits", "individual_digits": True},
            {"type": "Punctuation", "behavior": rng.choice(ways)},
            {"type": "CharDelimiterSplit", "delimiter": rng.choice(["a", "", "ab"])},
            {"type": "FixedLength", "length": rng.choice([0, 1, 2**40])},
        ]
    )


def post_processor(rng):
    """Return a post-processor that may name tokens that are not there."""
    single = [rng.choice([{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}])] * 2
    many = single * rng.choice([1, 1, 50_000])
    tokens = rng.choice([{}, {"<s>": {"id": "<s>", "ids": [rng.choice([0, 1, 2**32 - 1])], "tokens": ["<s>"]}}])
    pair = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
    template = {"type": "TemplateProcessing", "single": many, "pair": pair, "special_tokens": tokens}
    roles = {"sep": ["</s>", rng.choice([2, 2**32 - 1])], "cls": ["<s>", 0]}
    return rng.choice(
        [
            template,
            template,
            {"type": "RobertaProcessing", **roles, "trim_offsets": True, "add_prefix_space": False},
            {"type": "BertProcessing", **roles},
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            {"type": "Sequence", "processors": [template] * 3},
        ]
    )


def decoder(rng):
    """Return a decoder; only some are of an algorithm that is implemented."""
    return rng.choice(
        [
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            {"type": "Replace", "pattern": pattern(rng), "content": rng.choice(TEXTS)},
            {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
            {"type": "Strip", "content": rng.choice(["a", "", " "]), "start": rng.choice([0, 1, 2**40]), "stop": 0},
            {"type": "Sequence", "decoders": []},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "CTC"},
            {"type": "WordPiece", "prefix": "##", "cleanup": True},
        ]
    )


def change_model(model, rng):
    """Change ids, tokens, merges or settings of a model."""
    vocab, merges = model.get("vocab"), model.get("merges")
    tokens = [*vocab] if isinstance(vocab, dict) else []
    kind = rng.randrange(9)
    if kind == 0 and tokens:
        vocab[rng.choice(tokens)] = rng.choice(NUMBERS)
    elif kind == 1 and tokens:
        vocab[rng.choice(tokens)] = vocab[rng.choice(tokens)]
    elif kind == 2 and tokens:
        for token in rng.sample(tokens, rng.choice([1, 5, len(tokens)])):
            del vocab[token]
    elif kind == 3 and tokens:
        vocab[rng.choice(TEXTS)] = rng.choice(NUMBERS)
    elif kind == 4 and isinstance(merges, list):
        at = rng.randrange(len(merges) + 1)
        merges[at:at] = [
            rng.choice(["a", "a b c", "", " ", ["a"], ["a", "b", "c"], ["zz", "zz"], None, 3, "a " + "b" * 9999])
        ]
    elif kind == 5 and isinstance(merges, list):
        rng.shuffle(merges)
        merges += merges * rng.choice([0, 3])
    elif kind == 6:
        name = rng.choice(
            ["dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "unk_id"]
        )
        model[name] = rng.choice([*NUMBERS, *TEXTS, True, None, float("nan")])
    elif kind == 7:
        model["type"] = rng.choice(["BPE", "Unigram", "WordPiece", "WordLevel", "x"])
    else:
        scores = [0.0, -1.0, 1e308, -1e308, float("nan"), float("inf")]
        model["type"], model["unk_id"] = "Unigram", rng.choice([0, None, 2**40])
        model["vocab"] = [[token, rng.choice(scores)] for token in tokens[:200] or TEXTS]
        model["vocab"] += [["a" * i, -1.0] for i in range(rng.choice([0, 0, 500]))]


def change_added(added, rng):
    """Change the added tokens, or add some."""
    if added and rng.random() < 0.5:
        one = rng.choice(added)
        name = rng.choice([*one])
        one[name] = rng.choice([*NUMBERS, *TEXTS, True, False, None])
        return
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for i in range(rng.choice([1, 1, 2000])):
        token = {"id": rng.choice([i, 5, *NUMBERS]), "content": rng.choice([f"<{i}>", "a", *TEXTS])}
        added.append(token | {name: rng.random() < 0.5 for name in flags})


def change_tokenizer(value, rng):
    """Change one part of a tokenizer.json in a way that its form allows."""
    kind = rng.randrange(8)
    makers = {
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor,
        "decoder": decoder,
    }
    if kind < 4:
        name = rng.choice([*makers])
        value[name] = makers[name](rng)
    elif kind < 6 and isinstance(value.get("model"), dict):
        change_model(value["model"], rng)
    elif kind == 6 and isinstance(value.get("added_tokens"), list):
        change_added(value["added_tokens"], rng)
    else:
        number = rng.choice(NUMBERS)
        how = {"strategy": {"Fixed": number}, "direction": "Right", "pad_to_multiple_of": number, "pad_id": 0}
        value["padding"] = how | {"pad_type_id": 0, "pad_token": "a"}
        value["truncation"] = {"direction": "Right", "max_length": number, "strategy": "LongestFirst", "stride": number}


def change_config(value, rng):
    """Change one setting of tokenizer_config.json or generation_config.json."""
    names = [
        "bos_token",
        "eos_token",
        "pad_token",
        "add_bos_token",
        "chat_template",
        "bos_token_id",
        "eos_token_id",
        "top_k",
        "temperature",
        "top_p",
        "suppress_tokens",
        "do_sample",
        "vocab_size",
    ]
    value[rng.choice(names)] = copy.deepcopy(
        rng.choice(
            [
                *NUMBERS,
                *TEXTS,
                *TEMPLATE_PARTS,
                True,
                False,
                None,
                float("nan"),
                float("inf"),
                [],
                {},
                [1, "a", None],
                [2**70] * 3,
                {"content": rng.choice([*TEXTS, *NUMBERS])},
                [{"name": "default", "template": rng.choice(TEXTS)}],
                [{"name": ["default"], "template": "x"}],
                [{"name": {}}],
                [[]] * 1000,
                list(range(100_000)),
                "{" * 2_000_000,
            ]
        )
    )


def change_text(text, rng):
    """Return JSON text with damage that no value has: doubled keys, deep nesting, long numbers, other constants."""
    bombs = [
        "[" * 100_000,
        '{"a":' * 50_000,
        "9" * 5000,
        "-" + "9" * 100_000,
        "1e" + "9" * 400,
        "NaN",
        "-Infinity",
        '"\\ud800"',
        "[" + "[]," * 300_000 + "[]]",
        '"' + "x" * 1_000_000 + '"',
        "{" + ",".join(f'"{i}":{i}' for i in range(50_000)) + "}",
        "0" * 100,
        '"\\u0000"',
        "true" * 9,
    ]
    kind = rng.randrange(4)
    at = rng.choice([i for i, c in enumerate(text) if c in ":,"] or [0])
    if kind == 0:
        return text.replace(":", ":" + rng.choice(bombs), 1)
    if kind == 1:
        return text[: at + 1] + rng.choice(bombs) + text[at + 1 :]
    if kind == 2:  # keys that appear twice
        return "{" + ",".join([text.strip()[1:-1]] * 2) + "}"
    return rng.choice(
        ["\ufeff" + text, text + text, text[::-1], "\0" + text, text.replace('"', "'"), text.replace("a", "\\u0061")]
    )


TEMPLATE_PARTS = [
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ 'x' * 10 ** 11 }}",
    "{{ 'x' * 10 ** 8 }}",
    "{{ [0] * 10 ** 9 }}",
    "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "{{ " + "-" * 50_000 + "1 }}",
    "{{ " + "[" * 300 + "]" * 300 + " }}",
    "{% if 1 %}" * 500 + "{% endif %}" * 500,
    "{% for m in messages %}" * 30 + "x" + "{% endfor %}" * 30,
    "{%" * 20_000,
    "{{" * 20_000,
    "{#" * 20_000,
    "{% raw %}" * 5000,
    "{{ messages[0].a.b }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'x' as y %}",
    "{% extends 'x' %}",
    "{{ raise_exception('no') }}",
    "{{ raise_exception() }}",
    "{{ strftime_now('%' * 10 ** 7) }}",
    "{{ strftime_now('\ud800') }}",
    "{{ messages|tojson(indent=10**9) }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ 'a\n'|indent(10**9) }}",
    "{{ 'a b'|wordwrap(1) }}",
    "{{ [1]|batch(10**9, 'x')|list }}",
    "{{ range(99999)|slice(99999)|list }}",
    "{{ lipsum(n=10**5) }}",
    "{{ 'ab'|replace('', 'x' * 10 ** 8) }}",
    "{{ 'x'|center(10**11) }}",
    "{{ ('a' * 50000 ~ '@')|urlize }}",
    "{{ ('<' * 200000)|striptags }}",
    "{{ messages|pprint }}",
    "{{ x.y.z }}",
    "{{ range(99999)|random }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{% call m() %}{% endcall %}",
    "{% set a = [] %}{% set _ = a.append(a) %}{{ a }}",
    "{{ dict.fromkeys(range(99999))|dictsort }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ 1 << 10 ** 12 }}",
    "{{ 'x'.join(range(99999)|map('string')) }}",
    "{% generation %}x{% endgeneration %}",
    "{% break %}",
    "{% autoescape true %}{{ '<' }}{% endautoescape %}",
    "{{ self._TemplateReference__context }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ joiner('x')() }}",
    "{{ caller() }}",
    "{% trans %}x{% endtrans %}",
    "\ud800",
    "\0",
    "x" * 1_100_000,
    "{{ 'x' }}" * 100_000,
    "{{ messages[0]['content'] }}",
    "{{ bos_token }}{{ eos_token }}",
    "<|im_start|>",
    "{{ 1 / 0 }}",
    "{{ [].pop() }}",
    "{% for k in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{{ (1, 2)|sum(start=messages) }}",
    "{{ 0 if 1 else " * 500 + "1" + " }}" * 1,
]
PIECES = [
    "{{",
    "}}",
    "{%",
    "%}",
    "{#",
    "#}",
    "{%-",
    "-%}",
    "(",
    ")",
    "[",
    "]",
    "'",
    '"',
    "|",
    ".",
    "~",
    " if ",
    " for ",
    " in ",
    "messages",
    "endfor",
    "endif",
    "loop.index0",
    "namespace",
    "\n",
    " ",
    "**",
    "10",
    "*",
    "<|im_start|>",
    "</think>",
    "tools",
]


def change_template(text, rng):
    """Return a template with a part put in, or with its syntax damaged."""
    at, to = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    if rng.random() < 0.08:  # many of them take all the time that they may
        return rng.choice(["", text[:at]]) + rng.choice(TEMPLATE_PARTS) + rng.choice(["", text[at:]])
    kind = rng.randrange(2, 7)
    if kind == 2:
        return text[:at] + rng.choice(PIECES) + text[at:]
    if kind == 3:
        return text[:at] + text[min(to, at + 30) :]
    if kind == 4:
        return text[:to] + text[at:]
    if kind == 5:
        piece = rng.choice(PIECES)
        return text.replace(piece, rng.choice(PIECES), rng.choice([1, 1, -1]))
    return text[:at] + rng.choice(PIECES) * rng.choice([2, 50, 10_000]) + text[at:]


def damaged_template(good, rng):
    """Return a damaged chat template as bytes."""
    text = good.decode()
    for _ in range(rng.choice([1, 1, 2, 3])):
        text = change_template(text, rng)
    return text.encode("utf-8", "surrogatepass")


def damaged_value(good, change, rng):
    """Return the bytes of a JSON file with one to three changes of `change`, and sometimes of its text."""
    value = json.loads(good)
    for _ in range(rng.choice([1, 1, 2, 3])):
        change(value, rng)
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    if rng.random() < 0.1:
        text = change_text(text, rng)
    return text.encode("utf-8", "surrogatepass")
