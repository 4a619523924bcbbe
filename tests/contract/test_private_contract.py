"""With privacy on, nothing leaves a client that the noise does not cover: for every method, whatever it sends.

Bounds so small and noise so large that no sample shows: clients with other samples must then send the same, bit by bit.
"""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from tests.contract.table import CASES, everyday

import polyfed as pf
from polyfed.core.errors import InputError
from polyfed.core.privacy import Privacy, check_privacy
from polyfed.core.samples import Samples
from polyfed.engines.inprocess import InProcess
from polyfed.testing.setting import synthetic

pytest.importorskip("dp_accounting")
BLIND = Privacy(noise_multiplier=1e20, max_norm=1e-30, release_norm=1e-30)


def others(data):
    """Return clients with as many samples, all of them others."""

    def other(samples):
        x, y = samples.inputs(), samples.labels()
        return Samples((3 - 2 * x).flip(-1), (y + 1) % 3)

    return replace(data, train=[other(samples) for samples in data.train])


def plain(model):
    """Return a network without BatchNorm, where that is an option: it mixes samples and is refused."""
    return model.replace(",bn", "") if isinstance(model, str) else model


def sent_by(setting, data):
    exchange, sent = InProcess.exchange, []

    def look(self, step, messages, ctx):
        replies = exchange(self, step, messages, ctx)
        assert not replies.failed, replies.failed
        for client in sorted(replies.messages):
            reply = replies.messages[client].detached()
            sent.append((step.name, client, dict(reply.tensors()), dict(reply.meta)))
        return replies

    with patch.object(InProcess, "exchange", look):
        setting.run(data=data, privacy=BLIND, workers=1)
    return sent


@everyday(few=True)
def test_what_leaves_does_not_depend_on_samples_that_the_noise_hides(case):
    setting = replace(case.setting, models=tuple(plain(model) for model in case.setting.models))
    try:
        check_privacy(BLIND, setting.method)
    except InputError as refusal:
        pytest.skip(str(refusal))
    data = synthetic(per_client=8, public=setting.public)
    try:
        one, other = sent_by(setting, data), sent_by(setting, others(data))
    except InputError as refusal:
        assert "privacy:" in str(refusal)
        pytest.skip(str(refusal))
    assert len(one) == len(other)
    for (step, client, tensors, meta), (_, _, again, meta_again) in zip(one, other, strict=True):
        assert meta == meta_again and tensors.keys() == again.keys(), f"{step} of client {client}"
        for name, tensor in tensors.items():
            assert torch.equal(tensor, again[name]), f"{step} of client {client}: '{name}' shows the samples"


def test_a_method_that_tells_more_is_found():
    class Talkative(pf.FedAvg):
        """Tells the mean of its inputs."""

        name = "talkative"

        def local(self, client, step, ctx):
            reply = yield from super().local(client, step, ctx)
            reply.meta["mean"] = float(client.train.inputs().mean())
            return reply

    setting = replace(CASES[2].setting, method=Talkative())
    data = synthetic(public=False)
    one, other = sent_by(setting, data), sent_by(setting, others(data))
    assert one[0][3] != other[0][3]
