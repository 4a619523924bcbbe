"""Messages that are not what the method would send: refused on arrival, by name, and the round goes on."""

from __future__ import annotations

import json

import problem
import pytest
import torch
from test_same_result import TRAINING
from torch import nn

from polyfed.build import make_blueprint
from polyfed.config import Config, Networks
from polyfed.core.errors import InputError, MessageError
from polyfed.core.message import Message
from polyfed.core.method import Method, Step
from polyfed.core.needs import check_needs
from polyfed.core.party import ClientInfo
from polyfed.core.samples import Samples
from polyfed.core.settings import Evaluation, Execution
from polyfed.flower.agree import settle
from polyfed.flower.backend import LiveFederation
from polyfed.flower.describe import introduce, read_introduction
from polyfed.flower.expect import Expectations
from polyfed.flower.rehearse import Problem, rehearse
from polyfed.flower.running import Given, run_federation
from polyfed.flower.serve import start_directory
from polyfed.flower.sitedata import SiteData
from polyfed.methods import make
from polyfed.models import adapt

MAX_BYTES = 200_000
WEIGHTS = {
    "shape": "expected",
    "name": "'params/main/evil' was not asked for",
    "model": "was not asked for",
    "missing": "is missing",
    "dtype": "torch.float64",
    "nan": "NaN or infinite",
    "inf": "NaN or infinite",
    "huge": "beyond 1e+10",
    "heavy": "beyond every count",
    "negative": "joined with 23",
    "no-meta": "'samples' is missing",
    "word": "joined with 23",
    "random": "cannot be read",
    "pickle": "cannot be read",
    "truncated": "cannot be read",
    "declared": "cannot be read",
    "header": "cannot be read",
    "large": "the limit is",
    "loss": "loss is not a number",
    "empty": "refused",
    "head": "loss is not a number",
    "crash": "xxx",
}
PROTOTYPES = {
    "class-beyond": "beyond 2",
    "class-twice": "lists classes twice",
    "ragged": "expected",
    "width": "expected",
}


@pytest.mark.parametrize(
    "method, kinds", [("fedavg", WEIGHTS), ("fedproto", PROTOTYPES)], ids=["weights", "prototypes"]
)
def test_hostile_replies_are_refused_by_name_and_the_others_go_on(method, kinds, local_federation, tmp_path):
    rounds = [*kinds, "honest"]
    table = dict.fromkeys(problem.SITES, "mlp:1x16")
    local_federation.models.write_text(json.dumps({**table, "evil": {"site": "south", "rounds": rounds}}))
    once = {"evaluation": Evaluation(0), "execution": Execution(checkpoint_seconds=0.0)}
    config = Config(make(method, {}), method, len(rounds), training=TRAINING, models=Networks(feature_dim=8), **once)
    directory, run = start_directory(config, tmp_path / "run", problem.SITES, False)
    given = Given(config.method, config.settings(), run, problem.SITES, directory, max_bytes=MAX_BYTES)
    result = run_federation(local_federation.post(min_sites=2), given)
    assert len(result.history) == len(rounds)
    for kind, line in zip(rounds, result.history, strict=True):
        if kind == "honest":
            assert "missing" not in line
            continue
        assert list(line["missing"]) == ["1"], kind
        assert "south" in line["missing"]["1"], kind
        assert kinds[kind] in line["missing"]["1"], f"{kind}: {line['missing']}"
    state = result.server.state if method == "fedavg" else result.server.memory["prototypes"]
    assert all(torch.isfinite(tensor.float()).all() for tensor in state.values())
    assert result.accuracy()["mean"] > 0.5


def blueprint(model="mlp:1x16", method=None):
    return make_blueprint(model, model, (1, 8, 8), 3, 0, None, "linear")


def test_a_rehearsal_finds_what_each_step_sends():
    found = rehearse(make("fedproto", {}), blueprint(), Problem(3, (1, 8, 8), 3, False), 0)
    tensors = found["main"].tensors
    assert set(tensors) == {"data/classes", "data/counts", "data/prototypes"}
    assert tensors["data/prototypes"].axes == ((3, 1), (16, 16))
    assert tensors["data/classes"].classes and not tensors["data/counts"].classes


def test_a_class_that_few_hold_is_no_reason_to_refuse():
    method, info = make("fedproto", {}), ClientInfo(0, 5, "mlp:1x16", 0, None, "north")
    checks = Expectations(method, {"mlp:1x16": blueprint()}, Problem(3, (1, 8, 8), 3, False), 0)
    prototypes = {"classes": [2], "counts": [4], "prototypes": [[0.0] * 16]}
    types = {"classes": torch.uint8, "counts": torch.int32, "prototypes": torch.float32}
    reply = Message(data={key: torch.tensor(value, dtype=types[key]) for key, value in prototypes.items()})
    checks.check(reply, Message(), Step(), info)
    reply.data["counts"] = torch.tensor([4, 4], dtype=torch.int32)
    with pytest.raises(MessageError, match=r"client 0 \(north\)"):
        checks.check(reply, Message(), Step(), info)


def test_a_network_that_only_its_site_can_build_is_checked_by_its_own_description():
    from dataclasses import replace

    own = replace(blueprint(), build=None)
    method, info = make("fedavg", {}), ClientInfo(0, 5, own.name, 0, None, "north")
    checks = Expectations(method, {own.name: own}, Problem(3, (1, 8, 8), 3, False), 0)
    sent = Message(params={"main": own.initial})
    checks.check(Message({"main": dict(own.initial)}, {}, {"samples": 5}), sent, Step(), info)
    for spoilt in ({"evil": torch.zeros(1)}, {name: t.double() for name, t in own.initial.items()}, {}):
        with pytest.raises(MessageError):
            checks.check(Message({"main": spoilt}, {}, {"samples": 5}), sent, Step(), info)


class Strided(nn.Module):
    """A site's own network; another stride leaves all its tensors as they are, but not what enters the middle."""

    def __init__(self, stride):
        super().__init__()
        self.entry = nn.Conv2d(1, 4, 2, stride=stride)
        self.body = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 6))
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.body(self.entry(x)))


def strided(stride):
    return adapt(Strided(stride), head="out", stem="entry", input_shape=(1, 8, 8))


def introduced(model):
    x, y = torch.rand(6, 1, 8, 8), torch.arange(6) % 3
    own = make_blueprint(model, "Strided", (1, 8, 8), 3, 0, None, "linear")
    return introduce(make("fedin", {}), model, SiteData(Samples(x, y), Samples(x, y), 3), own)


def met(site, head, blob):
    run = {"seed": 0, "feature_dim": None, "feature_adapter": "linear"}
    return read_introduction(site, head, blob, make("fedin", {}), run, MAX_BYTES)


def test_a_site_tells_what_enters_and_leaves_the_middle_of_its_network():
    sites = {f"site{stride}": met(f"site{stride}", *introduced(strided(stride))) for stride in (2, 3)}
    assert [own.cuts for _, own in sites.values()] == [
        {"s_in": (4, 4, 4), "s_out": (6,)},
        {"s_in": (4, 3, 3), "s_out": (6,)},
    ]
    infos, blueprints = settle(sites, ["site2", "site3"])
    assert len(blueprints) == 2  # their tensors have the same shapes
    with pytest.raises(
        InputError, match=r"s_in of one shape.*\[4, 4, 4\] at client 0 \(site2\).*\[4, 3, 3\] at client 1"
    ):
        check_needs(make("fedin", {}), list(infos.values()), blueprints, None, (1, 8, 8))


@pytest.mark.parametrize("cuts", [{}, {"s_in": [4, 4, 4]}, {"s_in": [4, -4, 4], "s_out": [6]}, None])
def test_a_network_in_three_parts_without_credible_cuts_is_not_let_in(cuts):
    head, blob = introduced(strided(2))
    with pytest.raises(MessageError, match="Site north cannot take part"):
        met("north", {**head, "cuts": cuts}, blob)


def test_fedin_is_rehearsed_with_a_stand_in_of_other_cuts():
    _, own = met("north", *introduced(strided(2)))
    found = rehearse(make("fedin", {"noise": 0.5}), own, Problem(3, (1, 8, 8), 3, False), 0)
    assert set(found["main"].tensors) == {"data/s_in", "data/s_out"}
    assert found["main"].tensors["data/s_out"].axes[1] == (6, 6)


def test_a_reply_that_breaks_the_fusion_is_left_out_and_the_server_is_as_if_it_never_came():
    class Fragile(Method):
        name = ""

        def fuse(self, server, replies, step, ctx):
            for reply in replies.values():
                server.memory["sum"] = server.memory.get("sum", torch.zeros(3)) + 1
                server.memory["sum"] = server.memory["sum"] + torch.zeros(3)[reply.data["index"]]

    federation = LiveFederation.__new__(LiveFederation)
    from polyfed.core.party import Party, PartyData

    federation.method, federation.server = Fragile(), Party(-1, None, PartyData())
    federation.ctx = None
    federation.backend = type("B", (), {"infos": {0: ClientInfo(0, 1, "x", name="north"), 1: "south"}})()
    missing = {}
    good, bad = Message(data={"index": torch.tensor([0])}), Message(data={"index": torch.tensor([99])})
    federation._fuse(Step(), {0: bad, 1: good}, missing)
    assert list(missing) == [0] and "north" in missing[0] and "IndexError" in missing[0]
    assert federation.server.memory["sum"].tolist() == [1.0, 1.0, 1.0]
