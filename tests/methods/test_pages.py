"""The page of a method tells the truth about its options: the defaults in its table are those of the code."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from polyfed import methods
from polyfed.cli.listing import PAGES as BESIDE
from polyfed.cli.listing import UNTOLD

PAGES = Path(__file__).parents[2] / "docs" / "methods"
COST = re.search(r'^COST = r"(.*)"  #', (PAGES.parent / "_site" / "hooks.py").read_text(), re.M)[1]
WORDS = {"none": None, "the run's": None, "true": True, "on": True, "false": False, "off": False}
TABLES = sorted(p.stem for p in PAGES.glob("*.md") if "| field | default |" in p.read_text().lower())


def rows(page):
    """Yield the names and the default cell of every row of the table of options."""
    table = re.search(r"^\| field \| default .*?(?:\n\n|\Z)", (PAGES / f"{page}.md").read_text(), re.I | re.M | re.S)
    for line in table.group().strip().splitlines()[2:]:
        names, default = re.split(r"(?<!\\)\|", line)[1:3]
        yield re.findall(r"`(\w+)`", names), default.strip()


def values(text):
    """Return `1e-3, none, adam` as values."""
    found = []
    for word in text.split(","):
        word = word.strip().strip("`")
        try:
            found.append(WORDS[word] if word in WORDS else float(word))
        except ValueError:
            found.append(word)
    return found


def told(page):
    """Yield (method, field, value) for all that the table says, also of a second method in brackets."""
    for names, cell in rows(page):
        if not cell or "as in" in cell or "..." in cell:
            continue
        plain, *others = re.split(r"\(`(\w+)`: ([^)]*)\)", cell)
        for method, text in ((page, plain), (others[0], others[1]) if others else (page, plain)):
            each = values(text)
            each = each * len(names) if len(each) == 1 else each
            if len(each) == len(names):  # "by epochs, 1" is a sentence
                yield from ((method, name, value) for name, value in zip(names, each, strict=True))


@pytest.mark.parametrize("page", TABLES)
def test_defaults_on_a_page_are_those_of_the_code(page):
    checked = 0
    for method, name, value in told(page):
        defaults = {field.name: field.default for field in fields(methods.registry()[method])}
        if name not in defaults or (isinstance(value, str) and not isinstance(defaults[name], str)):
            continue  # of another method of this page, or in words
        nothing = value is None or value is False  # `none`, or `off`
        assert defaults[name] == value or (nothing and defaults[name] in (None, "none")), f"{method}.{name}"
        checked += 1
    assert checked


@pytest.mark.parametrize("page", [page for page in TABLES if "\n## Idea" in (PAGES / f"{page}.md").read_text()])
def test_a_page_has_all_its_parts_and_all_options_of_the_method_itself(page):
    text = (PAGES / f"{page}.md").read_text()
    assert re.findall(r"^## (.*)$", text, re.M)[:3] == ["Idea", "Run it", "Hyper-parameters"]
    assert {"Cost", "Deviations"} <= set(re.findall(r"^## (.*)$", text, re.M))
    idea = text.partition("## Run it")[0]
    assert re.search(r"```.*[─►◄→←].*```", idea, re.S), "a picture of what travels"
    kind = methods.registry()[page]
    own = {name for name in vars(kind).get("__annotations__", {}) if name in {field.name for field in fields(kind)}}
    known = {name for names, _ in rows(page) for name in names} | set(re.findall(r"`(\w+)`", text))
    assert own <= known, f"not on the page: {own - known}"


@pytest.mark.parametrize("name", sorted(set(methods.registry()) - set(UNTOLD)))
def test_every_option_of_a_method_is_explained_on_its_page(name):
    """Also those that it has from another method, by name: nobody has to look them up in the code."""
    text = (PAGES / f"{BESIDE.get(name, name)}.md").read_text()
    section = re.search(r"^## Hyper-parameters.*?(?=^## )", text, re.M | re.S)
    told = re.findall(r"`([^`\n]+)`", section.group() if section else text)
    known = {word for code in told for word in re.findall(r"\w+", code)}
    missing = [field.name for field in fields(methods.registry()[name]) if field.name not in known]
    assert not missing, f"not on the page: {missing}"


def test_the_list_of_methods_says_of_each_what_its_class_says():
    text = (PAGES / "README.md").read_text()
    listed = re.findall(r"^\| \[?`(\w+)`(?:\]\(\w+\.md\))? \| `pf\.(\w+)` \| (.*?) \| (.*?) \|$", text, re.M)
    known = {name: (kind.__name__, kind.paper, kind.sends) for name, kind in methods.registry().items()}
    assert {name: tuple(more) for name, *more in listed} == known


@pytest.mark.parametrize("page", sorted(p.stem for p in PAGES.glob("*.md") if p.stem != "README"))
def test_a_page_says_how_to_run_the_method_and_what_it_costs(page):
    """In bytes: by the formulas of the class, which the site shows in place of this line."""
    text = (PAGES / f"{page}.md").read_text()
    assert "```sh\npolyfed run" in text
    line = f"The bytes of an exchange, as formulas of the class: `polyfed methods {page}`."
    assert f"\n## Cost\n\n{line}\n\n" in text
    assert methods.registry()[page].traffic
    assert re.fullmatch(COST, line), "the site would not replace it"
    cost = text.partition("\n## Cost\n")[2].partition("\n## ")[0]
    assert re.search(r"[Ss]tacked\s+by\s+the\s+`batched`\s+engine", cost), "whether many clients train as one program"
