"""The package as it is installed."""

from importlib import resources

import ddtree_jax
from ddtree_jax import models


def test_types_are_shipped():
    """PEP 561: without the marker, a type checker takes nothing from an installed package."""
    for package in (ddtree_jax, models):
        assert resources.files(package).joinpath("py.typed").is_file(), package.__name__
