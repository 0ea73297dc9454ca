"""The denoiser once more, written from its definition alone: plain numpy in float64, one document at a time, a dense
mask for attention and a loop over tokens for the state-space recurrence. Slow on purpose: the fast code is held to it.

A document is read in one pass as the sequence [clean tokens before the block, the block's r tokens]. There is no
context, no chunk, no boundary and no padding here, so none of them can be wrong in the same way twice.

Everything is analytic in the parameters and runs in complex numbers too, so that f(p + i h v).imag / h with a tiny h is
the derivative of f along v without rounding error: an independent truth for gradients.
"""

import numpy as np


def as_float64(params):
    """The same nested dict with every leaf as a numpy float64 array."""
    if isinstance(params, dict):
        return {name: as_float64(leaf) for name, leaf in params.items()}
    return np.asarray(params, np.float64)


def block_logits(params, config, vocab_size, clean, block, embedding=None):
    """Logits [r, V] of a block of r tokens that stands after the clean tokens of its document.

    clean is [T] with T a multiple of the block size when the prefix is bidirectional. `embedding` [r, D] is added to
    the block's token embeddings.
    """
    hidden = hidden_states(params, config, clean, block, embedding)[len(clean) :]
    return head(params, config, vocab_size, hidden)


def clean_logits(params, config, vocab_size, tokens):
    """Next-token logits [T, V] of a causal prefix: position j predicts token j + 1."""
    assert config.prefix == "causal"
    return head(params, config, vocab_size, hidden_states(params, config, tokens, []))


def row_logits(params, config, vocab_size, clean, frontiers, frontier_index, segments, frontier_valid=None):
    """Logits [F, G, V] of the frontiers of one packed row, each document on its own; NaN where a frontier has no token.

    clean [L], frontiers [F, G], frontier_index [F] blocks of the row, segments [K] (a document is a run of equal
    numbers, 0 is no document), frontier_valid [F, G] whose true entries come first.
    """
    size = config.block_size
    logits = np.full((len(frontiers), size, vocab_size), np.nan, params["embed"]["table"].dtype)
    for f, k in enumerate(frontier_index):
        length = size if frontier_valid is None else int(np.sum(frontier_valid[f]))
        if segments[k] == 0 or length == 0:
            continue
        start = k
        while start > 0 and segments[start - 1] == segments[k]:
            start -= 1
        document = clean[start * size : k * size]
        logits[f, :length] = block_logits(params, config, vocab_size, document, frontiers[f][:length])
    return logits


def head(params, config, vocab_size, hidden):
    """[T, D] -> [T, V]: the last norm and the output matrix, cut to the ids that exist."""
    normed = rms_norm(hidden, params["norm"]["scale"], config.norm_eps)
    matrix = params["embed"]["table"].T if config.tie_embeddings else params["head"]["kernel"]
    return (normed @ matrix)[:, :vocab_size]


def hidden_states(params, config, clean, block, embedding=None):
    """The residual stream [T + r, D] after the last layer, clean tokens first."""
    tokens = np.concatenate([np.asarray(clean, int), np.asarray(block, int)])
    hidden = params["embed"]["table"][tokens].copy()
    if embedding is not None:
        hidden[len(clean) :] += embedding
    for kind, layer in layers(params, config):
        normed = rms_norm(hidden, layer["mixer_norm"]["scale"], config.norm_eps)
        mixer = {"A": attention, "M": mamba}[kind]
        hidden = hidden + mixer(layer["mixer"], config, normed, len(clean))
        normed = rms_norm(hidden, layer["mlp_norm"]["scale"], config.norm_eps)
        hidden = hidden + mlp(layer["mlp"], normed)
    return hidden


def layers(params, config):
    """(kind, weights) of every layer in order: the stacked repeats of the unit, then the cut last unit."""
    repeats, left = divmod(config.layers, len(config.pattern))
    ordered = []
    for repeat in range(repeats):
        ordered += layers_of_unit(pick(params["layers"]["unit"], repeat), config.pattern)
    return ordered + (layers_of_unit(params["layers"]["tail"], config.pattern[:left]) if left else [])


def layers_of_unit(unit, kinds):
    """Equal neighbours share one entry, named after the first of them and stacked over the run."""
    ordered = []
    for i, kind in enumerate(kinds):
        first = len(kinds[:i].rstrip(kind))  # where the run of this kind starts
        alone = (i == 0 or kinds[i - 1] != kind) and (i + 1 == len(kinds) or kinds[i + 1] != kind)
        weights = unit[f"layer_{first}"]
        ordered.append((kind, weights if alone else pick(weights, i - first)))
    return ordered


def pick(tree, index):
    """Entry `index` of every leaf."""
    return {name: pick(leaf, index) for name, leaf in tree.items()} if isinstance(tree, dict) else tree[index]


def rms_norm(x, scale, eps):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * scale


def silu(x):
    return x / (1.0 + np.exp(-x))


def mlp(weights, x):
    return (silu(x @ weights["gate"]["kernel"]) * (x @ weights["up"]["kernel"])) @ weights["down"]["kernel"]


# Attention


def allowed(query, key, clean, block_size, prefix):
    """May position `query` read position `key`, where the first `clean` positions are clean and the rest one block?"""
    if query >= clean:
        return True  # the block sees every clean token before it and all of itself
    if key >= clean:
        return False  # clean text never sees noise
    if prefix == "bidirectional":
        return query // block_size >= key // block_size
    return query >= key


def attention(weights, config, x, clean):
    """[T, D] -> [T, D] with one dense mask; position = offset in the document."""
    total = len(x)
    query = np.einsum("td,dhp->thp", x, weights["query"]["kernel"])
    key = np.einsum("td,dhp->thp", x, weights["key"]["kernel"])
    value = np.einsum("td,dhp->thp", x, weights["value"]["kernel"])
    if config.qk_norm:
        query = rms_norm(query, weights["query_norm"]["scale"], config.norm_eps)
        key = rms_norm(key, weights["key_norm"]["scale"], config.norm_eps)
    query, key = rotate(query, config.rope_theta), rotate(key, config.rope_theta)
    positions = range(total)
    mask = np.array([[allowed(q, k, clean, config.block_size, config.prefix) for k in positions] for q in positions])
    out = np.zeros_like(x)
    for h in range(config.heads):
        group = h // (config.heads // config.kv_heads)
        scores = query[:, h] @ key[:, group].T / np.sqrt(config.head_dim)
        scores = np.where(mask, scores, -np.inf)
        probabilities = np.exp(scores - scores.real.max(axis=1, keepdims=True))
        probabilities = probabilities / probabilities.sum(axis=1, keepdims=True)
        out += probabilities @ value[:, group] @ weights["output"]["kernel"][h]
    return out


def rotate(x, theta):
    """Rotary embedding of [T, heads, P]: pair (i, i + P/2) turns by position * theta^(-2i/P)."""
    half = x.shape[-1] // 2
    out = x.copy()
    for position in range(len(x)):
        for i in range(half):
            angle = position * theta ** (-2.0 * i / x.shape[-1])
            first, second = x[position, :, i], x[position, :, i + half]
            out[position, :, i] = first * np.cos(angle) - second * np.sin(angle)
            out[position, :, i + half] = second * np.cos(angle) + first * np.sin(angle)
    return out


# Mamba-2


def mamba(weights, config, x, clean):
    """[T, D] -> [T, D]: one forward scan over everything, plus a reverse scan that restarts in every block."""
    out = mamba_direction(weights["forward"], config, x)
    if config.mamba.directions == "forward":
        return out
    reverse = weights["reverse" if config.mamba.directions == "separate" else "forward"]
    blocks = [(clean, len(x))]
    if config.prefix == "bidirectional":
        assert clean % config.block_size == 0
        blocks += [(start, start + config.block_size) for start in range(0, clean, config.block_size)]
    for start, stop in blocks:
        out[start:stop] += mamba_direction(reverse, config, x[start:stop][::-1])[::-1]
    return out


def mamba_direction(weights, config, u):
    """One direction over [T, D], from zero state and zero conv input."""
    width, groups = config.mamba.conv, config.mamba.groups
    gate = np.einsum("td,dhp->thp", u, weights["z"]["kernel"])
    raw_x = np.einsum("td,dhp->thp", u, weights["x"]["kernel"])
    raw_B = np.einsum("td,dgn->tgn", u, weights["B"]["kernel"])
    raw_C = np.einsum("td,dgn->tgn", u, weights["C"]["kernel"])
    kernel_BC, bias_BC = weights["conv_BC"]["kernel"], weights["conv_BC"]["bias"]
    x = causal_conv(raw_x, weights["conv_x"]["kernel"], weights["conv_x"]["bias"], width)
    B = causal_conv(raw_B, kernel_BC[:, 0], bias_BC[0], width)
    C = causal_conv(raw_C, kernel_BC[:, 1], bias_BC[1], width)
    dt = np.log1p(np.exp(u @ weights["dt"]["kernel"] + weights["dt_bias"]))
    y, _ = recurrence(x, dt, -np.exp(weights["A_log"]), B, C)
    y = (y + weights["D_skip"][:, None] * x) * silu(gate)
    heads = config.mamba.heads // groups
    out = np.zeros_like(u)
    for t in range(len(u)):
        for g in range(groups):
            mine = slice(g * heads, (g + 1) * heads)
            square = np.mean(y[t, mine] ** 2)  # one statistic over all channels of the group
            normed = y[t, mine] / np.sqrt(square + config.norm_eps) * weights["norm"]["scale"][mine]
            out[t] += np.einsum("hp,hpd->d", normed, weights["output"]["kernel"][mine])
    return out


def causal_conv(raw, kernel, bias, width):
    """silu(bias + sum over taps): tap width-1 meets the current token, tap 0 the oldest; zeros before the start."""
    out = np.zeros_like(raw)
    for t in range(len(raw)):
        total = bias.copy()
        for tap in range(width):
            source = t - (width - 1) + tap
            if source >= 0:
                total = total + kernel[tap] * raw[source]
        out[t] = silu(total)
    return out


def recurrence(x, dt, A, B, C, state=None):
    """S_t = exp(dt_t A) S_{t-1} + dt_t x_t (x) B_t and y_t = S_t C_t, token by token.

    x [T, H, P], dt [T, H], A [H], B and C [T, g, N] -> y [T, H, P] and the states [T + 1, H, P, N] before each token
    and after the last. Head h reads group h // (H / g).
    """
    tokens, heads, channels = x.shape
    groups, size = B.shape[1:]
    dtype = np.result_type(x, dt, A, B, C, 0.0 if state is None else state)
    state = np.zeros((heads, channels, size), dtype) if state is None else np.array(state, dtype)
    y, states = np.zeros((tokens, heads, channels), dtype), [state.copy()]
    for t in range(tokens):
        for h in range(heads):
            g = h // (heads // groups)
            state[h] = np.exp(dt[t, h] * A[h]) * state[h] + dt[t, h] * np.outer(x[t, h], B[t, g])
            y[t, h] = state[h] @ C[t, g]
        states.append(state.copy())
    return y, np.array(states)


def derivative(function, point, direction):
    """The derivative of an analytic function of a pytree of real arrays along a direction, exact to rounding."""
    step = 1e-30
    moved = _along(point, direction, 1j * step)
    return function(moved).imag / step


def _along(tree, direction, step):
    if isinstance(tree, dict):
        return {name: _along(leaf, direction[name], step) for name, leaf in tree.items()}
    return tree + step * direction
