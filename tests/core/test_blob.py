"""Blobs are what safetensors itself would write, also of tensors that it refuses."""

import pytest
import torch
from safetensors.torch import load, save, save_file

from polyfed.core.blob import DTYPES, all_finite, blob_bytes, blob_of
from polyfed.core.checkpoint import pack_tree, read_tree, state_file
from polyfed.core.errors import InputError, RunDirectoryError
from polyfed.core.weights import read_state

WORDS = {"meta": '{"a": "ü"}'}


def test_blobs_are_those_of_safetensors():
    tensors = {f"{dtype}-{n}": torch.ones(n, 3).to(dtype) for dtype in DTYPES for n in (2, 1)}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "ü": torch.arange(3)}
    blob = blob_of(tensors.items(), WORDS)
    assert load(blob).keys() == tensors.keys()
    again, theirs = load(blob), load(save(tensors, metadata=WORDS))
    assert all(torch.equal(again[n], theirs[n]) and again[n].dtype == tensors[n].dtype for n in tensors)
    assert len(blob) == blob_bytes(tensors.items(), WORDS) == len(save(tensors, metadata=WORDS))


def test_tensors_may_share_memory_and_lie_in_pieces():
    whole = torch.arange(12.0, requires_grad=True).reshape(3, 4)
    tensors = {"whole": whole, "same": whole, "turned": whole.T, "row": whole[1], "wide": torch.ones(1).expand(5)}
    again = load(blob_of(tensors.items(), {}))
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_finite(dtype, bad):
    tensor = torch.zeros(4, 5, dtype=dtype)
    assert all_finite(tensor)
    tensor[2, 3] = bad
    assert not all_finite(tensor)
    assert all_finite(torch.zeros(0)) and all_finite(torch.tensor([1 << 40]))
    assert not all_finite(torch.ones(3, dtype=dtype), tensor, torch.tensor([1]))
    large = torch.full((3,), torch.finfo(dtype).max, dtype=dtype)  # their sum is infinite, they are not
    assert all_finite(large, -large, torch.zeros(0), torch.ones(2, device="meta"))


def test_a_tree_is_read_from_its_file_and_a_damaged_one_is_named(tmp_path):
    tree = {"a": [torch.arange(3), {"b": torch.ones(2, 2)}], "n": 1, "none": None}
    path = tmp_path / "tree.safetensors"
    path.write_bytes(pack_tree(tree))
    again = read_tree(path)
    assert torch.equal(again["a"][0], torch.arange(3)) and torch.equal(again["a"][1]["b"], torch.ones(2, 2))
    assert again["n"] == 1 and again["none"] is None
    again["a"][0].add_(1)  # the file is not written to
    assert torch.equal(read_tree(path)["a"][0], torch.arange(3))
    for content in (path.read_bytes()[:-9], b"", b"\x00" * 40):
        path.write_bytes(content)
        with pytest.raises(RunDirectoryError, match=r"tree.safetensors is damaged"):
            read_tree(path)


def test_a_damaged_model_file_is_named_and_files_of_others_need_no_checksum(tmp_path):
    path, state = tmp_path / "model.safetensors", {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(2).t()}
    sound = state_file(state, {"polyfed": "{}"})
    for place in range(len(sound)):
        damaged = bytearray(sound)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            found = read_state(path)  # only if it was the word "checksum" itself: then all else is as it was
        except InputError as error:
            assert str(path) in str(error)
        else:
            assert b"checksum" not in damaged
            assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)
    path.write_bytes(sound)
    assert all(torch.equal(tensor, state[name]) for name, tensor in read_state(path).items())
    save_file({"a": state["a"]}, path)
    assert torch.equal(read_state(path)["a"], state["a"])
