"""Every example and every Python block of the documentation runs."""

import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


def blocks(page):
    """The Python blocks of a page; one that starts with `# not run` only shows a shape."""
    found = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [block for block in found if not block.startswith("# not run")]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_and_learns(example, tmp_path, monkeypatch, capsys):
    """What it prints is far above guessing, which is right once in ten digits or once in two findings."""
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(example), run_name="__main__")
    printed = re.search(r"^alone (\S+)%, together (\S+)%$", capsys.readouterr().out, re.MULTILINE)
    learned = 65.0 if example.stem == "own_data" else 40.0
    assert float(printed[2]) > learned


def test_the_command_of_the_own_method_runs_as_printed():
    """From the root of the repository, with nothing on the path that the installed command does not have."""
    line = re.search(r"^polyfed (run .*)$", (ROOT / "examples" / "own_method.py").read_text(), re.MULTILINE)[1]
    command = [
        sys.executable,
        "-P",
        "-c",
        "from polyfed.cli import main; main()",
        *shlex.split(line),
        "--json",
        "--quiet",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["accuracy"]["mean"] > 0.3


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda path: path.stem)
def test_page(page, tmp_path, monkeypatch):
    """The blocks of a page run in order, in one namespace, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for number, block in enumerate(blocks(page), 1):
        exec(compile(block, f"{page.name} block {number}", "exec"), namespace)


def test_every_public_name_is_in_the_documentation():
    import polyfed

    text = "\n".join(page.read_text() for page in PAGES)
    missing = [name for name in polyfed.__all__ if not re.search(rf"\b{name}\b", text)]
    assert not missing, f"not mentioned in any page: {missing}"


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_the_project_names_no_machine_paths():
    for page in PAGES:
        assert not re.search(r"(?<![\w.])/(work|root|tmp)/", page.read_text()), page
