"""Adapters: a framework's model seen as named flat arrays (`contracts.FlatModel`)."""

from maniple.adapters.base import Adapter, FlatGradients, GradientBuckets, Params, PassedGradients, choose_parameters
from maniple.adapters.registry import adapt, adapter_for

__all__ = [
    "Adapter",
    "FlatGradients",
    "GradientBuckets",
    "Params",
    "PassedGradients",
    "adapt",
    "adapter_for",
    "choose_parameters",
]
