"""Entries: every file can be run, names methods and cases that exist, and gives the papers' numbers where it claims."""

import pytest

from polyfed import methods
from polyfed.core.errors import InputError
from polyfed.reproduce.counts import COUNTS
from polyfed.reproduce.entries import Case, Side, find_entries, home, parse_claim, read_entries, read_entry
from polyfed.reproduce.figures import ANALYSES
from polyfed.reproduce.studies import STUDIES

ENTRIES = read_entries(home())


def test_a_claim_is_a_difference():
    claim = parse_claim("fedmd_global:distilled - local", "local")
    assert (claim.one, claim.two, claim.sign) == (Side("fedmd_global", "distilled"), Side("local", "local"), 0)
    assert parse_claim("a - b < 0", "global").sign == -1
    assert Case("c", "c").gain(parse_claim("a - b = 0", "global")) == 0.0
    assert claim.words("local") == "fedmd_global:distilled - local"
    for text in ("a", "a - b - c", "a-b", " - b"):
        with pytest.raises(InputError, match="A claim is"):
            parse_claim(text, "local")


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.path)
def test_an_entry_can_be_run_and_judged(entry):
    assert entry.scales
    for scale in ("mini", "middle", "paper"):
        assert {case.name for case in entry.cases(scale)} >= set(entry.told.get(scale, {}).get("cases", ()))
    if entry.kind == "count":
        assert entry.told["count"] in COUNTS
        return
    if entry.kind == "study":
        assert entry.told["study"] in STUDIES
        claims = [claim for scale in entry.scales for case in entry.cases(scale) for claim in entry.claims(case, scale)]
        assert not entry.over or all(claim.sign for claim in claims)  # sizes of computed differences are not compared
        return
    assert entry.told.get("analysis", "cka") in ANALYSES
    for scale in entry.scales:
        for case in entry.cases(scale):
            made = entry.experiment(scale, case)
            assert made.compare and made.seeds >= 5, (entry.path, scale)
            for label in made.compare:
                assert made.config(label).method.name in methods.registry()
            for claim in entry.claims(case, scale):
                assert {claim.one.label, claim.two.label} <= set(made.compare), (scale, case.name, claim)
                assert claim.sign or case.gain(claim) or claim.equal, (
                    case.name,
                    claim,
                )  # a gain of zero is no direction


@pytest.mark.long
def test_equal_settings_of_a_paper_share_their_runs():
    seen = {}
    for entry in ENTRIES:
        if entry.kind in ("count", "study"):
            continue
        for scale in entry.scales:
            for case in entry.cases(scale):
                made = entry.experiment(scale, case)
                for label in made.compare:
                    config = made.config(label).dump()
                    place = entry.folder(scale, case), label
                    assert seen.setdefault(place, config) == config, (entry.path, place)


def test_names_are_found_or_the_nearest_is_told(tmp_path):
    assert [entry.path for entry in find_entries(ENTRIES, "fedin/table4")] == ["fedin/table4"]
    assert {entry.paper for entry in find_entries(ENTRIES, "ams")} == {"ams"}
    with pytest.raises(InputError, match="ams/table2"):
        find_entries(ENTRIES, "ams/table22")
    (tmp_path / "x.toml").write_text("rounds = 1")
    with pytest.raises(InputError, match=r"no \[paper\] table"):
        read_entry(tmp_path / "x.toml")
