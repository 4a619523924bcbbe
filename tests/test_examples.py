"""Every example and every Python block of the documentation runs."""

import importlib
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


def command(folder, *words):
    """Run `polyfed` as the installed command, without the current folder on the path; return what it prints."""
    start = [sys.executable, "-P", "-c", "from polyfed.cli import main; main()"]
    done = subprocess.run([*start, *words], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout


@pytest.fixture
def fewer_digits(monkeypatch):
    """Less than half of the digits, where no other number is asked for: enough to see that all runs, and learns."""
    from polyfed.data import sources

    subset = sources.subset

    def fewer(data, limit, seed):
        return subset(data, (600, 150) if limit is None and data.name == "digits" else limit, seed)

    monkeypatch.setattr(sources, "subset", fewer)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_and_learns(example, tmp_path, monkeypatch, capsys, fewer_digits):
    """What it prints is far above guessing, which is right once in ten digits or once in two findings."""
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(example), run_name="__main__")
    printed = re.search(r"^alone (\S+)%, together (\S+)%$", capsys.readouterr().out, re.MULTILINE)
    learned = 65.0 if example.stem == "own_data" else 40.0
    assert float(printed[2]) > learned


def test_the_command_of_the_own_method_runs_as_printed():
    """From the root of the repository, with nothing on the path that the installed command does not have.

    As printed, but for the length: that the example learns is seen above.
    """
    line = re.search(r"^polyfed (run .*)$", (ROOT / "examples" / "own_method.py").read_text(), re.MULTILINE)[1]
    short = ["--limit", "600", "--rounds", "4", "--json", "--quiet"]
    assert json.loads(command(ROOT, *shlex.split(line), *short))["accuracy"]["mean"] > 0.2


@pytest.mark.long
def test_the_commands_of_the_readme_run_in_their_order(tmp_path):
    """As printed, but for the length of the comparison."""
    section = (ROOT / "README.md").read_text().partition("## The command line")[2]
    lines = re.search(r"```\n(.*?)```", section, re.DOTALL)[1].splitlines()
    shorter = {"compare": ["--set", "rounds=1", "--seeds", "1"]}
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    for line in lines:
        name, *words = shlex.split(line)
        assert name == "polyfed"
        assert command(tmp_path, *words, *shorter.get(words[0], []))
    assert (
        len(lines) == 10
        and (tmp_path / "fused.safetensors").is_file()
        and (tmp_path / "runs" / "cmp" / "report.html").is_file()
    )


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda path: path.stem)
def test_page(page, tmp_path, monkeypatch, fewer_digits):
    """The blocks of a page run in order, in one namespace, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for number, block in enumerate(blocks(page), 1):
        exec(compile(block, f"{page.name} block {number}", "exec"), namespace)


def commands(page):
    """The lines of the `bash` blocks of a page: cheap, and run; other commands (`sh`, plain) are only shown."""
    found = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in found for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda path: path.stem)
def test_commands_of_a_page(page, tmp_path, monkeypatch):
    """In their order, in one folder, as a reader would type them."""
    from typer.testing import CliRunner

    from polyfed.cli import app

    monkeypatch.chdir(tmp_path)
    for line in commands(page):
        name, *words = shlex.split(line)
        assert name == "polyfed", line
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0 and done.output, (line, done.output, done.exception)


def test_every_public_name_is_in_the_reference():
    """The site's pages are made from the stub; its build fails where one is not found."""
    import polyfed

    sys.path.insert(0, str(ROOT / "docs" / "_site"))
    try:
        import names
    finally:
        sys.path.pop(0)
    text = "".join(names.pages().values())
    for name in polyfed.__all__:
        path = names.public()[name]
        assert f"::: {path}\n" in text
        module, _, attribute = path.rpartition(".")
        assert getattr(importlib.import_module(module), attribute) is getattr(polyfed, name)


def test_every_public_name_is_in_the_documentation():
    import polyfed

    text = "\n".join(page.read_text() for page in PAGES)
    missing = [name for name in polyfed.__all__ if not re.search(rf"\b{name}\b", text)]
    assert not missing, f"not mentioned in any page: {missing}"


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target and not target.startswith("gallery/"):  # made when the site is built
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_the_project_names_no_machine_paths():
    for page in PAGES:
        assert not re.search(r"(?<![\w.])/(work|root|tmp)/", page.read_text()), page
