"""What all kernels share: which backend runs (an explicit choice never falls back), and the name of what they save."""

from types import ModuleType

SAVED = "saved by a kernel"  # the name (jax.ad_checkpoint.checkpoint_name) of results that rematerialisation may keep


def choose(operation: str, backend: str, backends: dict[str, ModuleType]) -> ModuleType:
    """The module that implements `operation`: the one named, or for `auto` the XLA form.

    Raises:
      ValueError: there is no such backend.
    """
    name = "xla" if backend == "auto" else backend
    if name not in backends:
        raise ValueError(f"kernels.{operation}: unknown backend '{backend}'; there are auto, {', '.join(backends)}")
    return backends[name]
