"""The page in a real browser: it draws, sorts, changes colours, fits a phone and prints; and it asks for nothing."""

from __future__ import annotations

import re
from contextlib import contextmanager

import pytest
from report_runs import make_run

from polyfed import report
from polyfed.report.cells import NOTHING
from polyfed.report.runs import Study, study

pytestmark = [pytest.mark.pages, pytest.mark.xdist_group("report")]  # one comparison and one browser
SECTIONS = ["answer", "leaderboard", "curves", "frontier", "clients", "data", "wire", "configuration"]


@pytest.fixture(scope="module")
def page_file(comparison):
    return report.write_report(comparison)


@contextmanager
def opened(browser, path, **options):
    """Open a file; every complaint of the browser and every request to anywhere fails the test."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
    page = context.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "request",
        lambda asked: problems.append(asked.url) if not asked.url.startswith(("file:", "data:", "blob:")) else None,
    )
    page.goto(path.resolve().as_uri())
    page.wait_for_selector("html[data-ready=yes]", timeout=60_000)
    yield page
    context.close()
    assert problems == []


@pytest.fixture(scope="module")
def page(browser, page_file):
    """Return the page on a desktop, opened once: drawing its charts without a graphics card takes seconds."""
    with opened(browser, page_file) as found:
        yield found


@pytest.fixture(scope="module")
def dark(browser, page_file):
    """Return the page where the reader prefers dark, opened once."""
    with opened(browser, page_file, color_scheme="dark") as found:
        yield found


@pytest.fixture(scope="module")
def crowded(browser, many):
    """Return a page with many methods, opened once."""
    with opened(browser, many) as found:
        yield found


def test_all_sections_and_charts_are_drawn(page):
    assert page.eval_on_selector_all("section", "all => all.map(one => one.id)") == SECTIONS
    for name in ("curves", "frontier", "gains", "tiers", "split", "sizes", "entropy", "wire"):
        drawn = page.locator(f"#chart-{name} .main-svg").count()
        assert drawn > 0, name
    assert page.locator("#chart-curves .scatterlayer .trace path.js-line").count() >= 4
    assert page.locator("#chart-split .points path").count() > 4
    assert "fedavg" in page.locator("#chart-curves .legend").text_content()
    assert page.locator("#chart-curves-bytes .main-svg").count() == 0  # drawn when its tab is chosen
    page.click("#tab-curves-bytes")
    page.wait_for_selector("#chart-curves-bytes .main-svg")
    assert page.locator("#panel-curves").is_hidden()
    page.click("#tab-curves")
    assert page.locator("#panel-curves").is_visible()


def test_a_method_can_be_hidden_and_stays_hidden_in_the_dark(browser, page_file):
    with opened(browser, page_file) as page:
        find = "document.getElementById('chart-curves').data.filter(t => t.name === 'fedavg').map(t => t.visible)"
        page.locator("#chart-curves .legendtoggle").nth(1).click()
        page.wait_for_function(f"({find}).includes('legendonly')")
        page.click("#theme")
        page.wait_for_function("document.documentElement.dataset.theme === 'dark'")
        assert "legendonly" in page.evaluate(find)


def test_pointing_at_a_point_says_what_it_is(page):
    page.locator("#chart-frontier").scroll_into_view_if_needed()
    box = page.locator("#chart-frontier .points path").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector("#chart-frontier .hoverlayer .hovertext")
    assert "% for" in page.locator("#chart-frontier .hoverlayer").text_content()


def test_a_chart_can_be_saved_as_png(page, tmp_path):
    page.hover("#chart-curves")
    with page.expect_download() as started:
        page.click("#chart-curves .modebar-btn[data-title*=PNG], #chart-curves .modebar-btn[data-title*=png]")
    started.value.save_as(tmp_path / "curves.png")
    assert started.value.suggested_filename == "curves.png"
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_sorts(page):
    column = "#table-leaderboard thead tr:last-child th:nth-child(2)"
    values = "[...document.querySelectorAll('#table-leaderboard tbody tr')].map(r => Number(r.cells[1].dataset.value))"
    page.click(f"{column} button")
    found = page.evaluate(values)
    assert found == sorted(found, reverse=True)
    assert page.get_attribute(column, "aria-sort") == "descending"
    page.click(f"{column} button")
    assert page.evaluate(values) == sorted(found)
    page.focus("#table-leaderboard thead tr:last-child th:nth-child(1) button")
    page.keyboard.press("Enter")
    names = page.eval_on_selector_all("#table-leaderboard tbody th", "all => all.map(one => one.textContent)")
    assert names == sorted(names)


def test_empty_cells_sort_last_either_way(page):
    headings = page.eval_on_selector_all("#table-leaderboard thead th", "all => all.map(one => one.textContent.trim())")
    column = headings.index("vs. local") + 1
    for _ in range(2):
        page.click(f"#table-leaderboard thead th:nth-child({column}) button")
        last = page.locator("#table-leaderboard tbody tr").last.locator("th")
        assert last.inner_text() == "local"


def luminance(colour):
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_charts_are_readable_in_light_and_dark(request, scheme):
    page = request.getfixturevalue({"light": "page", "dark": "dark"}[scheme])
    style = "(selector, name) => getComputedStyle(document.querySelector(selector))[name]"

    def read(selector, name):
        return page.evaluate(f"([s, n]) => ({style})(s, n)", [selector, name])

    paper = luminance(read("body", "backgroundColor"))
    assert (paper < 0.1) == (scheme == "dark")
    for selector, name in (("body", "color"), ("figcaption", "color"), ("#chart-curves .xtick text", "fill")):
        ink = luminance(read(selector, name))
        assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) > 4.5, selector
    background = page.evaluate("document.querySelector('#chart-curves').layout.paper_bgcolor")
    assert background == {"light": "#ffffff", "dark": "#181d24"}[scheme]


def test_a_phone_needs_no_sideways_scrolling(browser, page_file):
    with opened(browser, page_file, viewport={"width": 390, "height": 844}) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        widths = page.eval_on_selector_all(
            ".js-plotly-plot .main-svg", "all => all.map(one => one.getBoundingClientRect().width)"
        )
        assert widths and max(widths) <= 390


def test_the_leaderboard_fits_a_laptop(browser, comparison, tmp_path):
    found = study(comparison)
    for run in found.all:  # with every column that there can be
        accuracy = run.summary["accuracy"]
        accuracy["took_part"] = {"mean": accuracy["per_client"][0], "clients": [0]}
        accuracy["global"] = accuracy["mean"]
    with opened(browser, report.write_report(found, tmp_path / "wide.html")) as page:
        sizes = "(([box]) => [box.scrollWidth, box.clientWidth])([document.querySelector('#leaderboard .scroll')])"
        wanted, given = page.evaluate(sizes)
        assert wanted <= given


def test_it_prints_every_tab_on_light_paper(dark):
    dark.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert dark.evaluate("document.documentElement.dataset.theme") == "light"
    assert dark.locator("#panel-curves-bytes").is_visible()
    assert dark.locator("#chart-curves-bytes .main-svg").count() > 0
    dark.evaluate("dispatchEvent(new Event('afterprint'))")
    assert dark.evaluate("document.documentElement.dataset.theme") == "dark"
    assert dark.locator("#panel-curves-bytes").is_hidden()
    assert dark.pdf(format="A4").startswith(b"%PDF")


def test_names_cannot_inject_anything(browser, tmp_path):
    evil = "</script ><img src=x onerror=alert(1)>&amp;{{7*7}}"
    runs = {
        label: [make_run(label, 0, [[0.5] * 3], architectures=[evil] * 3, up=3, down=3)] for label in ("local", evil)
    }
    path = report.write_report(Study(runs), tmp_path / "evil.html")
    with opened(browser, path) as page:
        assert page.locator("img").count() == 0
        assert evil in page.locator("#table-leaderboard").inner_text()


def test_a_single_run_of_one_seed_has_a_page(comparison, tmp_path, browser):
    path = report.write_report(comparison / "fedavg" / "seed-0", tmp_path / "one.html")
    with opened(browser, path) as page:
        text = page.inner_text("main")
    assert "One seed only" in text
    assert "without a run of 'local'" in text
    assert "Gains need runs of 'local'" in text


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Sixteen methods of four families; `ams` is the best of them and the dearest."""
    kinds = ["local", "fedavg", "fedprox", "scaffold", "fedmd", "fedmd_global", "fedfd_student", "fedproto", "fedvtc"]
    kinds += ["ams", "ensemble", "pfnm", "oneshot_fedavg", "heterofl", "fedrolex", "fedfd"]
    runs = {}
    for place, label in enumerate(kinds):
        level = 0.95 if label == "ams" else 0.3 + 0.02 * place
        cost = 0 if label == "local" else 9000 if label == "ams" else 100 * (17 - place)
        runs[label] = [
            make_run(label, seed, [[level - 0.1] * 3, [level + 0.01 * seed] * 3], up=cost) for seed in (0, 1)
        ]
        for run in runs[label]:
            run.config["method"] = {"name": label}
    return report.write_report(Study(runs), tmp_path_factory.mktemp("many") / "many.html")


def test_many_methods_are_shown_by_family_and_can_be_narrowed(crowded):
    headings = crowded.locator("#table-leaderboard thead th").all_inner_texts()
    family, beaten = headings.index("family"), headings.index("beaten by")
    rows = [row.locator("th, td").all_inner_texts() for row in crowded.locator("#table-leaderboard tbody tr").all()]
    assert [row[family] for row in rows] == sorted(row[family] for row in rows)  # grouped
    told = {row[0]: row[beaten] for row in rows}
    assert told["fedavg"] == "fedfd" and told["fedfd"] == told["ams"] == told["local"] == NOTHING
    shown = "Plotly && [...document.getElementById('chart-curves').data].filter(t => t.showlegend"
    names = crowded.evaluate(f"{shown} && t.visible !== 'legendonly' && t.visible !== false).map(t => t.name)")
    assert 4 < len(names) < 12 and "ams" in names
    crowded.locator("#filter button", has_text="one-shot").click()
    visible = crowded.locator("#table-leaderboard tbody tr:visible th").all_inner_texts()
    assert sorted(visible) == ["ams", "ensemble", "oneshot_fedavg", "pfnm"]
    names = crowded.evaluate(f"{shown} && t.visible !== 'legendonly' && t.visible !== false).map(t => t.name)")
    assert sorted(names) == sorted(visible)
    rows = "document.getElementById('chart-{}').layout.yaxis.ticktext"
    assert crowded.evaluate(rows.format("gains")) == visible[::-1]  # a chart with a row for each method: best on top
    both = [f"{method} {way}" for method in visible[::-1] for way in ("received", "sent")]
    assert crowded.evaluate(rows.format("wire")) == both
    crowded.locator("#filter button", has_text="one-shot").click()
    assert crowded.locator("#table-leaderboard tbody tr:visible").count() == 16


def test_names_at_the_frontier_only_where_there_are_many(crowded):
    traces = "[...document.getElementById('chart-frontier').data]"
    named = f"{traces}.filter(t => t.mode?.includes('text')).map(t => t.name)"
    assert sorted(crowded.evaluate(named)) == ["ams", "fedfd"]


def test_charts_of_many_methods_begin_with_a_few_and_fit_a_phone(crowded):
    crowded.set_viewport_size({"width": 360, "height": 740})
    crowded.wait_for_function("document.documentElement.scrollWidth === 360")  # charts follow a little later
    rows = crowded.evaluate("document.getElementById('chart-gains').layout.yaxis.ticktext")
    assert rows == ["fedfd", "scaffold", "fedvtc", "ams", "fedfd_student"]  # the best, by family from the top
    points = "Math.max(...document.getElementById('chart-gains').data.flatMap(t => t.y).map(Math.round))"
    assert crowded.evaluate(points) == len(rows) - 1
    height = crowded.locator("#chart-gains").bounding_box()["height"]
    assert height == pytest.approx(130 + 62 * len(rows), abs=2)
    tiers = "document.getElementById('chart-tiers').data.filter(t => t.visible !== false).map(t => t.name)"
    assert sorted(crowded.evaluate(tiers)) == sorted({*rows, "local"})
    assert not crowded.locator("#table-wire").is_visible()  # of hundreds of rows: unfolded on demand
    crowded.set_viewport_size({"width": 1280, "height": 900})
