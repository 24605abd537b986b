"""The golden vectors in tests/data are what their generator makes today."""

import importlib.util
import pathlib

import ml_dtypes
import numpy as np
import pytest
from safetensors import deserialize

_SPEC = importlib.util.spec_from_file_location(
    "golden", pathlib.Path(__file__).parent / "golden.py"
)
golden = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(golden)

CASES = dict(golden.cases())
_DTYPES = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "BF16": ml_dtypes.bfloat16, "F32": np.float32}
_DTYPES |= {"I32": np.int32, "I64": np.int64, "U8": np.uint8, "U16": np.uint16, "U32": np.uint32}


def _load(path):
    """A file's arrays: safetensors.numpy writes e4m3, but does not read it."""
    return {
        name: np.frombuffer(view["data"], _DTYPES[view["dtype"]]).reshape(view["shape"])
        for name, view in deserialize(path.read_bytes())
    }


@pytest.mark.parametrize("name", sorted(CASES))
def test_file_is_what_is_generated(name):
    stored = _load(golden.FOLDER / f"{name}.safetensors")
    made = CASES[name]
    assert stored.keys() == made.keys()
    for key, value in made.items():
        assert stored[key].dtype == value.dtype and stored[key].shape == value.shape, key
        if value.dtype.kind in "iu":
            np.testing.assert_array_equal(stored[key], value, err_msg=key)
        else:  # exponentials may differ by a rounding between machines
            got, want = stored[key].astype(np.float64), value.astype(np.float64)
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6, err_msg=key)


def test_no_file_is_left_over():
    assert {path.stem for path in golden.FOLDER.glob("*")} == set(CASES)
    assert sum(path.stat().st_size for path in golden.FOLDER.glob("*")) < 300_000


def test_walks_go_deep_and_end_early():
    """The composition covers what it is for: long and short paths, stops, and budgets below the capacity."""
    for name in ("compose_32", "compose_64"):
        case = CASES[name]
        assert case["num_emitted"].max() >= 5 and case["num_emitted"].min() <= 2
        assert 0 < case["finished"].sum() < len(case["finished"])
        assert len(set(case["num_nodes"].tolist())) > 8
