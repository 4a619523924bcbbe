"""Rules on messages: what a method's own mean becomes when a rule is switched on, by hand numbers."""

import warnings

import pytest
import torch

import polyfed as pf
from polyfed import methods
from polyfed.api import prepare
from polyfed.core.errors import InputError, TrainingError
from polyfed.core.message import Message
from polyfed.core.method import Step
from polyfed.core.replies import Common
from polyfed.core.robust import check_rule, combined, finite_only, geometric_median, nobody_to_compare
from polyfed.core.settings import Settings, Training
from polyfed.core.trust import RULES, Rule, Trust
from polyfed.methods.ams import AMS
from polyfed.methods.fedavg import FedAvg
from polyfed.methods.fedproto import FedProto
from polyfed.methods.heterofl import HeteroFL
from polyfed.testing.setting import synthetic
from polyfed.testing.watch import same_lines, same_states, states

SMALL = Training(epochs=1, batch_size=8)


def federation(method, clients=5, models=("mlp:1x4",)):
    return prepare(method, synthetic(clients, public=False), models, Settings(1))


def weights(made, changes, samples=None):
    """Replies that move every weight of client k by `changes[k]`."""
    start = made.method.send(made.server, made.ctx.infos[0], Step(), made.ctx).params["main"]
    return {
        client: Message(
            {"main": {n: t + change for n, t in start.items()}}, meta={"samples": (samples or [1] * 9)[client]}
        )
        for client, change in enumerate(changes)
    }, start


def fused(made, rule, replies):
    """Fuse under a rule and return how far every weight moved."""
    sent = {c: made.method.send(made.server, made.ctx.infos[c], Step(), made.ctx).detached() for c in replies}
    start = {name: tensor.clone() for name, tensor in made.server.state.items()}
    missing: dict[int, str] = {}
    seen = combined(rule, made.method, made.server, sent, replies, made.ctx, missing)
    made.method.fuse(made.server, seen, Step(), made.ctx)
    assert not missing
    moved = torch.cat([(made.server.state[n] - t).flatten() for n, t in start.items()])
    return moved, seen


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Rule("median"), 3.0),
        (Rule("trimmed", 0.2), 3.0),
        (Rule("trimmed", 0.0), (0.5 + 2 + 3 + 4 + 1000) / 5),
        (Rule("krum", 0.2), 3.0),  # the smallest sum of two squared distances: 1 + 1
        (Rule("multikrum", 0.2), (0.5 + 2 + 3 + 4) / 4),
        (Rule("cosine", 0.0), (0.5 + 2 + 3 + 4 + 1000) / 5),  # all in one direction
        (Rule("distance", 2.0), (0.5 + 2 + 3 + 4) / 4),  # from a majority: 2.5, 1.5, 1, 2 and 997
        (Rule("distance", 1000.0), (0.5 + 2 + 3 + 4 + 1000) / 5),
        (Rule("norm"), (0.5 + 2 + 3 + 3 + 3) / 5),  # nobody moves farther than the median
    ],
)
def test_the_methods_own_mean_becomes_the_rule(rule, expected):
    made = federation(FedAvg())
    replies, _ = weights(made, [0.5, 2.0, 3.0, 4.0, 1000.0])
    moved, _ = fused(made, rule, replies)
    assert torch.allclose(moved, torch.full_like(moved, expected), rtol=1e-4)


def test_a_replacing_rule_does_not_believe_sample_counts():
    made = federation(FedAvg())
    replies, _ = weights(made, [1.0, 2.0, 3.0, 4.0, 5.0], samples=[1, 1, 1, 1, 10**9])
    moved, _ = fused(made, Rule("median"), replies)
    assert torch.allclose(moved, torch.full_like(moved, 3.0), atol=1e-5)


def test_the_cosine_filter_leaves_out_who_goes_the_other_way():
    made = federation(FedAvg())
    replies, _ = weights(made, [1.0, 2.0, 3.0, 4.0, -50.0])
    moved, seen = fused(made, Rule("cosine", 0.0), replies)
    assert sorted(seen) == [0, 1, 2, 3] and made.ctx.records["left_out"] == [4]
    assert torch.allclose(moved, torch.full_like(moved, 2.5), atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "out"),
    [
        ([1.0, 2.0, 3.0, 4.0, 5.0], []),  # nobody sticks out: unlike multikrum, nobody is left out
        ([1.0, 1.0, 1.0, 1.0, 1.0], []),
        ([1.0, 2.0, 3.0, 50.0, 50.0], [3, 4]),  # two that agree are no majority
        ([2.0, 2.1, 50.0], [2]),
    ],
)
def test_only_who_is_far_from_the_majority_is_left_out(changes, out):
    made = federation(FedAvg(), len(changes))
    replies, _ = weights(made, changes)
    _, seen = fused(made, Rule("distance", 2.0), replies)
    assert sorted(seen) == [client for client in range(len(changes)) if client not in out]
    assert made.ctx.records.get("left_out", []) == out


def test_replies_are_not_changed_in_place():
    made = federation(FedAvg())
    replies, _ = weights(made, [1.0, 2.0, 3.0])
    kept = {c: m.detached() for c, m in replies.items()}
    for rule in (Rule("median"), Rule("norm"), Rule("geometric")):
        fused(made, rule, replies)
        for client, message in replies.items():
            assert all(
                torch.equal(a, b) for (_, a), (_, b) in zip(message.tensors(), kept[client].tensors(), strict=True)
            )


def test_the_geometric_median_minimises_the_sum_of_distances():
    points = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 3.0], [100.0, 100.0]])
    (middle,) = geometric_median([Common("k", points, None, ["k"] * 4)])
    best = float((points - middle).norm(dim=1).sum())
    for step in torch.randn(200, 2, generator=torch.Generator().manual_seed(0)) * 0.1:
        assert best <= float((points - middle - step).norm(dim=1).sum()) + 1e-4
    # On a line, it is the median.
    line = torch.tensor([[0.0], [1.0], [5.0]])
    assert float(geometric_median([Common("k", line, None, ["k"] * 3)])[0]) == pytest.approx(1.0, abs=1e-3)


def test_prototypes_meet_class_by_class():
    made = federation(FedProto(), 4)

    def told(values, classes):
        held = torch.tensor(classes, dtype=torch.uint8)
        counts = torch.ones(len(classes), dtype=torch.int32)
        return Message(data={"prototypes": torch.tensor(values), "classes": held, "counts": counts})

    replies = {
        0: told([[1.0], [10.0]], [0, 1]),
        1: told([[2.0], [20.0]], [0, 1]),
        2: told([[9.0]], [0]),
        3: told([[7.0]], [2]),
    }
    seen = combined(Rule("median"), made.method, made.server, {}, replies, made.ctx, {})
    made.method.fuse(made.server, seen, Step(), made.ctx)
    found = made.server.memory["prototypes"]
    assert found["classes"].tolist() == [0, 1, 2]
    assert found["prototypes"].flatten().tolist() == [2.0, 15.0, 7.0]


def test_class_numbers_out_of_range_refuse_their_sender_only():
    made = federation(FedProto(), 3)
    good = {"prototypes": torch.ones(1, 4), "counts": torch.ones(1, dtype=torch.int32)}
    replies = {c: Message(data={**good, "classes": torch.tensor([c * 100], dtype=torch.uint8)}) for c in range(3)}
    missing: dict[int, str] = {}
    seen = combined(Rule("median"), made.method, made.server, {}, replies, made.ctx, missing)
    assert list(seen) == [0] and sorted(missing) == [1, 2] and "client 1 refused" in missing[1]


def test_slices_and_absent_classes_count_for_their_holders_only():
    models = ("cnn:4@1", "cnn:4@0.5")
    made = prepare(
        HeteroFL(static_bn=False), pf.split(pf.load("digits", limit=200), 4, "labels:5", 0), models, Settings(1)
    )
    rng = torch.Generator().manual_seed(0)
    replies = {}
    for client, info in made.ctx.infos.items():
        sent = made.method.send(made.server, info, Step(), made.ctx).params["main"]
        state = {n: torch.randn(t.shape, generator=rng) for n, t in sent.items()}
        replies[client] = Message({"main": state}, meta={"samples": 1})
    seen = combined(Rule("median"), made.method, made.server, {}, replies, made.ctx, {})
    start = {n: t.clone() for n, t in made.server.state.items()}
    made.method.fuse(made.server, seen, Step(), made.ctx)
    for key, tensor in made.server.state.items():
        told = torch.full((4, *tensor.shape), float("nan"))
        for client, reply in replies.items():
            part = made.method.part(made.server, client, reply, made.ctx)
            for name, slot in part.slots.items():
                if slot.key == key:
                    told[client][(...,) if slot.part is None else slot.part] = part.state[name]
        expected = torch.nanquantile(told, 0.5, dim=0)
        expected = torch.where(expected.isnan(), start[key], expected)
        assert torch.allclose(tensor, expected, atol=1e-6), key


@pytest.mark.parametrize("method", [FedAvg(), FedProto()])
def test_trimming_nobody_is_the_method_bit_for_bit(method):
    runs = [pf.run(method, synthetic(public=False), rounds=2, training=SMALL, robust=r) for r in (None, "trimmed:0")]
    same_lines(*runs)
    same_states(*map(states, runs))


def test_nan_leaves_its_sender_out_by_name_and_the_run_goes_on():
    made = federation(FedAvg(), 3)
    replies, _ = weights(made, [1.0, 2.0, 3.0])
    replies[1].params["main"]["head.bias"][0] = float("nan")
    missing: dict[int, str] = {}
    assert sorted(finite_only(replies, made.ctx.infos, missing)) == [0, 2]
    assert missing == {1: "Message from client 1 refused: 'params/main/head.bias' holds NaN or infinite values."}
    replies[2].meta["samples"] = float("inf")
    assert sorted(finite_only(replies, made.ctx.infos, missing)) == [0]


def test_a_run_with_infinite_messages_ends_well():
    result = pf.run("fedavg", synthetic(5, public=False), rounds=2, training=SMALL, attack="scale:0.2:1e39")
    (bad,) = result.history[-1]["malicious"]
    assert str(bad) in result.history[-1]["missing"]
    assert result.accuracy()["clients"] == [client for client in range(5) if client != bad]
    assert all(torch.isfinite(t).all() for t in result.server_model.state_dict().values())


@pytest.mark.parametrize("engine", ["auto", "threads", "batched"])
@pytest.mark.parametrize("models", [["mlp:1x4"], ["mlp:1x4", "mlp:2x4"]])  # in a stack with others, and in one alone
def test_one_client_whose_training_breaks_down_is_left_out_and_starts_over(engine, models):
    x = [torch.randn(20, 5, generator=torch.Generator().manual_seed(c)) for c in range(3)]
    x[1] = x[1] * 1e30  # its loss is not a number
    parts = [(part.numpy(), (torch.arange(20) % 3).numpy()) for part in x]
    data = pf.Clients.from_parts(parts, test=parts[0], num_classes=3, normalize=False)
    result = pf.run("fedavg", data, models, rounds=2, training=SMALL, engine=engine)
    assert all(list(line["missing"]) == ["1"] for line in result.history)
    assert "The loss of client 1 became" in result.history[0]["missing"]["1"]
    assert all(torch.isfinite(t).all() for c in range(3) for t in result.models[c].state_dict().values())
    with pytest.raises(TrainingError, match="try a smaller lr"):  # nobody is left
        alone = pf.Clients.from_parts(parts[1:2], test=parts[0], num_classes=3, normalize=False)
        pf.run("fedavg", alone, ["mlp:1x4"], rounds=1, training=SMALL, engine=engine)


def test_methods_whose_replies_are_not_averaged_say_so_and_name_others():
    with pytest.raises(InputError, match=r"ams .*krum.*Methods with which median works: .*fedavg"):
        check_rule(Rule("median"), AMS(), lambda: [FedAvg(), FedProto()])
    check_rule(Rule("norm"), AMS(), tuple)
    check_rule(Rule("trimmed", 0.0), AMS(), tuple)
    with pytest.raises(InputError, match="not averaged"):
        check_rule(Rule("median"), pf.Method(), tuple)


def test_controls_stand_beside_a_rule_and_an_attack_and_are_what_they_are_without():
    def run(**trust):
        return pf.run("local", synthetic(public=False), rounds=1, **trust).accuracy()["per_client"]

    alone = run()
    assert run(robust="median") == alone
    honest = run(attack="signflip:0.5")
    assert len(honest) < len(alone) and set(honest) <= set(alone)  # the malicious count nowhere


@pytest.mark.parametrize(
    "text", ["trimed:0.2", "trimmed:0.5", "trimmed:x", "median:3", "norm:0", "cosine:2", "krum:-1", "distance:0.5"]
)
def test_rules_that_do_not_exist_are_refused(text):
    with pytest.raises(InputError, match="robust"):
        Trust(robust=text)


@pytest.mark.parametrize("text", ["signflip", "signflip:1", "sign:0.2", "alie:0.2:1:1", "scale:0.2:x"])
def test_attacks_that_do_not_exist_are_refused(text):
    with pytest.raises(InputError, match=r"attack|malicious"):
        Trust(attack=text)


def test_every_rule_runs_with_every_method_that_it_fits():
    declared = [kind for kind in methods.registry().values() if kind.combines]
    assert {"fedavg", "fedproto"} <= {kind.name for kind in declared}
    assert {Trust(robust=name).rule().name for name in RULES} == set(RULES)


# --- who cannot be compared ---


def told(method, models, rule, clients=6):
    made = prepare(method, synthetic(clients, public=False), models, Settings(1))
    return nobody_to_compare(Trust(robust=rule).rule(), made.method, made.server, made.ctx)


SENDERS = ("distance", "cosine", "krum", "multikrum")


@pytest.mark.parametrize("rule", SENDERS)
def test_architectures_without_a_majority_are_named_before_training(rule):
    """Whole networks meet those of their own architecture only: of one or two clients nobody knows who is wrong."""
    alone = told(AMS(), ["mlp:1x4", "mlp:2x4", "mlp:3x4"], rule, 4)
    assert alone is not None and f"robust={rule}" in alone
    assert "mlp:1x4 (2 clients), mlp:2x4 (1 client), mlp:3x4 (1 client)" in alone
    assert ("left out whatever it sends" in alone) == ("krum" in rule)
    some = told(AMS(), ["mlp:1x4", "mlp:1x4", "mlp:1x4", "mlp:2x4"], rule, 4)
    assert some is not None and "mlp:2x4 (1 client)" in some and "mlp:1x4" not in some


@pytest.mark.parametrize("rule", ["median", "trimmed", "geometric", *SENDERS])
def test_slices_that_few_hold_are_named_and_what_all_hold_is_not(rule):
    slices = told(HeteroFL(), ["mlp:1x8@1.0", "mlp:1x8@0.5", "mlp:1x8@0.5"], rule)
    assert slices is not None and "mlp:1x8@1.0 (2 clients)" in slices and "@0.5" not in slices
    assert told(FedAvg(), ["mlp:1x4"], rule, 3) is None
    assert told(FedProto(), ["mlp:1x4", "mlp:2x4"], rule, 2) is None  # class means meet, whatever the network


def test_changes_have_lengths_whoever_else_has_the_network():
    """With `norm` everybody is compared: the median is over all clients, and a change of one of them is shortened."""
    models = ["mlp:1x4", "mlp:2x4", "mlp:3x4"]
    assert told(AMS(), models, "norm", 3) is None and told(AMS(), models, "norm:5", 3) is None
    made = federation(AMS(), 3, models)
    start = {client: made.ctx.blueprints[info.architecture].initial for client, info in made.ctx.infos.items()}
    replies = {
        client: Message({"main": {n: t + (1000 if client == 2 else 1) for n, t in state.items()}})
        for client, state in start.items()
    }
    seen = combined(Rule("norm"), made.method, made.server, {}, replies, made.ctx, {})
    for client, reply in seen.items():
        moved = torch.cat([(t - start[client][n]).flatten() for n, t in reply.params["main"].items()])
        torch.testing.assert_close(moved, torch.ones_like(moved), rtol=1e-3, atol=1e-3)


def test_a_run_warns_of_it_and_one_without_a_rule_does_not():
    clients, models = synthetic(2, public=False), ["mlp:1x4", "mlp:2x4"]
    with pytest.warns(UserWarning, match=r"robust=distance: .* mlp:1x4 \(1 client\), mlp:2x4 \(1 client\)"):
        prepare(AMS(), clients, models, Settings(1, trust=Trust(robust="distance")))
    with warnings.catch_warnings(action="error"):
        prepare(AMS(), clients, models, Settings(1))
