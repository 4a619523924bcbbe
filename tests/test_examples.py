"""Every example and every Python block of the documentation runs."""

import importlib
import json
import re
import runpy
import shlex
import subprocess
import sys

import pytest

from pages import PAGES, ROOT, name_of, python

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


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


@pytest.mark.pages
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_and_learns(example, tmp_path, monkeypatch, capsys, fewer_digits):
    """What it prints is far above guessing, which is right once in ten digits or once in two findings."""
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(example), run_name="__main__")
    printed = re.search(r"^alone (\S+)%, together (\S+)%$", capsys.readouterr().out, re.MULTILINE)
    learned = 65.0 if example.stem == "own_data" else 40.0
    assert float(printed[2]) > learned


@pytest.mark.pages
def test_the_command_of_the_own_method_runs_as_printed():
    """From the root of the repository, with nothing on the path that the installed command does not have.

    As printed, but for the length: that the example learns is seen above.
    """
    line = re.search(r"^polyfed (run .*)$", (ROOT / "examples" / "own_method.py").read_text(), re.MULTILINE)[1]
    short = ["--limit", "600", "--rounds", "4", "--json", "--quiet"]
    assert json.loads(command(ROOT, *shlex.split(line), *short))["accuracy"]["mean"] > 0.2


@pytest.mark.pages
@pytest.mark.parametrize("page", [page for page in PAGES if python(page)], ids=name_of)
def test_page(page, tmp_path, monkeypatch, fewer_digits):
    """The blocks of a page run in order, in one namespace, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for number, block in enumerate(python(page), 1):
        exec(compile(block, f"{page.name} block {number}", "exec"), namespace)


@pytest.fixture
def site(monkeypatch):
    """The folder of what generates the site, on the path."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "_site")


def test_every_public_name_is_in_the_reference(site):
    """The site's pages are made from the stub; its build fails where one is not found."""
    import names

    import polyfed

    text = "".join(names.pages().values())
    for name in polyfed.__all__:
        path = names.public()[name]
        assert f"::: {path}\n" in text
        module, _, attribute = path.rpartition(".")
        assert getattr(importlib.import_module(module), attribute) is getattr(polyfed, name)


def test_names_that_share_a_description_keep_their_types_in_the_reference(site):
    """The reader of docstrings gave `training` the type and default of `rounds`, where both stand in one line."""
    griffe = pytest.importorskip("griffe")
    from grouped import Apart

    made = griffe.load(
        "polyfed.api", search_paths=[ROOT / "src"], docstring_parser="numpy", extensions=griffe.load_extensions(Apart)
    )
    parameters = next(part for part in made["run"].docstring.parsed if part.kind.value == "parameters").value
    told = {one.name: (str(one.annotation), one.value) for one in parameters}
    assert told["rounds"] == ("int", "10") and told["training"] == ("Training | None", "None")


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
