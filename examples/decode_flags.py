"""The flags that say how to decode, and the config that they make.

A program that takes them adopts them: `flags.adopt_module_key_flags(decode_flags)`.
"""

from __future__ import annotations

from absl import flags
from one_line_errors import naming, note

MODE = flags.DEFINE_enum("mode", "ddtree", ["ddtree", "chain", "ar"], "How to decode.")
BUDGET = flags.DEFINE_integer(
    "budget",
    None,
    "Draft nodes of a tree, root excluded; the most of them with a cost curve. By default what the curve goes to; "
    "without one 4 on a CPU, where each costs arithmetic, else 16.",
    lower_bound=0,
    upper_bound=256,
)
COST_CURVE = flags.DEFINE_string(
    "cost_curve",
    None,
    "File of benchmark.py --suite=curve or step, --json: rounds then verify what pays.",
)
MAX_NEW = flags.DEFINE_integer(
    "max_new_tokens",
    256,
    "Tokens to emit after each prompt, at most.",
    lower_bound=1,
    upper_bound=2**30,
)
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 takes the most probable token.")
TOP_P = flags.DEFINE_float("top_p", 1.0, "Draw from this share of the probability; 1 is all.")
TOP_K = flags.DEFINE_integer(
    "top_k", 0, "Draw from this many tokens; 0 is all.", lower_bound=0, upper_bound=2**30
)
SEED = flags.DEFINE_integer(
    "seed", 0, "Seed of the draws.", lower_bound=-(2**31), upper_bound=2**32 - 1
)
SAMPLES = flags.DEFINE_integer(
    "n", 1, "Texts to draw for each prompt, at a temperature above 0.", lower_bound=1
)

_LARGEST = 3.4028234663852886e38  # of float32


def check():
    """Refuses what no flag's own bounds refuse, and flags that do not go together.

    Raises:
      OSError, ValueError: the message names the flag.
    """
    for flag, fits, wanted in (
        (TEMPERATURE, lambda x: 0 <= x <= _LARGEST, "finite in float32 and at least 0"),
        (TOP_P, lambda x: 0 < x <= 1, "above 0 and at most 1"),
    ):
        if not fits(flag.value):
            raise ValueError(f"--{flag.name} must be {wanted}, not {flag.value}")
    if SAMPLES.value > 1 and TEMPERATURE.value == 0:
        raise ValueError(
            f"--n {SAMPLES.value} draws the same text each time at --temperature 0: raise it"
        )
    if COST_CURVE.value is not None:
        with naming(COST_CURVE.name, COST_CURVE.value), open(COST_CURVE.value, "rb"):
            pass


def config(target, tokenizer, on_cpu: bool):
    """The `DecodeConfig` for a target; says so if its context is shorter than the texts that are asked for.

    Args:
      target: that has a `max_context`.
      tokenizer: of the target, for the tokens that end a text.
      on_cpu: whether each node of a tree costs arithmetic.

    Raises:
      OSError, ValueError: a cost curve that cannot be read.
    """
    import ddtree_jax

    path, budget = COST_CURVE.value, BUDGET.value
    with naming(COST_CURVE.name, path or ""):
        curve = None if path is None else ddtree_jax.CostCurve.from_json(path)
    if budget is None:
        budget = curve.nodes[-1] - 1 if curve else 4 if on_cpu else 16
    if MAX_NEW.value > target.max_context:
        note(
            f"the context of {target.max_context} tokens ends a text before --max_new_tokens {MAX_NEW.value} does"
        )
    return ddtree_jax.DecodeConfig(
        mode=MODE.value,
        cost_curve=curve,
        budget=budget,
        # More than the context holds would only make room for what can never be said.
        max_new_tokens=min(MAX_NEW.value, target.max_context),
        stop_tokens=tuple(tokenizer.stop_ids),
        temperature=TEMPERATURE.value,
        top_k=TOP_K.value,
        top_p=TOP_P.value,
        seed=SEED.value,
    )
