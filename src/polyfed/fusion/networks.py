"""Fused networks: ordinary modules made of several trained ones. They can be saved, reloaded and exported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from polyfed.core.checkpoint import read_json, write_atomic, write_json
from polyfed.core.errors import InputError
from polyfed.fusion.chain import load_chain
from polyfed.models import build
from polyfed.ops.selection import ensemble_scores, normalized, top_k_scores

FORMAT = 1  # of the json file beside a fused model
Rows = Sequence[Sequence[float]]


class Several(nn.Module):
    """Networks with the same outputs, run side by side. The state holds their tensors under `networks.<j>.` only."""

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
    """

    kind = "ensemble"
    weights: Tensor | None

    def __init__(self, networks: Sequence[nn.Module], space: str = "prob", weights: Rows | None = None) -> None:
        super().__init__(networks)
        self.space = space
        self._table("weights", weights, torch.get_default_dtype())

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores, `[B, C]`."""
        scores = ensemble_scores(self.logits(x), self.weights, self.space)
        return scores.clamp_min(1e-30).log() if self.space == "prob" else scores

    def recipe(self) -> dict[str, Any]:
        """Return the other arguments of the constructor, as plain values."""
        return {"space": self.space, "weights": self._plain(self.weights)}


class BlockNetwork(nn.Module):
    """Several perceptrons of one depth as one: stacked first layers, then block-diagonal ones.

    Nothing mixes before the end: the last layer keeps its J blocks apart. It shows what AMS does; it is no faster.
    """

    def __init__(
        self,
        weights: Sequence[Sequence[Tensor]],
        biases: Sequence[Sequence[Tensor | None]],
        k: int | None,
        activation: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.k = k
        self.activation = activation
        self.count = len(weights)
        self.layers = nn.ModuleList()
        for place in range(len(weights[0])):
            blocks = [own[place] for own in weights]
            joined = torch.cat(blocks) if place == 0 else torch.block_diag(*blocks)
            parts = [own[place] for own in biases]
            with_bias = any(part is not None for part in parts)
            layer = nn.Linear(joined.shape[1], joined.shape[0], bias=with_bias)
            layer.weight = nn.Parameter(joined.clone())
            if with_bias:
                zeros = [block.new_zeros(len(block)) for block in blocks]
                layer.bias = nn.Parameter(
                    torch.cat([zero if part is None else part for part, zero in zip(parts, zeros, strict=True)])
                )
            self.layers.append(layer)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of all networks, `[J, B, C]`."""
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        x = self.layers[-1](x)
        return x.reshape(len(x), self.count, -1).transpose(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores, `[B, C]`."""
        return top_k_scores(self.logits(x), self.k)


def known_outputs(network: nn.Module) -> int | None:
    """Return the number of outputs of a module where it can be read off without running it."""
    declared = getattr(network, "num_classes", None)
    if isinstance(declared, int):
        return declared
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Linear)]
    return layers[-1].out_features if layers else None


def check_networks(networks: Sequence[nn.Module]) -> None:
    """Refuse what cannot be fused at all: nothing, things that are no modules, outputs of different sizes."""
    if not networks:
        raise InputError("There is nothing to fuse: give at least one network.")
    for place, network in enumerate(networks):
        if not isinstance(network, nn.Module):
            raise InputError(f"Network {place} is a {type(network).__name__}: give trained torch modules.")
    sizes = [known_outputs(network) for network in networks]
    for place, size in enumerate(sizes):
        if size is not None and sizes[0] is not None and size != sizes[0]:
            raise InputError(
                f"Network 0 has {sizes[0]} outputs and network {place} has {size}: networks are fused over one set of "
                "labels, in one order."
            )


def write_fused(fused: nn.Module, description: Mapping[str, Any], out: str | Path) -> None:
    """Write `<out>.safetensors` and `<out>.json`, which says how to build the module again."""
    base = _base(out)
    state = {name: tensor.detach().contiguous().clone() for name, tensor in fused.state_dict().items()}
    write_atomic(base.with_name(f"{base.name}.safetensors"), save(state))
    write_json(base.with_name(f"{base.name}.json"), {"format": FORMAT, **description})


def load_fused(path: str | Path) -> nn.Module:
    """Read what `write_fused` wrote (either of its two files, or their common name), in prediction mode.

    Raises
    ------
    InputError
        If a file is missing, damaged or from another version.
    """
    base = _base(path)
    about = read_json(base.with_name(f"{base.name}.json"))
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise InputError(f"{base}.json does not describe a fused model of this version.")
    state = read_state(base.with_name(f"{base.name}.safetensors"))
    networks = [build(spec, about["input_shape"], about["num_classes"]) for spec in about["models"]]
    kinds: dict[str, type[Several]] = {"selection": Selection, "ensemble": Averaged}
    if about["kind"] in kinds:
        fused: nn.Module = kinds[about["kind"]](networks, **about["options"])
    elif about["kind"] == "matched":
        fused = load_chain(networks[0], state)
    else:
        fused = networks[0]
    fill(fused, state, base)
    return fused.eval()


def read_state(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file, or say what is wrong with it."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"Cannot read {path} ({error}): give a safetensors file of a trained network.") from error


def fill(network: nn.Module, state: Mapping[str, Tensor], source: object) -> None:
    """Load a state that must fit; `source` is named where it does not."""
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip() if "\n" in str(error) else str(error)
        raise InputError(f"{source} does not fit: {first}") from error


def _base(path: str | Path) -> Path:
    path = Path(path)
    return path.with_suffix("") if path.suffix in (".safetensors", ".json") else path
