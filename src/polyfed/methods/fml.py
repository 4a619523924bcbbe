"""FML: Federated Mutual Learning.

Shen, Zhang, Jia, Zhang, Huang, Zhou, Kuang, Wu, Wu, 2020. https://arxiv.org/abs/2006.16765

Every client has a private network of its own architecture and a copy of a small common model (the "meme"). Both learn
from the labels and from each other's predictions, as in deep mutual learning; only the memes are averaged.

Deviations:
    The two networks step in turn on each batch (first the private one), as in deep mutual learning; some programs
    compute both losses before either steps.
    alpha = beta = 0.5; a common benchmark's default of 1 switches the mutual terms off, and its divergence is a mean
    over classes, too: a factor of 1/C.
    Each loss moves its own network only: the other one's predictions are fixed targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.nn import functional as F

from polyfed.core.fields import Share
from polyfed.core.method import Local, Step
from polyfed.core.party import Context, Party
from polyfed.core.stage import Aux, Batch, Stage, Update
from polyfed.methods.proxies import Proxies
from polyfed.ops.distance import kl_divergence


@dataclass(frozen=True)
class FML(Proxies):
    """A private network and a common model teach each other.

    Parameters
    ----------
    alpha
        Share a of the labels in the private network's loss, the rest is the meme's teaching; 1 gives local training
        exactly.
    beta
        Share b of the labels in the meme's loss; 1 gives FedAvg of the memes exactly.
    proxy, weighting
        The meme g as a model string, and a client's weight in the mean.
    """

    name: ClassVar[str] = "fml"
    paper: ClassVar[str] = "Shen et al. 2020"
    needs: ClassVar[frozenset[str]] = frozenset({"classes"})

    alpha: Share = 0.5
    beta: Share = 0.5

    def private_loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return a·CE + (1 - a)·KL(meme || private)."""
        return mutual(nets["main"], nets["proxy"], batch, self.alpha)

    def meme_loss(self, nets: Mapping[str, Any], batch: Batch, aux: Aux) -> Tensor:
        """Return b·CE + (1 - b)·KL(private || meme)."""
        return mutual(nets["proxy"], nets["main"], batch, self.beta)

    def local(self, client: Party, step: Step, ctx: Context) -> Local:
        """Train both on each batch and return the meme."""
        private = Update((self.private_loss,), {"main": None})
        meme = Update((self.meme_loss,), {"proxy": None})
        yield Stage(updates=(private, meme))
        return self.reply(client)


def mutual(student: Any, teacher: Any, batch: Batch, share: float) -> Tensor:
    """Return share·CE + (1 - share)·KL(teacher || student); the teacher predicts as in training."""
    z = student(batch.x)
    loss = F.cross_entropy(z, batch.y)
    if share == 1:
        return loss
    return share * loss + (1 - share) * kl_divergence(z, teacher.still()(batch.x))
