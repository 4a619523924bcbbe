"""FedVTC's Fig. 3: every method of a claim is counted, FedGen as by hand."""

import pytest

from polyfed.models.generators import FeatureGenerator
from polyfed.reproduce.entries import home, read_entries
from polyfed.reproduce.memory import CLASSES, LATENTS, sizes_of

BATCH, GENERATED = 16, 32


@pytest.fixture(scope="module")
def sizes():
    return sizes_of("cnn:8-16", BATCH)


def test_every_side_of_a_claim_is_counted(sizes):
    (entry,) = [entry for entry in read_entries(home()) if entry.path == "fedvtc/fig3"]
    claims = entry.claims(entry.cases("paper")[0], "paper")
    assert {side.label for claim in claims for side in (claim.one, claim.two)} <= set(sizes)
    assert {"fedproto", "fedgen", "pfedafm", "fedtype", "fedvtc"} <= set(sizes)


def test_fedgen_holds_its_generator_and_what_it_makes(sizes):
    """By hand: all of G without gradients, generated features before the head; logits of the head are a few bytes."""
    generator = sum(p.numel() for p in FeatureGenerator(32, CLASSES, 256, LATENTS).parameters())
    assert generator == (42 * 256 + 256) + 2 * 256 + (256 * LATENTS + LATENTS)
    more = sizes["fedgen"] - sizes["fedproto"] - 4 * (generator + (GENERATED + BATCH) * LATENTS)
    assert 0 < more < 4096
