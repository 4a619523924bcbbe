"""Data: sets by name or from files and arrays, and their division among clients."""

from polyfed.data.catalog import describe_sources
from polyfed.data.clients import Clients
from polyfed.data.dataset import Dataset
from polyfed.data.parse import as_partitioner, parse_partition
from polyfed.data.partition import IID, ByColumn, Dirichlet, LabelSets, Partitioner, Quantity, Shards
from polyfed.data.sources import load
from polyfed.data.split import from_recipe, split

__all__ = [
    "IID",
    "ByColumn",
    "Clients",
    "Dataset",
    "Dirichlet",
    "LabelSets",
    "Partitioner",
    "Quantity",
    "Shards",
    "as_partitioner",
    "describe_sources",
    "from_recipe",
    "load",
    "parse_partition",
    "split",
]
