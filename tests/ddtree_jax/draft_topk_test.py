"""draft_topk against its oracle."""

import numpy as np
import pytest
from primitive_checks import DTYPES, check_draft_topk, draft_topk


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "depth", "vocab", "k"),
    [
        (2, 3, 1, 1),
        (2, 3, 7, 7),
        (1, 7, 300, 256),
        (3, 2, 1023, 5),
        (2, 2, 1024, 64),
        (1, 3, 5003, 17),
    ],
)
def test_random_logits(rng, dtype, batch, depth, vocab, k):
    logits = (rng.normal(size=(batch, depth, vocab)) * 5).astype(DTYPES[dtype])
    check_draft_topk(logits, k)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_smaller_id(rng, dtype):
    # Three values only, both zeros among them: nearly every comparison is a tie.
    logits = rng.choice([-1.0, 0.0, -0.0, 1.0], size=(2, 4, 3000), p=[0.5, 0.25, 0.24, 0.01])
    check_draft_topk(logits.astype(DTYPES[dtype]), 200)
    flat = np.zeros((1, 1, 4000), DTYPES[dtype])
    np.testing.assert_array_equal(draft_topk(flat, 9)[1][0, 0], np.arange(9))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinities(rng, dtype):
    logits = rng.normal(size=(1, 6, 2100)).astype(DTYPES[dtype])
    logits[0, 0, ::2] = np.nan
    logits[0, 1] = np.nan
    logits[0, 2] = -np.inf
    logits[0, 3, 5:] = -np.inf  # fewer finite logits than candidates
    logits[0, 4, 1500] = np.inf
    logits[0, 5, :1100] = -np.inf
    check_draft_topk(logits, 30)
    log_probs = np.asarray(draft_topk(logits, 30)[0])
    assert np.isneginf(log_probs[0, [1, 2, 4]]).all()
    assert np.isfinite(log_probs[0, [0, 5]]).all()


def test_ascending_logits_replace_every_candidate():
    logits = np.arange(6000, dtype=np.float32)[None, None] / 100
    check_draft_topk(logits, 256)


def test_large_logits_do_not_overflow():
    logits = np.array([[[3e38, 3e38, -3e38, 0.0]]], np.float32)
    log_probs, token_ids = draft_topk(logits, 4)
    np.testing.assert_array_equal(token_ids[0, 0], [0, 1, 3, 2])
    # The largest logit's spacing swallows log 2: the log-prob is rounded, never positive, never NaN.
    assert (np.asarray(log_probs) <= 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_kimi_vocabulary(rng, dtype):
    logits = (rng.normal(size=(1, 7, 163840)) * 3).astype(DTYPES[dtype])
    check_draft_topk(logits, 64)
