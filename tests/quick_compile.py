"""XLA at its quickest to compile, for tests that would else wait for its optimizer more than for anything else.

What a program computes is the same up to rounding. Its code is not the one that users run, so a test that compares a
model with transformers, a decode with the golden ones or the greedy modes of a model with each other keeps the
defaults, or does both. So does one that reads the compiled text.
"""

import functools

import jax

# LLVM without its passes, the older of two code generators, and one module in place of one a core: a fifth of the time.
_WANTED = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}


def _accepted():
    """`_WANTED` where this jaxlib still has it all: an option that it does not know is an error."""
    if jax.default_backend() != "cpu":
        return {}
    try:
        jax.jit(lambda x: x + 1, compiler_options=_WANTED).lower(1).compile()
    except jax.errors.JaxRuntimeError:
        return {}
    return _WANTED


OPTIONS = _accepted()
#: The same for a process that a test starts.
XLA_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())

jit = functools.partial(jax.jit, compiler_options=OPTIONS)
