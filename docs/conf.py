"""The site: ``make docs`` builds it into build/site."""

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from docutils import nodes

import unidist
from docs import tables

project = "unidist"
author = "the unidist developers"
version = release = unidist.__version__
# In the footer of each page.
copyright = f"{author}, unidist {release}"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click", "sphinx_copybutton"]
exclude_patterns = ["_generated/*"]

# A "--" is one of an option.
smartquotes = False
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block", "colon_fence"]
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
add_module_names = False
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
html_title = "unidist"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_show_sphinx = False


def no_addresses(app: object, context: object, lines: list[str]) -> None:
    """BACKEND@LAUNCHER in a help text is no address of e-mail."""
    lines[:] = [re.sub(r"\w+(\[@\w+\]|@\w+)", r"``\g<0>``", line) for line in lines]


def names_in_diffs(app: object, doctree: nodes.document) -> None:
    """Sphinx heads a diff with the files' places on this machine."""
    root = f"{Path(__file__).parents[1]}/"
    for block in doctree.findall(nodes.literal_block):
        if block.get("language") == "udiff":
            text = block.astext().replace(root, "")
            block[:] = [nodes.Text(text)]
            block.rawsource = text


def level_of_captions(app: object, page: str, template: str, context: dict[str, Any], tree: object) -> None:
    """Screen readers want the level of what the theme calls a heading."""
    captions = context["furo_navigation_tree"]
    context["furo_navigation_tree"] = captions.replace('role="heading"', 'role="heading" aria-level="2"')


def setup(app: Any) -> None:
    """Write the generated tables, which pages include."""
    tables.write(Path(__file__).parent / "_generated")
    app.connect("sphinx-click-process-description", no_addresses)
    app.connect("sphinx-click-process-options", no_addresses)
    app.connect("sphinx-click-process-arguments", no_addresses)
    app.connect("doctree-read", names_in_diffs)
    app.connect("html-page-context", level_of_captions, priority=900)  # after the theme's
