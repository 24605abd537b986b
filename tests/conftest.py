"""Fixtures that every test may use."""

import numpy as np
import pytest


@pytest.fixture
def rng():
    """A generator of fresh random inputs; its seed is printed, and pytest shows it when a test fails."""
    seed = int(np.random.SeedSequence().entropy % 2**32)
    print("seed", seed)
    return np.random.default_rng(seed)
