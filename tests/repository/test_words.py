"""Names and sentences use the field's words, none that a reader would have to learn here."""

import ast
import inspect
import io
import re
import tokenize

import pytest
from source import PACKAGE, Source
from words import IN_NAMES, IN_PROSE

import attnlib


def public_names() -> set[str]:
    """The names that users write: public objects, their attributes and their parameters."""
    found = set(attnlib.__all__)
    for name in attnlib.__all__:
        made = getattr(attnlib, name)
        members = [getattr(made, x, None) for x in dir(made) if not x.startswith("_")]
        found |= {x for x in dir(made) if not x.startswith("_")}
        for x in (made, *members):
            if callable(x):
                try:
                    found |= {*inspect.signature(x).parameters}
                except (TypeError, ValueError):
                    continue
    return found


PUBLIC = public_names()


def defined(source: Source) -> set[str]:
    """The names that a file defines: functions, classes, parameters, variables and attributes."""
    found = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return found - PUBLIC


def parts(name: str) -> set[str]:
    """The words of a name, in snake case or camel case."""
    return {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def names_with(source: Source, word: str) -> list[str]:
    return sorted(name for name in defined(source) if word in parts(name))


@pytest.mark.parametrize(("word", "folder", "instead"), IN_NAMES)
def test_names_use_the_fields_words(word, folder, instead):
    sources = [x for x in PACKAGE if x.path.startswith(folder)]
    assert sources, f"no folder is named {folder}"
    found = {x.path: names for x in sources if (names := names_with(x, word))}
    assert not found, f"{word}: write {instead}: {found}"


def prose(source: Source) -> list[str]:
    """The docstrings and comments of a file."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(x) or "" for x in ast.walk(source.tree) if isinstance(x, documented)]
    tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
    return texts + [token.string for token in tokens if token.type == tokenize.COMMENT]


@pytest.mark.parametrize("word", IN_PROSE)
def test_sentences_do_without_private_words(word):
    found = {x.path: [t for t in prose(x) if re.search(rf"\b{word}\b", t)] for x in PACKAGE}
    assert not {path: texts for path, texts in found.items() if texts}


@pytest.mark.parametrize(
    "text", ["def told(): pass", "was_told = 1", "class ToldCall: pass", "def f(told): pass", "self.told = 2"]
)
def test_a_planted_name_is_found(text):
    assert names_with(Source("call/call.py", text), "told")
    assert not names_with(Source("call/call.py", text.replace("told", "untold").replace("Told", "X")), "told")


@pytest.mark.parametrize(
    "text", ['"""It is dealt."""', "x = 1  # as dealt", 'def f():\n    """Dealt, or dealt."""']
)
def test_planted_prose_is_found(text):
    assert any(re.search(r"\bdealt\b", found) for found in prose(Source("call/call.py", text)))
