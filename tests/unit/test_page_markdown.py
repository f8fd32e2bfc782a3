"""The page's Markdown, run by Node.js: equal to CommonMark's for all cuts into pieces, harmless, and linear."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from mlx_engine.serve.page import FILE

SCRIPT = Path(__file__).parents[1] / "page" / "markdown.mjs"
pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="no Node.js")

TEXTS = [
    "# One\n\n### Two ##\n\na *b* **c** ***d*** `e` ~~f~~\ng  \nh\\\ni\n",
    "- a\n- b\n  - c\n\n    d\n- e\n\n1. f\n2) g\n3) h\n\ni\n1984. j\n1. k\n",
    "> a\n> b\nc\n\n> d\n> - e\n>   f\n>\n> g\n",
    "1. a\n\n   ```sh\n   ls -l\n     x\n   ```\n2. b\n   > c\n",
    "```python\ndef f():\n\n\treturn '<b>'\n```\n~~~\n```\n~~~~\n````\n```\n",
    "a\n\n| a | b \\| c | d |\n|:--|:-:|--:|\n| 1 | `2` |\n| *3* | 4 | 5 | 6 |\n\nend\n",
    "a | b\nno | table\n\nx | y\n--|--\n1 | 2\n# h\n",
    "*a **b* c** _x_y_ __z__ a*b*c \\*no\\* `` ` `` * x * **y**z __a__b ***a** b* *(c)* **(d)**e\n",
    '[a *b*](https://x.y/z_(1) "t") [c](<https://x.y/a b>) [d][e] [f] ![g](https://x.y/g) [h [i](https://j.k/) l](m)',
    "<https://x.y/?a=1&b=2> <mailto:a@b.c> <script>alert(1)</script> <b>c</b>\n",
    "***\n- - -\n_ _ _\n* * a\n-\n- b\n\n-not\n#not\n+ c\n",
    "- a\n\n- b\n\n\n- c\n\nd\n* e\n  f\ng\n",
    "a\n***\nb\n> c\n***\n- d\n***\n",
    "*a `b*` c* [a`](https://x.y)` **a*b**c* *a __b__ c*\n",
    "한국어 **굵게** 텍스트, *日本* 語 — “*q*”\n",
]

HOSTILE = [
    "[a](javascript:alert(1)) [b](JAVASCRIPT:x) [c](java\tscript:x) [d](data:text/html,x) [e](vbscript:x) [f](//h)",
    "<javascript:alert(1)> <img src=x onerror=alert(1)> <a href='javascript:x'>y</a> ![h](data:image/svg+xml,x)",
    "| <script>a</script> | [x](javascript:y) |\n|---|---|\n| <img/onerror=x> | `<b>` |",
    "[a](<javascript:x>) [b]( javascript:x ) [c](&#106;avascript:x) [d](file:///etc) [e](blob:x) [f](about:blank)",
]

N = 50_000
BOMBS = {
    "line": "x" * N,
    "words": "word " * (N // 5),
    "stars": "*a **b " * (N // 7),
    "closers": "*a" * (N // 4) + "*" * (N // 2),
    "brackets": "[" * N,
    "links": "[a](b " * (N // 6),
    "images": "![a](" * (N // 5),
    "ticks": "".join("`" * i + "a" for i in range(1, 310)),
    "angles": "<" * N,
    "underscores": "_a_ " * (N // 4),
    "quotes": "> " * (N // 2) + "x",
    "lists": "\n".join(" " * (2 * i) + "- a" for i in range(220)),
    "list in a line": "- " * (N // 2) + "a",
    "mixed": "> - 1. " * (N // 7) + "`x",
    "columns": "|a" * 500 + "|\n" + "|-" * 500 + "|\n" + ("|b" * 500 + "|\n") * 50,
    "rows": "|a|b|\n|-|-|\n" + "|c|d|\n" * (N // 6),
    "fence": "```\n" + "code line\n" * (N // 10),
    "fence in a line": "```\n" + "x" * N,
    "comments": "```js\n" + "/*" * (N // 2) + "\n```\n",
    "strings": "```py\n" + "\"'`" * (N // 3) + "\n```\n",
    "escapes": "```c\n" + '"\\' * (N // 2) + "\n```\n",
    "lazy": "> a\n" + "b\n" * (N // 2),
    "hashes": "# " + "#" * N,
    "breaks": "<br>" * (N // 4),
    "spaces": " " * N + "x",
}


def markdown(*cases: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the page's Markdown on texts that come in pieces of `size` characters."""
    command = ["node", str(SCRIPT), str(FILE)]
    result = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def normal(html: str) -> str:
    """Return HTML without what the page writes differently: wrappers, classes, levels, images, tightness."""
    html = re.sub(r'<div class="head">.*?</div>', "", html)
    html = re.sub(r"</?(?:div|span|b)(?: [^>]*)?>", "", html)
    html = re.sub(r' (?:class|rel|style|title)="[^"]*"', "", html)
    html = re.sub(r"(</?h)\d>", r"\1>", html.replace(" />", ">"))
    html = html.replace("<s>", "<del>").replace("</s>", "</del>").replace("\n</code></pre>", "</code></pre>")
    html = re.sub(r'<img src="([^"]*)" alt="([^"]*)">', r'<a href="\1">\2</a>', html)
    html = re.sub(r"</?p>", "", re.sub(r"</p>\s*<p>", "¶", html))
    parts = re.split(r"(<pre>.*?</pre>)", html, flags=re.DOTALL)
    return "".join(part if part.startswith("<pre>") else re.sub(r"\s+", "", part) for part in parts)


def test_blocks_and_spans_are_those_of_commonmark_however_they_are_cut():
    oracle = MarkdownIt("commonmark", {"breaks": True, "html": False}).enable(["table", "strikethrough"])
    sizes = (1, 3, 10_000)
    found = markdown(*({"text": text, "size": size} for text in TEXTS for size in sizes))
    for i, text in enumerate(TEXTS):
        alone = {result["html"] for result in found[3 * i : 3 * i + 3]}
        assert len(alone) == 1, text
        assert normal(alone.pop()) == normal(oracle.render(text)), text


def test_no_text_is_lost_and_none_becomes_markup():
    for result, text in zip(markdown(*({"text": text, "size": 7} for text in HOSTILE)), HOSTILE, strict=True):
        tags = set(re.findall(r"<(\w+)", result["html"]))
        assert tags <= {"div", "p", "table", "thead", "tbody", "tr", "th", "td", "code"}, result["html"]
        assert "href" not in re.sub(r">[^<]*<", "><", result["html"])
        if "|--" not in text:
            assert result["shown"] == text


def test_links_keep_their_referrer_and_opener_to_themselves():
    html = markdown({"text": "[a](https://x.y) https://z.a/b_(c). (https://d.e)", "size": 5})[0]["html"]
    assert re.findall(r'href="([^"]*)"', html) == ["https://x.y/", "https://z.a/b_(c)", "https://d.e/"]
    assert html.count('rel="noopener noreferrer nofollow"') == 3
    assert unescape(re.sub(r"<[^>]*>", "", html)) == "a https://z.a/b_(c). (https://d.e)"


def test_code_is_colored_when_it_is_complete_and_its_text_stays():
    code = 'def f(x):  # comment\n    return \'a\' + """b\n# no""" + str(1.5)\n'
    html = markdown({"text": f"```python\n{code}```\n", "size": 2})[0]["html"]
    colored = re.findall(r'<b class="(\w+)">(.*?)</b>', html, flags=re.DOTALL)
    assert [(kind, unescape(text)) for kind, text in colored] == [
        ("word", "def"),
        ("comment", "# comment"),
        ("word", "return"),
        ("string", "'a'"),
        ("string", '"""b\n# no"""'),
        ("number", "1.5"),
    ]
    assert unescape(re.sub(r"<[^>]*>", "", html.split("<code>")[1])) == code.rstrip("\n")


def test_texts_of_users_are_shown_as_they_are_except_for_fences():
    text = "*a* <b>\n  # c\n```x\n- d\n```\n| e |"
    html = markdown({"text": text, "size": 3, "fencesOnly": True})[0]["html"]
    assert html.startswith("<div><p>*a* &lt;b&gt;\n  # c</p>")
    assert "<code><span>- d</span></code>" in html
    assert html.endswith("<p>| e |</p></div>")


@pytest.mark.slow
def test_no_text_takes_long_or_nests_deeply():
    results = markdown(*({"text": text, "size": 500, "isTimed": True} for text in BOMBS.values()))
    for name, result in zip(BOMBS, results, strict=True):
        assert result["seconds"] < 5, name
        assert result["depth"] < 50, name
