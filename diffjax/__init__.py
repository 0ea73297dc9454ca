"""diffjax: block-diffusion language models in JAX. The names below are the public API; the command line calls the same.

Names are imported on first use, so that `import diffjax` and a config error cost no start of JAX.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOME = {
    "load_config": "diffjax.config",
    "Denoiser": "diffjax.models.denoiser",
    "prepare": "diffjax.data.prepare",
    "train": "diffjax.run",
    "sample": "diffjax.run",
    "evaluate": "diffjax.run",
    "load_run": "diffjax.run",
}

__all__ = ["Denoiser", "__version__", "evaluate", "load_config", "load_run", "prepare", "sample", "train"]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'diffjax' has no attribute '{name}'; its names are {', '.join(__all__)}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted(__all__)
