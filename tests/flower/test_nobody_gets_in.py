"""Without the right key nobody is let in, and only the server itself may steer."""

from __future__ import annotations

import httpx
import problem
import pytest

from polyfed.core.errors import MessageError, RunDirectoryError
from polyfed.flower.keys import create_keys
from polyfed.flower.site import Site


@pytest.fixture
def door(local_federation):
    """The server's address and a client that trusts its certificate."""
    import ssl

    context = ssl.create_default_context(cafile=str(local_federation.folder / "keys" / "ca.crt"))
    with httpx.Client(verify=context, base_url=f"https://127.0.0.1:{local_federation.port}") as client:
        yield client


def protobuf(client, path, message):
    from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

    return client.post(path, content=message.SerializeToString(), headers={"content-type": PROTOBUF_MEDIA_TYPE})


def test_plain_http_gets_no_answer(local_federation):
    with pytest.raises(httpx.TransportError):
        httpx.post(f"http://127.0.0.1:{local_federation.port}/v1/fleet/activate-node", content=b"")


def test_a_stranger_does_not_trust_the_server_without_the_authority(local_federation):
    with pytest.raises(httpx.ConnectError, match="certificate"):
        httpx.post(f"https://127.0.0.1:{local_federation.port}/v1/fleet/activate-node", content=b"")


def test_fleet_calls_without_a_signature_are_refused(local_federation, door):
    from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest
    from flwr.proto.node_pb2 import Node

    node = next(iter(local_federation.link.names))
    for path, message in (
        ("/v1/fleet/activate-node", ActivateNodeRequest(public_key=b"x", heartbeat_interval=30)),
        ("/v1/fleet/pull-messages", PullMessagesRequest(node=Node(node_id=node))),
    ):
        assert protobuf(door, path, message).status_code == 401


def test_only_the_server_itself_may_register_keys_and_start_runs(local_federation, door):
    from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest

    public = (local_federation.folder / "keys" / "site-north.pub").read_bytes()
    for path, message in (
        ("/v1/control/register-node", RegisterNodeRequest(public_key=public)),
        ("/v1/control/start-run", StartRunRequest()),
    ):
        assert protobuf(door, path, message).status_code == 403
    assert door.get("/docs").status_code == 403 and door.get("/openapi.json").status_code == 403


def test_nobody_else_can_claim_the_servers_task(door):
    from flwr.proto.runtime_pb2 import AcquireTaskRequest, GetNodesRequest

    claim = protobuf(door, "/v1/runtime/acquire-task", AcquireTaskRequest(supported_task_types=["flwr-serverapp"]))
    assert claim.status_code in (401, 403)
    assert protobuf(door, "/v1/runtime/get-nodes", GetNodesRequest()).status_code in (401, 403)


def test_a_request_that_is_too_large_is_cut_off(door):
    answer = door.post("/v1/fleet/push-object", content=b"x" * (8 << 20))
    assert answer.status_code == 413
    assert door.post("/v1/fleet/push-messages", content=b"x" * (1 << 20)).status_code == 413

    def pieces():  # no declared length
        for _ in range(8):
            yield b"x" * (1 << 20)

    from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

    try:
        kind = {"content-type": PROTOBUF_MEDIA_TYPE}
        status = door.post("/v1/fleet/push-object", content=pieces(), headers=kind).status_code
    except httpx.TransportError:
        status = 413  # cut off while still sending
    assert status == 413


def test_a_site_with_another_authority_is_told_so(local_federation, tmp_path):
    create_keys(tmp_path / "other", "127.0.0.1", ["north"])
    process = join(local_federation, tmp_path, "other/site-north", "wrong-ca")
    assert process.wait(90) == 1
    assert "does not have the certificate that our ca.crt vouches for" in local_federation.log("wrong-ca")


def test_a_site_with_an_unknown_key_stays_outside(local_federation, tmp_path):
    create_keys(tmp_path / "other", "127.0.0.1", ["north"])
    folder = tmp_path / "other" / "site-north"
    (folder / "ca.crt").write_bytes((local_federation.folder / "keys" / "ca.crt").read_bytes())
    wait_for(lambda: len(local_federation.link.nodes()) == 3)  # its own sites: on a busy machine they come late
    before = set(local_federation.link.nodes())
    process = join(local_federation, tmp_path, "other/site-north", "unknown-key")
    wait_for(lambda: "does not let us in" in local_federation.log("unknown-key"))
    assert set(local_federation.link.nodes()) == before
    assert process.poll() is None  # it keeps trying for a while: its key may be registered later
    process.terminate()
    assert process.wait(20) != 0


def test_a_site_without_keys_cannot_talk_to_a_server_with_keys(local_federation, tmp_path):
    wait_for(lambda: len(local_federation.link.nodes()) == 3)
    before = set(local_federation.link.nodes())
    server = f"127.0.0.1:{local_federation.port}"
    common = ["--server", server, "--model", "mlp:1x16", "--data", "problem:north", "--state", str(tmp_path / "s")]
    process = local_federation.start("insecure", ["join", *common, "--insecure", "--name", "north", "--give-up", "15"])
    assert process.wait(120) == 1
    assert set(local_federation.link.nodes()) == before


def join(local_federation, tmp_path, keys, name):
    server = f"127.0.0.1:{local_federation.port}"
    common = ["--server", server, "--model", "mlp:1x16", "--data", "problem:north", "--state", str(tmp_path / "state")]
    return local_federation.start(name, ["join", *common, "--keys", str(tmp_path / keys)])


def wait_for(condition, seconds=90):
    import time

    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


# --- what a server may make a site do ---


@pytest.fixture
def site(tmp_path):
    said = []
    made = Site("north", "mlp:1x16", problem.part(0), tmp_path / "state", ["fedproto"], 1 << 20, said.append)
    made.said = said
    return made


def run(**changes):
    from dataclasses import asdict

    from polyfed.core.settings import Training

    settings = {
        "federation": "0123456789abcdef",
        "method": "fedproto",
        "options": {},
        "seed": 0,
        "rounds": 1,
        "training": asdict(Training()),
        "feature_dim": None,
        "feature_adapter": "linear",
        "public_classes": None,
    }
    return {"kind": "describe", "run": {**settings, **changes}}


def test_a_site_runs_only_the_methods_that_it_allows(site):
    assert "does not allow fedavg" in site.answer(run(method="fedavg"), b"")[0]["error"]
    assert site.answer(run(), b"")[0]["name"] == "north"


@pytest.mark.parametrize("name", ["os:system", "problem:own", "subprocess:Popen", "nonsense", "", 5, None])
def test_the_server_cannot_make_a_site_import_anything(site, name):
    site.allow = ()
    assert "error" in site.answer(run(method=name), b"")[0]


@pytest.mark.parametrize("federation", ["../../etc", "/tmp/x", "", "ABC", 7])
def test_the_server_cannot_choose_where_a_site_writes(site, federation, tmp_path):
    head = {**run(federation=federation), "kind": "work", "phase": "round", "round": 1, "position": 0}
    head.update(id=0, architecture="mlp:1x16", clients=3, participants=[0])
    head["step"] = {"name": "main", "who": "selected", "down": True, "up": True}
    assert "error" in site.answer(head, b"")[0]
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize(
    "head", [{}, {"kind": "eval"}, {"kind": "work"}, {"kind": "measure", "run": 3}, {"kind": ["x"]}]
)
def test_nonsense_from_the_server_does_not_end_a_site(site, head):
    assert "error" in site.answer(head, b"\x00" * 50)[0]


def test_before_it_takes_part_a_site_says_what_will_leave_it(site):
    site.answer(run(), b"")
    said = "\n".join(site.said)
    assert "prototypes: (up to 3) x 16 float32" in said and "No weights are among it" in said


# --- a server does what it announced ---


def test_a_server_cannot_ask_for_more_than_it_announced(site):
    """Each message says what is to be done: what differs from what the people here were told is refused, also later."""
    private = {"epsilon": 8.0, "delta": 1e-5}
    first = run(privacy=private)
    assert "error" not in site.answer({**first, "kind": "describe"}, b"")[0]
    again = Site("north", "mlp:1x16", site.data, site.folder, (), 1 << 20, lambda text: None)  # a process later
    for change in ({"privacy": {}}, {"privacy": {**private, "epsilon": 80.0}}, {"method": "fedavg"}):
        asked = {**first, "run": {**first["run"], **change}, "kind": "work"}
        assert "joined for" in again.answer(asked, b"")[0]["error"], change
    assert "joined for" not in again.answer({**first, "kind": "work"}, b"")[0].get("error", "")
    longer = {**first, "run": {**first["run"], "rounds": 5}, "kind": "work"}
    assert "joined for" not in again.answer(longer, b"")[0].get("error", "")


def test_what_was_not_announced_is_told_before_anything_is_done(site):
    site.answer({**run(), "kind": "measure"}, b"")
    assert any("What leaves this site" in line for line in site.said)


@pytest.mark.parametrize(
    "asked, fine",
    [
        ({"epsilon": 2.0, "delta": 1e-5}, True),
        ({"epsilon": 8.0, "delta": 1e-5}, False),
        ({"epsilon": 2.0, "delta": 0.5}, False),
        ({"noise_multiplier": 1.0}, False),
        ({"epsilon": 2.0, "unit": "client"}, False),
        ({}, False),
    ],
)
def test_a_site_has_a_bound_of_its_own(site, asked, fine):
    site.max_epsilon = 2.0
    answer = site.answer({**run(privacy=asked), "kind": "describe"}, b"")[0]
    assert ("error" not in answer) == fine
    assert fine or "takes part with epsilon 2 for each sample at most" in answer["error"]


# --- a budget is one budget ---


def work(step=None, **changes):
    """What a server sends to let a site train."""
    head = {**run(**changes), "kind": "work", "phase": "round", "round": 1, "position": 0}
    head.update(id=0, architecture="mlp:1x16", clients=3, participants=[0])
    return {**head, "step": {"name": "main", "who": "selected", "down": False, "up": True, **(step or {})}}


def test_training_alone_is_no_second_budget(site):
    """A server that says it is private does not ask for it; one that asks all the same gets nothing."""
    head = {**run(privacy={"epsilon": 8.0}), "kind": "alone", "id": 0, "architecture": "mlp:1x16", "clients": 3}
    answer = site.answer({**head, "rounds": 1}, b"")[0]
    assert "would spend privacy that nobody counts" in answer["error"]
    assert not list(site.folder.rglob("state-*"))
    assert "measures" in site.answer({**head, "rounds": 1, "run": run(federation="0" * 16)["run"]}, b"")[0]


def test_a_new_federation_is_no_new_budget(site):
    """What one folder has spent, in whichever federation, counts towards what its people accept."""
    pytest.importorskip("dp_accounting")
    site.max_epsilon, private = 10.0, {"epsilon": 8.0, "delta": 1e-5}
    first = work({"down": True}, privacy=private)
    spent = site.answer(first, b"")[0]["epsilon"]
    assert 2.0 < spent <= 8.0
    told = site.answer(run(federation="0" * 16, privacy=private), b"")[0]["error"]
    assert f"has spent epsilon {spent:.4g} in earlier federations" in told and "--state" in told
    again = run(federation="0" * 16, privacy={**private, "epsilon": 10.0 - spent - 0.01})
    assert "error" not in site.answer(again, b"")[0]
    assert any(f"has spent epsilon {spent:.4g} in earlier federations" in line for line in site.said)
    later = {**first, "round": 2}
    assert "takes part" not in site.answer(later, b"")[0].get("error", "")  # the first one goes on as agreed


def test_a_damaged_ledger_of_an_earlier_federation_is_said_and_counts_where_a_bound_is_set(site):
    old = site.folder / "0123456789abcdef" / "privacy.json"
    old.parent.mkdir(parents=True)
    old.write_text("{")
    private = {"epsilon": 1.0, "delta": 1e-5}
    assert "error" not in site.answer(run(federation="0" * 16, privacy=private), b"")[0]
    assert any("What was spent in earlier federations is not known" in line for line in site.said)
    site.max_epsilon = 8.0
    assert "privacy.json" in site.answer(run(federation="0" * 16, privacy=private), b"")[0]["error"]


@pytest.mark.parametrize("change", [{"name": "tell me more"}, {"up": False}, {"who": "all"}, {"down": False}])
def test_a_site_does_only_what_the_method_plans(site, change):
    answer = site.answer(work({"down": True, **change}), b"")[0]
    assert "fedproto has no such step" in answer["error"] and not list(site.folder.rglob("state-*"))
    assert "error" not in site.answer(work({"down": True}), b"")[0]


@pytest.mark.parametrize("name", ["hf:owner/model", "hf:{folder}", "timm:resnet18,pretrained", "timm:hf-hub:a/b"])
def test_nobody_makes_another_read_a_folder_or_fetch_a_network(site, name, tmp_path, monkeypatch):
    """A name that means a folder here, or a file from the Hub, is no name of the zoo: not in an introduction, not in
    an option of a method."""
    from polyfed.flower import describe
    from polyfed.methods import make

    name = name.format(folder=tmp_path)
    monkeypatch.setattr(describe, "check_size", lambda *given: pytest.fail("it would be built"))
    introduction, blob = site.answer(run(), b"")
    with pytest.raises(MessageError, match="is not one of the zoo"):
        head = {**introduction, "model": name}
        describe.read_introduction("south", head, blob, make("fedproto", {}), run()["run"], 1 << 20)
    site.allow = ()
    answer = site.answer(run(method="fml", options={"proxy": name}, federation="0" * 16), b"")[0]
    assert f"would fetch '{name}'" in answer["error"]


def test_a_folder_has_one_site_at_a_time(tmp_path):
    from polyfed.core.lock import Lock
    from polyfed.flower.join import Joining, join

    with Lock(tmp_path / "state"), pytest.raises(RunDirectoryError, match=r"in use by process \d+: .* another --state"):
        join(Joining("127.0.0.1:1", None, "north", tmp_path / "state"), "mlp:1x16", problem.part(0))
