"""FedAvg with Flower's simulation (Ray), as its PyTorch quickstart writes it, one client for each core at a time."""

from __future__ import annotations

import problem
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    """Train and write the times."""
    told = problem.arguments()
    clients = len(problem.samples(told.data)[0])
    file, name, rounds, batch, lr, out = told.data, told.network, told.rounds, told.batch, told.lr, told.out
    client_app, server_app = ClientApp(), ServerApp()

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        model = problem.network(name)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        x, y = (part[context.node_config["partition-id"]] for part in problem.samples(file))
        optimizer = torch.optim.SGD(model.parameters(), lr=message.content["config"]["lr"])
        model.train()
        for inputs, labels in DataLoader(TensorDataset(x, y), batch_size=batch, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
        return Message(content=RecordDict(content), reply_to=message)

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        clock = problem.Clock()
        model = problem.network(name)
        strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0)
        result = strategy.start(
            grid,
            ArrayRecord(model.state_dict()),
            num_rounds=rounds,
            train_config=ConfigRecord({"lr": lr}),
            evaluate_fn=lambda number, arrays: clock.note(),  # before the first round and after every round
        )
        model.load_state_dict(result.arrays.to_torch_state_dict())
        clock.save(out, problem.loss_of(model, *problem.samples(file)))

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}  # the default, 2, would leave a core idle
    run_simulation(server_app, client_app, num_supernodes=clients, backend_config=resources)


if __name__ == "__main__":
    main()
