"""Give a model another feature dimension, for methods that need it equal at all clients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

from polyfed.core.errors import InputError, unknown
from polyfed.models.width import Axis, Groups


def with_feature_dim(model: nn.Module, d: int, kind: str = "linear", always: bool = False) -> nn.Module:
    """Return the model with feature vectors of length `d`, for methods that need them equal at all clients.

    Parameters
    ----------
    model
        Any model of the contract. One that has `feature_dim == d` is returned unchanged; otherwise it is copied, and
        in the copy a new head takes the place of the old one.
    d
        The common feature dimension.
    kind
        "linear": a trainable linear map without activation; "avgpool": average pooling of the vector, no parameters.
    always
        Also where the model has such features already, for a family of widths whose other members have not.
    """
    if kind not in ("linear", "avgpool"):
        raise unknown("kind of projection", kind, ["linear", "avgpool"])
    if d < 1:
        raise InputError(f"A feature dimension must be at least 1, not {d}.")
    return model if model.feature_dim == d and not always else Projected(model, d, kind)


def _head_name(model: nn.Module) -> str | None:
    """Return the dotted name of the head, or None when it is a plain method."""
    return next((name for name, layer in model.named_modules() if layer is model.head), None)


def _head_input_axis(model: nn.Module) -> Axis:
    """Return the width group at the input of a scalable model's head."""
    if not hasattr(model, "width_groups") or not isinstance(model.head, nn.Linear):
        return None
    width_groups = cast(Callable[[], Groups], model.width_groups)
    return width_groups()[f"{_head_name(model)}.weight"][1]


def _without_head(model: nn.Module) -> nn.Module:
    """Return a copy without the head's parameters, which would neither be trained nor used."""
    model = copy.deepcopy(model)
    name = _head_name(model)
    if name is not None:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, nn.Identity())
    return model


class Projected(nn.Module):
    """A contract model with another feature dimension; made by `with_feature_dim`."""

    def __init__(self, model: nn.Module, d: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.feature_dim = d
        self.num_classes = cast(int, model.num_classes)
        self._feature_axis = _head_input_axis(model) if kind == "linear" else None
        self.model: Any = _without_head(model)  # torch declares every attribute of a module a tensor or a module
        self.projection = nn.Linear(cast(int, model.feature_dim), d) if kind == "linear" else nn.AdaptiveAvgPool1d(d)
        self.head = nn.Linear(d, self.num_classes)

    @property
    def stem(self) -> Callable[[Tensor], Tensor]:
        """The stem of the inner model."""
        stem: Callable[[Tensor], Tensor] = self.model.stem
        return stem

    @property
    def middle(self) -> Callable[[Tensor], Tensor]:
        """The middle of the inner model, with the projection."""
        inner = self.model.middle
        return lambda s: self.projection(inner(s))

    @property
    def family(self) -> str:
        """The family of the inner model with the kind of projection."""
        return f"{self.model.family}+{self.kind}{self.feature_dim}"

    @property
    def width_groups(self) -> Callable[[], Groups]:
        """Width groups: the inner model scales, the new feature vector does not (absent for pooled features)."""
        if self._feature_axis is None:
            raise AttributeError("this model cannot be sliced in width")  # hasattr then says that it is absent
        return self._width_groups

    def features(self, x: Tensor) -> Tensor:
        """Return the projected features."""
        z: Tensor = self.projection(self.model.features(x))
        return z

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the new head."""
        logits: Tensor = self.head(self.features(x))
        return logits

    def _width_groups(self) -> Groups:
        held = self.model.state_dict()
        groups = {f"model.{name}": axes for name, axes in self.model.width_groups().items() if name in held}
        return groups | {
            "projection.weight": (None, self._feature_axis),
            "projection.bias": (None,),
            "head.weight": (None, None),
            "head.bias": (None,),
        }
