"""Sphinx extension: formulas as MathML, which browsers show without a script or a network."""

from docutils import nodes
from latex2mathml.converter import convert


def inline(translator, node) -> None:
    """Write a formula within a line."""
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def display(translator, node) -> None:
    """Write a formula on its own line."""
    translator.body.append(convert(node.astext(), display="block"))
    raise nodes.SkipNode


def setup(app) -> dict[str, bool]:
    """Register the renderer; ``html_math_renderer`` selects it."""
    app.add_html_math_renderer("mathml", (inline, None), (display, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
