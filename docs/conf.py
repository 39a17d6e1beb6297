"""How Sphinx builds the site; `make docs`."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import bayesgrad

sys.path.insert(0, str(Path(__file__).parent / "site_tools"))
import api_pages
import gallery
import pages

project = "bayesgrad"
author = "the bayesgrad developers"
version = release = bayesgrad.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
root_doc = "index"
exclude_patterns = ["_build"]
default_role = "literal"

autodoc_typehints = "none"
autodoc_member_order = "bysource"
toc_object_entries_show_parents = "hide"
autosummary_generate = False
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Class attributes", "params_style")]

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# Equations are drawn as SVG by a copy of MathJax: one file, no fonts, no network.
MATHJAX = Path(importlib.util.find_spec("sphinx-mathjax-offline").origin).parent / "static/mathjax/tex-svg.js"
mathjax_path = "tex-svg.js"

html_theme = "pydata_sphinx_theme"
html_title = "bayesgrad"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "navbar_align": "left",
    "header_links_before_dropdown": 7,
    "navbar_end": ["theme-switcher"],
    "show_toc_level": 2,
    "navigation_with_keys": False,
    # Tables of results need the width; a page may match one pattern only.
    "secondary_sidebar_items": {"[!r]**": ["page-toc"], "reference/**": ["page-toc"], "results/**": []},
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_sidebars = {"index": [], "get-started": [], "choosing": []}
copyright = "the bayesgrad developers, MIT licence"


def setup(app) -> None:
    app.connect("builder-inited", lambda app: gallery.write_pages(Path(app.srcdir)))
    app.connect("builder-inited", lambda app: api_pages.write_pages(Path(app.srcdir)))
    app.connect("build-finished", lambda app, error: error or shutil.copy(MATHJAX, Path(app.outdir) / "_static"))
    app.connect("source-read", pages.rewrite)
    app.connect("doctree-resolved", pages.link_figures)
    app.connect("autodoc-skip-member", api_pages.from_elsewhere)
    app.connect("autodoc-process-docstring", api_pages.as_restructured_text, priority=400)
