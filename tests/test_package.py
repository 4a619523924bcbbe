"""The wheel and the sdist, in an environment that has nothing else of ours."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def call(*words, **more):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, **more)
    assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Wheel (made from the sdist) and sdist."""
    pytest.importorskip("build")
    out = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT)
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"))


@pytest.mark.long
def test_the_wheel_holds_what_it_needs_and_nothing_else(built):
    wheel, sdist = built
    names = zipfile.ZipFile(wheel).namelist()
    wanted = ["report/page.html", "report/page.css", "report/page.js", "__init__.pyi", "py.typed"]
    assert {f"polyfed/{name}" for name in wanted} <= set(names)
    assert all(name.startswith(("polyfed/", "polyfed-")) for name in names)
    with tarfile.open(sdist) as archive:
        inside = archive.getnames()
    for wanted in ("CITATION.cff", "SECURITY.md", "mkdocs.yml", "tests/test_package.py", "notebooks/own-models.ipynb"):
        assert any(name.endswith(f"/{wanted}") for name in inside), wanted
    assert not any("/.venv/" in name or "/build/" in name for name in inside)


@pytest.mark.long
def test_the_demo_runs_from_the_wheel_outside_of_the_repository(built, tmp_path):
    """Dependencies are those of this environment (its folder is on the path, but none of its own .pth files)."""
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    own = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (own / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    call(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", built[0], env=clean)
    where = call(python, "-c", "import polyfed; print(polyfed.__file__)", cwd=tmp_path, env=clean).strip()
    assert Path(where).is_relative_to(home)
    shown = call(home / "bin" / "polyfed", "demo", "--rounds", "1", "--quiet", cwd=tmp_path, env=clean)
    assert "fedproto" in shown and (tmp_path / "runs" / "demo" / "report.html").stat().st_size > 1_000_000
    assert "polyfed 0." in call(home / "bin" / "polyfed", "--version", cwd=tmp_path, env=clean)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_wheel_and_sdist_install_in_an_empty_environment(built, tmp_path):
    """Dependencies come from the package index, at the versions of constraints.txt: `make package`."""
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    pip = [home / "bin" / "python", "-m", "pip", "install", "-qq", "--no-compile", "--disable-pip-version-check"]
    call(*pip, "-c", ROOT / "constraints.txt", built[0], env=clean)
    call(home / "bin" / "python", "-m", "pip", "check", env=clean)
    for archive in built:
        call(*pip, "--no-deps", "--force-reinstall", archive, env=clean)
        shown = call(home / "bin" / "polyfed", "demo", "--rounds", "1", "--quiet", cwd=tmp_path, env=clean)
        assert "fedproto" in shown and (tmp_path / "runs" / "demo" / "report.html").stat().st_size > 1_000_000
        shutil.rmtree(tmp_path / "runs")


def test_the_readme_works_on_a_package_index():
    """Links there are absolute or none."""
    text = (ROOT / "README.md").read_text()
    assert not [t for t in re.findall(r"\]\(([^)]+)\)", text) if not t.startswith(("https://", "#"))]
    assert "pip install polyfed" in text and "polyfed demo" in text


def test_every_extra_is_told_by_the_install_page_and_by_the_doctor():
    from polyfed.cli.doctor import EXTRAS

    extras = set(project()["optional-dependencies"])
    told = set(re.findall(r"`polyfed\[(\w+)\]`", (ROOT / "docs" / "how-to" / "install.md").read_text()))
    assert told == extras and set(EXTRAS) == extras - {"docs", "dev"}


def test_versions_agree():
    import polyfed

    cited = (ROOT / "CITATION.cff").read_text()
    assert project()["version"] == polyfed.__version__ and f"version: {polyfed.__version__}\n" in cited
