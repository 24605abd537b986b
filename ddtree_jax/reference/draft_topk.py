"""The k most probable tokens of each draft position."""

import numpy as np


def draft_topk(logits, k):
    """The candidates of every position; the normaliser is summed in float64 and rounded to float32.

    Args:
      logits: [B, L, V] of any float type. NaN counts as -inf.
      k: 1 .. V.

    Returns:
      log_probs f32[B, L, k] and token_ids i32[B, L, k]: logit descending, then id ascending. A row whose
      normaliser is not finite is -inf throughout.
    """
    logits = np.asarray(logits).astype(np.float64)
    logits = np.where(np.isnan(logits), -np.inf, logits)
    # A stable sort keeps equal logits (0.0 and -0.0 among them) in the order of their ids.
    token_ids = np.argsort(-logits, axis=-1, kind="stable")[..., :k]
    top = np.take_along_axis(logits, token_ids, axis=-1)
    largest = logits.max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        normaliser = largest + np.log(np.sum(np.exp(logits - largest), axis=-1, keepdims=True))
        # Rounded before it is subtracted: equal steps between logits stay equal, and so do path sums.
        normaliser = normaliser.astype(np.float32)
        log_probs = np.minimum(top.astype(np.float32) - normaliser, 0)
    log_probs = np.where(np.isfinite(normaliser), log_probs, np.float32(-np.inf))
    return log_probs, token_ids.astype(np.int32)
