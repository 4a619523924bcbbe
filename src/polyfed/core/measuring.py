"""How models are measured in a run: who, on which samples, and whose figure stands for everybody."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from polyfed.core.attack import honest_infos
from polyfed.core.backend import Measure
from polyfed.core.evaluate import measure
from polyfed.core.message import Message
from polyfed.core.method import EVALUATE
from polyfed.core.rng import generator
from polyfed.core.runstate import Line, RunState
from polyfed.core.summary import over_clients, summarize


class Measuring(RunState):
    """A run whose models can be measured at any moment: nothing is learned from it, and nobody is changed by it."""

    def _evaluate(self, line: Line) -> dict[str, Any]:
        """Measure on validation data first: it may say that this round is the last one, which is measured in full."""
        validation = self._on_own("validation")
        if line["phase"] == "round" and validation and line["round"] < self.rounds:
            stopped = self.patience.over(self.history, line["round"], validation)
            if stopped is not None:
                line["stopped"] = stopped
                self.final = not self.plan.after
        summary = self._summary(self._evaluate_clients())
        with self.meter.time("evaluate"):
            summary.update(self._evaluate_server())
        own = {"validation": validation, "personal": self._on_own("personal")}
        if summary and self.ctx.task.score != "accuracy":
            summary["score"] = self.ctx.task.title  # what stands where accuracy is said
        return self._of_outcome(summary | {kind: found for kind, found in own.items() if found})

    def _on_own(self, kind: str) -> dict[str, Any]:
        """Measure every client on data of its own and say whose it was: not everybody has some."""
        with self.meter.time("evaluate"):
            found = self.backend.evaluate(self._evaluation_messages(), self.ctx, kind)
        return {**summarize(found), "clients": sorted(found)} if found else {}

    def _of_outcome(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Judge everybody by the server's model where that is what the method is for; what clients keep is `own`."""
        fused = summary.get("global")
        if self.method.outcome != "server" or fused is None or not summary.get("per_client"):
            return summary
        kept = ("mean", "std", "worst", "per_client", "metrics", "personal")
        own = {key: summary.pop(key) for key in kept if key in summary}
        everybody = [fused] * len(own["per_client"])
        judged = {"mean": fused, "std": 0.0, "worst": fused, "per_client": everybody, "own": own}
        if "global_metrics" in summary:
            metrics = summary["global_metrics"]
            judged["metrics"] = {name: over_clients([value] * len(everybody)) for name, value in metrics.items()}
        return {**summary, **judged}

    def _evaluate_clients(self) -> dict[int, Measure]:
        with self.meter.time("evaluate"):
            return self.backend.evaluate(self._evaluation_messages(), self.ctx, "test" if self.final else "sample")

    def _evaluation_messages(self) -> dict[int, Message]:
        """Return what each measured client would receive now. Not counted: nothing is learned from it."""
        infos, wanted = self.backend.infos, self.settings.evaluation.clients
        clients = honest_infos(infos, self.malicious)
        if wanted is not None and wanted < len(clients) and not self.final:
            order = torch.randperm(len(clients), generator=generator(self.settings.seed, "evaluate-clients"))
            clients = sorted(clients[place] for place in order[:wanted].tolist())
        with self._at_server("send/evaluate"):
            return {client: self.method.send(self.server, infos[client], EVALUATE, self.ctx) for client in clients}

    def _evaluate_server(self) -> Mapping[str, Any]:
        if self.test is None or self.sample is None or not self.method.serves(self.server):
            return {"global": None}
        with self._at_server("evaluate"):
            found = measure(self.method, self.server, self.test if self.final else self.sample, self.ctx)
        private = {} if found.private is None else {"global_private": found.private}
        return {"global": found.accuracy, **private, **({"global_metrics": found.metrics} if found.metrics else {})}

    def _summary(self, measures: Mapping[int, Measure]) -> dict[str, Any]:
        """Summarize measures on the common test set."""
        if not measures:
            return {}
        return {
            **summarize(measures),
            **({} if self.final or self.sample is self.test or self.sample is None else {"samples": len(self.sample)}),
            **({} if len(measures) == len(self.backend.infos) else {"clients": sorted(measures)}),  # some were away
        }
