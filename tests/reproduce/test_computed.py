"""Entries that are computed over networks: no seeds, no interval."""

from polyfed.reproduce.entries import read_entries
from polyfed.reproduce.pages import pages, told, verdicts
from polyfed.reproduce.results import Measured, Result, judged, write_result
from polyfed.reproduce.standing import known, standing

ENTRY = """
[paper]
title = "Fig. 9: memory"
study = "fedvtc_memory"
quantity = "memory"
OVER
claims = ["large - small > 0", "small - large > 0", "odd - small > 0"]
[paper.paper]
[paper.cases.all]
title = "five networks"
"""
VALUES = {
    "small": (10.0, 20.0, 100.0, 500.0, 1000.0),
    "large": (15.0, 30.0, 160.0, 800.0, 1900.0),
    "odd": (15.0, 30.0, 160.0, 400.0, 1900.0),
}


def entry_of(root, over='over = "networks"'):
    folder = root / "experiments" / "papers" / "fedvtc"
    folder.mkdir(parents=True)
    (folder / "fig9.toml").write_text(ENTRY.replace("OVER", over))
    (entry,) = read_entries(root)
    runs = {
        label: {str(place): {"memory": value} for place, value in enumerate(values)} for label, values in VALUES.items()
    }
    return entry, Result(entry.path, "paper", cases={"all": Measured(runs=runs)})


def test_networks_are_no_seeds(tmp_path):
    entry, result = entry_of(tmp_path)
    assert entry.computed and verdicts(entry, "paper", result) == ["holds", "refuted", "not resolved"]
    large, _, _ = judged(entry, "paper", result)
    assert (large.judged.ends, large.judged.half) == ((5.0, 900.0), None)


def test_taken_for_seeds_they_would_resolve_nothing(tmp_path):
    """An interval over networks of all sizes says how unlike they are, and nothing about the claim."""
    entry, result = entry_of(tmp_path, over="")
    assert not entry.computed and verdicts(entry, "paper", result) == ["not resolved"] * 3


def test_the_page_speaks_of_networks_and_of_no_interval(tmp_path):
    entry, result = entry_of(tmp_path)
    page = "\n".join(told(entry, "paper", result))
    assert "| | networks | memory |" in page and "| small | 5 | 10.0 to 1000.0 |" in page
    assert "each judged by its sign with all networks" in page
    assert "| large - small | above 0 | +5.00 to +900.00 | holds |" in page
    assert not any(word in page for word in ("±", "Holm", "seeds"))
    write_result(tmp_path, entry, result)
    told_of = "\n".join(standing("FedVTC", known(entry, tmp_path), 1))
    assert "small - large, memory, -900.00 to -5.00 (five networks)" in told_of


def test_the_index_counts_them_with_what_is_computed(tmp_path):
    entry, result = entry_of(tmp_path)
    write_result(tmp_path, entry, result)
    index = pages(tmp_path)["README.md"]
    assert "Verdicts on measured claims: 0 reproduced, 0 holds, 0 refuted, 0 not resolved." in index
    assert "on claims about such: 0 reproduced, 1 holds, 1 refuted, 1 not resolved." in index
    assert "| paper | none needed |" in index
