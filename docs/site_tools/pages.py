"""Pages as GitHub shows them become pages of the site.

Links to files outside of docs/ lead to the repository, the names of api.md to their pages, and figures to their files,
where they can be enlarged. A number and its standard error stay on one line.
"""

from __future__ import annotations

import posixpath
import re

REPOSITORY = "https://github.com/bayesgrad/bayesgrad/blob/main"
ON_THE_SITE = {"examples/README.md": "docs/gallery/index.rst", "examples/papers/README.md": "docs/gallery/index.rst"}


def linked(names: str) -> str:
    """The text of api.md with a link for each name that has a page of its own."""
    parts = re.split(r"^(## `bayesgrad[\w.]*`)$", names, flags=re.MULTILINE)
    for i in range(1, len(parts), 2):
        module = parts[i].strip("# `").removeprefix("bayesgrad.")
        page = rf"| [`\1`](reference/{module}.\1.rst) |"
        parts[i + 1] = re.sub(r"^\| `(\w+)` \|", page, parts[i + 1], flags=re.MULTILINE)
    return "".join(parts)


def rewrite(app, docname: str, source: list[str]) -> None:
    """Sphinx's event source-read."""
    folder = posixpath.dirname(f"docs/{docname}")

    def target(found: re.Match) -> str:
        path = posixpath.normpath(posixpath.join(folder, found[1]))
        if path in ON_THE_SITE:
            return f"]({posixpath.relpath(ON_THE_SITE[path], folder)})"
        return found[0] if path.startswith("docs/") else f"]({REPOSITORY}/{path}{found[2] or ''})"

    source[0] = re.sub(r"(?<=\d) ± (?=\d)", "\u00a0±\u00a0", source[0])
    if docname == "api":
        source[0] = linked(source[0])
    if docname == "results/README":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\nclaims\n*\n```\n"
    source[0] = re.sub(r"\]\((\.\./[^)#\s]+)(#[^)\s]+)?\)", target, source[0])


def link_figures(app, doctree, docname: str) -> None:
    """Sphinx's event doctree-resolved."""
    from docutils import nodes  # comes with Sphinx, which tests of `linked` do not need

    for image in list(doctree.findall(nodes.image)):
        if image["uri"] in app.env.images and isinstance(image.parent, (nodes.paragraph, nodes.section)):
            file = f"_images/{app.env.images[image['uri']][1]}"
            link = nodes.reference("", "", refuri=posixpath.relpath(file, posixpath.dirname(docname) or "."))
            image.replace_self(link)
            link += image
