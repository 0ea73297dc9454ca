"""The weight of the loss follows from the masking schedule (L4)."""

import jax
import numpy as np

from diffjax.diffusion.schedules import alpha, elbo_weight, loss_weight


def test_L4_weight_is_the_derivative_of_alpha_over_the_masked_share():
    times = np.linspace(1e-3, 1.0, 17, dtype=np.float32)
    weights = [-jax.grad(alpha)(t) / (1.0 - alpha(t)) for t in times]
    # 1 - alpha(t) cancels digits near 0, hence the tolerance.
    np.testing.assert_allclose(elbo_weight(times), weights, rtol=1e-4)


def test_L4_expected_weight_of_a_token_is_one_at_every_time():
    times = np.linspace(1e-3, 1.0, 17)
    np.testing.assert_allclose(loss_weight("elbo", times) * (1.0 - alpha(times)), 1.0, rtol=1e-6)
    np.testing.assert_array_equal(loss_weight("uniform", times), 1.0)
