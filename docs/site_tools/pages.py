"""Pages as GitHub shows them become pages of the site: links to files outside of docs/ lead to the repository."""

from __future__ import annotations

import posixpath
import re

REPOSITORY = "https://github.com/bayesgrad/bayesgrad/blob/main"
ON_THE_SITE = {"examples/README.md": "docs/gallery/index.rst", "examples/papers/README.md": "docs/gallery/index.rst"}


def rewrite(app, docname: str, source: list[str]) -> None:
    """Sphinx's event source-read."""
    folder = posixpath.dirname(f"docs/{docname}")

    def target(found: re.Match) -> str:
        path = posixpath.normpath(posixpath.join(folder, found[1]))
        if path in ON_THE_SITE:
            return f"]({posixpath.relpath(ON_THE_SITE[path], folder)})"
        return found[0] if path.startswith("docs/") else f"]({REPOSITORY}/{path}{found[2] or ''})"

    if docname == "results/README":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\nclaims\n*\n```\n"
    source[0] = re.sub(r"\]\((\.\./[^)#\s]+)(#[^)\s]+)?\)", target, source[0])
