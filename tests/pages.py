"""The code blocks of the documentation: which there are, which run, and why the others do not."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
WHY_NOT = re.compile(r"<!-- not run: (.+) -->")
PROGRAMS = {"polyfed", "python", "pip", "make", "torchrun", "srun", "sbatch"}


class Block(NamedTuple):
    """A fenced block: its language, its text, and why it is not run (empty: it is)."""

    language: str
    text: str
    why_not: str


def blocks(page):
    """The fenced blocks of a page, in their order; the line above one may say `<!-- not run: REASON -->`."""
    found, language, inside, above = [], None, [], ""
    for line in page.read_text().splitlines():
        if language is None and line.startswith("```"):
            language, inside = line[3:].strip(), []
        elif language is not None and line == "```":
            why = WHY_NOT.fullmatch(above)
            found.append(Block(language, "\n".join([*inside, ""]), why[1] if why else ""))
            language, above = None, ""
        elif language is not None:
            inside.append(line)
        else:
            above = line
    return found


def python(page):
    """The Python blocks of a page; one that starts with `# not run` only shows a shape."""
    found = [block.text for block in blocks(page) if block.language == "python"]
    return [text for text in found if not text.startswith("# not run")]


def commands(text):
    """The words of each command in a block, without comments; a line that ends with a backslash goes on."""
    lines = text.replace("\\\n", " ").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def name_of(page):
    """The page as tests name it."""
    return str(page.relative_to(ROOT).with_suffix("")).removeprefix("docs/")
