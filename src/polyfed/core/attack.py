"""Malicious clients of a simulation: what they send, or what their data teaches them, instead of the truth.

They see what the others send (the strongest adversary that the literature assumes), and they take part in training like
everybody else, so that switching an attack on changes nothing but their messages or their data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist

import torch
from torch import Tensor

from polyfed.core.errors import InputError
from polyfed.core.message import Message
from polyfed.core.method import Method, Step
from polyfed.core.party import ClientInfo, Context, Party, PartyData
from polyfed.core.places import Place, kind_of
from polyfed.core.replies import rebuilt, reference_of, tabled
from polyfed.core.rng import generator
from polyfed.core.samples import Samples
from polyfed.core.trust import IN_DATA, Attack

LOGITS = "data/logits"  # what `shuffle` and `lma` know how to falsify


def malicious(attack: Attack | None, clients: Sequence[int], seed: int) -> frozenset[int]:
    """Return who is malicious: the share rounded to whole clients, drawn from the seed; at least one stays honest."""
    if attack is None:
        return frozenset()
    number = min(round(attack.share * len(clients)), len(clients) - 1)
    order = torch.randperm(len(clients), generator=generator(seed, "malicious")).tolist()
    return frozenset(sorted(clients)[place] for place in order[:number])


def check_share(attack: Attack | None, clients: int) -> None:
    """Refuse a share of so few clients that nobody would be malicious: a rule would seem to have held."""
    if attack is not None and attack.share and not round(attack.share * clients):
        raise InputError(
            f"attack={attack.name}:{attack.share:g}: of {clients} clients that is nobody, one is {1 / clients:.2g}."
        )


def check_attack(attack: Attack | None, method: Method) -> None:
    """Refuse an attack on something that the method's clients do not send."""
    if attack is None or attack.name in IN_DATA or method.family == "control":
        return
    if not method.combines:
        raise InputError(f"attack={attack.name}: {method.name} does not say what its replies hold (Method.combines).")
    if attack.name in ("shuffle", "lma") and LOGITS not in method.combines:
        raise InputError(f"attack={attack.name} falsifies logits, but {method.name} sends {method.sends}.")
    if attack.name == "protoflip" and "classes" not in method.combines.values():
        raise InputError(f"attack=protoflip falsifies class means, but {method.name} sends {method.sends}.")


# --- in the data ---


def poisoned(attack: Attack, data: PartyData, num_classes: int, seed: int, client: int) -> PartyData:
    """Return a malicious client's data."""
    assert data.train is not None
    return replace(data, train=poisoned_samples(attack, data.train, num_classes, seed, client))


def poisoned_samples(attack: Attack, samples: Samples, num_classes: int, seed: int, client: int) -> Samples:
    """Return samples with labels `C-1-c`, or a share of them with a mark in a corner and class 0."""
    x, y = samples.x[samples.rows()], samples.labels()
    if attack.name == "labelflip":
        return Samples(x, num_classes - 1 - y, None, samples.scaling)
    chosen = torch.rand(len(y), generator=generator(seed, "backdoor", 0, client)) < attack.strength
    return Samples(
        torch.where(chosen.view(-1, *(1,) * (x.dim() - 1)), marked(x), x),
        torch.where(chosen, 0, y),
        None,
        samples.scaling,
    )


def marked(x: Tensor) -> Tensor:
    """Return inputs with the backdoor's mark: the last quarter of rows and columns (or features) at the top value."""
    x = x.clone()
    size = max(1, x.shape[-1] // 4)
    corner = (..., slice(-size, None), slice(-size, None)) if x.dim() > 2 else (..., slice(-size, None))
    x[corner] = x.max()
    return x


# --- in the messages ---


@torch.no_grad()
def falsified(
    attack: Attack,
    bad: frozenset[int],
    method: Method,
    server: Party,
    sent: Mapping[int, Message],
    replies: Mapping[int, Message],
    step: Step,
    ctx: Context,
) -> dict[int, Message]:
    """Return the replies with those of malicious clients falsified."""
    if attack.name in IN_DATA or not bad & replies.keys():
        return dict(replies)
    placed = {client: method.places(server, ctx.infos[client], message, ctx) for client, message in replies.items()}
    if attack.name in ("alie", "ipm"):
        return _colluding(attack, bad, placed, sent, replies, ctx)
    found = dict(replies)
    honest = [message for client, message in replies.items() if client not in bad]
    for client in sorted(bad & replies.keys()):
        tensors = dict(replies[client].tensors())
        rng = ctx.rng(f"attack/{step.name}", client)
        for name, tensor in tensors.items():
            how = method.combines.get(kind_of(name))
            if how is not None and tensor.is_floating_point():
                tensors[name] = _false(attack, name, how, tensor, honest, rng)
        found[client] = rebuilt(replies[client], tensors)
    return found


def _false(
    attack: Attack, name: str, how: str, tensor: Tensor, honest: Sequence[Message], rng: torch.Generator
) -> Tensor:
    """Return what is sent instead of one tensor."""
    if attack.name == "signflip":
        return -attack.strength * tensor
    if attack.name == "scale":
        return attack.strength * tensor
    if attack.name == "constant":
        return torch.full_like(tensor, attack.strength)
    if attack.name == "random":
        spread = float(tensor.double().std(correction=0)) or 1.0
        noise = torch.randn(tensor.shape, generator=rng).to(tensor)
        return float(tensor.double().mean()) + attack.strength * spread * noise
    if attack.name == "protoflip":
        return tensor.roll(1, 0) if how == "classes" else tensor
    if name != LOGITS or tensor.dim() != 2:
        return tensor
    if attack.name == "shuffle":
        return tensor[:, torch.randperm(tensor.shape[1], generator=rng)]
    answers = [message.data["logits"] for message in honest if "logits" in message.data] or [tensor]
    mean = torch.stack(answers).mean(0)  # lma: sure of the class that the honest find least likely
    wrong = torch.nn.functional.one_hot(mean.argmin(1), mean.shape[1]).to(tensor)
    return attack.strength * torch.lerp(mean.min().expand_as(mean), mean.max().expand_as(mean), wrong)


def _colluding(
    attack: Attack,
    bad: frozenset[int],
    placed: Mapping[int, Mapping[str, Place]],
    sent: Mapping[int, Message],
    replies: Mapping[int, Message],
    ctx: Context,
) -> dict[int, Message]:
    """Return replies in which all malicious clients say the same of every entry: a little, or the wrong way, off.

    ALIE (Baruch et al. 2019): mean - z · deviation of the honest, with the largest z that hides in their spread. IPM
    (Xie et al. 2019): minus `strength` times the honest mean change.
    """
    reference = {client: reference_of(client, sent, replies, placed, ctx) for client in replies}
    honest = torch.tensor([client not in bad for client in replies])
    found = {client: dict(replies[client].tensors()) for client in replies if client in bad}
    for common in tabled(placed, replies, reference):
        held = torch.ones_like(common.values, dtype=torch.bool) if common.held is None else common.held
        counts = (held & honest.unsqueeze(1)).double()
        number = counts.sum(0).clamp(min=1)
        mean = (common.values * counts).sum(0) / number
        deviation = (((common.values - mean) ** 2 * counts).sum(0) / number).sqrt()
        z = attack.strength or alie_z(len(replies), int((~honest).sum()))
        target = mean - z * deviation if attack.name == "alie" else -attack.strength * mean
        for client, name in zip(replies, common.names, strict=True):
            if client in found and name is not None:
                place, tensor = placed[client][name], found[client][name]
                whole = target.view(place.shape)
                change = (whole if place.part is None else whole[place.part]).to(tensor)
                new = reference[client][name].clone()
                if place.rows is None:
                    new = new + change.reshape(tensor.shape)
                else:
                    new[place.rows] += change
                found[client][name] = new
    return {c: rebuilt(message, found[c]) if c in found else message for c, message in replies.items()}


def alie_z(clients: int, bad: int) -> float:
    """Return the z of ALIE: so that, with the malicious ones, a majority lies beyond `mean - z · deviation`."""
    supporters = math.floor(clients / 2 + 1) - bad
    share = (clients - bad - supporters) / (clients - bad)
    return NormalDist().inv_cdf(min(max(share, 1e-6), 1 - 1e-6))


def honest_infos(infos: Mapping[int, ClientInfo], bad: frozenset[int]) -> list[int]:
    """Return the clients that count in an accuracy."""
    everybody = sorted(infos)
    return [client for client in everybody if client not in bad] if bad else everybody
