"""FedKD: Communication-efficient federated learning via knowledge distillation.

Wu, Wu, Lyu, Huang, Xie, Nature Communications 2022. https://arxiv.org/abs/2108.13323

Every client has a large mentor, which stays, and a small mentee, which is common. Both learn from the labels and from
each other, outputs and hidden states, the more the better both are. Only changes of the mentee travel, in both
directions, each matrix by a truncated singular value decomposition that keeps a growing share e_t of its energy.

Deviations:
    Mentor and mentee step in turn on each batch; the map W_h of hidden states steps with the mentee.
    The scale 1/c is a number to each loss (`detach_scale`); released code differentiates it too, lets each loss move
    both networks, and takes the divergence as a mean over classes, too (`distill_weight` = 1/C).
    Released code multiplies U·s·V without a diagonal and never accepts the full rank.
    Convolution kernels are matrices of their output channels. The ranks travel too, two bytes for each matrix; what did
    not change has rank 0, and its vectors and embeddings, which are never compressed, travel as zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.fields import NotNegative, Positive, SomeShare
from polyfed.core.message import Message
from polyfed.core.method import Combination, Local, Step
from polyfed.core.nets import features_and_logits
from polyfed.core.party import ClientInfo, Context, Party, cloned, load_state, shared_state
from polyfed.core.stage import Aux, Batch, Stage, Update
from polyfed.core.traffic import Symbol, Traffic, factor_size, matrix_count
from polyfed.methods.proxies import Proxies
from polyfed.models.embeddings import embedding_names
from polyfed.ops.aggregate import mean_state
from polyfed.ops.distance import kl_divergence
from polyfed.ops.lowrank import changed, packed_change, packed_difference, unpacked_change


@dataclass(frozen=True)
class FedKD(Proxies):
    """A mentor and a common mentee teach each other; compressed changes of the mentee travel.

    Parameters
    ----------
    e_0, e_1
        Share of the energy that is kept at the start and in the last round; 1 loses nothing.
    distill_weight, hidden_weight
        Weights of the divergence between outputs and of the distance between hidden states; with both 0 the mentors
        train alone exactly, and with e = 1 the mentees as in FedAvg.
    detach_scale
        Take c, the sum of both cross-entropies that the teaching is divided by, for a number.
    proxy_lr
        Learning rate of the mentee and the map, 0.01 in released code (None: the run's).
    """

    name: ClassVar[str] = "fedkd"
    paper: ClassVar[str] = "Wu et al. 2022"
    knows_rounds: ClassVar[bool] = True
    sends: ClassVar[str] = "the change of a small common model as low-rank factors"
    combines: ClassVar[Mapping[str, Combination]] = {}  # changes travel packed
    traffic: ClassVar[Mapping[str, Traffic]] = {"main": Traffic("4*R + 2*M", "4*R + 2*M + [weighting == 'samples']*8")}
    symbols: ClassVar[Mapping[str, Symbol]] = {"R": factor_size("proxy"), "M": matrix_count("proxy")}

    e_0: SomeShare = 0.95
    e_1: SomeShare = 0.98
    distill_weight: NotNegative = 1.0
    hidden_weight: NotNegative = 1.0
    detach_scale: bool = True
    proxy_lr: Positive | None = None

    def requirements(self) -> frozenset[str]:
        """Hidden states need models that show them."""
        return self.needs | {"classes"} | ({"features"} if self.hidden_weight else set())

    def energy(self, ctx: Context) -> float:
        """Return e_t = e_0 + (e_1 - e_0)·t/T in round t of T."""
        return self.e_0 + (self.e_1 - self.e_0) * ctx.round / ctx.rounds

    # --- server ---

    def setup_server(self, server: Party, infos: Mapping[int, ClientInfo], ctx: Context) -> None:
        """Start from the mentee that everybody makes from the seed: the first change is none."""
        super().setup_server(server, infos, ctx)
        server.memory["change"] = {"round": 0, "holders": list(infos), "packed": {}}

    def send(self, server: Party, info: ClientInfo, step: Step, ctx: Context) -> Message:
        """Send the last change to those who hold what it applies to, the whole mentee to those who missed a round."""
        change = server.memory["change"]
        if info.id in change["holders"] and ctx.round <= change["round"] + 1:  # later: a round without replies
            return Message(data=dict(change["packed"]))
        return super().send(server, info, step, ctx)

    def fuse(self, server: Party, replies: Mapping[int, Message], step: Step, ctx: Context) -> None:
        """Take the mean of the changes, compress it, and apply it here as the clients will."""
        g = shared_state(server.main)
        changes = (unpacked_change(reply.data, g) for reply in replies.values())
        mean = mean_state(changes, self.weights(replies))
        packed = packed_change(mean, self.energy(ctx), embedding_names(server.main))
        load_state(server.main, changed(g, packed))
        server.memory["change"] = {"round": ctx.round, "holders": list(replies), "packed": packed}

    # --- client ---

    def setup_client(self, client: Party, ctx: Context) -> None:
        """Add the mentee, the map W_h of its hidden states, and the common mentee that changes apply to."""
        super().setup_client(client, ctx)
        client.memory["common"] = cloned(shared_state(client.models["proxy"]))
        if self.hidden_weight:
            small, large = (cast(int, client.models[name].feature_dim) for name in ("proxy", "main"))
            client.models["map"] = ctx.initialized("map", lambda: nn.Linear(small, large, bias=False))

    def receive(self, client: Party, step: Step, ctx: Context) -> None:
        """Renew the common mentee, and start from it."""
        common = client.inbox.params.get("proxy") or changed(client.memory["common"], client.inbox.data)
        client.memory["common"] = cloned(common)
        load_state(client.models["proxy"], common)

    def mentor_loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return CE_mentor + (KL(mentee || mentor) + MSE(f_mentor, W_h f_mentee)) / c."""
        return self.taught("main", {**nets, "proxy": nets["proxy"].still()}, batch)

    def mentee_loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return CE_mentee + (KL(mentor || mentee) + MSE(f_mentor, W_h f_mentee)) / c."""
        return self.taught("proxy", {**nets, "main": nets["main"].still()}, batch)

    def taught(self, student: str, nets: Mapping[str, Any], batch: Batch) -> Tensor:
        """Return a student's loss: its own cross-entropy, and what the other one teaches."""
        if not self.distill_weight and not self.hidden_weight:
            return F.cross_entropy(nets[student](batch.x), batch.y)
        seen = {n: features_and_logits(nets[n], batch.x) for n in ("main", "proxy")} if self.hidden_weight else {}
        logits = {n: seen[n][1] if seen else nets[n](batch.x) for n in ("main", "proxy")}
        losses = {name: F.cross_entropy(z, batch.y) for name, z in logits.items()}
        c = (losses["main"] + losses["proxy"]).clamp_min(1e-8)  # two perfect networks have nothing left to teach
        teacher = "proxy" if student == "main" else "main"
        teaching = self.distill_weight * kl_divergence(logits[student], logits[teacher])
        if seen:
            teaching = teaching + self.hidden_weight * F.mse_loss(nets["map"](seen["proxy"][0]), seen["main"][0])
        return losses[student] + teaching / (c.detach() if self.detach_scale else c)

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Train both on each batch and return the change of the mentee."""
        mentor = Update((self.mentor_loss,), {"main": None})
        moved: dict[str, tuple[str, ...] | None] = {"proxy": None, **({"map": None} if self.hidden_weight else {})}
        rate = replace(ctx.training, lr=self.proxy_lr) if self.proxy_lr else None
        yield Stage(updates=(mentor, Update((self.mentee_loss,), moved, training=rate)))
        proxy, common = client.models["proxy"], client.memory["common"]
        packed = packed_difference(shared_state(proxy), common, self.energy(ctx), embedding_names(proxy))
        return Message(data=packed, meta=self.reply(client).meta)
