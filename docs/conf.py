"""Makes a site of README.md, docs/*.md and the docstrings: `make docs`.

Pages are GitHub's Markdown, with links that work on GitHub. What differs on the site is changed here, as a
page is read: the index becomes the navigation, a link to a folder becomes plain text, and a notebook a page.
"""

import posixpath
import re
import shutil
from itertools import groupby
from pathlib import Path
from textwrap import indent
from typing import Any

from sphinx.application import Sphinx

from regtopk import __version__
from tools.notebook import as_markdown

ROOT = Path(__file__).parents[1]

project = "regtopk"
author = "the regtopk authors"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"  # the folder that Sphinx reads is the root: the site opens with the README
source_suffix = {".md": "markdown", ".ipynb": "markdown"}
include_patterns = ["*.md", "docs/*.md", "docs/*.ipynb", "benchmarks/*/*.md"]
exclude_patterns = [".*", "build", "dist", "out", "docs/results", "src", "tests"]

smartquotes_action = "D"  # dashes alone: words in quotes, such as "4bit", are to be copied
highlight_language = "text"
myst_heading_anchors = 3  # named as GitHub names them

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_mock_imports = ["flwr", "torchft", "lightning", "transformers"]  # not installed everywhere
napoleon_use_rtype = False
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = "regtopk"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False

PAGE_LINK = re.compile(r"^\| \[([^]]+)\]\(([^)]+)\.(?:md|ipynb)\)", re.MULTILINE)
LINK = re.compile(r"\[([^]]+)\]\((?!\w+:|#)([^)#\s]+)\)")


def read_page(app: Sphinx, page: str, source: list[str]) -> None:
    """Give the first page the navigation, and take links to folders away: they have no page."""
    path = Path(app.env.doc2path(page))
    if path.suffix == ".ipynb":
        source[0] = as_markdown(source[0])
    source[0] = LINK.sub(lambda link: link[1] if (path.parent / link[2]).is_dir() else link[0], source[0])
    if page == root_doc:
        source[0] += "\n".join(navigation((ROOT / "docs" / "README.md").read_text(encoding="utf-8")))


def navigation(index: str) -> list[str]:
    """A hidden table of contents for each section of the index, with the titles that it gives to pages."""
    lines = ["", "```{toctree}", ":hidden:", "", "All pages <docs/README>", "```"]
    for section in index.split("\n## ")[1:]:
        found = [(title, posixpath.normpath(f"docs/{path}")) for title, path in PAGE_LINK.findall(section)]
        entries = [f"{title} <{page}>" for title, page in found if page != root_doc]
        lines += ["", "```{toctree}", ":hidden:", f":caption: {section.splitlines()[0]}", "", *entries, "```"]
    return lines


def read_docstring(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text, read as reStructuredText here: keep formulas and signs as they are."""
    paragraphs = [part for part in re.split(r"\n\n+", "\n".join(lines).rstrip()) if part != "::"]
    blocks = []
    for is_literal, group in groupby(paragraphs, is_formula):
        block = list(group)
        blocks += ["::", *(indent(part, " ") for part in block)] if is_literal else map(as_rst, block)
    lines[:] = ["", *"\n\n".join(blocks).splitlines(), ""]


def is_formula(paragraph: str) -> bool:
    """Formulas are indented, or have an equals sign; prose begins with a word, and ends with a full stop."""
    is_prose = re.match(r"[A-Z>]\w* ", paragraph) or paragraph.endswith(".")
    return paragraph.startswith(" ") or (bool(re.search(" :?= ", paragraph)) and not is_prose)


def as_rst(paragraph: str) -> str:
    """Mark code, link pages and escape signs."""
    if paragraph.startswith(">>>"):
        return paragraph
    parts = re.split(r"(``.+?``|`[^`]+`)", paragraph)
    parts[::2] = [re.sub(r"([*|]|(?<=\w)_(?!\w))", r"\\\1", text) for text in parts[::2]]
    parts[::2] = [re.sub(r"docs/([\w-]+)\.md", r":doc:`/docs/\1`", text) for text in parts[::2]]
    parts[1::2] = ["``" + code.strip("`") + "``" for code in parts[1::2]]
    return "".join(parts)


def open_with_the_readme(app: Sphinx, failure: Exception | None) -> None:
    """Let the site open with the README, whose page Sphinx has called README.html."""
    if failure is None:
        shutil.copy(app.outdir / f"{root_doc}.html", app.outdir / "index.html")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", read_page)
    app.connect("autodoc-process-docstring", read_docstring, priority=400)  # before napoleon
    app.connect("build-finished", open_with_the_readme)
