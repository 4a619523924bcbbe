"""PFNM: Bayesian Nonparametric Federated Learning of Neural Networks.

Yurochkin, Agarwal, Ghosh, Greenewald, Hoang, Khazaeni, ICML 2019. https://arxiv.org/abs/1905.12022

Clients upload their networks and label counts once. The server matches hidden units across clients by repeated linear
assignment (`ops/matching.py`) and averages the matched ones; the width of the fused network is inferred.

Deviations:
    The prior pulls weights to its mean: J identical networks give a copy shrunk by (J/sigma²) / (J/sigma² + 1/sigma0²),
    which is not undone; with `class_weighting` the last layer shrinks as for J = 1: the shares of a class sum to 1.
    Convolutions are an extension: a channel is a unit, its weights are its outgoing kernels (or H·W linear columns).
    Clients search settings on their own samples; papers also do so on the test set (`select_on="test"`, reported).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import ClassVar, Literal

import torch

from polyfed.core.errors import InputError
from polyfed.core.fields import AtLeastOne, Count, NotNegative, Positive
from polyfed.core.message import Message
from polyfed.core.method import Local, Plan, Step
from polyfed.core.party import ClientInfo, Context, Party
from polyfed.core.passes import count_right
from polyfed.core.traffic import Symbol, Traffic, floats
from polyfed.core.views import Blueprints
from polyfed.fusion.chain import check_alike, layers_of, load_chain
from polyfed.fusion.matching import accuracy_of, candidates, matched
from polyfed.methods.oneshot import OneShot
from polyfed.ops.matching import GRID, RELEASED, RELEASED_GRID, Matching

UPLOAD, SCORE = Step(), Step("score")


@dataclass(frozen=True)
class PFNM(OneShot):
    """Match and average hidden units.

    Parameters
    ----------
    sigma2, sigma0_2, gamma, mu0, mu0_bias, iterations, pop_factor, cap, max_global
        As in `ops.matching.Matching`.
    form
        `model`: the settings above; `released`: those of the authors' program (sigma0_2 1, mu0_bias 0.1, iterations 5,
        pop_factor 1, cap 10, max_global 700), which are then not set one by one, and its grid of 18 for `select_on`.
    class_weighting
        A client counts for the weights into an output by its share rho_jc of the samples of that class; False: fully.
    select_on
        `none`: the settings above, no grid; otherwise the best of a grid of sigma2, sigma0_2 and gamma by accuracy on
        the clients' own `train` or `validation` data, or on the `test` set (a paper's protocol; nothing to learn from).
    convolutions
        Allow convolutional networks without norms.
    """

    name: ClassVar[str] = "pfnm"
    paper: ClassVar[str] = "Yurochkin et al. 2019"
    needs: ClassVar[frozenset[str]] = frozenset({"builds", "mlp", "same_depth", "classes"})
    sends: ClassVar[str] = "the trained weights and the number of samples of each class, once"
    keeps: ClassVar[str] = "fused"
    traffic: ClassVar[Mapping[str, Traffic]] = {"main": Traffic(up="4*(P + C)"), "score": Traffic("4*K", "4*M + 8")}
    symbols: ClassVar[Mapping[str, Symbol]] = {
        "M": Symbol("candidates, one for each setting of the matching", lambda told: len(told.method.settings())),
        "K": Symbol("numbers of all candidates", lambda told: sum(map(floats, told.message.params.values()))),
    }

    sigma2: Positive = 1.0
    sigma0_2: Positive = 10.0
    gamma: Positive = 1.0
    mu0: float = 0.0
    mu0_bias: float = 0.0
    iterations: Count = 3
    pop_factor: NotNegative = 2.0
    cap: AtLeastOne | None = None
    max_global: AtLeastOne | None = None
    form: Literal["model", "released"] = "model"
    class_weighting: bool = True
    select_on: Literal["none", "train", "validation", "test"] = "none"
    convolutions: bool = False

    def check(self) -> None:
        """Refuse single settings beside the form that sets them all."""
        super().check()
        if self.form == "released" and self.own_settings() != Matching():
            raise InputError(f"{self.name}: form='released' sets the matching as a whole: leave its settings alone.")

    def requirements(self) -> frozenset[str]:
        """Convolutional networks are let in where they are asked for."""
        return self.needs - {"mlp"} if self.convolutions else self.needs

    def misfit(self, infos: Sequence[ClientInfo], blueprints: Blueprints, input_shape: tuple[int, ...]) -> str | None:
        """Return which architectures name their tensors differently: a state of one must fit a module of the other."""
        (first, own), *others = blueprints.items()
        words = f"networks that differ in width only, but the layers of {first} and %s have other names"
        return next((words % name for name, other in others if list(other.shapes) != list(own.shapes)), None)

    def selects_on_test(self) -> bool:
        """Only on the user's word."""
        return self.select_on == "test"

    def plan(self) -> Plan:
        """One round; a second exchange where clients score the candidates."""
        return Plan(round=(UPLOAD, SCORE) if self.select_on in ("train", "validation") else (UPLOAD,), rounds=1)

    def beyond_training(self) -> str | None:
        """Name the scores of candidates, which clients count on their samples."""
        return None if self.plan().round == (UPLOAD,) else "how many of their samples each candidate gets right"

    def tells_counts(self) -> bool:
        """Upload the label counts too."""
        return True

    def settings(self) -> list[Matching]:
        """Return the candidate settings: one, or the grid."""
        own, grid = (RELEASED, RELEASED_GRID) if self.form == "released" else (self.own_settings(), GRID)
        return [own] if self.select_on == "none" else candidates(own, grid)

    def own_settings(self) -> Matching:
        """Return the settings of the fields."""
        return Matching(**{field.name: getattr(self, field.name) for field in fields(Matching)})

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Train and upload; or count how many own samples each candidate gets right."""
        if step.name != SCORE.name:
            return (yield from super().local(client, step, ctx))
        data = client.train if self.select_on == "train" else client.data.validation
        states = [client.inbox.params[f"candidate-{place}"] for place in range(len(self.settings()))]
        right = [0 if data is None else count_right(load_chain(client.main, state), data) for state in states]
        return Message(data={"right": torch.tensor(right, dtype=torch.int32)}, meta={"samples": len(data or ())})

    def setup_server(self, server: Party, infos: Mapping[int, ClientInfo], ctx: Context) -> None:
        """Check before anything trains that every architecture is a chain of layers, all of one kind."""
        if self.select_on == "test" and server.data.validation is None:
            raise InputError(f"{self.name}: select_on='test' needs a test set at the server, and there is none.")
        check_alike({name: ctx.replica(name) for name in ctx.blueprints}, ctx.input_shape)

    def send(self, server: Party, info: ClientInfo, step: Step, ctx: Context) -> Message:
        """Send the candidates where clients score them; nothing otherwise."""
        states = server.memory["candidates"] if step.name == SCORE.name else []
        return Message(params={f"candidate-{place}": state for place, state in enumerate(states)})

    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Match the uploads with each candidate setting; keep the best by what clients (or the test set) say."""
        if step.name == SCORE.name:
            samples = sum(int(reply.meta["samples"]) for reply in replies.values())
            if not samples:
                raise InputError(f"{self.name}: select_on='validation' needs validation data, but no client has any.")
            right = torch.stack([reply.data["right"] for reply in replies.values()]).sum(dim=0)
            self.choose(server, (right.double() / samples).tolist(), ctx)
            return
        networks = [self.network(client, self.whole(client, reply, ctx), ctx) for client, reply in replies.items()]
        counts = torch.stack([reply.data["counts"] for reply in replies.values()]) if self.class_weighting else None
        found = [matched(networks, options, ctx.rng("matching"), counts) for options in self.settings()]
        server.memory["like"] = next(iter(replies))  # whose module holds the fused tensors
        server.memory["candidates"] = [dict(network.state_dict()) for network in found]
        if self.select_on in ("none", "test"):
            data = server.data.validation if self.select_on == "test" else None
            self.choose(server, [] if data is None else [accuracy_of(network, data) for network in found], ctx)

    def choose(self, server: Party, scores: list[float], ctx: Context) -> None:
        """Keep one candidate (ties: the first) and say which."""
        best = scores.index(max(scores)) if scores else 0
        server.memory["fused"] = server.memory.pop("candidates")[best]
        widths = [len(layer.weight) for layer in layers_of(self.fused(server, ctx))[:-1]]
        record = {**asdict(self.settings()[best]), "selected_on": self.select_on, "widths": widths}
        ctx.log("pfnm", record | ({"accuracy": scores[best]} if scores else {}))

    def make_fused(self, server: Party, ctx: Context) -> torch.nn.Module:
        """Return the matched network, of the kind of the first client's."""
        return load_chain(ctx.replica(ctx.infos[server.memory["like"]].architecture), server.memory["fused"])
