"""FedType: Bridging Model Heterogeneity in Federated Learning via Uncertainty-based Asymmetrical Reciprocity Learning.

Wang, Wang, Luo, Xiao, Ma, ICML 2024. https://arxiv.org/abs/2407.03247

A small proxy of one architecture is averaged; the large private network stays. They teach each other asymmetrically:
the private network teaches the proxy by plain distillation, the weaker proxy teaches only by its conformal prediction
sets: the private network should rank the labels of a set above all others, the more the two networks' sets agree.

Deviations:
    In released code the ranking loss is taken of the proxy's logits, which have no gradient, with the sign reversed;
    here the private network learns from it, as evidently meant.
    The calibration temperature is the exact minimum of the cross-entropy (released: ten passes of SGD from 1.3), found
    on validation data where a client has it, otherwise on its training data.
    Sets are those before each epoch of private training, in which the proxy is fixed; the private network's own are
    renewed with every batch. Optimizers start anew in every epoch. Images that change in training are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.augment import refuse_changes
from polyfed.core.fields import Count, NotNegative, PartShare, Positive, Share
from polyfed.core.method import Local, Plan, Step
from polyfed.core.party import ClientInfo, Context, Party
from polyfed.core.passes import count_right, logits_of
from polyfed.core.stage import Aux, Batch, Draw, Stage
from polyfed.core.traffic import Traffic
from polyfed.methods.proxies import Proxies
from polyfed.ops.conformal import agreement, calibrate, prediction_sets, ranking_loss
from polyfed.ops.distance import kl_divergence

FINISH = Step("finish", who="all", up=False)


@dataclass(frozen=True)
class FedType(Proxies):
    """A proxy teaches by prediction sets and is taught by distillation.

    Parameters
    ----------
    alpha
        A set misses the true label of a share alpha of the calibration samples at most.
    k_reg, lam_proxy, lam_private
        From rank k_reg on, each further label costs lam: sets stay small.
    randomized
        Draw whether the last label of a set is in.
    set_weight, distill_weight, temperature
        Weights of the sets' ranking loss and of the distillation, and the temperature of the latter; with both weights
        0 (and one epoch a round) the private networks train alone exactly and the proxies as in FedAvg.
    finish
        After the last round every client trains once more with the final proxy.
    """

    name: ClassVar[str] = "fedtype"
    paper: ClassVar[str] = "Wang et al. 2024"
    needs: ClassVar[frozenset[str]] = frozenset({"classes"})
    traffic: ClassVar[Mapping[str, Traffic]] = {**Proxies.traffic, "finish": Traffic("4*G")}

    alpha: PartShare = 0.1
    k_reg: Count = 5
    lam_proxy: Share = 0.5
    lam_private: Share = 1.0
    randomized: bool = True
    set_weight: NotNegative = 1.0
    distill_weight: NotNegative = 1.0
    temperature: Positive = 1.0
    finish: bool = True

    def plan(self) -> Plan:
        """One exchange a round, and a last training of all clients."""
        return Plan(after=(FINISH,) if self.finish else ())

    def own_epochs(self, epochs: int, rounds: int) -> int:
        """Count both networks, which learn in turn, and the training after the rounds."""
        return super().own_epochs(2 * epochs, rounds + len(self.plan().after))

    def beyond_training(self) -> str | None:
        """Name the sets: one sample moves the quantile of all, which no bound on its own gradient covers."""
        told = "what a proxy learned with prediction sets that are calibrated on all samples together"
        return f"{told} (set_weight=0 can be private)" if self.set_weight else None

    def setup_server(self, server: Party, infos: Mapping[int, ClientInfo], ctx: Context) -> None:
        """Make the proxy; refuse images that change, of which there are no sets and no targets."""
        super().setup_server(server, infos, ctx)
        if self.set_weight or self.distill_weight:
            way_out = "set set_weight and distill_weight to 0"
            refuse_changes(ctx.training, self.name, "prediction sets and targets are", way_out)

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """In each epoch train the private network with the proxy fixed, then the proxy with the private one fixed."""
        for epoch in range(ctx.training.epochs):
            yield self.private_stage(client, f"{step.name}/{epoch}", ctx)
            target = logits_of(client.main, client.train)
            yield Stage(self.proxy_loss, trainable={"proxy": None}, columns={"target": target}, epochs=1)
        return self.reply(client)  # after the last round it goes nowhere

    def proxy_loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return CE + KL(private || proxy), the latter mean over batch and classes."""
        z = nets["proxy"](batch.x)
        taught: Tensor = kl_divergence(z, batch["target"], self.temperature) / z.shape[1]
        return F.cross_entropy(z, batch.y) + self.distill_weight * taught

    def private_stage(self, client: Party, moment: str, ctx: Context) -> Stage:
        """Calibrate both networks; return the training of the private one with the proxy's sets."""
        if not self.set_weight:
            return Stage(self.loss, epochs=1)
        lam = self.current_lam(client)
        temperature, q = self.calibrated(client, "proxy", lam, moment, ctx)
        logits = logits_of(client.models["proxy"], client.train)
        u = self.draws(f"{moment}/sets", len(client.train), client, ctx)
        sets = prediction_sets(logits, temperature, q, lam, self.k_reg, u)
        temperature, q = self.calibrated(client, "main", self.lam_private, moment, ctx)
        aux = {"temperature": temperature, "q": q}
        draws = {"u": Draw((None,), "uniform")} if self.randomized else {}
        return Stage(self.private_loss, columns={"sets": sets}, aux=aux, draws=draws, epochs=1)

    def private_loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return CE + A·L_set, where A is how much the networks' sets agree."""
        z = nets["main"](batch.x)
        u = batch["u"] if self.randomized else None
        own = prediction_sets(z.detach(), aux["temperature"], aux["q"], self.lam_private, self.k_reg, u)
        agreed = agreement(own, batch["sets"]).to(z.dtype).mean()
        return F.cross_entropy(z, batch.y) + self.set_weight * agreed * ranking_loss(z, batch["sets"])

    def current_lam(self, client: Party) -> float:
        """Return the proxy's lam: larger after an epoch in which the private network became worse."""
        accuracy = count_right(client.main, client.train) / len(client.train)
        drop: float = max(0.0, client.memory.get("accuracy", accuracy) - accuracy)
        client.memory["accuracy"] = accuracy
        return self.lam_proxy + (1 - self.lam_proxy) * drop

    def calibrated(self, client: Party, model: str, lam: float, moment: str, ctx: Context) -> tuple[Tensor, Tensor]:
        """Return the temperature of a client's network and the quantile Q of its true labels' scores."""
        data = client.calibration
        logits = logits_of(client.models[model], data)
        u = self.draws(f"{moment}/{model}", len(data), client, ctx)
        return calibrate(logits, data.labels(), self.alpha, lam, self.k_reg, u)

    def draws(self, moment: str, count: int, client: Party, ctx: Context) -> Tensor | None:
        """Return the part u of its own probability that counts for the last label of each set."""
        if not self.randomized:
            return None
        return torch.rand(count, generator=ctx.rng(f"conformal/{moment}", client)).to(ctx.device)
