"""Sites that cannot take part: they hear why and exit, the others go on, and what the server prints works."""

from __future__ import annotations

import shlex

import pytest

PATIENT = ["--deadline", "240", "--wait", "240", "--rounds", "2", "--batch-size", "8", "--method", "fedavg"]
pytestmark = pytest.mark.timeout(900)


def join(processes, site, data, *options, name="", model="mlp:1x8"):
    return processes.join(site, "--data", f"faulty:{data}", *options, name=name, model=model)


def said(processes, name):
    return " ".join(processes.log(name).split())


def test_a_site_with_other_classes_exits_with_both_lists_and_may_come_back(processes):
    server = processes.serve(*PATIENT)
    north = join(processes, "north", "benign_malign")
    processes.until(lambda: "1 of 3 sites are here" in processes.log("serve"), what="north")
    wrong = join(processes, "south", "malign_unclear")
    assert processes.finish(wrong) == 2, processes.logs()
    both = "Site south has the classes [malign, unclear], but site north has [benign, malign]"
    assert f"Error: The server refused this site. {both}" in said(processes, "south")
    assert f"Not taking part: {both}" in said(processes, "serve") and not processes.history()
    right = join(processes, "south", "benign_malign", name="south-again")
    processes.until(lambda: "2 of 3 sites are here" in processes.log("serve"), what="south")
    west = join(processes, "west", "benign_malign")
    assert processes.finish(server) == 0, processes.logs()
    assert [processes.finish(process) for process in (north, right, west)] == [0, 0, 0], processes.logs()
    assert [line.get("missing", {}) for line in processes.history()] == [{}, {}]
    assert processes.result()["class_names"] == ["benign", "malign"]


def test_a_site_that_comes_when_the_federation_has_begun_is_turned_away(processes):
    processes.close("north-1-before")
    server = processes.serve(*PATIENT, "--min-sites", "2")
    north, west = join(processes, "north", "benign_malign"), join(processes, "west", "benign_malign")
    processes.until(lambda: "2 of 3 sites are here" in processes.log("serve"), what="north and west")
    assert processes.finish(join(processes, "south", "swapped")) == 2, (
        processes.logs()
    )  # now all have answered: it begins
    processes.reaches("north-1-before")
    assert processes.finish(join(processes, "south", "benign_malign", name="south-late")) == 2, processes.logs()
    assert "The federation has begun without site south" in said(processes, "south-late")
    processes.open("north-1-before")
    assert processes.finish(server) == 0, processes.logs()
    assert [processes.finish(process) for process in (north, west)] == [0, 0], processes.logs()
    result = processes.result()
    assert result["accuracy"]["clients"] == [0, 2] and result["samples"] == [20, 0, 20]
    assert result["architectures"] == ["mlp:1x8", "(did not take part)", "mlp:1x8"]
    north, west = (f"{value:.1%}" for value in result["accuracy"]["per_client"])
    assert f"(north {north}, west {west})" in said(processes, "serve")
    assert "south came too late" in said(processes, "serve")


def test_after_too_few_sites_the_printed_command_goes_on(processes):
    server = processes.serve(*PATIENT)
    north, west = join(processes, "north", "numbers"), join(processes, "west", "numbers")
    refusing = join(processes, "south", "numbers", "--allow", "fedproto")
    assert processes.finish(refusing) == 2 and "Site south does not allow fedavg" in said(processes, "south"), (
        processes.logs()
    )
    assert processes.finish(server) == 1, processes.logs()
    words = said(processes, "serve")
    assert "Only 2 of the 3 sites that are needed came (south did not)" in words
    assert "Site south does not allow fedavg" in words
    command = words.partition(" then go on with polyfed ")[2]
    assert command.startswith("serve --resume --out run --keys keys ")
    again = processes.serve(*PATIENT, name="again")  # the same as at first: refused, with the command that works
    assert processes.finish(again) == 2 and said(processes, "again").endswith(f"continue it with polyfed {command}"), (
        processes.logs()
    )
    for name in ("north", "west"):  # they wait for the server, and say so
        words = f"127.0.0.1:{processes.port} does not answer; trying for"
        processes.until(lambda name=name, words=words: words in said(processes, name), what=words)
    south = join(processes, "south", "numbers", name="south-again")
    resumed = processes.start("resumed", shlex.split(command))
    assert processes.finish(resumed) == 0, processes.logs()
    assert [processes.finish(process) for process in (north, south, west)] == [0, 0, 0], processes.logs()
    assert [line["round"] for line in processes.history()] == [1, 2]


def test_a_method_that_a_site_cannot_serve_ends_everybody_with_the_reason(processes):
    server = processes.serve(*PATIENT[:-1], "fedproto", "--min-sites", "2")
    sites = {name: processes.join(name, model="faulty:Featureless") for name in ("north", "west")}
    sites["south"] = processes.join("south", model="mlp:1x16")
    assert processes.finish(server) == 2, processes.logs()
    assert "fedproto needs" in said(processes, "serve")
    for name, process in sites.items():
        assert processes.finish(process) == 1, processes.logs()
        assert "The federation has ended early: fedproto needs" in said(processes, name)


def test_without_keys_a_wrong_name_and_a_name_used_twice_are_refused(processes):
    server = processes.serve(*PATIENT, "--insecure", "--sites", "north,south")
    common = ["--insecure", "--state"]
    stranger = join(processes, "west", "numbers", *common, "s1", "--name", "east")
    assert processes.finish(stranger) == 2 and "'east' is none of the sites (north, south)" in said(processes, "west")
    north = join(processes, "north", "numbers", *common, "s2", "--name", "north")
    processes.until(lambda: "1 of 2 sites are here" in processes.log("serve"), what="north")
    twin = join(processes, "north", "numbers", *common, "s3", "--name", "north", name="twin")
    assert processes.finish(twin) == 2 and "A site 'north' is connected already" in said(processes, "twin"), (
        processes.logs()
    )
    south = join(processes, "south", "numbers", *common, "s4", "--name", "south")
    assert processes.finish(server) == 0, processes.logs()
    assert [processes.finish(process) for process in (north, south)] == [0, 0], processes.logs()


def test_a_key_used_twice_is_said_at_once(processes):
    processes.serve(*PATIENT)
    join(processes, "north", "numbers")
    processes.until(lambda: "1 of 3 sites are here" in processes.log("serve"), what="north")
    common = ["--server", f"127.0.0.1:{processes.port}", "--model", "mlp:1x8", "--data", "faulty:numbers"]
    processes.start("twin", ["join", *common, "--keys", "keys/site-north", "--state", "twin"])
    processes.until(
        lambda: "does no other 'polyfed join' use the same key?" in said(processes, "twin"), what="the words"
    )
