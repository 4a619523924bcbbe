"""DS-FL: Distillation-Based Semi-Supervised Federated Learning for Communication-Efficient Collaborative Training.

Itahara, Nishio, Koda, Morikura, Yamamoto, IEEE TMC 2021. https://arxiv.org/abs/2008.06180

FedMD with probabilities instead of logits, and another mean: averaged predictions of clients with skewed data are too
flat, so the server sharpens them (entropy reduction aggregation, ERA) before clients distill them.

    p = mean_k softmax(z_k),    t = softmax(p / T)                                    (1)
    L = -sum_c t_c log softmax(z)_c                                                   (2)

Deviations:
    Public programs disagree on what is divided by T: `space` offers probabilities (most of them), logits, and log p,
    which is the only one for which T = 1 is the plain mean.
    Near the uniform vector Eq. (1) multiplies deviations by 1 / (C·T): it sharpens only if T < 1/C. The entropies of p
    and t are in the history.
    What travels down is the vector before the softmax of t, of the same size: FedMD's loss applies that softmax.
    There is no model at the server, and the subset travels as a seed, as in FedMD.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from polyfed.core.fields import Count, Positive
from polyfed.core.method import Plan
from polyfed.core.party import Context, Party
from polyfed.methods.fedmd import DIGEST, LOGITS, PRETRAIN, REVISIT, FedMD
from polyfed.ops.distance import entropy, log_of


@dataclass(frozen=True)
class DSFL(FedMD):
    """Exchange probabilities on public data, sharpened at the server.

    Parameters
    ----------
    temperature
        T of Eq. (1); the smaller it is, the sharper are the targets.
    aggregation
        `era`, Eq. (1); `mean`: t = p.
    space
        What is divided by T: `prob`, the mean probabilities p; `log`: log p, so that T = 1 is the mean; `logit`: the
        mean logits, which clients then send instead of probabilities.
    subset, digest_epochs, digest_loss, digest_lr, digest_batch
        The public samples of a round and the distillation on them (see FedMD), after the private training here.
        `digest_loss` is `ce`, Eq. (2), or `kl`. With `digest_epochs=0` clients train locally exactly.
    public_epochs, private_epochs
        Pre-training as in FedMD; none here.
    """

    name: ClassVar[str] = "dsfl"
    paper: ClassVar[str] = "Itahara et al. 2021"
    family: ClassVar[str] = "distillation"
    needs: ClassVar[frozenset[str]] = frozenset({"public", "classes"})
    sends: ClassVar[str] = "predicted probabilities on public samples"

    digest_loss: Literal["ce", "kl"] = "ce"  # targets are probabilities
    public_epochs: Count = 0
    private_epochs: Count = 0
    temperature: Positive = 0.1
    aggregation: Literal["era", "mean"] = "era"
    space: Literal["prob", "logit", "log"] = "prob"

    def plan(self) -> Plan:
        """Private training first, then what clients think of public data goes up and its mean comes down."""
        before = (PRETRAIN,) if self.public_epochs or self.private_epochs else ()
        return Plan(before=before, round=(REVISIT, LOGITS, DIGEST))

    def answer(self, client: Party) -> Tensor:
        """Return P_k, the probabilities of a client (in logit space, its logits)."""
        logits = super().answer(client)
        return logits if self.space == "logit" else logits.softmax(1)

    def consensus(self, answers: Sequence[Tensor], ctx: Context) -> Tensor:
        """Return the vector whose softmax is the target t, Eq. (1)."""
        mean = super().consensus(answers, ctx)
        plain = mean if self.space == "logit" else log_of(mean)  # its softmax is the mean without sharpening
        if self.aggregation == "mean":
            target = plain
        else:
            target = (mean if self.space == "prob" else plain) / self.temperature
        ctx.log("entropy", {"mean": entropy(plain), "target": entropy(target)})
        return target
