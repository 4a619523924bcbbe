"""What one site can do to the others: nothing. Without processes: the server's own code, and what arrives there."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.modules.module import register_module_parameter_registration_hook

sys.path.insert(0, str(Path(__file__).parents[1] / "storm"))

from messages import Hostile, campaign
from test_nobody_gets_in import run

from polyfed.core.errors import InputError, MessageError, RunDirectoryError
from polyfed.core.message import Message
from polyfed.core.method import Step
from polyfed.core.party import ClientInfo
from polyfed.core.privacy import Privacy
from polyfed.core.trust import Trust
from polyfed.flower.agree import settle
from polyfed.flower.audit import Audit
from polyfed.flower.backend import FlowerBackend, told_before
from polyfed.flower.codec import pack, seal, unpack
from polyfed.flower.describe import FAILING, JOINING, MEASURING, PRIVATE, WORKING, check_size
from polyfed.flower.enroll import add_site, read_request, request_key, revoke_site, sign_request
from polyfed.flower.gate import Gate, look
from polyfed.flower.keys import create_keys, read_server_keys, read_site_keys
from polyfed.flower.mailbox import Answers, Asked, Exchange, Mailbox, TooFewSites
from polyfed.flower.running import in_words_of_budget
from polyfed.flower.signing import Seal, SealCheck
from polyfed.flower.weights import bound, bounded, in_words, lessened

# --- whatever arrives refuses its sender ---


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    return Hostile("fedproto", tmp_path_factory.mktemp("hostile"))


@given(st.integers(0, 2**32))
@settings(max_examples=3, deadline=None)
def test_changed_messages_are_used_or_refuse_their_sender(seed):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        found = campaign(25, seed, Path(folder), ("fedavg", "fedproto"))
    assert found.escapes == [] and found.slow == [] and found.unclean == []
    assert found.tried == found.used + found.refused == 25


@pytest.mark.parametrize("loss", [10**400, float("inf"), float("nan"), "1", True, None, 1e11])
def test_a_loss_that_is_no_number_refuses_the_reply(server, loss):
    from polyfed.flower.backend import _number

    info = server.backend.infos[1]
    found, why = server.take(
        lambda client, head, blob: _number(head, "loss", info), {**server.replies[1][0], "loss": loss}, b""
    )
    assert found is None and "south" in why and "loss is not a number" in why


@pytest.mark.parametrize("wrong", [float("inf"), 10**400, float("nan"), -1, "many", None, []])
def test_a_measurement_of_nonsense_is_left_out(server, wrong):
    from polyfed.flower.backend import read_measure

    ctx = server.federation.ctx
    told = {metric.name: 0.5 for metric in ctx.metrics}
    assert told and read_measure({"measures": {"test": [0.5, 0.1, 10, None, told]}}, "test", ctx).samples == 10
    assert read_measure({"measures": {"test": [0.5, 0.1, wrong, None, told]}}, "test", ctx) is None
    if wrong is not None and wrong != -1:  # a metric may not exist, and may be below zero
        spoiled = {**told, ctx.metrics[0].name: wrong}
        assert read_measure({"measures": {"test": [0.5, 0.1, 10, None, spoiled]}}, "test", ctx) is None


def test_figures_of_a_regression_may_be_large_and_their_mean_exists(server):
    from dataclasses import replace

    from polyfed.core.metrics import make_metrics
    from polyfed.core.summary import summarize
    from polyfed.core.task import Regression
    from polyfed.flower.backend import read_measure

    task = Regression()
    ctx = replace(server.federation.ctx, task=task, metrics=make_metrics((), task))
    for size, taken in ((1e12, True), (1e99, True), (1e300, False), (1e308, False)):
        told = {metric.name: size for metric in ctx.metrics}
        found = read_measure({"measures": {"test": [-size, size, 10, None, told]}}, "test", ctx)
        assert (found is not None) == taken
        if found is not None:
            assert summarize({0: found, 1: found})["mean"] == -size


def test_an_exception_that_nobody_thought_of_refuses_the_sender(server):
    def accept(client, head, blob):
        raise OverflowError("\x1b[31mtoo large")

    found, why = server.take(accept, {}, b"")
    assert found is None and "Message from south refused" in why and why.isprintable()


def test_words_of_a_site_lose_their_control_characters_where_they_come_in():
    head, _ = unpack(pack({"class\x1b_names": ["\x1b[2Jred", {"a": "\u202eb"}], "n": 1}), "south")
    assert head == {"class?_names": ["?[2Jred", {"a": "?b"}], "n": 1}


@pytest.mark.parametrize(
    "model", ["mlp:100000x8", "mlp:8x100000", "mlp:2x9999999999", "cnn:99999-99999", "mlp:1x8" * 99]
)
def test_a_network_that_is_too_large_is_refused_before_it_is_built(model):
    made = []
    hook = register_module_parameter_registration_hook(lambda module, name, parameter: made.append(name))
    settings_ = {"seed": 0, "feature_dim": None, "feature_adapter": "linear"}
    with pytest.raises((ValueError, InputError, RuntimeError, TypeError)):
        check_size(model, (1, 8, 8), 10, settings_, 1 << 22)
    hook.remove()
    assert len(made) <= 4001
    check_size("mlp:2x64", (1, 8, 8), 10, settings_, 1 << 22)
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu"


@pytest.mark.parametrize(
    "change",
    [
        {"samples": 2**40},
        {"samples": float("inf")},
        {"num_classes": 10**6},
        {"input_shape": [2**30, 2**30]},
        {"feature_dim": 2**39},
        {"shapes": {"w": [0, 2**39, 2**39, 2**39]}},
        {"dtypes": {}},
        {"model": "mlp:1x99999999"},
        {"shapes": []},
        {"validation": 2**40},
        {"task": None},
        {"task": ["dance"]},
        {"task": ["classification", "x"]},
        {"task": ["regression", [10**400] * 3, [1.0] * 3]},
        {"task": ["regression", [0.0] * 2, [1.0] * 2]},
        {"task": ["regression", [0.0] * 3, [float("inf")] * 3]},
        {"task": ["regression", [0.0] * 3, [5e-324] * 3]},
    ],
    ids=str,
)
def test_an_introduction_beyond_every_limit_refuses_its_site(server, change):
    head, blob = server.introductions["south"]
    with pytest.raises(MessageError, match="Site south cannot take part"):
        server.given.read("south", {**head, **change}, blob)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e20])
def test_initial_weights_that_no_network_has_are_refused(value, tmp_path):
    """They become the server's, and everybody's of that architecture: where they overflow, nobody can train."""
    server = Hostile("fedavg", tmp_path)
    head, blob = server.introductions["south"]
    message = Message.from_bytes(blob)
    assert server.given.read("south", head, blob)
    next(iter(message.params["main"].values())).view(-1)[0] = value
    with pytest.raises(MessageError, match=r"values beyond 1e\+10, which no network has|NaN or infinite"):
        server.given.read("south", head, message.to_bytes())


def test_a_site_cannot_speak_for_the_architecture_of_others(tmp_path):
    """North calls a network of its own by a name of the zoo: the others have the zoo's, with the seed's weights."""
    server = Hostile("fedavg", tmp_path)
    zoo = server.given.read("west", *server.introductions["west"])
    (_, own) = server.given.read("south", *server.introductions["south"])
    assert own.build is None and own.name == zoo[1].name
    ruined = {name: torch.zeros_like(tensor) for name, tensor in own.initial.items()}
    for blueprint in (replace(own, initial=ruined), replace(own, initial=ruined, buffers=frozenset(own.shapes))):
        met = {"north": (zoo[0], blueprint), "south": zoo, "west": zoo}
        infos, blueprints = settle(met, ["north", "south", "west"])
        assert infos[1].architecture == infos[2].architecture == zoo[1].name and blueprints[zoo[1].name] is zoo[1]
        assert (infos[0].architecture == zoo[1].name) == (blueprint.buffers == zoo[1].buffers)


def test_networks_of_one_name_are_told_apart_by_what_they_are_and_stay_together(tmp_path):
    server = Hostile("fedavg", tmp_path)
    info, own = server.given.read("south", *server.introductions["south"])
    other = replace(own, frozen=frozenset([next(iter(own.shapes))]))
    met = {"a": (info, own), "b": (info, other), "c": (info, other), "d": (info, own)}
    infos, blueprints = settle(met, ["a", "b", "c", "d"])
    name = own.name
    assert [infos[k].architecture for k in range(4)] == [name, f"{name}@b", f"{name}@b", name]
    assert set(blueprints) == {name, f"{name}@b"} and blueprints[f"{name}@b"].frozen == other.frozen


def test_a_bad_introduction_of_an_earlier_start_is_asked_for_again_and_bricks_nothing(server):
    from polyfed.flower.registration import Registration

    said: list[str] = []
    sites = list(server.introductions)
    again = Registration(None, server.given.run, sites, said.append, lambda heads: None, server.given.read)
    head, blob = server.introductions["south"]
    known = {**server.introductions, "south": ({**head, "samples": 2**40}, blob)}
    assert set(again.readable(known)) == {*sites} - {"south"} == set(again.met)
    assert len(said) == 1 and "Asking again: Site south cannot take part" in said[0]


# --- what a site weighs ---


def test_no_site_weighs_more_than_its_share():
    assert bounded({0: 90, 1: 10, 2: 10}, 0.5) == {0: 20, 1: 10, 2: 10}
    assert bounded({0: 90, 1: 10}, 0.5) == {0: 10, 1: 10}
    assert bounded({0: 2**40, 1: 2**40, 2: 10, 3: 10}, 0.4) == {0: 40, 1: 40, 2: 10, 3: 10}
    assert bounded({0: 5, 1: 6, 2: 7}, 1.0) == {0: 5, 1: 6, 2: 7}
    assert bounded({0: 5, 1: 60, 2: 70}, 0.1) == {0: 5, 1: 5, 2: 5}


@given(st.lists(st.integers(1, 2**40), min_size=1, max_size=8), st.floats(0.05, 1.0))
@settings(max_examples=200, deadline=None)
def test_the_bound_holds_and_nobody_gains(counts, share):
    found = bounded(dict(enumerate(counts)), share)
    assert all(1 <= found[client] <= count for client, count in enumerate(counts))
    allowed = max(share, 1 / len(counts))
    assert max(found.values()) <= allowed * sum(found.values()) + len(counts)  # whole numbers: rounding


def test_counts_in_replies_follow_and_the_operator_is_told():
    infos = {
        0: ClientInfo(0, 90, "a", label_counts=(89, 1), name="north"),
        1: ClientInfo(1, 10, "a", label_counts=(5, 5), name="south"),
        2: ClientInfo(2, 10, "a", label_counts=(10, 0), name="west"),
    }
    weighed = bound(infos, 0.5)
    assert weighed[0].samples == 20 and weighed[0].label_counts == (19, 1) and weighed[1] == infos[1]
    assert lessened(torch.tensor([80, 9, 1, 0], dtype=torch.int32), 20, 90).tolist() == [17, 2, 1, 0]
    lines = in_words(infos, weighed)
    assert lines[0] == "north says it has 90 samples (81.8% of all) and counts as 20 (50.0%): --max-share."
    assert "more than all others together" in in_words(infos, infos)[0]


def test_the_counts_of_prototypes_are_held_to_what_a_site_joined_with(server):
    reply = Message.from_bytes(server.replies[1][1])
    reply.data["counts"] = torch.full_like(reply.data["counts"], 2**30)
    with pytest.raises(MessageError, match=r"'data/counts' counts .* samples, but it joined with 12"):
        checked(server, 1, reply)


def checked(server, client, reply):
    """Let a reply arrive."""
    ctx = server.federation.ctx
    return server.backend._checked(
        server.backend.infos[client], reply.to_bytes(), server.sent[client], server.step, ctx
    )


@pytest.mark.parametrize("told", [1e-9, 1.9, 2.1, 1e9])
def test_how_far_a_site_went_is_held_to_the_plan(told, tmp_path):
    """FedNova divides by it: 12 samples in batches of 8 are two steps, and neither a hair nor a million."""
    server = Hostile("fednova", tmp_path)
    reply = Message.from_bytes(server.replies[1][1])
    assert reply.meta["effective"] == 2 and checked(server, 1, reply).meta["effective"] == 2
    reply.meta["effective"] = told
    with pytest.raises(MessageError, match=r"\(south\) refused: 'effective' is .*, but its plan gives 2"):
        checked(server, 1, reply)


def test_who_counts_with_fewer_samples_counts_with_their_steps(tmp_path):
    """South has claimed twelve samples and counts with eight: one step of a batch of eight."""
    server = Hostile("fednova", tmp_path)
    server.backend.infos[1] = replace(server.backend.infos[1], samples=8)
    reply = checked(server, 1, Message.from_bytes(server.replies[1][1]))
    assert reply.meta == {"samples": 8, "effective": 1.0}


def test_numbers_that_are_weights_or_divide_have_bounds_in_every_method(tmp_path):
    """Batches weigh BatchNorm's statistics, a temperature divides logits."""
    from polyfed.methods import make

    server = Hostile("fedavg", tmp_path)
    info, ctx = server.backend.infos[1], server.federation.ctx
    assert make("heterofl", {}).numbers(info, ctx) == {"batches": (2, 2)}  # 12 samples, by 8
    assert make("heterofl", {}).numbers(replace(info, samples=9), ctx) == {"batches": (1, 1)}  # nobody is alone
    assert make("ams", {"normalize": "temperature"}).numbers(info, ctx) == {"temperature": (0.05, 20.0)}


# --- when the budget is used up ---


@pytest.mark.parametrize("unit", ["sample", "client"])
def test_when_all_budgets_are_used_up_the_run_ends_by_itself(unit, tmp_path):
    """Nobody has to guess why no site answers: the last line names them, and what was learned is kept."""
    pytest.importorskip("dp_accounting")
    private = Privacy(unit, epsilon=8.0, noise_multiplier=2.0)
    server = Hostile("fedavg", tmp_path, private)
    server.backend.mailbox, server.mailbox.budgets = Answering(server), True
    server.federation.rounds = 50
    history = server.federation.run()
    assert 1 < len(history) < 50 and history[-1]["spent"] == [0, 1, 2]
    assert "stops: its privacy budget is epsilon 8" in history[-1]["missing"]["1"]
    assert all(value <= 8.0 for value in history[-2]["privacy"]["epsilon"].values())
    assert history[-1]["accuracy"]["mean"] is not None
    told = in_words_of_budget(server.federation, tmp_path / "out")
    assert "used up at all sites (north, south, west)" in told and str(tmp_path / "out") in told


class Answering:
    """A mailbox whose sites are in this process."""

    def __init__(self, server):
        self.server = server

    def ask(self, kind, questions, accept, quorum=True, when=""):
        mailbox = self.server.mailbox
        exchange = Exchange(mailbox, kind, questions, accept, when)
        for client, question in questions.items():
            head, blob = question()
            content = pack(*self.server.sites[client].answer(json.loads(json.dumps(head)), blob))
            exchange._take(Asked(client, client, ""), SimpleNamespace(has_error=lambda: False, content=content))
        return mailbox.usable(exchange.answers, quorum)


def test_where_there_is_no_budget_nobody_has_used_it_up(server):
    found, why = server.take(lambda client, head, blob: head, {"error": "I stop.", "spent": True}, b"")
    assert found is None and why == "south: I stop."
    exchange = Exchange(server.mailbox, "work", {1: lambda: ({}, b"")}, lambda client, head, blob: head)
    content = pack({"error": "I stop.", "spent": True})
    exchange._take(Asked(1, 1, ""), SimpleNamespace(has_error=lambda: False, content=content))
    with pytest.raises(TooFewSites, match="I stop"):
        server.mailbox.usable(exchange.answers, True)


def test_a_site_that_is_away_is_no_budget_used_up():
    mailbox = Mailbox(None, dict, {}, {0: "north", 1: "south"}, 1.0, 1, 1.0, print)
    used_up = Answers(failed={0: "Client 0 (north) stops: its privacy budget ..."}, spent={0})
    assert mailbox.usable(used_up, True) is used_up and mailbox.usable(Answers(), True).given == {}
    both = Answers(failed={**used_up.failed, 1: "south is not connected"}, spent={0})
    with pytest.raises(TooFewSites, match=r"No site gave a usable answer. .*budget .* south is not connected"):
        mailbox.usable(both, True)


# --- fusing ---


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_the_majority_decides_which_replies_fit(wrong, tmp_path):
    server = Hostile("fedmd", tmp_path)
    replies = {client: checked(server, client, Message.from_bytes(server.replies[client][1])) for client in range(3)}
    name = next(iter(replies[wrong].data))
    replies[wrong].data[name] = replies[wrong].data[name][:-1]
    missing = {}
    server.federation._fuse(server.step, replies, missing)
    assert list(missing) == [wrong]


def test_an_error_of_the_servers_own_training_leaves_the_sender_out(server, monkeypatch):
    from polyfed.core.errors import TrainingError

    def fuse(self, party, replies, step, ctx):
        if 1 in replies:
            raise TrainingError("the loss is nan")

    monkeypatch.setattr(type(server.federation.method), "fuse", fuse)
    missing = {}
    server.federation._fuse(Step(), {0: Message(), 1: Message(), 2: Message()}, missing)
    assert list(missing) == [1] and "south" in missing[1] and "the loss is nan" in missing[1]


@pytest.mark.parametrize("rule", ["median", "distance", "norm"])
def test_a_reply_that_breaks_a_rule_is_left_out_by_name(rule, tmp_path, monkeypatch):
    server = Hostile("fedavg", tmp_path)
    usual = type(server.federation.method).places

    def places(self, party, info, message, ctx):
        if info.id == 1:
            raise OverflowError("\x1b[31mtoo large")
        return usual(self, party, info, message, ctx)

    monkeypatch.setattr(type(server.federation.method), "places", places)
    server.federation.rule = Trust(robust=rule).rule()
    replies = {client: checked(server, client, Message.from_bytes(server.replies[client][1])) for client in range(3)}
    missing = {}
    seen = server.federation._guarded(server.step, server.sent, replies, missing)
    assert sorted(seen) == [0, 2] and list(missing) == [1]
    assert "(south) refused: it cannot be compared" in missing[1] and missing[1].isprintable()


# --- who gives orders ---


@pytest.fixture
def keys(tmp_path):
    create_keys(tmp_path / "keys", "127.0.0.1", ["north", "south"])
    return tmp_path / "keys"


def signed(keys, site, head, blob=b"data"):
    server, content = Seal(read_server_keys(keys)), pack(head, blob)
    seal(content, lambda text, body: server.sign(site, text, body))
    return content


def test_a_site_takes_orders_of_the_server_only(keys, tmp_path):
    north = SealCheck(read_site_keys(keys / "site-north"))
    content = signed(keys, "north", {"kind": "end"})
    assert unpack(content, "the server", SealCheck(read_site_keys(keys / "site-north")).check)[0] == {"kind": "end"}
    with pytest.raises(MessageError, match="not signed by the server for site north"):
        unpack(pack({"kind": "end"}), "the server", north.check)  # no signature
    with pytest.raises(MessageError, match="not signed"):
        unpack(signed(keys, "south", {"kind": "end"}), "the server", north.check)  # for somebody else
    create_keys(tmp_path / "other", "127.0.0.1", ["north"])
    with pytest.raises(MessageError, match="not signed"):
        unpack(signed(tmp_path / "other", "north", {"kind": "end"}), "the server", north.check)  # another authority
    for spoil in ("json", "blob"):
        content = signed(keys, "north", {"kind": "end"})
        if spoil == "json":
            content["head"]["json"] = '{"kind": "work"}'
        else:
            content["body"]["blob"].data = b"DATA"
        with pytest.raises(MessageError, match="not signed"):
            unpack(content, "the server", north.check)
    head = dict(signed(keys, "north", {"kind": "end"}, b"")["head"])
    north.check(head, head["json"], b"")
    with pytest.raises(MessageError, match="came twice"):
        north.check(head, head["json"], b"")


def test_an_order_that_came_before_a_restart_is_an_old_one_too(keys, tmp_path):
    """Whoever kept the server's last 'end' cannot end the site again when it comes back."""
    site, file = read_site_keys(keys / "site-north"), tmp_path / "state" / "orders"
    head = dict(signed(keys, "north", {"kind": "end"}, b"")["head"])
    SealCheck(site, file).check(head, head["json"], b"")
    assert file.stat().st_mode & 0o777 == 0o600
    again = SealCheck(site, file)
    with pytest.raises(MessageError, match="came twice"):
        again.check(head, head["json"], b"")
    new = dict(signed(keys, "north", {"kind": "end"}, b"")["head"])
    again.check(new, new["json"], b"")
    assert len(file.read_text().splitlines()) == 2


def test_numbers_of_orders_are_whole_or_the_site_does_not_start(keys, tmp_path):
    site, file = read_site_keys(keys / "site-north"), tmp_path / "orders"
    head = dict(signed(keys, "north", {"kind": "end"}, b"")["head"])
    SealCheck(site, file).check(head, head["json"], b"")
    sound = file.read_bytes()
    for place in range(len(sound) - 1):
        file.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
        with pytest.raises(InputError, match=r"orders is damaged .*another --state"):
            SealCheck(site, file)
    file.write_bytes(sound + sound[:20])  # killed while it wrote the second one
    with pytest.raises(MessageError, match="came twice"):
        SealCheck(site, file).check(head, head["json"], b"")
    assert file.read_bytes() == sound


def test_a_site_that_forgot_what_it_has_spent_is_named(tmp_path):
    """Only the server can see that a folder was lost: the epsilon that it is told falls. A sum never does."""
    pytest.importorskip("dp_accounting")
    server = Hostile("fedavg", tmp_path, Privacy(epsilon=8.0, noise_multiplier=2.0))
    answering = server.backend.mailbox = Answering(server)
    server.federation.rounds = 2
    history = server.federation.run()
    home = server.sites[1].home({"run": server.given.run})
    (home / "privacy.json").unlink()
    for path in home.glob("state-*"):
        path.unlink()
    server.federation.ctx.round = 3
    backend = FlowerBackend(
        answering,
        server.backend.claimed,
        server.backend.blueprints,
        server.given.run,
        server.backend.expectations,
        1 << 20,
    )
    backend.told = told_before(history)
    replies = backend.exchange(server.step, server.sent, server.federation.ctx)
    assert sorted(replies.messages) == [0, 2] and sorted(replies.epsilon) == [0, 2]
    assert "(south) refused: it tells of epsilon" in replies.failed[1] and "--state" in replies.failed[1]


def call(gate, path, body, pieces=1, pause=0.0):
    """Send a request to the gate and return the status."""
    answers = []
    chunks = [body[k * len(body) // pieces : (k + 1) * len(body) // pieces] for k in range(pieces)]

    async def receive():
        await asyncio.sleep(pause)
        return {"type": "http.request", "body": chunks.pop(0), "more_body": bool(chunks)}

    async def send(message):
        answers.append(message)

    scope = {"type": "http", "path": path, "headers": [], "client": ("10.0.0.9", 1), "server": ("10.0.0.1", 1)}
    asyncio.run(gate(scope, receive, send))
    return answers[0]["status"]


async def accepts(scope, receive, send):
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def pushed(source=7, target=1, reply="x", count=1, node=7):
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from flwr.proto.message_pb2 import Message as Proto
    from flwr.proto.message_pb2 import Metadata, ObjectTree
    from flwr.proto.node_pb2 import Node

    about = Metadata(src_node_id=source, dst_node_id=target, reply_to_message_id=reply)
    return PushMessagesRequest(
        node=Node(node_id=node),
        messages_list=[Proto(metadata=about)] * count,
        message_object_trees=[ObjectTree()] * count,
    ).SerializeToString()


def test_a_site_may_answer_the_server_and_tell_nobody_else_anything():
    path = "/v1/fleet/push-messages"
    assert look(path, pushed()) == (7, True)
    for wrong in (
        pushed(target=8),  # an order to another site
        pushed(reply=""),  # not an answer
        pushed(source=8),  # in the name of another site
        pushed(count=2),
        pushed(count=0),
        b"\xff\xff",
    ):
        assert not look(path, wrong)[1]
        assert call(Gate(accepts, b"s", 1 << 20), path, wrong) == 403
    assert call(Gate(accepts, b"s", 1 << 20), path, pushed()) == 200


def test_a_site_stores_one_message_calls_seldom_and_sends_quickly(monkeypatch):
    from flwr.proto.message_pb2 import PushObjectRequest
    from flwr.proto.node_pb2 import Node

    from polyfed.flower import gate as module

    gate = Gate(accepts, b"s", 1 << 20)
    piece = PushObjectRequest(node=Node(node_id=7), object_content=bytes(1 << 20)).SerializeToString()
    assert [call(gate, "/v1/fleet/push-object", piece) for _ in range(4)] == [200, 200, 413, 413]
    assert call(gate, "/v1/fleet/push-messages", pushed()) == 200  # the next message
    assert call(gate, "/v1/fleet/push-object", piece) == 200
    assert gate.callers[7].stored > 1 << 20

    async def refuses(scope, receive, send):
        await send({"type": "http.response.start", "status": 401, "headers": []})

    stranger = Gate(refuses, b"s", 1 << 20)
    assert [call(stranger, "/v1/fleet/push-object", piece) for _ in range(3)] == [401] * 3  # nobody's quota is used
    monkeypatch.setattr(module, "CALLS", 3)
    often = Gate(accepts, b"s", 1 << 20)
    assert [call(often, "/v1/fleet/push-messages", pushed()) for _ in range(5)] == [200, 200, 200, 429, 429]
    assert call(often, "/v1/fleet/push-messages", pushed(node=8, source=8)) == 200  # others go on
    monkeypatch.setattr(module, "SECONDS", 0.05)
    assert call(Gate(accepts, b"s", 1 << 20), "/v1/fleet/push-messages", pushed(), pieces=4, pause=0.04) == 408


# --- keys ---


def test_a_key_is_made_at_the_site_and_only_its_public_half_travels(keys, tmp_path):
    request = request_key(tmp_path / "east", "east")
    assert b"PRIVATE" not in request.read_bytes()
    with pytest.raises(InputError, match="put the one there"):
        read_site_keys(tmp_path / "east")
    assert sign_request(keys, request) == "east"
    assert list(read_server_keys(keys).sites) == ["north", "south", "east"]
    (tmp_path / "east" / "ca.crt").write_bytes((keys / "ca.crt").read_bytes())
    private = read_site_keys(tmp_path / "east").private_key.read_bytes()
    assert not any(private == path.read_bytes() for path in keys.rglob("*") if path.is_file())
    with pytest.raises(InputError, match="has a key already"):
        sign_request(keys, request)
    before = read_server_keys(keys).sites["east"]
    sign_request(keys, request_key(tmp_path / "east2", "east"), renew=True)
    assert read_server_keys(keys).sites["east"] != before


def test_a_request_that_was_changed_is_refused(keys, tmp_path):
    request = request_key(tmp_path / "east", "east")
    sound = request.read_bytes()
    for place in range(0, len(sound), 11):
        damaged = bytearray(sound)
        damaged[place] ^= 4
        request.write_bytes(damaged)
        try:
            assert read_request(request)[0] == "east"  # the bit was in the armor and means nothing
        except InputError as error:
            assert "is no request of a site" in str(error) or "cannot name a site" in str(error)


def test_revoked_means_no_key_and_the_same_number(keys):
    revoke_site(keys, "north")
    assert read_server_keys(keys).sites["north"] == b"" and list(read_server_keys(keys).sites) == ["north", "south"]
    with pytest.raises(InputError, match="There is no site west"):
        revoke_site(keys, "west")
    assert (add_site(keys, "west") / "site.key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(InputError, match="is there already"):
        add_site(keys, "west")


def test_a_running_server_takes_over_what_was_revoked_and_renewed(keys, tmp_path):
    from polyfed.flower.child import Address
    from polyfed.flower.link import ServerLink
    from polyfed.flower.registration import NodeDirectory

    class Control:
        def __init__(self):
            self.registered = {}

        def RegisterNode(self, request):
            self.registered[len(self.registered) + 10] = request.public_key
            return type("R", (), {"node_id": len(self.registered) + 9})

        def UnregisterNode(self, request):
            self.registered[request.node_id] = b"gone"

    link = ServerLink(Address("127.0.0.1", 1), read_server_keys(keys), tmp_path / "flower", 1 << 20)
    link.control = Control()
    for name, public in link.keys.sites.items():
        link._register(name, public)
    audit, said = Audit(tmp_path), []
    directory = NodeDirectory(link, ["north", "south"], True, said.append, audit)
    assert directory.node_ids == {0: 10, 1: 11}
    directory.refresh()
    assert said == []
    revoke_site(keys, "north")
    directory.refresh()
    assert directory.node_ids == {1: 11} and link.control.registered[10] == b"gone"
    sign_request(keys, request_key(tmp_path / "north2", "north"))
    directory.refresh()
    assert directory.node_ids == {0: 12, 1: 11}
    assert said == ["The key of site north was revoked.", "The key of site north was renewed."]
    events = [json.loads(line)["event"] for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert events == ["key revoked", "key renewed"]


# --- what leaves, and what is kept ---


@pytest.mark.parametrize("method", ["fedproto", "heterofl", "fedin", "fedmd", "private"])
def test_what_a_site_transmits_is_what_it_declared(method, tmp_path):
    from polyfed.flower.site import Site

    if method == "private":
        pytest.importorskip("dp_accounting")
    private = Privacy(noise_multiplier=1.0) if method == "private" else Privacy()
    server = Hostile("fedavg" if method == "private" else method, tmp_path / "server", private)
    said = []
    model = server.sites[0].model
    site = Site("north", model, server.sites[0].data, tmp_path / "site", say=said.append)
    introduction = site.answer({"kind": "describe", "run": server.given.run}, b"")
    assert introduction[0].keys() == JOINING.keys()
    assert (introduction[0]["label_counts"] is not None) == (method == "heterofl")
    working = PRIVATE if method == "private" else WORKING
    assert server.replies[0][0].keys() == working.keys() and server.measure.keys() == MEASURING.keys()
    assert site.answer({"kind": "nonsense", "run": server.given.run}, b"")[0].keys() == FAILING.keys()
    assert method != "private" or server.replies[0][0]["loss"] == 0
    words = "\n".join(said)
    for declared in (*JOINING.values(), *working.values(), *MEASURING.values(), *FAILING.values()):
        assert declared in words
    template = server.backend.expectations.templates[server.backend.infos[0].architecture][server.step.name]
    reply = Message.from_bytes(server.replies[0][1])
    own = {name for name, _ in reply.tensors() if name.split("/")[1] not in template.echoed or name.startswith("data/")}
    assert own == template.tensors.keys() and reply.meta.keys() == template.meta.keys()
    named = [f"{name}: " for name in reply.data] + [f"weights of '{model}'" for model in reply.params]
    assert all(name in words for name in (*named, *(f"the number '{key}'" for key in reply.meta)))
    refused = site.answer({"kind": "nonsense", "run": server.given.run}, b"")
    both = len(json.dumps(introduction[0])) + len(introduction[1]) + 2 * len(json.dumps(refused[0]))
    assert site.sent({"run": server.given.run}) == both


def test_every_byte_of_a_reply_counts(server):
    site = server.sites[0]
    before = site.sent({"run": server.given.run})
    head = {**server.backend._head("measure", 0, server.federation.ctx, 0)}
    answer, blob = site.answer(json.loads(json.dumps(head)), b"")
    assert site.sent({"run": server.given.run}) - before == len(json.dumps(answer)) + len(blob) > 20


def test_a_flipped_bit_in_a_sites_state_is_found_and_named(server):
    from polyfed.core.checkpoint import read_tree

    (path,) = server.sites[2].home({"run": server.given.run}).glob("state-*.safetensors")
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    sound = path.read_bytes()
    for place in range(0, len(sound), 97):
        damaged = bytearray(sound)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(RunDirectoryError, match=r"state-.* is damaged"):
            read_tree(path)
    path.write_bytes(sound)
    read_tree(path)


def test_a_site_that_asks_reads_the_audit_and_nobody_else(tmp_path):
    audit = Audit(tmp_path)
    audit.write("joined", "north", samples=5)
    assert audit.news(0) == []
    audit.ask(0)
    assert [entry["event"] for entry in audit.news(0)] == ["joined"] and audit.news(0) == []
    audit.write("refused", "south", why="x" * 10_000)
    (entry,) = audit.news(0)
    assert entry["site"] == "south" and len(entry["why"]) == 500
    assert len((tmp_path / "audit.jsonl").read_text().splitlines()) == 2


def test_a_damaged_line_of_the_audit_ends_nobodys_work(tmp_path):
    audit = Audit(tmp_path)
    audit.ask(0)
    audit.write("joined", "north")
    with (tmp_path / "audit.jsonl").open("ab") as file:
        file.write(b'{"time": 1, "ev\xff\n')
    audit.write("arrived", "north")
    content = (tmp_path / "audit.jsonl").read_bytes()
    (tmp_path / "audit.jsonl").write_bytes(content.replace(b"arrived", b"brrived"))  # one bit
    assert [entry["event"] for entry in audit.news(0)] == ["joined", "damaged", "damaged"]
    (tmp_path / "audit.jsonl").write_bytes(content)
    audit.told[0] = 0
    assert [entry["event"] for entry in audit.news(0)] == ["joined", "damaged", "arrived"]


def test_a_site_keeps_the_audit_it_asked_for(server, tmp_path):
    from polyfed.flower.site import Site

    site = Site("north", "mlp:1x16", server.sites[0].data, tmp_path, say=lambda text: None)
    head = {**run(), "kind": "end", "reason": "", "audit": [{"event": "joined", "site": "north"}]}
    site.answer(head, b"")
    path = tmp_path / head["run"]["federation"] / "audit.jsonl"
    assert not path.exists()
    site.audit = True
    site.answer(head, b"")
    assert json.loads(path.read_text()) == {"event": "joined", "site": "north"}


def test_a_silent_server_keeps_its_task():
    from flwr.supercore.corestate import in_memory_corestate, sql_corestate

    modules = (in_memory_corestate, sql_corestate)
    usual = [module.HEARTBEAT_DEFAULT_INTERVAL for module in modules]  # Flower still reads it from here
    from polyfed.flower.superlink import PATIENCE, be_patient

    try:
        be_patient()
        assert [module.HEARTBEAT_DEFAULT_INTERVAL for module in modules] == [PATIENCE, PATIENCE]
    finally:
        for module, value in zip(modules, usual, strict=True):
            module.HEARTBEAT_DEFAULT_INTERVAL = value


def test_clocks_may_differ_by_minutes():
    """Flower let nobody in whose clock was six seconds ahead."""
    from flwr.superlink.routers.fleet import node_auth

    from polyfed.flower.gate import CLOCKS
    from polyfed.flower.superlink import allow_clocks

    usual = node_auth.SYSTEM_TIME_TOLERANCE  # Flower still reads it from here
    try:
        allow_clocks()
        assert usual < node_auth.SYSTEM_TIME_TOLERANCE == CLOCKS == 300
        assert "SYSTEM_TIME_TOLERANCE" in node_auth.authenticate_node.__code__.co_names
    finally:
        node_auth.SYSTEM_TIME_TOLERANCE = usual


@pytest.mark.parametrize(
    ("off", "words"),
    [(0, None), (290, None), (-290, None), (400, "400 seconds ahead of"), (-400, "400 seconds behind")],
)
def test_a_clock_that_is_too_far_off_is_said(off, words):
    from email.utils import formatdate

    from polyfed.flower.reach import wrong_clock

    theirs = 1_000_000_000
    assert wrong_clock(formatdate(theirs, usegmt=True), theirs + off, theirs + off) == words
    assert wrong_clock("", theirs, theirs) is None and wrong_clock("yesterday", theirs, theirs) is None


def test_what_sites_tell_is_for_those_who_run_the_server(tmp_path):
    from polyfed.config import Config
    from polyfed.flower.serve import start_directory
    from polyfed.methods import make

    config = Config(make("fedavg", {}), "fedavg", 2)
    directory, _ = start_directory(config, tmp_path / "run", ["north"], resume=False)
    directory.close()
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
