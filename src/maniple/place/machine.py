"""What variables say of this machine's threads, cores and GPUs; maniple sets none of those that stand here alone."""

import os
from collections.abc import Mapping

# By these an OpenMP runtime binds threads to cores of its own choice, also the thread that imports it.
_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def values_of(names: tuple[str, ...], env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables among `names` that are set, with what they say."""
    return {name: env[name] for name in names if env.get(name)}


def binding_variables(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that let a library bind threads to cores."""
    return values_of(_BINDING, env)


def visible_gpus(env: Mapping[str, str] = os.environ) -> str | None:
    """The GPUs that CUDA may see, in its own words; None: all."""
    return env.get("CUDA_VISIBLE_DEVICES")
