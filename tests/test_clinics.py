"""The trial in four clinics: its page says what its file holds, and a seed can be run again."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = json.loads((ROOT / "results" / "clinics" / "clinics.json").read_text())["rows"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['metric']}-{row['clinic']}")
def test_the_page_says_what_the_file_holds(row):
    page = (ROOT / "docs" / "how-to" / "learners.md").read_text()
    plain = [f"{t['mean']:.3f} ({t['low']:.3f} to {t['high']:.3f})" for t in (row["alone"], row["together"])]
    gained = row["gained"]
    told = [*plain, f"{gained['mean']:+.3f} ({gained['low']:+.3f} to {gained['high']:+.3f})"]
    assert f"| {' | '.join(told)} |" in page
    pairs = zip(row["alone"]["values"], row["together"]["values"], strict=True)
    assert gained["values"] == pytest.approx([after - before for before, after in pairs])


@pytest.mark.long
def test_a_seed_of_the_trial_gives_its_figures_again(tmp_path):
    main = runpy.run_path(str(ROOT / "examples" / "clinics" / "run.py"))["main"]
    main(1, tmp_path / "again.json")
    again = json.loads((tmp_path / "again.json").read_text())["rows"]
    for row, kept in zip(again, ROWS, strict=True):
        for kind in ("alone", "together"):  # other processors round otherwise, and an order of women may turn
            assert row[kind]["values"][0] == pytest.approx(kept[kind]["values"][0], abs=0.03), (row["clinic"], kind)
