"""The Mamba-2 mixer (arXiv 2405.21060): a forward scan that carries a state over blocks, and a reverse scan that
restarts at every block's right edge (arXiv 2607.02805, eq. 11-13)."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from diffjax.config import ModelConfig
from diffjax.kernels.precision import accumulation_dtype
from diffjax.kernels.ssd import Boundary, final_state, ssd_block, ssd_frontier, ssd_scan, states_at
from diffjax.models import context_shards
from diffjax.models.layers import Projection, normalise, parameter
from diffjax.models.streams import CleanStream, FrontierStream


class MambaContext(NamedTuple):
    """All that crosses a block edge, of constant size: state [B, H, P, N] in at least float32, and the last W-1 raw
    convolution inputs x [B, W-1, H, P] and BC [B, W-1, 2, g, N] in the compute dtype."""

    state: Array
    conv_x: Array
    conv_BC: Array


class MambaBoundary(NamedTuple):
    """The states at block edges, and the raw convolution inputs of the stream behind W-1 of the context:
    conv_x [B, W-1+T, H, P], conv_BC [B, W-1+T, 2, g, N]."""

    ssd: Boundary
    conv_x: Array
    conv_BC: Array


class Mamba(nn.Module):
    config: ModelConfig
    dtype: jnp.dtype
    output_std: float
    backend: str

    def setup(self):
        self.forward = MambaDirection(self.config, self.dtype, self.output_std, self.backend)
        if self.config.mamba.directions == "separate":
            self.reverse = MambaDirection(self.config, self.dtype, self.output_std, self.backend)

    def clean(self, u: Array, stream: CleanStream, context: MambaContext | None) -> tuple[Array, MambaBoundary]:
        """u [B, T, D] -> (out [B, T, D], boundary); the reverse scan runs only for a bidirectional prefix."""
        out, boundary = self.forward.scan(u, stream, self.empty_context(u.shape[0]) if context is None else context)
        if self.config.prefix == "bidirectional":
            size = self.config.block_size
            blocks = u.reshape(u.shape[0], u.shape[1] // size, size, u.shape[2])
            out = self._add_reverse(out.reshape(blocks.shape), blocks, stream.valid.reshape(blocks.shape[:3]))
        return out.reshape(u.shape), boundary

    def frontier(self, u: Array, stream: FrontierStream, boundary: MambaBoundary) -> Array:
        """u [B, F, G, D] -> [B, F, G, D]: forward from the state at the frontier's left edge, reverse from zero."""
        return self._add_reverse(self.forward.frontier(u, stream, boundary), u, stream.valid)

    def empty_context(self, batch: int) -> MambaContext:
        return empty_context(self.config, self.dtype, batch)

    def to_context(self, boundary: MambaBoundary, stream: CleanStream) -> MambaContext:
        """What the stream leaves after its `count` tokens: pads behind them changed neither state nor inputs."""
        taps = self.config.mamba.conv - 1
        last = stream.count[:, None] + jnp.arange(taps)  # the stream's token t stands at taps + t
        take = lambda array: jnp.take_along_axis(array, last.reshape(*last.shape, *(1,) * (array.ndim - 2)), axis=1)
        return MambaContext(final_state(boundary.ssd), take(boundary.conv_x), take(boundary.conv_BC))

    def to_boundary(self, context: MambaContext) -> MambaBoundary:
        """A context as the boundary of a stream without tokens, whose only edge is the context's end."""
        size = self.config.block_size
        edge = jnp.zeros((context.state.shape[0], 1), bool)
        return MambaBoundary(
            Boundary(context.state[:, None], edge, block_size=size, chunk=size), context.conv_x, context.conv_BC
        )

    def _add_reverse(self, out: Array, blocks: Array, valid: Array) -> Array:
        if self.config.mamba.directions == "forward":
            return out
        direction = self.reverse if self.config.mamba.directions == "separate" else self.forward
        return out + direction.reverse_blocks(blocks, valid)


class MambaDirection(nn.Module):
    """One direction: projections, depthwise convolution, scan, gated norm and output.

    Letters: H heads, P head dim, g groups, N state, W convolution width.
    """

    config: ModelConfig
    dtype: jnp.dtype
    output_std: float
    backend: str

    def setup(self):
        c, m = self.config, self.config.mamba
        heads, head_axes = (m.heads, m.head_dim), ("ssm_heads", "ssm_head_dim")
        group, group_axes = (m.groups, m.state), ("groups", "state")
        inward = lambda shape, axes, **kw: Projection((c.width, *shape), ("embed", *axes), self.dtype, c.init_std, **kw)
        self.z = inward(heads, head_axes)
        self.x = inward(heads, head_axes)
        self.B = inward(group, group_axes)
        self.C = inward(group, group_axes)
        self.dt = inward((m.heads,), ("ssm_heads",), out_dtype=accumulation_dtype(self.dtype))
        self.conv_x = Convolution(m.conv, heads, head_axes, self.dtype)
        self.conv_BC = Convolution(m.conv, (2, *group), (None, *group_axes), self.dtype)
        self.A_log = parameter(self, "A_log", _log_uniform_A, (m.heads,), ("ssm_heads",))
        self.dt_bias = parameter(self, "dt_bias", _inverse_softplus_dt, (m.heads,), ("ssm_heads",))
        self.D_skip = parameter(self, "D_skip", nn.initializers.ones, (m.heads,), ("ssm_heads",))
        self.norm = GatedNorm(m.groups, heads, head_axes, c.norm_eps, self.dtype)
        self.output = Projection((*heads, c.width), (*head_axes, "embed"), self.dtype, self.output_std, contract=2)

    def scan(self, u: Array, stream: CleanStream, context: MambaContext) -> tuple[Array, MambaBoundary]:
        """The clean stream u [B, T, D], from the state and inputs of `context`, or of the shards to the left."""
        z, raw_x, raw_BC, dt = self._project(u, stream.valid)
        on_shards, taps = context_shards.axis() is not None, self.config.mamba.conv - 1
        before = lambda raw, own: context_shards.left_tail(raw, taps) if on_shards else own.astype(raw.dtype)
        conv_x = jnp.concatenate([before(raw_x, context.conv_x), raw_x], axis=1)
        conv_BC = jnp.concatenate([before(raw_BC, context.conv_BC), raw_BC], axis=1)
        x, BC = self.conv_x(conv_x, stream.positions), self.conv_BC(conv_BC, stream.positions)
        state = context.state
        if on_shards:
            state = context_shards.entering_state(x, dt, self._A(), BC[..., 0, :, :], stream.reset[:, :-1])
        y, boundary = ssd_scan(
            x,
            dt,
            self._A(),
            BC[..., 0, :, :],
            BC[..., 1, :, :],
            block_size=self.config.block_size,
            initial_state=state,
            reset=stream.reset,
            backend=self.backend,
        )
        return self._finish(y, x, z), MambaBoundary(boundary, conv_x, conv_BC)

    def frontier(self, u: Array, stream: FrontierStream, boundary: MambaBoundary) -> Array:
        """Frontiers u [B, F, G, D], each from the state and the inputs at its left edge."""
        z, raw_x, raw_BC, dt = self._project(u, stream.valid)
        before = lambda inputs: self._inputs_before(inputs, stream.index, u.shape[1])
        x = self.conv_x(jnp.concatenate([before(boundary.conv_x), raw_x], axis=2), stream.positions)
        BC = self.conv_BC(jnp.concatenate([before(boundary.conv_BC), raw_BC], axis=2), stream.positions)
        inputs = (x, dt, self._A(), BC[..., 0, :, :], BC[..., 1, :, :])
        if stream.index is None:
            y = ssd_frontier(*inputs, boundary=boundary.ssd, backend=self.backend)
        else:
            blocks, read = boundary.ssd.reset.shape[1] - 1, lambda index: states_at(boundary.ssd, index)
            seed = context_shards.of_owner(read, stream.index, blocks)
            y = ssd_block(*inputs, seed=seed, backend=self.backend)
        return self._finish(y, x, z)

    def reverse_blocks(self, u: Array, valid: Array) -> Array:
        """Blocks u [B, F, G, D] right to left, each from zero state and zero inputs at its right edge."""
        z, raw_x, raw_BC, dt = self._project(u, valid)
        x, BC = self.conv_x.reverse(raw_x), self.conv_BC.reverse(raw_BC)
        y = ssd_block(x, dt, self._A(), BC[..., 0, :, :], BC[..., 1, :, :], reverse=True, backend=self.backend)
        return self._finish(y, x, z)

    def _project(self, u: Array, valid: Array) -> tuple[Array, Array, Array, Array]:
        """z, raw x, raw BC and dt. Where a token is invalid its raw inputs and its dt are 0, so that it changes no
        state and looks like the zero padding of the convolution."""
        dt = jnp.where(valid[..., None], jax.nn.softplus(self.dt(u) + self.dt_bias), 0)
        x = jnp.where(valid[..., None, None], self.x(u), 0)
        BC = jnp.where(valid[..., None, None, None], jnp.stack([self.B(u), self.C(u)], axis=-3), 0)
        return self.z(u), x, BC, dt

    def _inputs_before(self, inputs: Array, index: Array | None, frontiers: int) -> Array:
        """The W-1 raw inputs left of each frontier: [B, W-1+T, ...] -> [B, F, W-1, ...]."""
        taps, size = self.config.mamba.conv - 1, self.config.block_size
        if index is None:  # strided slices, whose gradients are cheaper than those of a gather
            last = (frontiers - 1) * size + 1
            return jnp.stack([inputs[:, tap : tap + last : size] for tap in range(taps)], axis=2)

        def read(index):
            where = (index[..., None] * size + jnp.arange(taps)).reshape(index.shape[0], -1)  # [B, F * (W-1)]
            taken = jnp.take_along_axis(inputs, where.reshape(*where.shape, *(1,) * (inputs.ndim - 2)), axis=1)
            return taken.reshape(*index.shape, taps, *inputs.shape[2:])

        return context_shards.of_owner(read, index, blocks=(inputs.shape[1] - taps) // size)

    def _A(self) -> Array:
        return -jnp.exp(self.A_log)

    def _finish(self, y: Array, x: Array, z: Array) -> Array:
        y = y + self.D_skip[:, None].astype(self.dtype) * x
        return self.output(self.norm(y * nn.silu(z)))


class Convolution(nn.Module):
    """A depthwise convolution over W tokens and silu; kernel[W-1] meets the current token."""

    width: int
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: jnp.dtype

    def setup(self):
        uniform = lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -1, 1) * self.width**-0.5
        self.kernel = parameter(self, "kernel", uniform, (self.width, *self.shape), ("conv", *self.axes))
        self.bias = parameter(self, "bias", uniform, self.shape, self.axes)

    def __call__(self, inputs: Array, positions: Array) -> Array:
        """inputs [..., W-1+T, *shape] -> [..., T, *shape]. A tap that would reach before the first token of the
        document reads 0: it is further back than the token's position."""
        axis, length = positions.ndim - 1, positions.shape[-1]
        y = self.bias.astype(self.dtype)
        for back in range(self.width):
            start = self.width - 1 - back
            tap = jax.lax.slice_in_dim(inputs, start, start + length, axis=axis)
            inside = (positions >= back).reshape(*positions.shape, *(1,) * len(self.shape))
            y = y + self.kernel[start].astype(self.dtype) * (jnp.where(inside, tap, 0) if back else tap)
        return nn.silu(y)

    def reverse(self, inputs: Array) -> Array:
        """The same from right to left: inputs [..., T, *shape], zeros behind the last token."""
        axis, length = inputs.ndim - 1 - len(self.shape), inputs.shape[-1 - len(self.shape)]
        pads = [(0, 0)] * inputs.ndim
        pads[axis] = (0, self.width - 1)
        padded = jnp.pad(inputs, pads)
        y = self.bias.astype(self.dtype)
        for ahead in range(self.width):
            tap = jax.lax.slice_in_dim(padded, ahead, ahead + length, axis=axis)
            y = y + self.kernel[self.width - 1 - ahead].astype(self.dtype) * tap
        return nn.silu(y)


class GatedNorm(nn.Module):
    """RMSNorm of the gated output over all channels [H, P] of a group."""

    groups: int
    shape: tuple[int, int]
    axes: tuple[str | None, ...]
    epsilon: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = parameter(self, "scale", nn.initializers.ones, self.shape, self.axes)
        by_group = x.reshape(*x.shape[:-2], self.groups, self.shape[0] // self.groups, self.shape[1])
        return (normalise(by_group, (-2, -1), self.epsilon).reshape(x.shape) * scale).astype(self.dtype)


def empty_context(config: ModelConfig, dtype, batch: int) -> MambaContext:
    """A context that has read nothing; it never grows."""
    m = config.mamba
    return MambaContext(
        state=jnp.zeros((batch, m.heads, m.head_dim, m.state), accumulation_dtype(dtype)),
        conv_x=jnp.zeros((batch, m.conv - 1, m.heads, m.head_dim), dtype),
        conv_BC=jnp.zeros((batch, m.conv - 1, 2, m.groups, m.state), dtype),
    )


def _log_uniform_A(key: Array, shape: tuple[int, ...], dtype) -> Array:
    return jnp.log(jax.random.uniform(key, shape, dtype, 1, 16))


def _inverse_softplus_dt(key: Array, shape: tuple[int, ...], dtype) -> Array:
    low, high, floor = np.log(1e-3), np.log(1e-1), 1e-4
    dt = jnp.maximum(jnp.exp(jax.random.uniform(key, shape, dtype, low, high)), floor)
    return dt + jnp.log(-jnp.expm1(-dt))
