"""Every command in the documentation is spelled right, and runs: as printed, but for its length.

A block that no machine of ours can run says so in the page's source, above the block: `<!-- not run: REASON -->`.
"""

import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import click
import pandas
import pytest
import typer.main
from typer.testing import CliRunner

from pages import PAGES, PROGRAMS, ROOT, blocks, commands, name_of, python
from polyfed.cli import app

REASONS = {  # what a block may be left out for, and by how many blocks it is
    "installs": 4,
    "sets up an environment": 1,
    "several terminals": 8,
    "hours": 2,
    "up to hours": 1,
    "half an hour": 1,
    "wants an idle machine": 1,
    "needs a GPU": 1,
    "starts processes": 1,
    "needs a SLURM cluster": 1,
}
LONG = re.compile(r"(method\.\w*(?:epochs|steps|rounds|samples_per_class))=\d+")
SHORTER = {"--rounds": 1, "--epochs": 1, "--seeds": 1, "--limit": 150, "--public": 50}


def shells(page):
    return [block for block in blocks(page) if block.language == "sh"]


def shortened(words):
    """A run or a comparison that takes about a second."""
    if words[1] not in ("run", "compare", "resume"):
        return words
    words = [LONG.sub(r"\1=1", word) for word in words]
    for option, most in SHORTER.items():
        if option in words and words[1] != "resume":
            place = words.index(option) + 1
            words[place] = str(min(int(words[place]), most))
    if words[2].endswith(".toml"):
        words += ["--set", "rounds=1", "--seeds", "1"]
    elif words[1] == "run" and "--limit" not in words:
        words += ["--limit", "150"]
    return words


def polyfed(*words):
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and done.output, (words, done.output, done.exception)


def two_hospitals():
    """What sites of the CSV page have: tables of their own, what one of them tells, and a model."""
    namespace = {}
    for block in python(ROOT / "docs" / "how-to" / "from-csv-to-prediction.md"):
        exec(block, namespace)
    rows = pandas.read_csv("patients.csv")
    for hospital in ("north", "south"):
        rows[rows["hospital"] == hospital].drop(columns="hospital").to_csv(f"{hospital}.csv", index=False)
    rows[:3].to_csv("new.csv", index=False)
    polyfed("form", "tell", "south.csv", "--label", "finding", "--out", "south-form.json")
    Path("north").mkdir()
    polyfed("export", "runs/try/fedgh/seed-0", "--client", "north", "--out", "north/north.safetensors")


def two_runs():
    for method in ("local", "fedavg"):
        options = ["--data", "digits", "--limit", "150", "--clients", "2", "--models", "mlp:1x8", "--rounds", "1"]
        polyfed("run", "--method", method, *options, "--out", f"runs/{'ab'[method == 'fedavg']}")
    polyfed("compare", "--methods", "fedavg", "--seeds", "1", *options, "--out", "runs/cmp")


def a_checkpoint():
    polyfed("run", "--data", "digits", "--limit", "150", "--clients", "1", "--models", "mlp:2x64", "--out", "runs/n")
    shutil.copy("runs/n/models/client-0.safetensors", "north.safetensors")


def a_request():
    """A new key of a site that the page's first command lets in."""
    polyfed("keys", "request", "again", "--name", "north")
    shutil.copy("again/north.request", "new.request")


PREPARED = {
    "how-to/from-csv-to-prediction": two_hospitals,
    "how-to/read-the-report": two_runs,
    "how-to/your-models": a_checkpoint,
    "how-to/real-federation": a_request,
}
LEFT = {
    "README": ["fused.safetensors", "runs/cmp/report.html"],
    "how-to/from-csv-to-prediction": ["form.json", "predicted.csv", "north.onnx"],
    "how-to/read-the-report": ["both.html", "runs/cmp/report.html"],
}


@pytest.fixture
def fashion(tmp_path, monkeypatch):
    """Noise under the name of a set that would be downloaded."""
    from data.image_tables import image_table

    folder = tmp_path / "sets" / "fashion_mnist"
    folder.mkdir(parents=True)
    for split, count in (("train", 60), ("test", 30)):
        image_table(count, classes=10, size=(28, 28))[0].to_parquet(folder / f"{split}.parquet")
    monkeypatch.setenv("POLYFED_DATA", str(folder.parent))


def cases():
    """Pages with commands."""
    for page in PAGES:
        if any(not block.why_not for block in shells(page)):
            yield pytest.param(page, id=name_of(page))


@pytest.mark.pages
@pytest.mark.filterwarnings("ignore:The networks given as")  # which the page of your models tells beforehand
@pytest.mark.parametrize("page", list(cases()))
def test_commands_run(page, tmp_path, monkeypatch, fashion):
    """In their order, in one folder, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    PREPARED.get(name_of(page), lambda: None)()
    for block in shells(page):
        for program, *words in [] if block.why_not else commands(block.text):
            assert program == "polyfed", f"say why this is not run: {program} {words}"
            polyfed(*shortened(["polyfed", *words])[1:])
    missing = [name for name in LEFT.get(name_of(page), ()) if not Path(name).is_file()]
    assert not missing, f"promised by the page: {missing}"


@pytest.mark.parametrize("page", [page for page in PAGES if shells(page)], ids=name_of)
def test_commands_are_spelled_right(page):
    """Also those that are not run: options, modules, targets and extras exist."""
    for block in shells(page):
        for words in commands(block.text):
            if words[0] == "srun":
                words = words[1:]
            if words[0] == "torchrun":  # it starts a module, as python does
                words = words[words.index("-m") + 1 :]
                words = words if words[0] == "polyfed" else ["python", "-m", *words]
            if words[0] == "polyfed":
                parsed(words[1:])
            elif words[:2] == ["python", "-m"]:
                assert find_spec(words[2]), words
            elif words[0] == "python":
                assert (ROOT / words[1]).is_file(), words
            elif words[0] == "make":
                assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
            elif words[0] == "pip":
                extras = (ROOT / "pyproject.toml").read_text()
                assert all(f"\n{extra} = [" in extras for extra in re.findall(r"\[(\w+)\]", " ".join(words))), words
            else:
                assert words[0].startswith("head="), f"a program that this test does not know: {words}"


def parsed(words):
    """Read a command without running it."""
    group = typer.main.get_command(app)
    context = group.make_context("polyfed", list(words), resilient_parsing=words[:1] in (["--help"], ["--version"]))
    while isinstance(group, click.Group) and words:
        name, group, words = group.resolve_command(context, list(words)) if words[0][0] != "-" else ("", None, [])
        if group is not None:
            inner = list(words)
            context = group.make_context(name, list(words), parent=context, resilient_parsing=not inner)


def test_a_block_with_commands_says_so():
    """Else nobody would run it."""
    for page in PAGES:
        for block in blocks(page):
            first = {line.split()[0] for line in block.text.splitlines() if line.strip() and not line.startswith(" ")}
            if block.language not in ("sh", "python"):
                assert not first & PROGRAMS, f"{name_of(page)}: a block with commands is not marked sh: {block.text}"


def test_what_is_not_run_has_a_known_reason():
    found = [block.why_not.partition(":")[0] for page in PAGES for block in blocks(page) if block.why_not]
    assert {reason: found.count(reason) for reason in set(found)} == REASONS
