"""The driver against a plain loop per row, on nets of known answers: tokens, counters, stops, batches, compiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.sampling import driver
from diffjax.sampling.driver import ERROR, LENGTH, STOP, bucket
from diffjax.sampling.rules import Decision, Rule, commit_only, quota, stateless, threshold
from tests.sampling.nets import EOS, FIRST, FORBID, MASK, HashNet, ScriptNet, flags

pytestmark = pytest.mark.xdist_group("sampling_driver")  # one worker, which compiles each loop once

G = 4
NET = HashNet(G)
PARAMS = NET.init(seed=0, stop_bias=-90.0)
STOPPING = NET.init(seed=1, stop_bias=1.0)
V = NET.vocab_size
PROMPTS = [np.random.default_rng(p).integers(FIRST, V, p) for p in (0, 1, G - 1, G, G + 1, 3 * G + 2)]
LIMITS = [12, 11, 8, 16, 13, 22]
QUOTA, THRESHOLD = {"steps": 3}, {"threshold": 0.6}


def run(rule, prompts, limits, rule_knobs, params=PARAMS, net=NET, pause=None, **options):
    """Decode to the end; pause: function called with the state whenever the driver stops to show a block."""
    knobs = {"temperature": 0.0, "top_p": 1.0, **rule_knobs}
    params = jax.tree.map(jnp.asarray, params)
    state = driver.start(net, params, rule, prompts, limits, knobs, mask_id=MASK, **options)
    forbid, stop = flags(V, FORBID), flags(V, [EOS])
    while True:
        state = driver.advance(net, rule, params, state, forbid, stop, pause is not None, mask_id=MASK)
        if pause:
            pause(state)
        if not np.any(state.live):
            return jax.device_get(state._replace(key=None, context=None))


def rows(state, n):
    """Tokens of the first n rows, cut to their lengths."""
    return [state.tokens[row, : state.length[row]].tolist() for row in range(n)]


def plain_decode(params, prompt, limit, choose):
    """One row at temperature 0, by loops -> tokens, denoise calls, commits, finish."""
    tokens, nfe, commits = [int(t) for t in prompt], 0, 0
    start = len(tokens)
    while True:
        first = len(tokens) // G * G
        absorbed, block = tokens[:first], tokens[first:] + [MASK] * (first + G - len(tokens))
        decided = [first + i < start for i in range(G)]
        step, n0 = 0, None
        while True:
            stops = [i for i in range(G) if decided[i] and first + i >= start and block[i] == EOS]
            end = min(stops, default=G)
            eligible = [not decided[i] and first + i < limit and i < end for i in range(G)]
            if not any(eligible):
                break
            n0 = sum(eligible) if n0 is None else n0
            logits = NET.logits(params, block, absorbed).astype(np.float64)
            logits[:, list(FORBID)] = -np.inf
            logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            best, confidence = logp.argmax(-1), np.exp(logp.max(-1))
            for i in choose(confidence, eligible, step, n0):
                block[i], decided[i] = int(best[i]), True
            nfe, step = nfe + 1, step + 1
        if stops:
            return absorbed + block[: end + 1], nfe, commits, STOP
        if first + G >= limit:
            return absorbed + block[: limit - first], nfe, commits, LENGTH
        tokens, commits = absorbed + block, commits + 1


def choose_quota(confidence, eligible, step, n0):
    order = sorted(np.flatnonzero(eligible), key=lambda i: (-confidence[i], i))
    return order[: max(1, n0 // 3 + (step < n0 % 3))]


def choose_threshold(confidence, eligible, step, n0):
    order = sorted(np.flatnonzero(eligible), key=lambda i: (-confidence[i], i))
    return [i for i in order if confidence[i] >= 0.6] or order[:1]


CASES = {"quota": (quota("prob"), QUOTA, choose_quota), "threshold": (threshold(), THRESHOLD, choose_threshold)}


@pytest.mark.parametrize("params", [PARAMS, STOPPING], ids=["length", "stop"])
@pytest.mark.parametrize("case", CASES)
def test_h_i_driver_equals_a_plain_loop(case, params):
    """Prompts of 0, 1, G-1, G, G+1 and more tokens, limits off the grid, stops anywhere: tokens, counters, reasons."""
    rule, knobs, choose = CASES[case]
    state = run(rule, PROMPTS, LIMITS, knobs, params)
    finishes = set()
    for row, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS, strict=True)):
        tokens, nfe, commits, finish = plain_decode(params, prompt, limit, choose)
        assert rows(state, 6)[row] == tokens
        assert (state.nfe[row], state.commits[row], state.finish[row]) == (nfe, commits, finish)
        assert state.prefill_calls[row] == (len(prompt) >= G)
        assert not set(tokens[len(prompt) :]) & set(FORBID), "I4"
        finishes.add(finish)
    assert finishes == ({LENGTH} if params is PARAMS else {STOP, LENGTH})
    assert not state.forced.any()
    assert state.nfe[6:].sum() == state.commits[6:].sum() == 0  # padding rows


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_f_a_row_does_not_depend_on_its_batch(temperature):
    """I5: alone, in a batch of four, in another order, with other knobs beside it; finishing at other times."""
    prompts, limits, ids = PROMPTS[1:5], [40, 33, 37, 38], [7, 1, 30, 4]
    tau = [0.9, 0.2, 0.6, 0.5]
    knobs = {"temperature": [temperature] * 3 + [0.5], "threshold": tau, "top_p": [1, 0.9, 1, 1]}
    knobs = {name: np.float32(value) for name, value in knobs.items()}
    state = run(threshold(), prompts, limits, knobs, STOPPING, row_ids=ids)
    together = rows(state, 4)
    assert len({tuple(r) for r in together}) == 4
    for order in ([0], [1], [2], [3], [3, 1, 0, 2]):
        part = run(
            threshold(),
            [prompts[i] for i in order],
            [limits[i] for i in order],
            {name: value[order] for name, value in knobs.items()},
            STOPPING,
            row_ids=[ids[i] for i in order],
        )
        assert rows(part, len(order)) == [together[i] for i in order]
        for name in ("nfe", "commits", "prefill_calls", "finish", "length"):
            assert getattr(part, name)[: len(order)].tolist() == getattr(state, name)[order].tolist()


def test_seed_and_row_id_change_samples():
    prompts, limits, knobs = [PROMPTS[1]] * 3, [21] * 3, {**QUOTA, "temperature": 1.0}
    first = rows(run(quota("random"), prompts, limits, knobs, seed=0), 3)
    assert first == rows(run(quota("random"), prompts, limits, knobs, seed=0), 3)
    assert first != rows(run(quota("random"), prompts, limits, knobs, seed=1), 3)
    assert len({tuple(row) for row in first}) == 3
    assert first == rows(run(quota("random"), prompts[:3], limits, knobs, seed=0, row_ids=[0, 1, 2]), 3)


def test_streaming_changes_no_token_and_shows_each_block_once():
    shown = {row: [] for row in range(6)}

    def look(state):
        news = np.asarray(state.news)
        assert news.any()
        for row in np.flatnonzero(news):
            live, block = bool(state.live[row]), int(state.block[row])
            end = (block + 1) * G if live else int(state.length[row])
            shown[row].append(np.asarray(state.tokens)[row, block * G : end].tolist())

    knobs = {**THRESHOLD, "temperature": 0.7}
    streamed = run(threshold(), PROMPTS, LIMITS, knobs, STOPPING, pause=look)
    whole = run(threshold(), PROMPTS, LIMITS, knobs, STOPPING)
    assert rows(streamed, 6) == rows(whole, 6)
    assert streamed.nfe.tolist() == whole.nfe.tolist() and streamed.commits.tolist() == whole.commits.tolist()
    for row, prompt in enumerate(PROMPTS):
        assert [token for piece in shown[row] for token in piece] == rows(whole, 6)[row][len(prompt) // G * G :]
        assert len(shown[row]) == whole.commits[row] + 1


SCRIPT = ScriptNet(G)
PATTERNS = np.arange(2**G)


def test_i_counters_by_hand():
    """A net that is sure of a block's first two positions, and of the others once those two are decided."""
    table = SCRIPT.script(8)
    table[..., 9] = np.where((np.arange(G) < 2) | (PATTERNS[:, None] & 3 == 0), 12.0, 1.0)
    state = run(threshold(), [[], [6, 6], [6] * 5], [8, 4, 8], THRESHOLD, table, SCRIPT)
    assert state.nfe[:3].tolist() == [4, 1, 2]  # 2 + 2; the unsure two after two given; one sure, then the rest
    assert state.commits[:3].tolist() == [1, 0, 0] and state.prefill_calls[:3].tolist() == [0, 0, 1]
    assert rows(state, 3) == [[9] * 8, [6, 6, 9, 9], [6] * 5 + [9] * 3]


def test_stop_ends_a_row_when_nothing_is_left_before_it():
    """A stop token committed early makes everything right of it ineligible; what stands left is still filled."""
    table = SCRIPT.script(8)
    for position, (token, height) in enumerate([(10, 3.0), (11, 2.0), (EOS, 4.0), (13, 3.5)]):
        table[:, :, position, token] = height
    state = run(quota("prob"), [[], [EOS] * 3, [7]], [28, 28, 2], {"steps": 4}, table, SCRIPT)
    assert rows(state, 3) == [[10, 11, EOS], [EOS, EOS, EOS, 13, 10, 11, EOS], [7, 11]]  # a prompt's stops stop nothing
    assert state.finish[:3].tolist() == [STOP, STOP, LENGTH]
    assert state.nfe[:3].tolist() == [3, 4, 1] and state.commits[:3].tolist() == [0, 1, 0]
    assert not state.masked[0, :3].any() and state.masked[0, 3:].all()


def test_bad_rows_are_frozen_and_named():
    """NaN at an eligible position ends that row only; NaN at a decided position is never read (I6)."""
    table = SCRIPT.script(8)
    table[..., 9] = 1.0
    table[2] = np.nan
    table[:, PATTERNS & 1 == 0, 0] = np.nan
    state = run(quota("prob"), [[], [23], [6] * 3], [28, 8, 5], {"steps": 4}, table, SCRIPT)
    assert state.finish[:3].tolist() == [ERROR, LENGTH, LENGTH]
    assert rows(state, 3)[1:] == [[23] + [9] * 7, [6, 6, 6, 9, 9]]
    assert state.block[0] == 2 and state.commits[0] == 2 and state.masked[0, 8:].all()


def test_a_rule_that_never_commits_is_forced():
    def idle(key, proposal, view, aux, knobs):
        return commit_only(jnp.zeros_like(view.masked), proposal, view)

    state = run(Rule(stateless, idle, guarded=False), [[]], [8], {})
    assert state.forced[0] and state.nfe[0] == 2 * 4 * G and state.length[0] == 8 and not state.masked[0, :8].any()


def test_rules_with_state_and_revocation_fit():
    """A rule with memory that commits all, takes one back once and overwrites another: aux resets at each block."""

    def init(key, view, knobs):
        return {"calls": jnp.zeros(view.tokens.shape[0], jnp.int32)}

    def step(key, proposal, view, aux, knobs):
        calls = aux["calls"] + 1
        second = (calls == 2)[:, None]
        decided = ~view.masked & ~view.given
        remask = second & decided & (jnp.arange(G) == 1)
        overwrite = second & decided & (jnp.arange(G) == 2)
        token = jnp.where(overwrite, 20, proposal.token)
        return Decision(view.eligible, remask, overwrite, token, {"calls": calls}, calls == 3)

    state = run(Rule(init, step, monotone=False, guarded=False), [[6, 6]], [8], {})
    assert state.nfe[0] == 6 and state.commits[0] == 1
    assert state.tokens[0, :2].tolist() == [6, 6] and state.tokens[0, 2] == 20 and state.tokens[0, 6] == 20
    assert not state.masked[0, :8].any() and MASK not in state.tokens[0, :8]


def test_j_one_compile_per_bucket():
    """Other prompts, lengths, knobs and seeds inside a bucket: one compile of the loop; another bucket, one more."""
    net = HashNet(G)  # a new static argument: nothing of it is compiled yet
    before = driver.advance._cache_size()
    for seed, (prompts, tau) in enumerate([(PROMPTS[:5], 0.5), (PROMPTS[1:6], 0.7), ([PROMPTS[2]] * 5, 0.1)]):
        run(threshold(), prompts, [24] * 5, {"threshold": tau, "temperature": 0.1 * seed}, net=net, seed=seed)
        run(threshold(), prompts, [23] * 5, {"threshold": tau}, net=net, pause=lambda state: None)
    assert driver.advance._cache_size() == before + 1
    run(threshold(), PROMPTS[:2], [24] * 2, THRESHOLD, net=net)
    assert driver.advance._cache_size() == before + 2
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 7, 8, 9, 11, 13, 17, 33)] == [1, 2, 3, 4, 5, 7, 8, 10, 12, 14, 20, 40]
    assert all(n <= bucket(n) <= 1.25 * n for n in range(1, 3000))


def test_prefill_in_chunks(monkeypatch):
    """Prompts longer than a chunk, of unequal length: as one absorb of each row alone."""
    monkeypatch.setattr(driver, "PREFILL_TOKENS", 2 * G)
    prompts = [np.random.default_rng(n).integers(FIRST, V, n) for n in (27, 3, 8, 19)]
    knobs = {"temperature": 0.0, "top_p": 1.0, **QUOTA}
    state = driver.start(NET, PARAMS, quota("prob"), prompts, [40] * 4, knobs, mask_id=MASK)
    assert state.context.length.tolist() == [24, 0, 8, 16]
    assert state.context.digest.tolist() == [NET.digest(p[: len(p) // G * G]) for p in prompts]
    assert state.prefill_calls.tolist() == [3, 0, 1, 2]
