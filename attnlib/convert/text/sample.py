"""The bundled sample: texts of several kinds, each with sources for calibration and others held out.

A source is a package or a book. ``sample_texts`` has a folder for each kind, with a file for each source in
``calibration`` or ``held_out``. ``sample_texts/sources.json`` lists packages, versions and licences.
"""

from importlib.resources import files
from importlib.resources.abc import Traversable
from types import MappingProxyType

from .mixture import Text, in_turn

PASSAGE = 2_000  # characters; sources of a kind alternate after this many
SCORED_PASSAGE = 900  # shorter, so that one held-out window of 512 tokens reads several sources
NAME = "the bundled sample"
# Perplexity of SmolLM2 135M with 1 of 3 KV heads, by the weight of old prose (2026-11):
#   weight 1   technical documentation 41.0, other old prose 93.3
#   weight 3   42.3, 82.4
#   weight 5   42.9, 79.8
WEIGHTS = MappingProxyType({"old_prose": 5})


def sample_texts() -> list[Text]:
    """Return the texts of the sample, one of each kind; passages of the kind's sources alternate in it."""
    kinds = [x for x in files(__package__).joinpath("sample_texts").iterdir() if x.is_dir()]
    return [
        Text(
            kind.name.replace("_", " "),
            alternated(_sources(kind / "calibration"), PASSAGE),
            alternated(_sources(kind / "held_out"), SCORED_PASSAGE),
            WEIGHTS.get(kind.name, 1),
        )
        for kind in sorted(kinds, key=lambda x: x.name)
    ]


def alternated(sources: list[str], length: int) -> str:
    """Return passages of about ``length`` characters of the sources in turn, until each source ends."""
    return "\n\n".join(in_turn([_passages(source, length) for source in sources])) + "\n"


def _sources(folder: Traversable) -> list[str]:
    found = sorted((x for x in folder.iterdir() if x.name.endswith(".txt")), key=lambda x: x.name)
    return [x.read_text(encoding="utf-8") for x in found]


def _passages(text: str, length: int) -> list[str]:
    """Cut a text between paragraphs into passages of at least ``length`` characters."""
    passages, paragraphs = [], []
    for paragraph in text.strip("\n").split("\n\n"):
        paragraphs.append(paragraph)
        if sum(map(len, paragraphs)) >= length:
            passages.append("\n\n".join(paragraphs))
            paragraphs = []
    return passages + (["\n\n".join(paragraphs)] if paragraphs else [])
