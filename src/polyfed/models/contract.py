"""What polyfed asks of a model, and how it looks at one.

A model is an ordinary `torch.nn.Module` that can be cut before its last layer. `polyfed.models.adapt` gives these
methods to any module from the names of its cut points.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from polyfed.core.errors import InputError, first_line
from polyfed.core.nets import frozen_names
from polyfed.core.shape import InputShape

REQUIRED = ("features", "head", "feature_dim", "num_classes")


def check_model(module: nn.Module, input_shape: Sequence[int]) -> None:
    """Check that a module keeps the contract, by one evaluation pass over two random inputs.

    The module is left as it was: training flags, buffers and random state do not change.

    Raises
    ------
    InputError
        One sentence that says what is missing or wrong and how to fix it.
    """
    kind = type(module).__name__
    if not isinstance(module, nn.Module):
        raise InputError(f"A model must be a torch.nn.Module, but this is a {kind}: pass an instance, not a class.")
    missing = [name for name in REQUIRED if not hasattr(module, name)]
    if missing:
        raise InputError(
            f"The model {kind} has no {' or '.join(repr(name) for name in missing)}: "
            "wrap it with pf.adapt(model, head='<name of its last layer>')."
        )
    x = sample_input(module, input_shape)
    model: Any = module  # torch declares every attribute of a module a tensor or a module
    with evaluating(module), torch.no_grad():
        try:
            features, logits = model.features(x), model(x)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise InputError(
                f"The model {kind} cannot take inputs of shape {tuple(input_shape)} ({first_line(error)}): "
                f"build it for the shape of your data{about_ids(module, input_shape)}."
            ) from error
        _expect(features, (2, model.feature_dim), f"{kind}.features(x)", "feature_dim")
        _expect(logits, (2, model.num_classes), f"{kind}.forward(x)", "num_classes")
        if not torch.allclose(model.head(features), logits, rtol=1e-4, atol=1e-5):
            raise InputError(
                f"In the model {kind}, head(features(x)) differs from forward(x): return plain logits from the last "
                "layer (no softmax after it), or name the right cut with pf.adapt(model, head=...)."
            )
        if hasattr(module, "stem") and hasattr(module, "middle"):
            again = model.middle(model.stem(x))
            if again.shape != features.shape or not torch.allclose(again, features, rtol=1e-4, atol=1e-5):
                raise InputError(
                    f"In the model {kind}, middle(stem(x)) differs from features(x): everything after the stem may "
                    "use only the stem's output; name an earlier cut with pf.adapt(model, stem=...)."
                )


def check_floats(module: nn.Module, input_shape: Sequence[int], label: str) -> None:
    """Check that a network takes the numbers of data sets and gives such: float32, unless torch was told otherwise.

    Raises
    ------
    InputError
        With what its numbers are: it would fail at the first step of training.
    """
    usual = torch.get_default_dtype()
    tensors = (*module.parameters(), *module.buffers())
    others = [tensor.dtype for tensor in tensors if tensor.is_floating_point() and tensor.dtype != usual]
    if not others:
        return
    x = sample_input(module, input_shape)
    try:
        with evaluating(module), torch.no_grad():
            logits = module(x.to(usual) if x.is_floating_point() else x)
    except (RuntimeError, TypeError):
        logits = None
    if not isinstance(logits, Tensor) or logits.dtype != usual:
        raise InputError(
            f"Model {label} computes in {_named(others[0])}, but data and messages are {_named(usual)}: call "
            f".to(torch.{_named(usual)}) where it is made, or let its forward turn the inputs into its numbers and the "
            "logits back."
        )


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def properties(module: nn.Module) -> frozenset[str]:
    """Return which of features, split3, width, exits, batchnorm, mlp and dropout hold for a module."""
    layers = list(module.modules())
    weighted = [layer for layer in layers if next(layer.parameters(recurse=False), None) is not None]
    features = all(hasattr(module, name) for name in REQUIRED)
    held = {
        "features": features,
        "split3": features and hasattr(module, "stem") and hasattr(module, "middle"),
        "width": hasattr(module, "width_groups"),
        "exits": hasattr(module, "exits"),
        "batchnorm": any(isinstance(layer, _BatchNorm) for layer in layers),
        "mlp": bool(weighted) and all(isinstance(layer, nn.Linear) for layer in weighted),
        "dropout": any(isinstance(layer, _DropoutNd) and layer.p > 0 for layer in layers),
    }
    return frozenset(name for name, holds in held.items() if holds)


def cut_shapes(module: nn.Module, input_shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what enters the middle of a network (`s_in`) and leaves it (`s_out`), of one sample.

    A network that cannot be cut in three has none.
    """
    if "split3" not in properties(module):
        return {}
    model: Any = module
    with evaluating(module), torch.no_grad():
        s_in = model.stem(sample_input(module, input_shape))
        s_out = model.middle(s_in)
    return {"s_in": tuple(s_in.shape[1:]), "s_out": tuple(s_out.shape[1:])}


def count_parameters(module: nn.Module) -> int:
    """Return the number of scalars in the parameters (buffers do not count)."""
    return sum(parameter.numel() for parameter in module.parameters())


def signature(module: nn.Module) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return name -> (shape, dtype) of the state dict: equal signatures mean the same architecture."""
    return {
        name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in module.state_dict().items()
    }


def parameter_parts(module: nn.Module, input_shape: Sequence[int]) -> dict[str, str]:
    """Return parameter name -> "stem", "middle" or "head" (without a three-way split: "features" or "head").

    A parameter belongs to the part whose output it can change, found from the graph of one evaluation pass, so it
    works for adapted models whose stem is several modules. A parameter that no part uses is left out.
    """
    parameters = dict(module.named_parameters())
    frozen = [parameter for parameter in parameters.values() if not parameter.requires_grad]
    x = sample_input(module, input_shape)
    model: Any = module
    parts: dict[str, str] = {}
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        with evaluating(module), torch.enable_grad():
            if hasattr(module, "stem") and hasattr(module, "middle"):
                s = model.stem(x)
                z = model.middle(s.detach().requires_grad_())
                outputs = {"stem": s, "middle": z}
            else:
                z = model.features(x)
                outputs = {"features": z}
            outputs["head"] = model.head(z.detach().requires_grad_())
            for part, output in outputs.items():
                gradients: Sequence[Tensor | None] = [None] * len(parameters)
                if output.requires_grad:
                    gradients = torch.autograd.grad(output.sum(), list(parameters.values()), allow_unused=True)
                for name, gradient in zip(parameters, gradients, strict=True):
                    if gradient is not None:
                        parts.setdefault(name, part)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
    return {name: parts[name] for name in parameters if name in parts}


def trainable_names(module: nn.Module, input_shape: Sequence[int], part: str) -> tuple[str, ...]:
    """Return which parameters of one part may move, for models of any make."""
    parts, frozen = parameter_parts(module, input_shape), frozen_names(module)
    return tuple(name for name, own in parts.items() if own == part and name not in frozen)


def sample_input(module: nn.Module, input_shape: Sequence[int]) -> Tensor:
    """Return two fixed random inputs on the device and in the float type of the module, or two rows of token ids."""
    like = next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0))
    rng = torch.Generator().manual_seed(0)
    if words := InputShape(input_shape).words:
        return torch.randint(1, words, (2, *input_shape), generator=rng).to(like.device)
    x = torch.rand((2, *input_shape), generator=rng)
    return x.to(device=like.device, dtype=like.dtype)


def about_ids(module: nn.Module, input_shape: Sequence[int]) -> str:
    """Return advice where a network embeds token ids and gets numbers."""
    embeds = any(isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in module.modules())
    told = ", and where its inputs are token ids load them with kind='tokens' (or kind='text')"
    return told if embeds and not InputShape(input_shape).words else ""


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Run the block with every layer in evaluation mode, then put each layer's own flag back."""
    flags = [(layer, layer.training) for layer in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for layer, training in flags:
            layer.training = training


def _expect(output: Tensor, shape: tuple[int, int], what: str, attribute: str) -> None:
    """Raise when an output does not have the shape that the model declares."""
    got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if got != shape:
        raise InputError(
            f"{what} of a batch of two gives {got}, but {attribute} says {shape}: correct {attribute}, "
            "or use pf.adapt(...), which finds it."
        )


@runtime_checkable
class Model(Protocol):
    """The part of a model that every method may use.

    Optional members, declared by being there: `stem(x)` and `middle(s)` with `features(x) == middle(stem(x))`;
    `exits(x)`, a list of logits; `width_groups()` (see `polyfed.models.width`); `family`, a name shared by models in
    which a parameter of the same name has the same role.
    """

    feature_dim: int
    num_classes: int

    def __call__(self, x: Tensor) -> Tensor:
        """Return the logits, `[B, num_classes]`."""

    def features(self, x: Tensor) -> Tensor:
        """Return the input of the last layer, `[B, feature_dim]`."""

    def head(self, z: Tensor) -> Tensor:
        """Return the logits of features: `head(features(x)) == forward(x)`."""
