"""The check at start that the mesh draws one device's noise (spec section 2)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import MeshConfig
from diffjax.parallel.mesh import make_mesh
from diffjax.training.loop import fit
from diffjax.training.noise_check import check_noise

from .toy import abstract_batch, make_config, make_draw, make_job

MESH = {"data": 2, "fsdp": 2, "context": 2}


def mesh(**sizes):
    return make_mesh(MeshConfig(**sizes), jax.devices()[: int(np.prod(list(sizes.values())))])


def depends_on(draw, change):
    """A draw that `change`s its noise where it runs on several devices."""

    def drawn(step, batch):
        noise = draw(step, batch)
        return change(noise) if jax.sharding.get_abstract_mesh().size > 1 else noise

    return drawn


def test_masks_must_be_equal_and_rates_close():
    draw, batch = make_draw(make_config()), abstract_batch(8)
    check_noise(draw, batch, mesh(**MESH))
    rounded = depends_on(draw, lambda noise: noise._replace(rate=jnp.nextafter(noise.rate, 2.0)))
    check_noise(rounded, batch, mesh(**MESH))
    flip = lambda masked: masked.at[3, 1, 2].set(~masked[3, 1, 2])
    one_bit = depends_on(draw, lambda noise: noise._replace(masked=flip(noise.masked)))
    with pytest.raises(RuntimeError, match=r"\(data 2, fsdp 2, context 2\).*'masked' differs in 1 of 8 rows"):
        check_noise(one_bit, batch, mesh(**MESH))
    moved = depends_on(draw, lambda noise: noise._replace(rate=noise.rate + 1e-4))
    with pytest.raises(RuntimeError, match="'rate' differs in 8 of 8 rows"):
        check_noise(moved, batch, mesh(**MESH))


def test_training_does_not_start_on_such_a_mesh(tmp_path):
    config = make_config(tmp_path, mesh__data=2)
    broken = depends_on(make_draw(config), lambda noise: noise._replace(masked=~noise.masked))
    with pytest.raises(RuntimeError, match="could not be repeated"):
        fit(make_job(config, jax.devices()[:2], draw_noise=broken))
    assert not (tmp_path / "metrics.jsonl").exists()
