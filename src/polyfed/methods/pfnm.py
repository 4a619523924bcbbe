"""PFNM: Bayesian Nonparametric Federated Learning of Neural Networks.

Yurochkin, Agarwal, Ghosh, Greenewald, Hoang, Khazaeni, ICML 2019. https://arxiv.org/abs/1905.12022

Clients upload their networks and label counts once. The server matches hidden units across clients by repeated linear
assignment (`ops/matching.py`) and averages the matched ones; the width of the fused network is inferred.

Deviations:
    The prior pulls weights to its mean, so the fusion of J identical networks is a shrunk copy of them (by the factor
    (J/sigma²) / (J/sigma² + 1/sigma0²)); this is the method's, not undone here. With `class_weighting` the weights
    into the outputs and the output biases shrink as for J = 1, since the shares of a class sum to 1.
    Convolutions are an extension: a channel is a unit, with its outgoing kernels (and, at a flattened map, its H·W
    columns of the linear layer) as its weights.
    Searching over settings: the clients count how many of their own samples each candidate gets right. Papers choose
    by training or by test accuracy; `select_on="test"` does the latter and the history says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from polyfed.core.errors import InputError
from polyfed.core.fields import AtLeastOne, Count, NotNegative, Positive
from polyfed.core.message import Message, State
from polyfed.core.method import Local, Plan, Step
from polyfed.core.nets import EVAL, mode
from polyfed.core.party import Blueprint, ClientInfo, Context, Party
from polyfed.core.passes import count_right
from polyfed.fusion.chain import check_alike, layers_of, load_chain, read_chain, write_chain
from polyfed.methods.ensemble import OneShot
from polyfed.ops.matching import GRID, Matching, match_networks
from polyfed.ops.selection import class_weights

UPLOAD, SCORE = Step(), Step("score")


@dataclass(frozen=True)
class PFNM(OneShot):
    """Match and average hidden units.

    Parameters
    ----------
    sigma2, sigma0_2, gamma, mu0, mu0_bias, iterations, pop_factor, cap, max_global
        As in `ops.matching.Matching`. The released program's form is sigma0_2 1, mu0_bias 0.1, iterations 5,
        pop_factor 1, cap 10, max_global 700.
    class_weighting
        A client counts for the weights into an output by its share rho_jc of the samples of that class; False: fully.
    select_on
        `none`: the settings above; otherwise the best of a grid of sigma2, sigma0_2 and gamma by accuracy on the
        clients' own `train` or `validation` data, or on the `test` set (a paper's protocol; nothing to learn from).
    convolutions
        Allow convolutional networks without norms.
    """

    name: ClassVar[str] = "pfnm"
    paper: ClassVar[str] = "Yurochkin et al. 2019"
    needs: ClassVar[frozenset[str]] = frozenset({"builds", "mlp", "same_depth"})
    sends: ClassVar[str] = "the trained weights and the number of samples of each class, once"

    sigma2: Positive = 1.0
    sigma0_2: Positive = 10.0
    gamma: Positive = 1.0
    mu0: float = 0.0
    mu0_bias: float = 0.0
    iterations: Count = 3
    pop_factor: NotNegative = 2.0
    cap: AtLeastOne | None = None
    max_global: AtLeastOne | None = None
    class_weighting: bool = True
    select_on: Literal["none", "train", "validation", "test"] = "none"
    convolutions: bool = False

    def requirements(self) -> frozenset[str]:
        """Convolutional networks are let in where they are asked for."""
        return self.needs - {"mlp"} if self.convolutions else self.needs

    def misfit(
        self, infos: Sequence[ClientInfo], blueprints: Mapping[str, Blueprint], input_shape: tuple[int, ...]
    ) -> str | None:
        """Return which architectures name their tensors differently: a state of one must fit a module of the other."""
        (first, own), *others = blueprints.items()
        other = next((name for name, blueprint in others if list(blueprint.shapes) != list(own.shapes)), None)
        if other is None:
            return None
        return f"networks that differ in width only, but the layers of {first} and {other} have other names"

    def selects_on_test(self) -> bool:
        """Only on the user's word."""
        return self.select_on == "test"

    def plan(self) -> Plan:
        """One round; a second exchange where clients score the candidates."""
        return Plan(round=(UPLOAD, SCORE) if self.select_on in ("train", "validation") else (UPLOAD,), rounds=1)

    def tells_counts(self) -> bool:
        """Upload the label counts too."""
        return True

    def settings(self) -> list[Matching]:
        """Return the candidate settings: one, or the grid."""
        own = Matching(
            self.sigma2,
            self.sigma0_2,
            self.gamma,
            self.mu0,
            self.mu0_bias,
            self.iterations,
            self.pop_factor,
            self.cap,
            self.max_global,
        )
        if self.select_on == "none":
            return [own]
        return [replace(own, sigma2=s, sigma0_2=s0, gamma=g) for s, s0, g in GRID]

    # --- client ---

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Train and upload; or count how many own samples each candidate gets right."""
        if step.name != SCORE.name:
            return (yield from super().local(client, step, ctx))
        data = client.train if self.select_on == "train" else client.data.validation
        if data is None or not len(data):
            return Message(data={"right": torch.zeros(len(GRID), dtype=torch.int32)}, meta={"samples": 0})
        candidates = [client.inbox.params[f"candidate-{place}"] for place in range(len(GRID))]
        right = [count_right(load_chain(client.main, state), data) for state in candidates]
        return Message(data={"right": torch.tensor(right, dtype=torch.int32)}, meta={"samples": len(data)})

    # --- server ---

    def setup_server(self, server: Party, infos: Mapping[int, ClientInfo], ctx: Context) -> None:
        """Check before anything trains that every architecture is a chain of layers, all of one kind."""
        if self.select_on == "test" and server.data.validation is None:
            raise InputError(f"{self.name}: select_on='test' needs a test set at the server, and there is none.")
        modules = {name: blueprint.build() for name, blueprint in ctx.blueprints.items() if blueprint.build is not None}
        for module in modules.values():
            read_chain(module, ctx.input_shape)
        check_alike(modules, ctx.input_shape)

    def send(self, server: Party, info: ClientInfo, step: Step, ctx: Context) -> Message:
        """Send the candidates where clients score them; nothing otherwise."""
        if step.name != SCORE.name:
            return Message()
        return Message(params={f"candidate-{n}": state for n, state in enumerate(server.memory["candidates"])})

    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Match the uploads with each candidate setting; keep the best by what clients (or the test set) say."""
        if step.name == SCORE.name:
            samples = sum(int(reply.meta["samples"]) for reply in replies.values())
            if not samples:
                raise InputError(f"{self.name}: select_on='validation' needs validation data, but no client has any.")
            right = torch.stack([reply.data["right"] for reply in replies.values()]).sum(dim=0)
            self.choose(server, (right.double() / samples).tolist(), ctx)
            return
        server.memory["like"] = min(replies)  # whose module holds the fused tensors
        server.memory["candidates"] = [self.match(replies, options, ctx) for options in self.settings()]
        if self.select_on == "none":
            self.choose(server, [], ctx)
        elif self.select_on == "test":
            data = server.data.validation
            assert data is not None, "setup_server has looked"
            modules = [load_chain(self.module(server.memory["like"], ctx), s) for s in server.memory["candidates"]]
            self.choose(server, [count_right(module, data) / len(data) for module in modules], ctx)

    def match(self, replies: Mapping[int, Message], options: Matching, ctx: Context) -> State:
        """Return the state of the fused network for one setting."""
        networks = [
            layers_of(load_chain(self.module(client, ctx), self.whole(client, reply, ctx)))
            for client, reply in replies.items()
        ]
        counts = torch.stack([reply.data["counts"] for reply in replies.values()])
        shares = list(class_weights(counts)) if self.class_weighting else None
        matched = match_networks(networks, options, ctx.rng("matching"), shares)
        return dict(write_chain(self.module(min(replies), ctx), matched.layers).state_dict())

    def choose(self, server: Party, scores: list[float], ctx: Context) -> None:
        """Keep one candidate (ties: the first) and say which."""
        best = scores.index(max(scores)) if scores else 0
        fused = server.memory.pop("candidates")[best]
        server.memory["fused"] = {name: tensor.detach().clone() for name, tensor in fused.items()}
        ctx.cache.pop("fused module", None)
        widths = [len(layer.weight) for layer in layers_of(self.fused_module(server, ctx))[:-1]]
        record: dict[str, Any] = {**asdict(self.settings()[best]), "selected_on": self.select_on, "widths": widths}
        ctx.log("pfnm", record | ({"accuracy": scores[best]} if scores else {}))

    def fused_module(self, server: Party, ctx: Context) -> nn.Module:
        """Return the fused network as a module."""
        if "fused module" not in ctx.cache:
            ctx.cache["fused module"] = load_chain(self.module(server.memory["like"], ctx), server.memory["fused"])
        module: nn.Module = ctx.cache["fused module"]
        return module

    def serves(self, server: Party) -> bool:
        """Predict as soon as the uploads are matched."""
        return "fused" in server.memory

    def fused_scores(self, server: Party, x: Tensor, ctx: Context) -> Tensor:
        """Return the logits of the fused network."""
        module = self.fused_module(server, ctx)
        with mode(module, EVAL):
            logits: Tensor = module(x)
        return logits
