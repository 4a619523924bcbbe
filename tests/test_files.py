"""A newcomer finds the file to open: docs/explanation/how-it-works.md names what there is, and nothing else."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "polyfed"
PAGE = (ROOT / "docs" / "explanation" / "how-it-works.md").read_text().partition("## Which file")[2]


def test_every_part_of_the_package_is_on_the_page():
    parts = {f"{path.name}/" for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    parts |= {path.name for path in PACKAGE.glob("*.py") if not path.name.startswith("__")}
    assert parts and not [part for part in sorted(parts) if f"`{part}`" not in PAGE]


def test_every_file_on_the_page_is_there():
    there = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")}
    names = {Path(path).name for path in there}
    found = [name for name in re.findall(r"`([\w/]+\.py)`", PAGE) if "NAME" not in name]
    assert len(found) > 40
    assert not [name for name in found if name not in (there if "/" in name else names)]


def test_every_file_says_what_it_holds():
    silent = [path for path in PACKAGE.rglob("*.py") if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent
