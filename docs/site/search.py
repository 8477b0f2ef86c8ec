"""Sphinx extension: excerpts on the search page without a server.

Sphinx's search page fetches each page that it found. Browsers refuse this if the site is opened from disk.
This extension ships the text of all pages in one script, which answers these requests.
"""

import json
from pathlib import Path

from bs4 import BeautifulSoup

SCRIPT = "search-texts.js"
ANSWER = r"""
window.fetch = async (url) => ({
  text: async () => texts[url.replace(/^\.\/|\.html$/g, "")] ?? "",
});
"""


def text_of(page: str) -> str:
    """Return HTML with the text of a page, and the elements that a search result may point to."""
    main = BeautifulSoup(page, "html.parser").find(role="main")
    for element in main.select("script, style, .headerlink"):
        element.decompose()
    for element in main.find_all(True):
        if element.get("id"):
            element.attrs = {"id": element["id"]}
        else:
            element.unwrap()
    main.attrs = {"role": "main"}
    return str(main)


def load(app, page: str, template: str, context: dict, doctree) -> None:
    """Load the script in the search page."""
    if page == "search":
        app.add_js_file(SCRIPT)


def write(app, exception: Exception | None) -> None:
    """Write the script."""
    if exception is None and app.builder.format == "html":
        folder = Path(app.outdir)
        texts = {page: text_of((folder / f"{page}.html").read_text()) for page in sorted(app.env.found_docs)}
        (folder / "_static" / SCRIPT).write_text(f"const texts = {json.dumps(texts)};{ANSWER}")


def setup(app) -> None:
    """Connect to Sphinx."""
    app.connect("html-page-context", load)
    app.connect("build-finished", write)
