"""Rematerialisation changes what is stored and how often it is computed, and no gradient."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.models.denoiser import Denoiser
from tests.models.cases import BASE, VOCAB, randomise, small

pytestmark = pytest.mark.xdist_group("remat")


def loss_of(policy):
    config, blocks = small("AM", 2, "causal", 3, 4)
    denoiser = Denoiser(replace(config, remat=policy), VOCAB)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (1, blocks * config.block_size)).astype(np.int32)
    noisy = np.random.default_rng(1).integers(0, VOCAB, (1, blocks, config.block_size)).astype(np.int32)
    params = randomise(denoiser.init(jax.random.key(0)), 0)
    return (lambda params: jnp.sin(denoiser.train_logits(params, tokens, noisy)).sum()), params


def test_policies_give_the_same_gradients_and_repeat_what_they_say():
    """`dots` computes every projection once, so it holds as many products with a parameter as `none`; `block` has
    each forward product twice."""
    gradients, products = {}, {}
    for policy in ("none", "dots", "block"):
        loss, params = loss_of(policy)
        gradients[policy] = jax.jit(jax.grad(loss))(params)
        jaxpr = str(jax.make_jaxpr(jax.grad(loss))(params))
        products[policy] = len(re.findall(rf"f32\[[0-9,]+,{BASE.mlp_width}\]\S* = dot_general", jaxpr))
    for policy in ("dots", "block"):
        for one, other in zip(jax.tree.leaves(gradients["none"]), jax.tree.leaves(gradients[policy]), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(one).max())
    assert products["none"] == products["dots"] < products["block"]
