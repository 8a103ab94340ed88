"""The site: ``make docs`` builds it into build/site."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import unidist
from docs import tables

project = "unidist"
author = "the unidist developers"
version = release = unidist.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click", "sphinx_copybutton"]
exclude_patterns = ["_generated/*"]

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block", "colon_fence"]
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
html_title = "unidist"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False


def setup(app: object) -> None:
    """Write the generated tables, which pages include."""
    tables.write(Path(__file__).parent / "_generated")
