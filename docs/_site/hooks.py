"""What the site generates: the API reference, a glance at every method, gallery, notebooks, and pages from the root."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))

import gallery  # noqa: E402
import glance  # noqa: E402
import names  # noqa: E402

FROM_ROOT = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
DIRECTORIES = ("methods", "reproductions", "reference", "decisions", "notebooks")
COST = r"^The bytes of an exchange, as formulas of the class: .*$"  # what the site shows in its place
OUTSIDE = r"\[([^\]]+)\]\((?:\.\./)+results[^)]*\)"  # measured figures: the repository has them, the site has not
ALONE = ("README.md", "gallery.md")  # pages beside which there is nothing to choose from


def on_config(config: Any) -> Any:
    """Put the pages of a directory into the navigation where mkdocs.yml names the directory."""
    config.nav = _expanded(config.nav)
    return config


def _expanded(items: list[Any]) -> list[Any]:
    found = []
    for item in items:
        title, value = next(iter(item.items()))
        if isinstance(value, list):
            value = _expanded(value)
        elif value.rstrip("/") in DIRECTORIES:
            value = _pages(value.rstrip("/"))
        found.append({title: value})
    return found


def _pages(folder: str) -> list[str]:
    made = {"methods": glance.generated(), "reference": names.pages(), "notebooks": notebooks()}.get(folder, {})
    there = {f"{folder}/{path.name}" for path in (ROOT / "docs" / folder).glob("*.md")} | set(made)
    return sorted(there, key=lambda name: (not name.endswith("README.md"), name))


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    made = {**names.pages(), **glance.generated(), **notebooks()}
    for source, target in FROM_ROOT.items():
        made[target] = _moved((ROOT / source).read_text())
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    for report in gallery.reports():
        files.append(File.generated(config, f"gallery/{report.stem}.html", abs_src_path=str(report)))
    return files


def notebooks() -> dict[str, str]:
    """Return the notebooks as pages: text and code, without outputs, which they are kept without."""
    made = {}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        parts = []
        for cell in json.loads(path.read_text())["cells"]:
            text = "".join(cell["source"])
            parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        parts.append(f"*The notebook itself: `notebooks/{path.name}` in the repository; the tests run it.*")
        made[f"notebooks/{path.stem}.md"] = "\n\n".join(parts) + "\n"
    return made


def _moved(text: str) -> str:
    """Return a page of the root with links as they are from the site's root."""
    text = re.sub(r"\]\(docs/", "](", text)
    text = re.sub(r"\]\((decisions|methods)/?\)", r"](\1/README.md)", text)
    return re.sub(r"\[([^\]]+)\]\((?!https?:|#|[\w/-]+\.md)[^)]*\)", r"\1", text)  # files that the site does not have


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Add what a method's class tells to its page, and point links to the root at the site's pages."""
    page.meta["hide"] = ["navigation"] if page.file.src_uri in ALONE else []
    if "```mermaid" in markdown:
        raise PluginError(f"{page.file.src_uri}: mermaid is drawn by a script from elsewhere; draw with characters.")
    if page.file.src_uri == "gallery.md":
        markdown += gallery.previews()
    if page.file.src_uri == "methods/README.md":  # pages that only the site has
        for name in glance.generated():
            stem = Path(name).stem
            markdown = markdown.replace(f"| `{stem}` |", f"| [`{stem}`]({stem}.md) |")
    for source, target in FROM_ROOT.items():
        up = "../" * page.file.src_uri.count("/")
        markdown = markdown.replace(f"](../{up}{source})", f"]({up}{target})")
    markdown = re.sub(OUTSIDE, r"\1", markdown)
    told = glance.sections(page.file.src_uri)
    if told:  # the options stand below, from the class: the same by hand is for readers of the file
        costs = glance.costs(page.file.src_uri)
        markdown, there = re.subn(COST, lambda _: costs, markdown, count=1, flags=re.MULTILINE)
        markdown += "" if there else f"\n\n## Cost\n\n{costs}" if costs else ""
        below = f"All options, with defaults and limits: [below](#{Path(page.file.src_uri).stem}-at-a-glance).\n"
        markdown = re.sub(r"^\| [Ff]ield \| [Dd]efault \| .*\n(?:\|.*\n?)+", below, markdown, flags=re.MULTILINE)
    return markdown + told


def on_post_build(config: Any) -> None:
    """Refuse a site in which a public name is missing from the reference, or that loads anything from elsewhere."""
    site = Path(config.site_dir)
    told = "".join(path.read_text() for path in (site / "reference").glob("*.html"))
    missing = [name for name, path in names.public().items() if f'id="{path}"' not in told]
    if missing:
        raise PluginError(f"Not in the reference: {', '.join(missing)}.")
    for page in site.rglob("*.html"):
        if page.parent.name != "gallery":
            found = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', page.read_text())
            if found:
                raise PluginError(f"{page.relative_to(site)} loads {found[0]}: the site needs no network.")
