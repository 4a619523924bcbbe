"""Handles through which a pure loss sees its models.

A loss gets `nets["main"]` and calls it, or its `features`, `head`, `stem`, `middle`; it asks for the parameters by
name. The same loss then runs on a live module (one client at a time) or on stacked states of many clients under
`torch.func.vmap`, and cannot tell the difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

TRAIN, STILL, EVAL = "train", "still", "eval"
_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


class Net:
    """A module in one of three modes.

    `train`: as in ordinary training. `still`: as in training, but running statistics of BatchNorm do not move (for a
    second pass whose inputs are not this client's data). `eval`: as in prediction.
    """

    def __init__(self, module: nn.Module, mode: str = TRAIN) -> None:
        self.module = module
        self.mode = mode
        self._named: dict[str, Tensor] | None = None

    def still(self) -> Net:
        """Return the same network with running statistics held still."""
        return Net(self.module, STILL)

    def eval(self) -> Net:
        """Return the same network in prediction mode."""
        return Net(self.module, EVAL)

    def parameters(self) -> Mapping[str, Tensor]:
        """Return the parameters by name."""
        if self._named is None:
            self._named = dict(self.module.named_parameters())
        return self._named

    def replaced(self, state: Mapping[str, Tensor]) -> FunctionalNet:
        """Return the same network with other tensors in place of some of its own; those may also be narrower.

        For a second network of the same architecture (the received one, an earlier one), for masks, and for slices.
        """
        params, buffers = self.parameters(), dict(self.module.named_buffers())
        return FunctionalNet(self.module, *_replaced(params, buffers, state), self.mode)

    def call(self, method: str, *inputs: Tensor) -> Tensor:
        """Call a method of the module in this handle's mode."""
        with mode(self.module, self.mode):
            output: Tensor = self.module(*inputs) if method == "forward" else getattr(self.module, method)(*inputs)
        return output

    def __call__(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.call("forward", x)

    def features(self, x: Tensor) -> Tensor:
        """Return the input of the last layer."""
        return self.call("features", x)

    def head(self, z: Tensor) -> Tensor:
        """Return the logits of features."""
        return self.call("head", z)

    def stem(self, x: Tensor) -> Tensor:
        """Return the output of the first part (three-way split)."""
        return self.call("stem", x)

    def middle(self, s: Tensor) -> Tensor:
        """Return the features of a stem output (three-way split)."""
        return self.call("middle", s)


class FunctionalNet(Net):
    """The same handle over explicit parameters and buffers instead of the module's own.

    Buffers are passed in, so that `torch.func.grad` and `vmap` accept their in-place update.
    """

    def __init__(
        self, module: nn.Module, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], mode: str = TRAIN
    ):
        super().__init__(module, mode)
        self.params = params
        self.buffers = buffers

    def still(self) -> FunctionalNet:  # noqa: D102
        return FunctionalNet(self.module, self.params, self.buffers, STILL)

    def eval(self) -> FunctionalNet:  # noqa: D102
        return FunctionalNet(self.module, self.params, self.buffers, EVAL)

    def parameters(self) -> Mapping[str, Tensor]:  # noqa: D102
        return self.params

    def replaced(self, state: Mapping[str, Tensor]) -> FunctionalNet:  # noqa: D102
        return FunctionalNet(self.module, *_replaced(self.params, self.buffers, state), self.mode)

    def call(self, method: str, *inputs: Tensor) -> Tensor:  # noqa: D102
        state = {f"module.{name}": tensor for name, tensor in (*self.params.items(), *self.buffers.items())}
        with mode(self.module, self.mode):
            output: Tensor = torch.func.functional_call(_Dispatch(self.module), state, (method, *inputs))
        return output


def _replaced(
    params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    unknown = [name for name in state if name not in params and name not in buffers]
    if unknown:
        raise KeyError(f"the network has no tensor '{unknown[0]}'")
    return {n: state.get(n, t) for n, t in params.items()}, {n: state.get(n, t) for n, t in buffers.items()}


class _Dispatch(nn.Module):
    """Let `functional_call` reach any method, not only `forward`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, method: str, *inputs: Tensor) -> Any:
        return self.module(*inputs) if method == "forward" else getattr(self.module, method)(*inputs)


def features_and_logits(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the features of some inputs, and the logits of these."""
    z = net.features(x)
    return z, net.head(z)


@contextmanager
def mode(module: nn.Module, wanted: str) -> Iterator[None]:
    """Run the block with the module in the given mode and leave it in training mode."""
    if wanted == TRAIN:
        if not module.training:
            module.train()
        yield
        return
    if wanted == EVAL:
        switch(module, False)
        try:
            yield
        finally:
            switch(module, True)
        return
    # A norm layer in training mode with `track_running_stats` off uses the batch and touches no buffer; setting the
    # flag (instead of saving and restoring buffers) keeps autograd's version check happy.
    if not module.training:
        module.train()
    norms = [m for m in norms_of(module) if m.track_running_stats]
    for norm in norms:
        norm.__dict__["track_running_stats"] = False
    try:
        yield
    finally:
        for norm in norms:
            norm.__dict__["track_running_stats"] = True


def switch(module: nn.Module, training: bool) -> None:
    """Do `module.train(training)`; the flags are set directly, since a deep network is switched at every batch."""
    parts = _parts(module)
    if parts.special:
        module.train(training)
        return
    module.training = training
    for part in parts.layers:
        part.__dict__["training"] = training


def has_batch_norm(module: nn.Module) -> bool:
    """Tell whether a batch of one sample cannot be trained on."""
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in norms_of(module))


def frozen_names(module: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that nobody may train: those that ask for no gradient."""
    return frozenset(n for n, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad)


def norms_of(module: nn.Module) -> tuple[Any, ...]:
    """Return the layers that keep running statistics."""
    return (module,) if isinstance(module, _NORMS) else _parts(module).norms


@dataclass(frozen=True)
class _Parts:
    """The layers below a module, looked up once. The module itself is not among them, so that it can be forgotten."""

    layers: tuple[nn.Module, ...]
    norms: tuple[Any, ...]
    special: bool  # some layer has a `train` of its own


_known: WeakKeyDictionary[nn.Module, _Parts] = WeakKeyDictionary()


def _parts(module: nn.Module) -> _Parts:
    found = _known.get(module)
    if found is None:
        _, *layers = module.modules()
        special = any(type(m).train is not nn.Module.train for m in (module, *layers))
        found = _Parts(tuple(layers), tuple(m for m in layers if isinstance(m, _NORMS)), special)
        _known[module] = found
    return found
