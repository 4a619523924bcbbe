"""Give the model contract to any module, from the names of its cut points."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from polyfed.core.errors import InputError, unknown
from polyfed.core.shape import InputShape
from polyfed.models.contract import evaluating, sample_input
from polyfed.models.width import Groups

HEADS = ("fc", "classifier", "score", "head", "heads")  # what torchvision, timm and transformers call it
MOST_TRIED = 8

log = logging.getLogger("polyfed.models")


def adapt(
    model: nn.Module,
    head: str | None = None,
    stem: str | None = None,
    input_shape: Sequence[int] | None = None,
    num_classes: int | None = None,
    feature_dim: int | None = None,
) -> Adapted:
    """Give the contract to a module without editing its class.

    Parameters
    ----------
    model
        Any module whose forward takes one batch of inputs and returns logits `[B, C]`. It is used, not copied.
    head
        Dotted name of the last layer (`"fc"`, `"classifier"`, `"4"` in a Sequential). Its input, flattened, is the
        feature vector. None: what the module calls its classifier (`get_classifier()`, `fc`, `classifier`, `score`,
        `head`), or the last linear layer; `head_name` of the result says which, and so does the log.
    stem
        Dotted name of the module whose output cuts the model in three (`"layer1"`, `"0"`), for methods such as FedIN.
    input_shape
        Shape of one input, without the batch axis. With it the cuts are tried out at once; with `stem` it is needed.
    num_classes, feature_dim
        Only needed without `input_shape`, when they cannot be read off the head.

    Returns
    -------
    Adapted
        A module with the same tensors under the prefix `model.`.

    Notes
    -----
    The model's own forward runs in every part, so the parts do only what it does: `features` stops at the head, `stem`
    stops after the stem, and `middle` starts the forward with zeros, in evaluation mode so that they leave no trace,
    and puts the given tensor in place of the stem's output. This works under `torch.func.functional_call`, `grad` and
    `vmap`. It does not work when the model reaches the head or the stem more than once in a forward, when something
    after the stem still looks at the input, for scripted or compiled modules, nor when two threads run the *same*
    object (give each thread its own copy).

    Raises
    ------
    InputError
        A name does not exist, the head is not a linear layer or never reached, or the parts do not make up the model.
    """
    if stem is not None:
        _submodule(model, stem)
    if head is None:
        head = find_head(model, input_shape)
        log.info("the head of %s is '%s'", type(model).__name__, head)
    last = _submodule(model, head)
    layers = [layer for layer in last.modules() if isinstance(layer, nn.Linear)]
    if not layers:
        raise InputError(
            f"The head '{head}' of {type(model).__name__} is a {type(last).__name__} without a linear layer: "
            f"name the module that gives the logits{_suggest_head(model)}."
        )
    if stem is not None and input_shape is None:
        raise InputError(
            "adapt(..., stem=...) needs input_shape=(channels, height, width) to run the part after the stem."
        )
    adapted = Adapted(model, head, stem, input_shape)
    if input_shape is not None:
        found_dim, found_classes = _try_out(adapted)
    else:
        found_dim, found_classes = layers[0].in_features, layers[-1].out_features  # zero in a lazy layer
    for attribute, given, found in (
        ("feature_dim", feature_dim, found_dim),
        ("num_classes", num_classes, found_classes),
    ):
        if given is not None and found and given != found:
            raise InputError(f"{attribute}={given} was given, but the head '{head}' has {found}: leave it out.")
        if not (given or found):
            raise InputError(f"adapt(...) needs input_shape=(channels, height, width) to find {attribute}.")
        setattr(adapted, attribute, given or found)
    return adapted


def find_head(model: nn.Module, input_shape: Sequence[int] | None = None) -> str:
    """Return the name of the layer that gives a module's logits: with an input shape, candidates are tried out.

    Raises
    ------
    InputError
        If none of them does; with what was tried.
    """
    layers: dict[str, nn.Module] = dict(model.named_modules())
    own = getattr(model, "get_classifier", None)
    wanted = own() if callable(own) else None
    named = [name for name, layer in layers.items() if name and layer is wanted]
    named += [name for last in HEADS for name in layers if name == last or name.endswith(f".{last}")]
    linear = [name for name, layer in layers.items() if isinstance(layer, nn.Linear)]
    inside = [name for name in linear if any(name.startswith(f"{part}.") for part in named)]
    candidates: list[str] = list(dict.fromkeys([*named, *reversed(inside), *reversed(linear)]))
    candidates = [name for name in candidates if any(isinstance(m, nn.Linear) for m in layers[name].modules())]
    if not candidates:
        raise InputError(f"{type(model).__name__} has no linear layer that could be its head: name it (head='...').")
    if input_shape is None:
        return candidates[0]
    for name in candidates[:MOST_TRIED]:
        try:
            _try_out(Adapted(model, name, None, input_shape))
            return name
        except InputError as error:
            failed = error
    raise InputError(
        f"No head of {type(model).__name__} was found among {', '.join(candidates[:MOST_TRIED])}: {failed}"
    )


def _submodule(model: nn.Module, name: str) -> nn.Module:
    known = [known for known, _ in model.named_modules() if known]
    if name not in known:
        raise unknown(f"submodule of {type(model).__name__}", name, known or ["(it has none)"])
    return model.get_submodule(name)


def _suggest_head(model: nn.Module) -> str:
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    return f", for instance '{names[-1]}'" if names else ""


def _try_out(adapted: Adapted) -> tuple[int, int]:
    """Run the parts once and compare them with the whole; return feature_dim and num_classes."""
    model, kind = adapted.model, type(adapted.model).__name__
    assert adapted.input_shape is not None
    x = sample_input(model, adapted.input_shape)
    with evaluating(model), torch.no_grad():
        try:
            logits = model(x)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise InputError(f"{kind} cannot take inputs of shape {adapted.input_shape}: {error}") from error
        if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != 2:
            got = tuple(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
            raise InputError(f"{kind} gives {got} for a batch of two: its forward must return logits [batch, classes].")
        z = adapted.features(x)
        try:
            same = torch.equal(adapted.head(z), logits) or torch.allclose(adapted.head(z), logits, rtol=1e-4, atol=1e-5)
        except (RuntimeError, IndexError, ValueError, TypeError):  # sizes do not fit, or it wants more than a vector
            same = False
        if not same:
            raise InputError(
                f"The head '{adapted.head_name}' does not give the output of {kind}: it must come last, "
                f"take one vector a sample, and nothing (such as a softmax) may follow it."
            )
        if adapted.stem_name is not None and not torch.allclose(
            adapted.middle(adapted.stem(x)), z, rtol=1e-4, atol=1e-5
        ):
            raise InputError(
                f"The output of the stem '{adapted.stem_name}' does not decide the features of {kind}: "
                "name a module that everything passes through."
            )
    return z.shape[1], logits.shape[1]


def _absent(module: nn.Module, name: str) -> NoReturn:
    raise AttributeError(f"{type(module).__name__} has no '{name}'")


@contextmanager
def _forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Give one module another forward for the duration of the block."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


class _Reached(BaseException):
    """Carries a tensor out of a running forward; not an Exception, so that no `except Exception` there stops it."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value


class Adapted(nn.Module):
    """A user's module behind the contract; made by `adapt`. Optional members are there only if the module has them."""

    feature_dim: int
    num_classes: int

    def __init__(self, model: nn.Module, head: str, stem: str | None, input_shape: Sequence[int] | None) -> None:
        super().__init__()
        self.model = model
        self.head_name = head
        self.stem_name = stem
        self.input_shape = None if input_shape is None else InputShape(input_shape)

    @property
    def head(self) -> nn.Module:
        """The last layer."""
        return self.model.get_submodule(self.head_name)

    # A property that raises AttributeError counts as absent for hasattr: optional members are declared by presence.
    @property
    def stem(self) -> Callable[[Tensor], Tensor]:
        """The part up to and with the stem module."""
        return self._stem if self.stem_name is not None else _absent(self, "stem")

    @property
    def middle(self) -> Callable[[Tensor], Tensor]:
        """The part from the stem's output to the features."""
        return self._middle if self.stem_name is not None else _absent(self, "middle")

    @property
    def family(self) -> str:
        """The family that the user's module declares."""
        return cast(str, self.model.family)

    @property
    def width_groups(self) -> Callable[[], Groups]:
        """The width groups that the user's module declares."""
        inner = cast(Callable[[], Groups], self.model.width_groups)
        return lambda: {f"model.{name}": axes for name, axes in inner().items()}

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the user's module."""
        logits: Tensor = self.model(x)
        return logits

    def features(self, x: Tensor) -> Tensor:
        """Return the flattened input of the head."""
        return self._until_head(x)

    def _until_head(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []

        def stop(z: Tensor, *_: Any, **__: Any) -> Tensor:
            if not torch.compiler.is_compiling():
                raise _Reached(z.flatten(1))
            # What writes a network down follows its modules in and out, so an exception would leave it inside: the
            # forward goes on to its end, with logits that nobody uses.
            found.append(z.flatten(1))
            return z.new_zeros(z.shape[0], self.num_classes)

        with _forward_replaced(self.head, stop):
            try:
                self.model(x)
            except _Reached as reached:
                return reached.value
        if found:
            return found[-1]
        raise InputError(
            f"The forward of {type(self.model).__name__} never reaches the head '{self.head_name}': "
            f"name the layer that gives the logits{_suggest_head(self.model)}."
        )

    def _stem(self, x: Tensor) -> Tensor:
        assert self.stem_name is not None
        module = self.model.get_submodule(self.stem_name)
        own = module.forward

        def stop(*inputs: Any, **named: Any) -> None:
            # The module may call itself again inside; only its outermost output counts, hence its own forward here.
            raise _Reached(own(*inputs, **named))

        with _forward_replaced(module, stop):
            try:
                self.model(x)
            except _Reached as reached:
                return reached.value
        raise InputError(f"The forward of {type(self.model).__name__} never reaches the stem '{self.stem_name}'.")

    def _middle(self, s: Tensor) -> Tensor:
        assert self.stem_name is not None and self.input_shape is not None
        module = self.model.get_submodule(self.stem_name)
        flags = [(layer, layer.training) for layer in self.model.modules()]

        def restore() -> None:
            for layer, training in flags:
                layer.training = training

        def put(*_: Any, **__: Any) -> Tensor:
            restore()
            return s

        # The layers before the stem see zeros: in evaluation mode they change no running statistics and draw nothing.
        self.model.eval()
        try:
            with _forward_replaced(module, put):
                return self._until_head(s.new_zeros((s.shape[0], *self.input_shape)))
        finally:
            restore()
