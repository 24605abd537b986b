"""What a decode call is asked to do: the static, hashable options and the reasons to end."""

from __future__ import annotations

import dataclasses
import enum

from ddtree_jax import _checks
from ddtree_jax.budget import CostCurve
from ddtree_jax.tree import MAX_BUDGET

MODES = ("ddtree", "chain", "ar")
SEEDS = (-(2**31), 2**32 - 1)  # lowest and highest seed; a negative one is the same as 2^32 more


class FinishReason(enum.IntEnum):
    """Why a request stands where it does; the values of `DecodeResult.finish_reason`."""

    RUNNING = 0  #: not finished: `max_rounds` ended the call
    STOP = 1  #: the last token is one of `stop_tokens`
    LENGTH = 2  #: `max_new_tokens` were emitted, or the request's own `max_new`
    CONTEXT = 3  #: the target's context is full
    NUMERICAL = 4  #: the target's logits were not finite; the tokens before are sound
    #: Nothing was decoded: the prompt's length lies outside 1 .. P or beyond the context, a token of it outside the
    #: vocabulary, or the request's `temperature` or `max_new` outside what `ddtree_decode` takes.
    INVALID = 5


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Options of `ddtree_decode`, static under `jax.jit`. Scalars of NumPy or JAX become Python's.

    Attributes:
      mode: "ddtree" verifies a draft tree a round, "chain" the drafter's single most probable
        continuation (DFlash), "ar" no draft at all. The tokens are the same in every mode.
      budget: draft nodes of a tree, root excluded, 0 .. 256 (DDTree, section 3).
      keep_spine: keep the chain's path in the tree when `budget` has room for it, so that a tree
        never accepts less than the chain would.
      cost_curve: measured times of a round. With it mode "ddtree" gives each round the passes' size and each
        request the nodes that promise the most tokens a second (`ddtree_jax.budget`); `budget` still bounds
        them, and must leave a size besides 1 or be 0. None verifies `budget` nodes in every draft. Mode "chain"
        learns from it what its drafts must gain.
      adaptive: a request whose drafts gain too little drafts rarely, down to one round in 16 (`ddtree_jax.pause`):
        fewer accepted drafts a round than make up for their time, by the cost curve or, without one, 0.75. The
        tokens are the same. False drafts in every round.
      max_new_tokens: tokens to emit after each prompt, at most. `ddtree_decode(max_new=...)` lowers it for each
        request without a recompilation.
      stop_tokens: token ids that end a request; the stop token itself is emitted.
      temperature: 0 takes the most probable token, more draws from softmax(logits / temperature); below 1e-5
        that is the most probable token too. `ddtree_decode(temperature=...)` overrides one above 0 without a
        recompilation. At most float32's largest number.
      top_k: draw among the `top_k` most probable tokens only; 0 means all of them.
      top_p: draw among the smallest set of most probable tokens that holds this share of the
        probability (after temperature and top_k), in float32; 1 means all of them.
      seed: seed of the draws; with the prompt it decides a request's text, whatever the mode,
        the budget and the batch. `ddtree_decode(seed=...)` overrides it without a recompilation.
      prefill_chunk: prompt tokens a prefill step takes, 1 .. 256.
      max_rounds: rounds after which the call returns though requests still run (stream with it:
        pass the result's `state` to the next call); 0 only prefills; None runs to the end.

    Raises:
      ValueError: names the option and what it must be.
    """

    mode: str = "ddtree"
    budget: int = 16
    keep_spine: bool = True
    cost_curve: CostCurve | None = None
    adaptive: bool = True
    max_new_tokens: int = 128
    stop_tokens: tuple[int, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    prefill_chunk: int = 64
    max_rounds: int | None = None

    def __post_init__(self):
        # Plain Python values, whatever kind of scalar was given: the config must be hashable.
        if not isinstance(self.mode, str) or self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, not {self.mode!r}")
        self._set("mode", str(self.mode))
        self._whole("budget", 0, MAX_BUDGET)
        self._set("keep_spine", _checks.flag("keep_spine", self.keep_spine))
        if self.cost_curve is not None and not isinstance(self.cost_curve, CostCurve):
            raise ValueError(f"cost_curve must be a CostCurve or None, not {self.cost_curve!r}")
        self._set("adaptive", _checks.flag("adaptive", self.adaptive))
        self._check_sizes()
        self._whole("max_new_tokens", 0, 2**30)
        self._whole("top_k", 0, 2**30)
        self._whole("seed", *SEEDS)
        self._whole("prefill_chunk", 1, MAX_BUDGET)
        if self.max_rounds is not None:
            self._whole("max_rounds", 0, 2**30)
        self._set("temperature", _checks.float32("temperature", self.temperature))
        if self.temperature < 0:
            raise ValueError(f"temperature must be at least 0, not {self.temperature}")
        self._set("top_p", _checks.number("top_p", self.top_p))
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], not {self.top_p}")
        try:
            stops = tuple(self.stop_tokens)
        except TypeError as error:
            raise ValueError(
                f"stop_tokens must be a tuple of token ids, not {self.stop_tokens!r}"
            ) from error
        named = "each of stop_tokens"
        self._set(
            "stop_tokens", tuple(_checks.between(named, token, 0, 2**31 - 1) for token in stops)
        )

    def _check_sizes(self):
        """Every draft would be thrown away, without a word, if no pass could verify it."""
        if self.mode != "ddtree" or self.cost_curve is None or self.budget == 0:
            return
        if len(self.cost_curve.sizes(self.budget + 1)) == 1:
            larger = self.cost_curve.nodes[1:2]
            remedy = f"raise budget to {larger[0] - 1}, " if larger else ""
            raise ValueError(
                f"cost_curve has no size in 2 .. {self.budget + 1}, so that no draft of budget {self.budget} "
                f"could be verified: {remedy}measure one there, or decode plainly with mode 'ar'"
            )

    def _whole(self, name: str, low: int, high: int):
        self._set(name, _checks.between(name, getattr(self, name), low, high))

    def _set(self, name: str, value):
        object.__setattr__(self, name, value)
