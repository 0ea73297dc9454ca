"""Which backend of a kernel runs. An explicit choice never falls back."""

from types import ModuleType


def choose(operation: str, backend: str, backends: dict[str, ModuleType]) -> ModuleType:
    """The module that implements `operation`: the one named, or for `auto` the XLA form.

    Raises:
      ValueError: there is no such backend.
    """
    name = "xla" if backend == "auto" else backend
    if name not in backends:
        raise ValueError(f"kernels.{operation}: unknown backend '{backend}'; there are auto, {', '.join(backends)}")
    return backends[name]
