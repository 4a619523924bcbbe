import torch

from polyfed.ops import aggregate
from polyfed.ops.aggregate import Part, Slot, extract, scatter_mean, weighted_mean


def whole(state):
    return {name: Slot(name) for name in state}


def test_the_mean_is_weighted_by_hand_computed_numbers():
    state = {"w": torch.zeros(2)}
    a, b = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([5.0, 10.0])}
    scatter_mean(state, [Part(a, whole(a), 1.0), Part(b, whole(b), 3.0)])
    assert state["w"].tolist() == [4.0, 8.0]


def test_layers_are_averaged_over_their_owners_only():
    state = {"stem": torch.zeros(1), "deep": torch.zeros(1), "nobody": torch.tensor([7.0])}
    shallow, deep = {"stem": torch.tensor([1.0])}, {"stem": torch.tensor([3.0]), "deep": torch.tensor([5.0])}
    scatter_mean(state, [Part(shallow, whole(shallow), 1.0), Part(deep, whole(deep), 3.0)])
    assert state["stem"].item() == 2.5
    assert state["deep"].item() == 5.0
    assert state["nobody"].item() == 7.0


def test_nested_slices_of_a_4x4_weight():
    """FedFD acceptance 5: two clients of size 4, one of size 3, two of size 2; counts 5, 3, 2 from the corner out."""
    state = {"w": torch.full((4, 4), -1.0)}
    sizes = [4, 4, 3, 2, 2]
    parts = [
        Part({"w": torch.full((n, n), float(k))}, {"w": Slot("w", (slice(0, n), slice(0, n)))}, 1.0)
        for k, n in enumerate(sizes)
    ]
    scatter_mean(state, parts)
    assert torch.allclose(state["w"][:2, :2], torch.tensor((0 + 1 + 2 + 3 + 4) / 5))
    assert torch.allclose(state["w"][2, :3], torch.tensor((0 + 1 + 2) / 3))
    assert torch.allclose(state["w"][3, :], torch.tensor((0 + 1) / 2))


def test_entries_that_nobody_holds_are_bitwise_unchanged():
    state = {"w": torch.randn(4, 4)}
    before = state["w"].clone()
    scatter_mean(state, [Part({"w": torch.ones(2, 2)}, {"w": Slot("w", (slice(0, 2), slice(0, 2)))}, 1.0)])
    assert torch.equal(state["w"][2:], before[2:])
    assert torch.equal(state["w"][:2, 2:], before[:2, 2:])
    assert torch.equal(state["w"][:2, :2], torch.ones(2, 2))


def test_whole_and_sliced_parts_mix_in_either_order():
    small = Part({"w": torch.tensor([2.0])}, {"w": Slot("w", (slice(0, 1),))}, 1.0)
    large = Part({"w": torch.tensor([4.0, 8.0])}, {"w": Slot("w")}, 1.0)
    for order in ([small, large], [large, small]):
        state = {"w": torch.zeros(2)}
        scatter_mean(state, order)
        assert state["w"].tolist() == [3.0, 8.0]


def test_slices_are_weighted_too():
    small = Part({"w": torch.tensor([2.0])}, {"w": Slot("w", (slice(0, 1),))}, 3.0)
    large = Part({"w": torch.tensor([6.0, 8.0])}, {"w": Slot("w")}, 1.0)
    for order in ([small, large], [large, small]):
        state = {"w": torch.zeros(2)}
        scatter_mean(state, order)
        assert state["w"].tolist() == [3.0, 8.0]


def test_a_part_without_weight_does_not_count_wherever_it_stands():
    nothing, some = ({"w": torch.tensor([value, value])} for value in (9.0, 2.0))
    for sliced in (False, True):
        slots = {"w": Slot("w", (slice(0, 2),) if sliced else None)}
        for order in ([(nothing, 0.0), (some, 2.0)], [(some, 2.0), (nothing, 0.0)], [(nothing, 0.0)]):
            state = {"w": torch.tensor([5.0, 5.0])}
            scatter_mean(state, [Part(given, slots, weight) for given, weight in order])
            assert state["w"].tolist() == ([2.0, 2.0] if len(order) == 2 else [5.0, 5.0])


def test_large_tensors_are_averaged_piece_by_piece(monkeypatch):
    monkeypatch.setattr(aggregate, "PIECE", 4)
    state = {"w": torch.zeros(5, 2)}
    a, b = {"w": torch.arange(10.0).view(5, 2)}, {"w": torch.arange(10.0).view(2, 5).T * 3}
    scatter_mean(state, [Part(a, whole(a), 1.0), Part(b, whole(b), 2.0)])
    torch.testing.assert_close(state["w"], (a["w"] + 2 * b["w"]) / 3)


def test_cutting_and_averaging_untouched_parts_is_the_identity():
    torch.manual_seed(0)
    state = {"w": torch.randn(8, 8), "b": torch.randn(8)}
    before = {name: tensor.clone() for name, tensor in state.items()}
    slots = [{"w": Slot("w", (slice(0, n), slice(0, n))), "b": Slot("b", (slice(0, n),))} for n in (8, 8, 5, 3)]
    parts = [Part({n: t.clone() for n, t in extract(state, s).items()}, s, 1.0) for s in slots]
    scatter_mean(state, parts)
    for name in state:
        assert torch.allclose(state[name], before[name], atol=1e-6)


def test_rows_by_number():
    state = {"w": torch.zeros(3, 2)}
    rows = torch.tensor([0, 2])
    scatter_mean(state, [Part({"w": torch.ones(2, 2)}, {"w": Slot("w", (rows, slice(0, 2)))}, 1.0)])
    assert state["w"].tolist() == [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]


def test_weighted_mean_leaves_its_inputs_alone():
    a, b = torch.tensor([1.0]), torch.tensor([4.0])
    assert weighted_mean([a, b], [2.0, 1.0]).item() == 2.0
    assert (a.item(), b.item()) == (1.0, 4.0)


def test_replies_of_another_precision_are_averaged_in_that_of_the_state():
    state = {"w": torch.zeros(2)}
    parts = [Part({"w": torch.tensor([k, 4.0], dtype=torch.float64)}, {"w": Slot("w")}, 1.0) for k in (1, 3)]
    scatter_mean(state, parts)
    assert state["w"].tolist() == [2.0, 4.0] and state["w"].dtype == torch.float32
