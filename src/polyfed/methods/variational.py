"""The loss L_vtc of FedVTC's decoder: a variational autoencoder whose encoder is a classifier's feature extractor.

The prior of a class is a Gaussian around its *global* prototype; features of decoded images are matched with these
prototypes too. Equation numbers are those of docs/methods/fedvtc.md, the formulas themselves in `ops/gaussian.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from polyfed.core.fields import NotNegative
from polyfed.core.method import Method
from polyfed.core.party import Context, Party
from polyfed.core.prototypes import spread
from polyfed.core.stage import Aux, Batch, Draw
from polyfed.ops.gaussian import distribution_matching, gaussian_kl, reconstruction_error, reparameterized


@dataclass(frozen=True)
class VariationalLoss(Method):
    """A method whose clients train a decoder with L_vtc, from global prototypes and standard deviations they received.

    Parameters
    ----------
    lambda_dm
        Weight lambda of distribution matching; 0 leaves it (and its pass through the extractor) out.
    kl_weight, rec_weight
        Weights of the two parts of the negative ELBO.
    reduction
        Squared error of an image over its pixels, KL and matching over the latents: their `mean`, or their `sum` as in
        the textbook. Sums grow with both sizes beside a cross-entropy that does not: at the paper's 4096 latents they
        diverge with its learning rate.
    dm_mode, dm_latents
        What is matched: the mean feature of a class (`class_mean`) or every feature (`pointwise`), of images decoded
        from latents of the `batch` or from latents drawn from the `global` class Gaussians.
    prior_cov
        Covariance of the prior: `identity`, or the global standard deviations (`global_sd`).
    """

    lambda_dm: NotNegative = 1.0
    kl_weight: NotNegative = 1.0
    rec_weight: NotNegative = 1.0
    reduction: Literal["mean", "sum"] = "mean"
    dm_mode: Literal["class_mean", "pointwise"] = "class_mean"
    dm_latents: Literal["batch", "global"] = "batch"
    prior_cov: Literal["identity", "global_sd"] = "identity"

    def aux(self, client: Party, ctx: Context) -> dict[str, Tensor]:
        """Return what the losses need beside the batch: prototypes, standard deviations, the scaling of images."""
        sigma = client.inbox.data["sigma"]
        prototypes, known = spread(client.inbox.data, ctx.num_classes, len(sigma))
        return {
            "prototypes": prototypes,
            "known": known,
            "global_sd": sigma,
            "prior_sd": sigma if self.prior_cov == "global_sd" else torch.ones_like(sigma),
            **client.train.scaling.channels(),
        }

    def draws(self, client: Party) -> dict[str, Draw]:
        """Return the noise of the latents."""
        draw = Draw((None, cast(int, client.main.feature_dim)))
        return {"noise": draw, "latents": draw} if self.dm_latents == "global" and self.lambda_dm else {"noise": draw}

    def vtc_loss(self, main: Any, vtc: Any, z: Tensor, batch: Batch, aux: Aux) -> Tensor:
        """Return L_vtc = L_rec + L_KL + lambda·L_DM (Eq. 4 and 6), each with its weight."""
        sigma = vtc.parameters()["log_sigma"].exp()
        prototype, known = aux["prototypes"][batch.y], aux["known"][batch.y]
        latents = z.shape[1] if self.reduction == "mean" else 1  # of which KL and matching are sums
        kl_weight, lambda_dm = self.kl_weight / latents, self.lambda_dm / latents
        loss = kl_weight * gaussian_kl(z, sigma, prototype, aux["prior_sd"], known).mean()  # Eq. 3
        if not (self.rec_weight or self.lambda_dm):
            return loss
        images = vtc(reparameterized(z, sigma, batch["noise"]))  # Eq. 1
        target = batch.x * aux["std"] + aux["mean"]
        loss = loss + self.rec_weight * reconstruction_error(images, target, self.reduction)  # Eq. 2
        if not self.lambda_dm:
            return loss
        if self.dm_latents == "global":
            centre = torch.where(known.unsqueeze(1) > 0, prototype, z)
            images = vtc.still()(reparameterized(centre, aux["global_sd"], batch["latents"]))  # statistics: of Eq. 1
        features = main.features((images - aux["mean"]) / aux["std"])
        matching = distribution_matching(features, batch.y, aux["prototypes"], aux["known"], self.dm_mode)  # Eq. 5
        return loss + lambda_dm * matching
