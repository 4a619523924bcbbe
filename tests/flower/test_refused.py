"""Sites that cannot take part: they hear why and exit, the others go on, and what the server prints works."""

from __future__ import annotations

import shlex

import pytest
from town import FLOWER, GATED

PATIENT = ["--deadline", "240", "--wait", "240", "--rounds", "2", "--batch-size", "8", "--method", "fedavg"]
pytestmark = pytest.mark.timeout(900)


def join(town, site, data, *options, name="", model="mlp:1x8"):
    return town.join(site, "--data", f"faulty:{data}", *options, name=name, model=model)


def said(town, name):
    return " ".join(town.log(name).split())


def test_a_site_with_other_classes_exits_with_both_lists_and_may_come_back(town):
    server = town.serve(*PATIENT)
    north = join(town, "north", "benign_malign")
    town.until(lambda: "1 of 3 sites are here" in town.log("serve"), what="north")
    wrong = join(town, "south", "malign_unclear")
    assert town.finish(wrong) == 2, town.logs()
    both = "Site south has the classes [malign, unclear], but site north has [benign, malign]"
    assert f"Error: The server refused this site. {both}" in said(town, "south")
    assert f"Not taking part: {both}" in said(town, "serve") and not town.history()
    right = join(town, "south", "benign_malign", name="south-again")
    town.until(lambda: "2 of 3 sites are here" in town.log("serve"), what="south")
    west = join(town, "west", "benign_malign")
    assert town.finish(server) == 0, town.logs()
    assert [town.finish(process) for process in (north, right, west)] == [0, 0, 0], town.logs()
    assert [line.get("missing", {}) for line in town.history()] == [{}, {}]
    assert town.result()["class_names"] == ["benign", "malign"]


def test_a_site_that_comes_when_the_federation_has_begun_is_turned_away(town):
    town.close("north-1-before")
    server = town.serve(*PATIENT, "--min-sites", "2")
    north, west = join(town, "north", "benign_malign"), join(town, "west", "benign_malign")
    town.until(lambda: "2 of 3 sites are here" in town.log("serve"), what="north and west")
    assert town.finish(join(town, "south", "swapped")) == 2, town.logs()  # now all have answered: it begins
    town.reaches("north-1-before")
    assert town.finish(join(town, "south", "benign_malign", name="south-late")) == 2, town.logs()
    assert "The federation has begun without site south" in said(town, "south-late")
    town.open("north-1-before")
    assert town.finish(server) == 0, town.logs()
    assert [town.finish(process) for process in (north, west)] == [0, 0], town.logs()
    result = town.result()
    assert result["accuracy"]["clients"] == [0, 2] and result["samples"] == [20, 0, 20]
    assert result["architectures"] == ["mlp:1x8", "(did not take part)", "mlp:1x8"]
    north, west = (f"{value:.1%}" for value in result["accuracy"]["per_client"])
    assert f"(north {north}, west {west})" in said(town, "serve")
    assert "south came too late" in said(town, "serve")


def test_after_too_few_sites_the_printed_command_goes_on(town):
    server = town.serve(*PATIENT)
    north, west = join(town, "north", "numbers"), join(town, "west", "numbers")
    refusing = join(town, "south", "numbers", "--allow", "fedproto")
    assert town.finish(refusing) == 2 and "Site south does not allow fedavg" in said(town, "south"), town.logs()
    assert town.finish(server) == 1, town.logs()
    words = said(town, "serve")
    assert "Only 2 of the 3 sites that are needed came (south did not)" in words
    assert "Site south does not allow fedavg" in words
    command = words.partition(" then go on with polyfed ")[2]
    assert command.startswith("serve --resume --out run --keys keys ")
    again = town.serve(*PATIENT, name="again")  # the same as at first: refused, with the command that works
    assert town.finish(again) == 2 and said(town, "again").endswith(f"continue it with polyfed {command}"), town.logs()
    for name in ("north", "west"):  # they wait for the server, and say so
        words = f"127.0.0.1:{town.port} does not answer; trying for"
        town.until(lambda name=name, words=words: words in said(town, name), what=words)
    south = join(town, "south", "numbers", name="south-again")
    resumed = town.start("resumed", [*FLOWER, *shlex.split(command)])
    assert town.finish(resumed) == 0, town.logs()
    assert [town.finish(process) for process in (north, south, west)] == [0, 0, 0], town.logs()
    assert [line["round"] for line in town.history()] == [1, 2]


def test_a_method_that_a_site_cannot_serve_ends_everybody_with_the_reason(town):
    server = town.serve(*PATIENT[:-1], "fedproto", "--min-sites", "2")
    sites = {name: town.join(name, model="faulty:Featureless") for name in ("north", "west")}
    sites["south"] = town.join("south", model="mlp:1x16")
    assert town.finish(server) == 2, town.logs()
    assert "fedproto needs" in said(town, "serve")
    for name, process in sites.items():
        assert town.finish(process) == 1, town.logs()
        assert "The federation has ended early: fedproto needs" in said(town, name)


def test_without_keys_a_wrong_name_and_a_name_used_twice_are_refused(town):
    server = town.serve(*PATIENT, "--insecure", "--sites", "north,south")
    common = ["--insecure", "--state"]
    stranger = join(town, "west", "numbers", *common, "s1", "--name", "east")
    assert town.finish(stranger) == 2 and "'east' is none of the sites (north, south)" in said(town, "west")
    north = join(town, "north", "numbers", *common, "s2", "--name", "north")
    town.until(lambda: "1 of 2 sites are here" in town.log("serve"), what="north")
    twin = join(town, "north", "numbers", *common, "s3", "--name", "north", name="twin")
    assert town.finish(twin) == 2 and "A site 'north' is connected already" in said(town, "twin"), town.logs()
    south = join(town, "south", "numbers", *common, "s4", "--name", "south")
    assert town.finish(server) == 0, town.logs()
    assert [town.finish(process) for process in (north, south)] == [0, 0], town.logs()


def test_a_key_used_twice_is_said_at_once(town):
    town.serve(*PATIENT)
    join(town, "north", "numbers")
    town.until(lambda: "1 of 3 sites are here" in town.log("serve"), what="north")
    common = ["--server", f"127.0.0.1:{town.port}", "--model", "mlp:1x8", "--data", "faulty:numbers"]
    town.start("twin", [*GATED, "join", *common, "--keys", "keys/site-north", "--state", "twin"])
    town.until(lambda: "does no other 'polyfed join' use the same key?" in said(town, "twin"), what="the words")
