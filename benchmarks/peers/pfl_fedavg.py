"""FedAvg with pfl-research, as its tutorials write it. Runs alone or under torchrun (several processes)."""

from __future__ import annotations

from typing import Any

import problem
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.internal.ops.selector import get_framework_module
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional as F


class Classifier(nn.Module):
    """A network with the two functions that pfl asks for."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.net(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return what training minimises."""
        self.train()
        return F.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        """Return what an evaluation reports (only before the first round here)."""
        self.eval()
        return {"loss": Weighted(F.cross_entropy(self(x), y, reduction="sum").item(), len(y))}


class Rounds(TrainingProcessCallback):
    """Note the time of every central iteration."""

    def __init__(self, clock: problem.Clock) -> None:
        self.clock = clock

    def on_train_begin(self, *, model: Any) -> Metrics:
        """Start."""
        self.clock.note()
        return Metrics()

    def after_central_iteration(self, metrics: Any, model: Any, *, central_iteration: int) -> tuple[bool, Metrics]:
        """Note and go on."""
        self.clock.note()
        return False, Metrics()


def main() -> None:
    """Train and write the times."""
    told = problem.arguments()
    x, y = problem.samples(told.data)
    classifier = Classifier(problem.network(told.network))
    model = PyTorchModel(classifier, torch.optim.SGD, torch.optim.SGD(classifier.parameters(), lr=1.0))
    users = list(range(len(x)))

    def dataset_of(user: int) -> PyTorchTensorDataset:
        return PyTorchTensorDataset((x[user], y[user]), user_id=str(user))

    training = FederatedDataset(dataset_of, get_user_sampler("minimize_reuse", users))
    clock = problem.Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(told.rounds, told.rounds + 1, train_cohort_size=len(users), val_cohort_size=0),
        SimulatedBackend(training, training, [WeightByDatapoints()]),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=told.lr, local_batch_size=told.batch),
        callbacks=[Rounds(clock)],
        send_metrics_to_platform=False,
    )
    if get_framework_module().distributed.global_rank == 0:
        clock.save(told.out, problem.loss_of(classifier, x, y))


if __name__ == "__main__":
    main()
