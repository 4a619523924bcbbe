import json
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyfed.core.errors import MessageError
from polyfed.core.message import Message

names = st.text(st.characters(codec="utf-8", exclude_characters="/\x00"), min_size=1, max_size=8)
dtypes = st.sampled_from(
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]
)
shapes = st.lists(st.integers(0, 4), max_size=3)
tensors = st.builds(lambda shape, dtype: torch.ones(shape, dtype=dtype), shapes, dtypes)
meta = st.dictionaries(
    names, st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False, width=32) | names
)
messages = st.builds(
    Message,
    params=st.dictionaries(names, st.dictionaries(names, tensors, min_size=1, max_size=3), max_size=2),
    data=st.dictionaries(names, tensors, max_size=3),
    meta=meta,
)


@given(messages)
@settings(max_examples=80, deadline=None)
def test_a_message_survives_the_wire_and_its_size_is_exact(message):
    blob = message.to_bytes()
    again = Message.from_bytes(blob)
    assert len(blob) == message.wire_bytes()
    assert again.meta == message.meta
    assert again.nbytes() == message.nbytes() == sum(message.kinds().values())
    before, after = dict(message.tensors()), dict(again.tensors())
    assert before.keys() == after.keys()
    for name in before:
        assert torch.equal(before[name], after[name])
        assert before[name].dtype == after[name].dtype


def test_the_payload_is_four_bytes_a_float_and_eight_a_number():
    message = Message({"main": {"w": torch.zeros(3, 5)}}, {"classes": torch.zeros(7, dtype=torch.uint8)}, {"n": 1})
    assert message.nbytes() == 4 * 15 + 7 + 8
    assert message.kinds() == {"params/main": 60, "data/classes": 7, "meta": 8}


def test_tensors_that_share_memory_are_sent_in_full():
    w = torch.arange(6.0)
    message = Message({"main": {"a": w[:3], "b": w[3:], "c": w}})
    again = Message.from_bytes(message.to_bytes())
    assert torch.equal(again.params["main"]["b"], w[3:])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda b: b[:-4], "cannot be read"),
        (lambda b: b"", "cannot be read"),
        (lambda b: b"garbage" * 20, "cannot be read"),
        (lambda b: struct.pack("<Q", 2**50) + b[8:], "cannot be read"),
    ],
)
def test_a_damaged_message_is_refused_with_the_senders_name(damage, says):
    blob = Message(data={"z": torch.zeros(4)}).to_bytes()
    with pytest.raises(MessageError, match=f"site-a refused: .*{says}"):
        Message.from_bytes(damage(blob), sender="site-a")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(value):
    blob = Message(data={"z": torch.tensor([0.0, value])}).to_bytes()
    with pytest.raises(MessageError, match="'data/z' holds NaN or infinite"):
        Message.from_bytes(blob)


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        ({"flag": True}, "'flag' is neither a number nor a word"),
        ({"rate": float("inf")}, "'rate' is not finite"),
        ({"rate": float("nan")}, "'rate' is not finite"),
        ({str(number): 0 for number in range(257)}, "not a small table"),
    ],
)
def test_meta_values_are_a_few_finite_numbers_and_words(meta, says):
    with pytest.raises(MessageError, match=f"site-a refused: .*{says}"):
        Message.from_bytes(Message(meta=meta).to_bytes(), sender="site-a")
    assert Message.from_bytes(Message(meta={"n": 1, "x": 0.5, "word": "a"}).to_bytes()).meta["word"] == "a"


def test_a_detached_message_does_not_change_with_its_model():
    message = Message({"main": {"w": torch.ones(2, requires_grad=True)}}, {"z": torch.ones(2)}, {"n": 1})
    copy = message.detached()
    with torch.no_grad():
        message.params["main"]["w"].zero_()
    message.data["z"].zero_()
    message.meta["n"] = 2
    assert copy.params["main"]["w"].tolist() == copy.data["z"].tolist() == [1, 1] and copy.meta == {"n": 1}
    assert not copy.params["main"]["w"].requires_grad


def test_a_message_over_the_limit_is_refused():
    with pytest.raises(MessageError, match="the limit is 100"):
        Message.from_bytes(Message(data={"z": torch.zeros(1000)}).to_bytes(), max_bytes=100)


@given(st.binary(max_size=300))
@settings(max_examples=150, deadline=None)
def test_random_bytes_never_do_worse_than_a_refusal(blob):
    with pytest.raises(MessageError):
        Message.from_bytes(blob)


def declared(**tensors):
    """A blob whose header says what it is told to: (type, shape, bytes)."""
    header, body = {}, b""
    for name, (kind, shape, size) in tensors.items():
        header[f"data/{name}"] = {"dtype": kind, "shape": shape, "data_offsets": [len(body), len(body) + size]}
        body += bytes(size)
    text = json.dumps({**header, "__metadata__": {"meta": "{}"}}).encode()
    return struct.pack("<Q", len(text)) + text + body


@pytest.mark.parametrize(
    "blob",
    [
        declared(x=("F8_E4M3", [4], 4)),
        declared(x=("F8_E5M2", [4], 4)),
        declared(x=("C64", [1], 8)),
        declared(x=("F32", [0, 2**62, 2**62], 0)),
        declared(x=("F32", [2**62, 2**62, 4], 4)),
        declared(x=("F32", [0, 2**200], 0)),
        declared(x=("F32", [-1, -1], 4)),
        declared(x=("F32", [True], 4)),
        declared(x=("F32", [1] * 70, 4)),
        declared(x=("F32", [1.0], 4)),
        declared(x=("F32", "1", 4)),
        declared(x=("F32", [2], 4)),
        declared(**{str(number): ("F32", [0], 0) for number in range(20_001)}),
        struct.pack("<Q", 30_000) + b"[" * 30_000,
    ],
    ids=lambda blob: str(len(blob)),
)
def test_a_header_that_no_message_has_is_refused(blob):
    with pytest.raises(MessageError, match="site-a refused: it cannot be read"):
        Message.from_bytes(blob, sender="site-a")


@pytest.mark.parametrize(
    ("value", "says"), [(10**400, "beyond every count"), (2**63, "beyond"), ("x" * 10**5, "letters")]
)
def test_numbers_and_words_of_a_message_are_bounded(value, says):
    with pytest.raises(MessageError, match=says):
        Message.from_bytes(Message(meta={"samples": value}).to_bytes())
