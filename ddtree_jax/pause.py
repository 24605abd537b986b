"""When a request drafts: in every round while its drafts gain, else rarely.

A round with a draft takes longer than a step of plain decoding: it drafts, and it verifies more nodes. How many
accepted drafts make up for that is known where there is a cost curve. Elsewhere `BREAK_EVEN` stands for it, which suits
small batches; where a larger one takes several steps for a round, as on a CPU, a curve has to say so. Drafts are judged
by those that the target accepted, since a drafter may be sure of itself and wrong.

The constants were chosen by replaying the demo's 32 prompts and drafts that are accepted at random: of a drafter that
is never right, 8 drafts come before the first pause, while the demo's rounds grow by 0 to 1.5%.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

BREAK_EVEN = 0.75  # accepted drafts a round, where no cost curve says better
_RATE = 1 / 16  # of the running mean: about the last 16 drafts
_START = 0.5  # of the running mean, above what was needed: some bad rounds at a text's beginning decide nothing
_LONGEST = (
    16  # rounds from a draft to the next: now and then one sees that the text has become easier
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pause:
    """What each request's drafts have gained, and when it drafts next. B requests.

    All requests of a call count the same rounds, and periods are powers of two. So requests that pause draft in the
    same rounds, and a batch of them is delayed by drafting as rarely as one of them.

    Attributes:
      surplus: f32[B], running mean over a request's drafts: accepted ones less those that were needed.
      period: i32[B], rounds from one draft to the next: 1 while drafts gain, else 2, 4, 8 and 16.
      next_draft: i32[B], the first round in which to draft again, as `DecodeState.rounds` counts them.
    """

    surplus: jax.Array
    period: jax.Array
    next_draft: jax.Array

    @classmethod
    def none(cls, batch: int) -> Pause:
        """That of `batch` requests that have not drafted yet."""
        return cls(
            surplus=jnp.full((batch,), _START, jnp.float32),
            period=jnp.ones((batch,), jnp.int32),
            next_draft=jnp.zeros((batch,), jnp.int32),
        )

    def after(self, rounds, drafted, accepted, needed, promising) -> Pause:
        """What follows a round.

        A draft that gained what it had to is followed by another at once. One that gained twice that lets the request
        begin anew; until then, or until the running mean has risen, pauses are as long as before, since a draft now
        and then is accepted by chance.

        Args:
          rounds: i32[B], rounds of each request before this one.
          drafted: bool[B], who took part with a draft.
          accepted: i32[B], drafts that the target accepted.
          needed: f32[], how many of them make up for the draft's time.
          promising: bool[], whether the draft was expected to; a pause follows one that was not.
        """
        gain = accepted.astype(jnp.float32) - needed
        surplus = self.surplus + _RATE * (gain - self.surplus)
        surplus = jnp.where(gain >= needed, jnp.maximum(surplus, _START), surplus)
        worthwhile = promising & (surplus >= 0)
        again = worthwhile | (promising & (gain >= 0))
        period = jnp.where(again, self.period, jnp.minimum(2 * self.period, _LONGEST))
        period = jnp.where(worthwhile, 1, period)
        next_draft = jnp.where(again, rounds + 1, (rounds // period + 1) * period)
        after = Pause(surplus, period, next_draft)
        return jax.tree.map(lambda new, old: jnp.where(drafted, new, old), after, self)
