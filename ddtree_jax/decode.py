"""The decode loop: draft, build the tree, verify, accept, commit, round after round on the device.

One round (DDTree, sections 3.1 to 3.3): the drafter proposes one distribution for each of L positions in
a single pass, `tree_build` keeps the most probable continuations, the target scores all of them in one
pass under the ancestor mask, and the longest path that the target agrees with is kept. All rounds are
one `lax.while_loop`; no array of it visits the host.

The loop knows no model. A target has `vocab_size`, `max_context`, `init_cache`, `embed`, `verify` and `head`; a
drafter has `block_size`, `taps`, `init_cache`, `extend` and `draft`: see `ddtree_jax.models.KimiK26` and
`ddtree_jax.models.DFlashDrafter`. Both are pytrees, so they pass through `jax.jit` as arguments. Where both
say what `vocab_size` and `hidden_size` they have, in themselves or in a `config`, these must agree.
A target whose logits lie split over devices by their tokens has a true `vocab_is_split`.

Bookkeeping: of `lengths` known tokens the last is the root of the next tree. It is in no cache yet, so the
caches hold `lengths - 1` rows, and a node of depth d stands at absolute position `lengths - 1 + d`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax import _checks, sampling
from ddtree_jax._models import check_models
from ddtree_jax._varying import vary_as
from ddtree_jax.accept import AcceptedPath, tree_accept
from ddtree_jax.budget import first_nodes, node_budgets
from ddtree_jax.cache import commit_path
from ddtree_jax.config import SEEDS, DecodeConfig, FinishReason
from ddtree_jax.pause import BREAK_EVEN, Pause
from ddtree_jax.tree import DraftTree, chain_tree, draft_topk, tree_build


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """All that a later call needs to go on. B requests, P prompt columns, L draft positions.

    Attributes:
      tokens: i32[B, P + max_new_tokens], prompt and what followed, -1 past `lengths`.
      lengths: i32[B], known tokens.
      prompt_lengths: i32[B].
      max_new: i32[B], tokens to emit after each prompt, at most.
      temperature: f32[B]; 0 without sampling.
      keys: u32[B, 2], the requests' generator states.
      rounds: i32[B], rounds that each request took part in.
      undrafted_rounds: i32[B], those of them in which it had no draft.
      accepted_histogram: i32[B, L + 2], of those rounds, how many emitted 0 .. L + 1 tokens.
      finish_reason: i32[B], values of `FinishReason`.
      cache: the target's latent cache [layers, B, S, 576].
      draft_cache: the drafter's, or None in mode "ar".
      pause: when each request drafts next (`ddtree_jax.pause`).
    """

    tokens: jax.Array
    lengths: jax.Array
    prompt_lengths: jax.Array
    max_new: jax.Array
    temperature: jax.Array
    keys: jax.Array
    rounds: jax.Array
    undrafted_rounds: jax.Array
    accepted_histogram: jax.Array
    finish_reason: jax.Array
    cache: jax.Array
    draft_cache: Any
    pause: Pause


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeResult:
    """What `ddtree_decode` returns: a state, and by these names what a caller wants of it.

    The state is all there is to it, so that no array leaves a program twice. Beside the saving: XLA for GPUs has
    given donated arrays to the wrong outputs where others came before the state's own
    (https://github.com/jax-ml/jax/issues/39625; here, with jax 0.11.2, a state's `finish_reason` read as its
    `lengths`). So a function of your own that donates a state returns the new one ahead of all else, and nothing of
    it a second time.

    Attributes:
      state: pass it to the next call to go on. If that call donates it, the names below are gone with it: read
        them before.
      tokens: i32[B, P + max_new_tokens]: each prompt with what followed it; -1 past `lengths`.
      lengths: i32[B], prompt included.
      rounds: i32[B], target passes after the prefill (which emits the first token).
      undrafted_rounds: i32[B], those of them that were steps of plain decoding: all in mode "ar", and where drafts
        gained too little (`DecodeConfig.adaptive`).
      accepted_histogram: i32[B, L + 2]: rounds by the number of tokens they emitted.
      finish_reason: i32[B], values of `FinishReason`.
    """

    state: DecodeState

    @property
    def tokens(self) -> jax.Array:
        return self.state.tokens

    @property
    def lengths(self) -> jax.Array:
        return self.state.lengths

    @property
    def rounds(self) -> jax.Array:
        return self.state.rounds

    @property
    def undrafted_rounds(self) -> jax.Array:
        return self.state.undrafted_rounds

    @property
    def accepted_histogram(self) -> jax.Array:
        return self.state.accepted_histogram

    @property
    def finish_reason(self) -> jax.Array:
        return self.state.finish_reason


def ddtree_decode(
    target,
    drafter,
    prompt_tokens,
    prompt_lengths,
    *,
    config: DecodeConfig,
    state: DecodeState | None = None,
    seed=None,
    temperature=None,
    max_new=None,
    request_ids=None,
) -> DecodeResult:
    """Continues each prompt with the target's tokens, drafting with the drafter.

    Jit it with `config` static: `jax.jit(ddtree_decode, static_argnames="config")`; donate `state`.

    Args:
      target: the model whose text this is.
      drafter: the draft model; None is fine in mode "ar".
      prompt_tokens: i32[B, P], right-padded with anything.
      prompt_lengths: i32[B], 1 .. P.
      config: what to do.
      state: None to start; a result's `state` to go on, with the same prompts and models. It holds the generators
        and limits too, so what follows here is for the start only.
      seed: overrides `config.seed`; an i32[] or u32[] may be traced. As an argument of a jitted function
        a Python int beyond int32 must be np.uint32(seed): jit itself takes no other.
      temperature: f32[] or f32[B], finite and at least 0: overrides `config.temperature`, which must be above 0, as it
        decides whether the program samples at all. A request below 1e-5 gets its most probable tokens.
      max_new: i32[B], 0 .. `config.max_new_tokens`, each request's own limit. The texts are those of a config with
        these values.
      request_ids: i32[B] that tell requests apart in sampling. By default a hash of the prompt, so
        equal prompts with equal seeds get equal text; number them to draw several for one prompt.

    Returns:
      A `DecodeResult`.

    Raises:
      ValueError: arguments of the wrong shape, dtype or range. Trouble with data that only the running program
        knows is a `FinishReason` of its request instead.
      TypeError: `target`, `drafter` or `config` is nothing of the kind.
    """
    prompt_tokens, prompt_lengths = _check(target, drafter, prompt_tokens, prompt_lengths, config)
    if config.mode == "ar":
        drafter = None
    if state is None:
        if request_ids is None:
            request_ids = sampling.prompt_ids(prompt_tokens, prompt_lengths)
        batch = prompt_tokens.shape[:1]
        request_ids = _checks.array("request_ids", request_ids, batch, jnp.int32)
        keys = sampling.request_keys(_seed(config.seed if seed is None else seed), request_ids)
        limits = _temperatures(temperature, config, batch), _max_new(max_new, config, batch)
        state = _prefill(target, drafter, prompt_tokens, prompt_lengths, keys, *limits, config)
    else:
        given = dict(seed=seed, temperature=temperature, max_new=max_new, request_ids=request_ids)
        for name, value in given.items():
            if value is not None:
                raise ValueError(
                    f"{name} cannot be given with a state, which goes on with what it was started with: "
                    "leave it out, or start anew"
                )
        _check_state(state, target, drafter, prompt_tokens, prompt_lengths, config)

    if config.max_rounds != 0:

        def running(carry):
            rounds, state = carry
            alive = jnp.any(state.finish_reason == FinishReason.RUNNING)
            return alive if config.max_rounds is None else alive & (rounds < config.max_rounds)

        def body(carry):
            rounds, state = carry
            return rounds + 1, _round(target, drafter, state, config)

        state = vary_as(state, state, target, drafter)
        _, state = jax.lax.while_loop(running, body, (jnp.int32(0), state))
    return DecodeResult(state)


def max_path(drafter, config: DecodeConfig) -> int:
    """L: how deep a round's tree can be."""
    return 0 if config.mode == "ar" else drafter.block_size - 1


def max_nodes(drafter, config: DecodeConfig) -> int:
    """N: nodes a round verifies, root included."""
    return 1 + (config.budget if config.mode == "ddtree" else max_path(drafter, config))


def draft_tree(target, drafter, state: DecodeState, config: DecodeConfig) -> DraftTree:
    """The tree that the next round verifies if every request drafts; those that have finished get an empty one."""
    check_models(target, drafter, config)
    if max_nodes(drafter, config) == 1:
        return _bare_tree(drafter, state, config)
    running = state.finish_reason == FinishReason.RUNNING
    return _draft(target, drafter, state, running, config)[0]


def _round(target, drafter, state: DecodeState, config: DecodeConfig) -> DecodeState:
    """One turn of the loop: a draft for the requests whose turn it is, and the pass that verifies it."""
    running = state.finish_reason == FinishReason.RUNNING
    drafts = running & (max_nodes(drafter, config) > 1)
    if config.adaptive:
        drafts &= state.rounds >= state.pause.next_draft

    def draft():
        return _draft(target, drafter, state, drafts, config)

    def none():
        return _bare_tree(drafter, state, config), jnp.float32(0), jnp.bool_(False)

    if max_nodes(drafter, config) == 1:
        tree, needed, promising = none()
    elif not config.adaptive:
        tree, needed, promising = draft()
    else:
        # A draft only reads the caches, so that this conditional copies none.
        tree, needed, promising = jax.lax.cond(
            jnp.any(drafts),
            *(lambda f=f: vary_as(f(), state, target, drafter) for f in (draft, none)),
        )
    after = _sized_round(target, drafter, state, tree, config)
    accepted = after.lengths - state.lengths - 1
    return dataclasses.replace(
        after,
        undrafted_rounds=state.undrafted_rounds + (running & ~drafts),
        pause=state.pause.after(state.rounds, drafts, accepted, needed, promising),
    )


def _draft(target, drafter, state, drafts, config) -> tuple[DraftTree, jax.Array, jax.Array]:
    """Trees with nodes for the requests that draft, and roots alone for others that run.

    Returns:
      The trees; f32[], how many accepted nodes a request make up for the time that they take; and bool[], whether as
      many are expected.
    """
    nodes, curve = max_nodes(drafter, config), config.cost_curve
    needed, promising = BREAK_EVEN if curve is None else curve.full_pass(nodes) - 1, jnp.bool_(True)
    running = state.finish_reason == FinishReason.RUNNING
    roots = _root_tokens(state)
    with jax.named_scope("draft"):
        logits = drafter.draft(target, state.draft_cache, roots, state.lengths - 1)
        k = 1 if config.mode == "chain" else min(config.budget, target.vocab_size)
        log_probs, token_ids = draft_topk(logits, k)
        budgets = nodes - 1
        if _is_sized(config):
            best = tree_build(log_probs, token_ids, roots, budget=nodes - 1)
            used = jnp.where(drafts, best.num_nodes, running)
            budgets, promising, time = node_budgets(best.log_probs, used, curve)
            needed = time - 1
        # Without the spine this is the first tree cut off and its links to what is gone undone. Built again it is
        # one kernel of microseconds (docs/performance.md) and one piece of code for both.
        tree = tree_build(
            log_probs,
            token_ids,
            roots,
            budget=nodes - 1,
            budgets=jnp.where(drafts, budgets, 0).astype(jnp.int32),
            keep_spine=config.keep_spine,
        )
    tree = dataclasses.replace(tree, num_nodes=jnp.where(running, tree.num_nodes, 0))
    return tree, jnp.asarray(needed, jnp.float32), promising


def _bare_tree(drafter, state, config) -> DraftTree:
    """Roots alone, in a tree of the config's capacity: a step of plain decoding."""
    shape = (state.lengths.shape[0], max_nodes(drafter, config))
    tokens = jnp.broadcast_to(_root_tokens(state)[:, None], shape)
    running = state.finish_reason == FinishReason.RUNNING
    tree = chain_tree(tokens, running.astype(jnp.int32))
    return dataclasses.replace(tree, max_depth=max_path(drafter, config))


def _is_sized(config: DecodeConfig) -> bool:
    return config.mode == "ddtree" and config.cost_curve is not None


def _sized_round(target, drafter, state: DecodeState, tree: DraftTree, config: DecodeConfig):
    """`verify_round` in the smallest pass that the trees fit: of the curve's, or of a root alone and of all nodes."""
    nodes = tree.tokens.shape[1]
    sizes = (1, nodes) if config.adaptive and nodes > 1 else (nodes,)
    if _is_sized(config):
        sizes = config.cost_curve.sizes(nodes)
    if len(sizes) == 1:
        return verify_round(target, drafter, state, first_nodes(tree, sizes[0]), config)[0]
    # One loop of at most one turn for each size, and no `lax.switch`: XLA updates what a loop carries in place,
    # but copies whole caches into and out of a conditional.
    left = jnp.searchsorted(jnp.asarray(sizes, jnp.int32), jnp.max(tree.num_nodes))
    left = left.astype(jnp.int32)
    done = vary_as(jnp.int32(-1), left)
    for i, size in enumerate(sizes):

        def turn(carry, size=size):
            cut = first_nodes(tree, size)
            return done, verify_round(target, drafter, carry[1], cut, config)[0]

        left, state = jax.lax.while_loop(lambda carry, i=i: carry[0] == i, turn, (left, state))
    return state


def verify_round(
    target, drafter, state: DecodeState, tree: DraftTree, config: DecodeConfig
) -> tuple[DecodeState, AcceptedPath]:
    """Verifies a tree and keeps the path that the target agrees with."""
    check_models(target, drafter, config)
    _checks.instance("tree", tree, DraftTree)
    cached = state.lengths - 1
    taps = () if drafter is None else drafter.taps
    with jax.named_scope("verify"):
        hidden, features, cache = target.verify(tree, state.cache, cached, taps=taps)
        logits = target.head(hidden)
    path, state = _emit(target, state, tree, logits, config)
    with jax.named_scope("commit"):
        cache = commit_path(cache, path, cached)
        draft_cache = state.draft_cache
        if drafter is not None:
            # The accepted nodes need not be a prefix of the tree's rows: gather, do not slice.
            # A path holds no more nodes than the pass did.
            rows = jnp.maximum(path.nodes[:, : features.shape[1]], 0)[..., None]
            features = jnp.take_along_axis(features, rows, axis=1)
            draft_cache = drafter.extend(draft_cache, features, cached, path.num_emitted)
    took_part = tree.num_nodes > 0
    emitted = jnp.arange(state.accepted_histogram.shape[1]) == path.num_emitted[:, None]
    state = dataclasses.replace(
        state,
        cache=cache,
        draft_cache=draft_cache,
        rounds=state.rounds + took_part,
        accepted_histogram=state.accepted_histogram + (emitted & took_part[:, None]),
    )
    return state, path


def _emit(target, state: DecodeState, tree: DraftTree, logits, config: DecodeConfig):
    """Walks the tree along the target's tokens and appends what is emitted to the requests."""
    running = state.finish_reason == FinishReason.RUNNING
    wanted = state.prompt_lengths + state.max_new
    limit = jnp.minimum(wanted, min(target.max_context, state.tokens.shape[1]))
    with jax.named_scope("accept"):
        chosen = sampling.target_tokens(
            logits,
            tree.depths,
            state.lengths,
            state.keys,
            max_depth=tree.max_depth,
            temperature=state.temperature if config.temperature > 0 else None,
            top_k=config.top_k,
            top_p=config.top_p,
            vocab_is_split=getattr(target, "vocab_is_split", False),
        )
        path = tree_accept(
            tree,
            chosen,
            stop_tokens=config.stop_tokens,
            max_new=jnp.where(running, limit - state.lengths, 0),
        )
    batch, capacity = state.tokens.shape
    steps = jnp.arange(path.tokens.shape[1], dtype=jnp.int32)
    emitted = steps < path.num_emitted[:, None]
    columns = jnp.where(emitted, state.lengths[:, None] + steps, capacity)
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
    tokens = state.tokens.at[rows, columns].set(path.tokens, mode="drop")
    lengths = state.lengths + path.num_emitted

    last = jnp.sum(jnp.where(steps == path.num_emitted[:, None] - 1, path.tokens, 0), axis=1)
    stops = jnp.asarray(config.stop_tokens, jnp.int32)
    stopped = (path.num_emitted > 0) & jnp.any(last[:, None] == stops, axis=1)
    reason = jnp.where(path.finished, FinishReason.NUMERICAL, FinishReason.RUNNING)
    reason = jnp.where(lengths >= limit, FinishReason.CONTEXT, reason)
    reason = jnp.where(lengths >= wanted, FinishReason.LENGTH, reason)
    reason = jnp.where(stopped, FinishReason.STOP, reason)
    reason = jnp.where(running, reason, state.finish_reason).astype(jnp.int32)
    return path, dataclasses.replace(state, tokens=tokens, lengths=lengths, finish_reason=reason)


def _prefill(
    target, drafter, prompt_tokens, prompt_lengths, keys, temperature, max_new, config
) -> DecodeState:
    """Runs the prompts through the target in chunks, fills both caches and emits the first token."""
    batch, width = prompt_tokens.shape
    chunk = min(config.prefill_chunk, width)
    padded = -(-width // chunk) * chunk
    valid = (prompt_lengths >= 1) & (prompt_lengths <= min(width, target.max_context))
    steps = jnp.arange(width, dtype=jnp.int32)
    foreign = (prompt_tokens < 0) | (prompt_tokens >= target.vocab_size)
    valid &= ~jnp.any(foreign & (steps < prompt_lengths[:, None]), axis=1)
    valid &= jnp.isfinite(temperature) & (temperature >= 0)
    valid &= (max_new >= 0) & (max_new <= config.max_new_tokens)
    counts = jnp.where(valid, prompt_lengths, 0)

    # Room for the longest request's tree behind its last committed row, and for whole prefill chunks.
    longest = min(width + config.max_new_tokens, target.max_context)
    rows = max(longest - 1 + max_nodes(drafter, config), padded)
    chunks = jnp.pad(prompt_tokens, ((0, 0), (0, padded - width)))
    taps = () if drafter is None else drafter.taps

    def body(carry):
        start, cache, draft_cache, last_hidden = carry
        tokens = jax.lax.dynamic_slice_in_dim(chunks, start, chunk, axis=1)
        here = jnp.clip(counts - start, 0, chunk)
        starts = jnp.full((batch,), start, jnp.int32)
        tree = chain_tree(tokens, here)
        hidden, features, cache = target.verify(tree, cache, starts, taps=taps)
        if drafter is not None:
            draft_cache = drafter.extend(draft_cache, features, starts, here)
        last = jnp.clip(counts - 1 - start, 0, chunk - 1)[:, None, None]
        row = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
        last_hidden = jnp.where((here > 0)[:, None], row, last_hidden)
        return start + chunk, cache, draft_cache, last_hidden

    with jax.named_scope("prefill"):
        cache = target.init_cache(batch, rows)
        draft_cache = None if drafter is None else drafter.init_cache(batch, rows)
        hidden_shape = jax.eval_shape(target.embed, jax.ShapeDtypeStruct((batch,), jnp.int32))
        carry = (
            jnp.int32(0),
            cache,
            draft_cache,
            jnp.zeros(hidden_shape.shape, hidden_shape.dtype),
        )
        start, *rest = carry
        rest = vary_as(rest, prompt_tokens, prompt_lengths, target, drafter)
        _, cache, draft_cache, last_hidden = jax.lax.while_loop(
            lambda carry: carry[0] < jnp.max(counts), body, (start, *rest)
        )
        logits = target.head(last_hidden[:, None])

    columns = jnp.arange(width + config.max_new_tokens, dtype=jnp.int32)
    tokens = jnp.pad(prompt_tokens, ((0, 0), (0, config.max_new_tokens)))
    state = DecodeState(
        tokens=jnp.where(columns < counts[:, None], tokens, -1),
        lengths=counts,
        prompt_lengths=counts,
        max_new=max_new,
        temperature=temperature,
        keys=keys,
        rounds=jnp.zeros((batch,), jnp.int32),
        undrafted_rounds=jnp.zeros((batch,), jnp.int32),
        accepted_histogram=jnp.zeros((batch, max_path(drafter, config) + 2), jnp.int32),
        finish_reason=jnp.where(valid, FinishReason.RUNNING, FinishReason.INVALID).astype(
            jnp.int32
        ),
        cache=cache,
        draft_cache=draft_cache,
        pause=Pause.none(batch),
    )
    # The last prompt token is the root of a tree of one node that has just been verified.
    root = chain_tree(_root_tokens(state)[:, None], valid.astype(jnp.int32))
    return _emit(target, state, root, logits, config)[1]


def _root_tokens(state: DecodeState) -> jax.Array:
    last = jnp.maximum(state.lengths - 1, 0)[:, None]
    return jnp.maximum(jnp.take_along_axis(state.tokens, last, axis=1)[:, 0], 0)


def _seed(seed) -> jax.Array:
    """The seed as the u32[] that the generators take; equal numbers are equal seeds in every dtype."""
    if isinstance(seed, jax.Array) and not _checks.is_known(seed):
        seed = _checks.array("seed", seed, (), (jnp.int32, jnp.uint32))
        return seed.astype(jnp.uint32)
    return jnp.uint32(_checks.between("seed", seed, *SEEDS) % 2**32)


def _temperatures(temperature, config: DecodeConfig, batch: tuple[int]) -> jax.Array:
    """f32[B] of the requests; 0 without sampling."""
    if temperature is None:
        return jnp.full(batch, config.temperature, jnp.float32)
    if config.temperature == 0:
        raise ValueError(
            "temperature is given, but config.temperature is 0, and so the program takes the most probable "
            "tokens whatever it is: set config.temperature above 0"
        )
    if not isinstance(temperature, jax.Array):
        try:
            temperature = np.asarray(temperature)
        except (TypeError, ValueError) as error:
            raise ValueError(f"temperature must be an array of float32 ({error})") from error
        if temperature.dtype.kind in "iuf":
            with np.errstate(over="ignore"):
                temperature = temperature.astype(np.float32)
    shape = batch if temperature.ndim else ()
    temperature = _checks.array("temperature", temperature, shape, jnp.float32)
    if _checks.is_known(temperature):
        wrong = [t for t in np.ravel(temperature).tolist() if not 0 <= t < np.inf]
        if wrong:
            raise ValueError(
                f"temperature must be finite in float32 and at least 0, not {wrong[0]}"
            )
    return jnp.broadcast_to(temperature, batch)


def _max_new(max_new, config: DecodeConfig, batch: tuple[int]) -> jax.Array:
    """i32[B] of the requests."""
    if max_new is None:
        return jnp.full(batch, config.max_new_tokens, jnp.int32)
    max_new = _checks.array("max_new", max_new, batch, jnp.int32)
    if _checks.is_known(max_new):
        for value in np.asarray(max_new).tolist():
            _checks.between("each of max_new", value, 0, config.max_new_tokens)
    return max_new


def _check(target, drafter, prompt_tokens, prompt_lengths, config) -> tuple[jax.Array, jax.Array]:
    """The prompts as arrays, if all that can be known of the arguments is in order."""
    check_models(target, drafter, config)
    prompt_tokens = _checks.array("prompt_tokens", prompt_tokens, ("B", "P"), jnp.int32)
    batch, width = prompt_tokens.shape
    if batch == 0 or width == 0:
        raise ValueError(f"prompt_tokens must hold at least one token, not shape {[batch, width]}")
    prompt_lengths = _checks.array("prompt_lengths", prompt_lengths, (batch,), jnp.int32)
    outside = [token for token in config.stop_tokens if token >= target.vocab_size]
    if outside:
        raise ValueError(
            f"stop_tokens holds {outside[0]}, outside the vocabulary 0 .. {target.vocab_size - 1}"
        )
    if not _checks.is_known(prompt_tokens, prompt_lengths):
        # Under jit the values are unknown; what is wrong with them becomes a finish reason.
        return prompt_tokens, prompt_lengths
    lengths = np.asarray(prompt_lengths)
    if lengths.min() < 1:
        raise ValueError(f"prompt {lengths.argmin()} is empty: give it at least one token")
    if lengths.max() > min(width, target.max_context):
        raise ValueError(
            f"prompt {lengths.argmax()} has {lengths.max()} tokens, but prompt_tokens has {width} "
            f"columns and the target's context holds {target.max_context}"
        )
    known = np.arange(width) < lengths[:, None]
    tokens = np.asarray(prompt_tokens)
    if np.any(known & ((tokens < 0) | (tokens >= target.vocab_size))):
        raise ValueError(
            f"prompt_tokens holds an id outside the vocabulary 0 .. {target.vocab_size - 1}"
        )
    return prompt_tokens, prompt_lengths


def _check_state(state, target, drafter, prompt_tokens, prompt_lengths, config):
    if not isinstance(state, DecodeState):
        hint = ": pass its `state`" if isinstance(state, DecodeResult) else ""
        raise ValueError(f"state must be a DecodeState, not a {type(state).__name__}{hint}")
    batch, width = prompt_tokens.shape
    columns = width + config.max_new_tokens
    if state.tokens.shape != (batch, columns):
        raise ValueError(
            f"state.tokens has shape {list(state.tokens.shape)}, but these prompts and max_new_tokens "
            f"make {[batch, columns]}: continue with the arguments that the state was made with"
        )
    if (drafter is None) != (state.draft_cache is None):
        raise ValueError(
            "state was made in mode 'ar', or is continued in it: keep to one of the two"
        )
    if state.accepted_histogram.shape[1] != max_path(drafter, config) + 2:
        raise ValueError("state was made with a drafter of another block size")
    made = state.cache.shape[2]
    for name, model, cache in (
        ("target", target, state.cache),
        ("drafter", drafter, state.draft_cache),
    ):
        wanted = model and jax.eval_shape(lambda model=model: model.init_cache(batch, made))
        if _shapes(cache) != _shapes(wanted):
            raise ValueError(
                f"state was made with another {name}: its caches have other sizes or dtypes; "
                "continue with the models that the state was made with"
            )
    rows = min(columns, target.max_context) - 1 + max_nodes(drafter, config)
    if made < rows:
        raise ValueError(
            f"state.cache has {made} rows a request, but budget {config.budget} in "
            f"mode {config.mode!r} needs {rows}: start with the largest budget that will be used"
        )
    if not _checks.is_known(state.tokens, state.prompt_lengths, prompt_tokens, prompt_lengths):
        return
    # A prompt that could not be decoded has no length and no token in the state.
    kept = np.asarray(state.prompt_lengths)
    given = np.where(kept > 0, np.asarray(prompt_lengths), 0)
    columns = np.arange(width) < given[:, None]
    same = np.asarray(state.tokens)[:, :width] == np.asarray(prompt_tokens)
    other = (kept != given) | np.any(columns & ~same, axis=1)
    if np.any(other):
        raise ValueError(
            f"prompt {other.argmax()} is not the one that the state was started with: continue with "
            "the same prompt_tokens and prompt_lengths, or start anew"
        )


def _shapes(cache):
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(cache)]
