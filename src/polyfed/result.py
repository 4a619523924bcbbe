"""What a run leaves behind: the history, the cost, the models, and a summary for `result.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from torch import nn

from polyfed.core.checkpoint import pack_tree, state_file, sync_folder, write_atomic, write_json
from polyfed.core.cost import DOWN, UP, CostMeter
from polyfed.core.errors import InputError
from polyfed.core.learner import Learner
from polyfed.core.party import Party
from polyfed.core.selection import best_line, worth
from polyfed.core.summary import client_columns, over_clients
from polyfed.core.task import CLASSIFICATION, Task
from polyfed.core.versions import versions
from polyfed.trained import MANY, about_one, model_file

LAST = 5  # rounds whose mean is reported beside the last one


def took_part(history: list[dict[str, Any]]) -> set[int] | None:
    """Return who was among the participants of some round and answered (None: the history does not say).

    Exchanges with everybody before or after the rounds (pre-training, statistics, fine-tuning) do not count.
    """
    rounds = [line for line in history if line["phase"] == "round"]
    if any("participants" not in line for line in rounds):
        return None
    return {who for line in rounds for who in line["participants"] if str(who) not in line.get("missing", {})}


class Models(Mapping[int, nn.Module]):
    """The clients' models after the run, made when asked for, in prediction mode: `result.models[3]`."""

    def __init__(self, ids: list[int], make: Callable[[int], nn.Module]) -> None:
        self._ids = ids
        self._make = make

    def __getitem__(self, client: int) -> nn.Module:
        if client not in self._ids:
            raise InputError(f"There is no client {client}: they are numbered 0 to {len(self._ids) - 1}.")
        return self._make(client).eval()

    def __iter__(self) -> Any:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)


@dataclass(frozen=True)
class Best:
    """The round that validation data chooses: its figure there, and what was measured on test data in this round."""

    round: int
    validation: float
    accuracy: dict[str, Any] = field(repr=False)

    def __int__(self) -> int:
        return self.round


@dataclass
class Result:
    """The outcome of one run."""

    method: str
    seed: int
    rounds: int
    history: list[dict[str, Any]]
    cost: CostMeter
    architectures: list[str]  # of every client
    samples: list[int]  # of every client
    parameters: list[int] = field(default_factory=list)  # of every client's model
    label_counts: list[list[int]] = field(default_factory=list)  # training samples by client and class
    class_names: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    models: Models = field(default_factory=lambda: Models([], lambda _: nn.Identity()), repr=False)
    server_model: nn.Module | None = field(default=None, repr=False)
    server: Party | None = field(default=None, repr=False)  # what the method keeps there: prototypes, a decoder, ...
    directory: Path | None = None
    use: dict[str, Any] | None = field(default=None, repr=False)  # how raw inputs become those of the models
    pooled: bool = False  # the "clients" of the history are architectures that saw all data
    task: Task = CLASSIFICATION
    names: list[str] = field(default_factory=list)  # of the clients, where they have names
    notes: list[str] = field(default_factory=list)  # what was done to the data
    alone: dict[str, Any] | None = None  # what each client reaches by itself, where that was measured in the same run
    worked: set[int] | None = None  # clients that were active in some round or step; None: all may have been

    def __post_init__(self) -> None:
        """Nobody trains the server's model any more: it is handed out to predict."""
        if self.server_model is not None:
            self.server_model.eval()

    def accuracy(self) -> dict[str, Any]:
        """Return the final accuracies: of each client, their mean, spread and worst, and the global model's.

        Where somebody never took part in a round, `took_part` has the mean over those who did.
        """
        measured = [line for line in self.history if "per_client" in line.get("accuracy", {})]
        if not measured:
            return {}
        last = measured[-1]["accuracy"]
        per_client = self._spread(last)
        rounds = [line["accuracy"] for line in measured if line["phase"] == "round"][-LAST:]
        before = [line["accuracy"]["mean"] for line in measured if line["phase"] == "before"]
        summary: dict[str, Any] = {
            "mean": fmean(per_client),
            "std": pstdev(per_client),
            "worst": min(per_client),
            "per_client": per_client,
            "global": last["global"],
            "last_five": fmean(fmean(self._spread(a)) for a in rounds) if rounds else None,
            "before_rounds": before[0] if before else None,
        }
        summary |= {key: last[key] for key in ("score", "personal", "validation", "own", "clients") if key in last}
        summary |= {key: measured[-1][key] for key in ("malicious",) if key in measured[-1]}
        if self.pooled and "validation" in last:  # measured by architecture
            held, everybody = last["validation"], {"clients": [*range(len(per_client))]}
            metrics = self._metrics(held)
            summary["validation"] = {**held, **metrics, "per_client": self._spread(held), **everybody}
        if self.alone:
            summary["alone"] = self.alone
        summary |= self._metrics(last)
        if "global_metrics" in last:
            summary["global_metrics"] = last["global_metrics"]
        measured_clients = last.get("clients", range(len(per_client)))
        active = self._took_part(dict(zip(measured_clients, per_client, strict=True)))
        if len(active) < len(per_client):  # the others count above with the weights they hold
            mean = fmean(active.values()) if active else None
            summary["took_part"] = {"mean": mean, "clients": sorted(active)}
        return summary

    def privacy(self) -> dict[str, Any]:
        """Return delta, whom it is for (`unit`), and each client's epsilon so far; empty where nothing was private."""
        told = [line["privacy"] for line in self.history if "privacy" in line]
        spent = {client: epsilon for item in told for client, epsilon in item["epsilon"].items()}
        return {"unit": told[-1].get("unit", "sample"), "delta": told[-1]["delta"], "epsilon": spent} if told else {}

    def best_round(self) -> Best:
        """Return the round that is best on validation data (never on test data), and what it reached on test data.

        It is the one with the highest mean accuracy, or of a regression the lowest loss; of equal ones the first.
        """
        line = best_line(self.history, self.task)
        if line is None:
            raise InputError("Choosing a round needs validation data: split(..., validation=0.1).")
        accuracy = line["accuracy"]
        chosen = worth(accuracy["validation"], self.task)
        assert chosen is not None
        return Best(line["round"], chosen if self.task.selects == "score" else -chosen, accuracy)

    def summary(self) -> dict[str, Any]:
        """Return the content of `result.json`."""
        cost = self.cost.dump()
        return {
            "method": self.method,
            "seed": self.seed,
            "rounds": self.rounds,
            "task": self.task.name,
            "accuracy": self.accuracy(),
            **self._chosen(),
            "architectures": self.architectures,
            **({"privacy": spent} if (spent := self.privacy()) else {}),
            **({"names": self.names} if self.names else {}),
            **({"notes": self.notes} if self.notes else {}),
            "samples": self.samples,
            "parameters": self.parameters,
            "label_counts": self.label_counts,
            "class_names": self.class_names,
            "cost": {
                "bytes_up": self.cost.total(UP),
                "bytes_down": self.cost.total(DOWN),
                "wire_up": self.cost.wire[UP],
                "wire_down": self.cost.wire[DOWN],
                "per_client": {direction: cost["bytes"][direction] for direction in (UP, DOWN)},
                "kinds": cost["kinds"],
                "peak_memory": self.cost.peak_memory,
                "seconds": {k: cost["seconds"].get(k, 0.0) for k in ("send", "local", "fuse", "evaluate", "total")},
            },
            "versions": versions(),
        }

    def _chosen(self) -> dict[str, Any]:
        """Return the round that validation data chooses, whether it ended the run, and who has no budget left."""
        line = best_line(self.history, self.task)
        stopped = next((line["stopped"] for line in self.history if "stopped" in line), None)
        return {
            **({} if line is None else {"best_round": {"round": line["round"], "accuracy": line["accuracy"]}}),
            **({} if stopped is None else {"stopped": stopped}),
            **({"spent": self.history[-1]["spent"]} if self.history and "spent" in self.history[-1] else {}),
        }

    def save(self, directory: str | Path) -> None:
        """Write `result.json` and the clients' models (safetensors; of learners, what they were taught).

        Of more than `MANY` clients only those that worked in some round have a file.
        """
        directory = Path(directory)
        everybody = self.worked is None or len(self.models) <= MANY
        written = list(self.models) if everybody else sorted(self.worked or ())
        for client in written:
            model = self.models[client]
            if isinstance(model, Learner):  # what it was taught: from that, and its samples, it is fitted again
                blob = pack_tree(model.lessons())
            else:
                blob = model_file(model, {} if self.use is None else about_one(self.use, client))
            write_atomic(directory / "models" / f"client-{client}.safetensors", blob, synced=False)
        if written:
            sync_folder(directory / "models")
        if self.server_model is not None:
            write_atomic(directory / "models" / "server.safetensors", state_file(self.server_model.state_dict()))
        if self.use is not None:
            write_json(directory / "models" / "inputs.json", self.use)
        write_json(directory / "result.json", self.summary())

    def table(self) -> Any:
        """Return a rich table of the clients: who has what, and how good it is."""
        from polyfed.terminal.tables import client_table

        return client_table(self.summary())

    def frame(self) -> Any:
        """Return a pandas data frame of the clients: network, samples, accuracy, bytes."""
        import pandas  # type: ignore[import-untyped]

        summary = self.summary()
        cost = summary["cost"]["per_client"]
        clients = range(len(self.architectures))
        columns = client_columns(summary["accuracy"], len(clients))
        return pandas.DataFrame(
            {
                "client": list(self.names) if self.names else list(clients),
                "model": self.architectures,
                "samples": self.samples,
                **columns,  # None: it was away at the end, or has no such data
                "bytes_up": [cost[UP].get(str(client), 0) for client in clients],
                "bytes_down": [cost[DOWN].get(str(client), 0) for client in clients],
            }
        )

    def plot(self, kind: str = "curves", backend: str = "plotly") -> Any:
        """Return a figure of this run (see `polyfed.report.figure` for the kinds)."""
        from polyfed.report import figure

        return figure(self, kind, backend)

    def _repr_html_(self) -> str:
        """Show a run in a notebook: one line and the table of its clients."""
        from html import escape

        from polyfed.terminal.tables import in_rounds

        accuracy = self.accuracy()
        line = f"{self.method}, {in_rounds(self.rounds)}, seed {self.seed}"
        if accuracy:
            score = accuracy.get("score", "accuracy")
            line += f": mean {score} {100 * accuracy['mean']:.1f} %, worst client {100 * accuracy['worst']:.1f} %"
            if accuracy.get("personal", {}).get("mean") is not None:
                line += f", on own test data {100 * accuracy['personal']['mean']:.1f} %"
        table = self.frame().to_html(index=False, float_format="{:.3f}".format, border=0)
        return f"<div><p><b>{escape(line)}</b></p>{table}</div>"

    def _took_part(self, accuracy: dict[int, float]) -> dict[int, float]:
        """Keep the clients that took part in some round; where the data was pooled, their architecture did."""
        found = took_part(self.history)
        if found is None:
            return accuracy
        order = list(dict.fromkeys(self.architectures))
        party = [order.index(name) for name in self.architectures] if self.pooled else range(len(self.architectures))
        return {client: value for client, value in accuracy.items() if party[client] in found}

    def _metrics(self, accuracy: Mapping[str, Any]) -> dict[str, Any]:
        """Give every client the metrics of its architecture where the data was pooled."""
        found = accuracy.get("metrics", {})
        values = {name: self._spread({**accuracy, "per_client": one["per_client"]}) for name, one in found.items()}
        return {"metrics": {name: over_clients(each) for name, each in values.items()}} if values else {}

    def _spread(self, accuracy: Mapping[str, Any]) -> list[float]:
        """Give every client the value of its architecture where the data was pooled, as far as that was measured."""
        values: list[float] = accuracy["per_client"]
        if not self.pooled:
            return values
        order = list(dict.fromkeys(self.architectures))
        known = dict(zip(accuracy.get("clients", range(len(order))), values, strict=True))
        places = (order.index(architecture) for architecture in self.architectures)
        return [known[place] for place in places if place in known]
