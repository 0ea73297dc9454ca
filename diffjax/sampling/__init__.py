"""Sampling: the driver, proposals, commit rules, and text generation on top of them."""

from diffjax.sampling.generate import Generation, Statistics, generate, summary

__all__ = ["Generation", "Statistics", "generate", "summary"]
