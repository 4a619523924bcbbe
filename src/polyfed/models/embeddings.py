"""Which parameters of a network are embeddings: a row for each word, or for each value of a column."""

from __future__ import annotations

from torch import nn

from polyfed.models.tabular import Embeddings

KINDS = (nn.Embedding, nn.EmbeddingBag, Embeddings)


def embedding_names(module: nn.Module) -> frozenset[str]:
    """Return the names of the parameters of embeddings, as in the module's state."""
    layers = [(place, layer) for place, layer in module.named_modules() if isinstance(layer, KINDS)]
    names = (f"{place}.{name}" for place, layer in layers for name, _ in layer.named_parameters())
    return frozenset(name.removeprefix(".") for name in names)
