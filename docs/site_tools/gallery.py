"""The gallery: every example with what it printed and drew; `make gallery` runs those that changed.

Outputs are kept in docs/gallery, under version control: some examples train for a minute, need packages that the site
does not, or start processes, and a build of the site should take seconds and no more than Sphinx. A record begins with
a hash of the script and of the modules beside it that it imports; a test compares the hashes, and a slow one runs the
papers' scripts.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

from api_pages import escaped

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "docs/gallery"
GROUPS = {"task": "Tasks", "training loop": "Training loops and processes", "script": "The five papers"}
DRAWN = "figure.png"


def examples() -> list[Path]:
    """The scripts of examples/ and examples/papers/; a module that others import has no __main__."""
    scripts = [p for p in sorted((ROOT / "examples").glob("*.py")) if "__main__" in p.read_text(encoding="utf-8")]
    return [*sorted((ROOT / "examples/papers").glob("*.py")), *scripts]


def groups() -> dict[str, list[Path]]:
    """Title -> scripts, as the tables of the two README.md list them; the first heading of a table says which it is."""
    found: dict[str, list[Path]] = {title: [] for title in GROUPS.values()}
    title = ""
    for page in (ROOT / "examples/README.md", ROOT / "examples/papers/README.md"):
        for row in re.findall(r"^\| .*$", page.read_text(encoding="utf-8"), re.MULTILINE):
            first = row.split("|")[1].strip()
            title = GROUPS.get(first, title)
            found[title] += [page.parent / name for name in re.findall(r"\]\((\w+\.py)\)", first)]
    return found


def docstring(script: Path) -> list[str]:
    """Its paragraphs; the first is one sentence."""
    return (ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "").split("\n\n")


def beside(script: Path) -> list[Path]:
    """The modules of examples/ that the script imports."""
    names = re.findall(r"^(?:from|import) (\w+)", script.read_text(encoding="utf-8"), re.MULTILINE)
    return [path for name in sorted(set(names)) if (path := script.parent / f"{name}.py").exists()]


def hash_of(script: Path) -> str:
    """Of the script and of the modules beside it."""
    parts = [path.read_text(encoding="utf-8") for path in (script, *beside(script))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def record_of(script: Path) -> Path:
    return RECORDS / f"{script.stem}.txt"


def is_current(script: Path) -> bool:
    record = record_of(script)
    return record.exists() and record.read_text(encoding="utf-8").partition("\n")[0] == hash_of(script)


def command(script: Path) -> list[str]:
    """That of its docstring, if it has one for torchrun; `--small` where the script has that option."""
    text = script.read_text(encoding="utf-8")
    launched = re.search(r"^ +torchrun (.*) examples/", text, re.MULTILINE)
    if launched:
        return [sys.executable, "-m", "torch.distributed.run", *launched[1].split(), str(script)]
    return [sys.executable, __file__, str(script), *(["--small"] if re.search(r"\bsmall\(\)|--small", text) else [])]


def run(script: Path, folder: Path) -> str:
    """What the script prints, started in an empty folder, where its figures are left."""
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "MPLBACKEND": "Agg"}
    done = subprocess.run(
        command(script), capture_output=True, text=True, env=os.environ | quiet, cwd=folder, timeout=900, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{script.name} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return "".join(line.rpartition("\r")[2] + "\n" for line in done.stdout.splitlines() if line.strip())


def record(script: Path) -> None:
    """Runs the script and keeps what it printed and drew."""
    with tempfile.TemporaryDirectory() as folder:
        printed = run(script, Path(folder))
        drawn = Path(folder) / DRAWN
        if drawn.exists():
            (RECORDS / f"{script.stem}.png").write_bytes(drawn.read_bytes())
    record_of(script).write_text(f"{hash_of(script)}\n{printed}", encoding="utf-8")


def run_here(script: Path) -> None:
    """In this process: figures that are open at the end are saved."""
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *sys.argv[2:]]
    runpy.run_path(str(script), run_name="__main__")
    if "matplotlib.pyplot" in sys.modules:
        import matplotlib.pyplot as plt

        if plt.get_fignums():
            plt.gcf().savefig(DRAWN, dpi=130)


def write_pages(folder: Path) -> None:
    """A page for each example and one with all of them, in docs/gallery; called by Sphinx."""
    place = folder / "gallery"
    cards: dict[str, str] = dict.fromkeys(GROUPS.values(), "")
    for group, script in ((group, script) for group, scripts in groups().items() for script in scripts):
        sentence, *more = docstring(script)
        title, _, rest = sentence.partition(": ")
        lead = escaped(" ".join((rest or sentence).split()))
        lead = lead[0].upper() + lead[1:]
        title = title if rest else script.stem.replace("_", " ")
        picture = f"{script.stem}.png" if (place / f"{script.stem}.png").exists() else None
        image = f".. image:: {picture}\n   :alt: {title}\n\n" if picture else ""
        known = record_of(script).read_text(encoding="utf-8").partition("\n")[2] if record_of(script).exists() else ""
        printed = "".join(f"   {line}\n" for line in known.splitlines())
        output = f"It printed:\n\n.. code-block:: text\n   :class: printed\n\n{printed}\n" if printed else ""
        words = "\n\n".join(escaped(paragraph.rstrip()) for paragraph in more)
        words = re.sub(r"^( +)((?:torchrun|python) .*)$", r".. code-block:: sh\n\n\1\2", words, flags=re.MULTILINE)
        words = re.sub(r"\[([^]]+)\]\((?:\.\./)*docs/([^)]+)\.md\)", r":doc:`\1 </\2>`", words)
        path = script.relative_to(ROOT).as_posix()
        modules = [module.relative_to(ROOT).as_posix() for module in beside(script)]
        needed = f", which imports {' and '.join(f'``{module}``' for module in modules)}" if modules else ""
        folded = "".join(
            f"\n.. dropdown:: {module}\n\n   .. literalinclude:: ../../{module}\n      :language: python\n"
            for module in modules
        )
        (place / f"{script.stem}.rst").write_text(
            f"{title}\n{'=' * len(title)}\n\n{lead}\n\n{words}\n\n{image}{output}"
            f"``{path}``{needed}:\n\n.. literalinclude:: ../../{path}\n   :language: python\n{folded}",
            encoding="utf-8",
        )
        shown = f"   .. image:: {picture}\n      :alt: {title}\n\n" if picture else ""
        card = f".. grid-item-card:: {title}\n   :link: {script.stem}\n   :link-type: doc\n\n   {lead}\n\n{shown}"
        cards[group] += "".join(f"   {line}\n" if line else "\n" for line in card.splitlines())
    text = "Gallery\n=======\n\nEvery example was run; its page has the code, what it printed and what it drew. "
    text += "Run them from a checkout of the repository.\n\n"
    for title, shown in cards.items():
        text += f"{title}\n{'-' * len(title)}\n\n.. grid:: 1 2 2 2\n   :gutter: 3\n\n{shown}\n"
    names = "".join(f"   {script.stem}\n" for scripts in groups().values() for script in scripts)
    (place / "index.rst").write_text(f"{text}.. toctree::\n   :hidden:\n\n{names}", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_here(Path(sys.argv[1]))
    else:
        for script in (script for script in examples() if not is_current(script)):
            print(script.relative_to(ROOT), flush=True)
            record(script)
