"""Fused networks: ordinary modules made of several trained ones. They can be saved, reloaded and exported.

`fuse` makes them of networks that somebody has, the one-shot methods of the networks that clients upload.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.metrics import score_of
from polyfed.core.samples import Samples
from polyfed.core.task import CLASSIFICATION, Task, as_task
from polyfed.ops.selection import ensemble_scores, normalized, top_k_scores

CHUNK = 512  # inputs at once
Rows = Sequence[Sequence[float]] | Tensor


@torch.no_grad()
def scores_on(model: nn.Module, data: Samples) -> Tensor:
    """Return the scores of a module, which is in prediction mode, on all inputs of some samples."""
    device = next((parameter.device for parameter in model.parameters()), data.x.device)
    return torch.cat([model(x.to(device)) for x, _ in data.chunks(CHUNK)])


def score_on(model: nn.Module, data: Samples, task: Task) -> float | None:
    """Return how good a module is on some samples, by the score of its task; None: it does not exist there."""
    return score_of(task, task.predictions(scores_on(model, data)), data.labels())


class Several(nn.Module):
    """Networks with the same outputs, run side by side. The state holds their tensors under `networks.<j>.`."""

    kind = ""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks: Any = nn.ModuleList(networks)  # Any: torch does not know of their stem, middle and head
        self.places = list(range(len(networks)))  # which of the given networks these are

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of all networks, `[J, B, C]`."""
        return torch.stack([network(x) for network in self.networks])

    def recipe(self) -> dict[str, Any]:
        """Return the other arguments of the constructor, as plain values."""
        raise NotImplementedError

    def _table(self, name: str, values: Any, dtype: torch.dtype) -> None:
        """Keep a small constant table with the module (it moves with it), outside of the state."""
        table = None if values is None else torch.as_tensor(values).to(dtype)
        self.register_buffer(name, table, persistent=False)

    @staticmethod
    def _plain(table: Tensor | None) -> Any:
        return None if table is None else table.tolist()


class Selection(Several):
    """AMS: the summed logits of the k networks with the largest logit (None: of all).

    Parameters
    ----------
    networks
        Any modules with logits of one size.
    k
        1 is AMS-top1, None AMS-full.
    normalize, temperatures
        As in `ops.selection.normalized`.
    present
        For each network which classes it knows; None: all.
    confidence
        `logit`, or `first_norm` and `first_max`: networks are chosen by the activations of their stem.
    """

    kind = "selection"
    present: Tensor | None
    temperatures: Tensor | None

    def __init__(
        self,
        networks: Sequence[nn.Module],
        k: int | None = 1,
        normalize: str = "none",
        temperatures: Sequence[float] | None = None,
        present: Rows | None = None,
        confidence: str = "logit",
    ) -> None:
        super().__init__(networks)
        self.k, self.normalize, self.confidence = k, normalize, confidence
        self._table("temperatures", temperatures, torch.get_default_dtype())
        self._table("present", present, torch.bool)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores, `[B, C]`."""
        if self.confidence == "logit":
            logits = normalized(self.logits(x), self.normalize, self.temperatures)
            return top_k_scores(logits, self.k, present=self.present)
        stems = [network.stem(x) for network in self.networks]
        strength = torch.stack([self._strength(stem.flatten(1)) for stem in stems])
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
            # A program of fixed shape cannot run a network on some rows only: all are run, one is chosen.
            logits = torch.stack([n.head(n.middle(s)) for n, s in zip(self.networks, stems, strict=True)])
            return top_k_scores(logits, 1, strength, self.present)
        return self._run_winners(stems, strength.argmax(dim=0))

    def _strength(self, stem: Tensor) -> Tensor:
        return stem.norm(dim=1) if self.confidence == "first_norm" else stem.amax(dim=1)

    def _run_winners(self, stems: Sequence[Tensor], winner: Tensor) -> Tensor:
        """Run the rest of each network on the inputs that chose it, and on no others."""
        places, rows = [], []
        for j, network in enumerate(self.networks):
            mine = torch.nonzero(winner == j).flatten()
            if len(mine):
                logits = network.head(network.middle(stems[j][mine])).unsqueeze(0)
                present = None if self.present is None else self.present[j : j + 1]
                places.append(mine)
                rows.append(top_k_scores(logits, 1, present=present))
        return torch.cat(rows)[torch.argsort(torch.cat(places))]

    def recipe(self) -> dict[str, Any]:
        """Return the other arguments of the constructor, as plain values."""
        return {
            "k": self.k,
            "normalize": self.normalize,
            "temperatures": self._plain(self.temperatures),
            "present": self._plain(self.present),
            "confidence": self.confidence,
        }


class Averaged(Several):
    """The mean prediction of all networks, in log space: softmax of the output gives the mean probabilities.

    Parameters
    ----------
    networks
        Any modules with logits of one size.
    space
        `prob`, or `logit` for the mean of the logits.
    weights
        For each network its weight for each class; None: equal.
    task
        What the outputs are: where they are no classes, the task says what the mean prediction is.
    """

    kind = "ensemble"
    weights: Tensor | None

    def __init__(
        self,
        networks: Sequence[nn.Module],
        space: str = "prob",
        weights: Rows | None = None,
        task: str = CLASSIFICATION.name,
    ) -> None:
        super().__init__(networks)
        self.space, self.task = space, task
        self._table("weights", weights, torch.get_default_dtype())

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores, `[B, C]`."""
        if self.task != CLASSIFICATION.name:
            outputs = self.logits(x)
            return outputs.mean(0) if self.space == "logit" else as_task(self.task).mean(outputs)
        scores = ensemble_scores(self.logits(x), self.weights, self.space)
        return scores.clamp_min(1e-30).log() if self.space == "prob" else scores

    def recipe(self) -> dict[str, Any]:
        """Return the other arguments of the constructor, as plain values."""
        return {"space": self.space, "weights": self._plain(self.weights), "task": self.task}
