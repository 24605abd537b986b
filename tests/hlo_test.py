"""The searches for copies and for collectives find them."""

import jax
import jax.numpy as jnp
import pytest
from hlo import cache_copies, collectives

_CACHE = jax.ShapeDtypeStruct((2, 3, 576), jnp.float32)


@pytest.mark.parametrize(
    "line, also, found",
    [
        ("  %copy.1 = f32[2,3,576]{2,1,0} copy(f32[2,3,576]{2,1,0} %p)", (), True),
        ("  ROOT copy.1 = bf16[2,3,576]{2,1,0:T(8)} copy(%p)", (), True),
        (
            "  %c = (f32[2,3,576]{2,1,0}, f32[2,3,576]{2,1,0}, u32[]) copy-start(%p)",
            (),
            True,
        ),
        ("  %c = f32[2,3,576]{2,1,0} copy-done(%c)", (), False),
        ("  %c = f32[2,3,577]{2,1,0} copy(%p)", (), False),
        ("  %a = f32[9] add(f32[2,3,576] %copy(x), %p)", (), False),
        ("  %t = f32[2,3,576]{0,2,1} transpose(%p), dimensions={0,1,2}", (), False),
        ("  %t = f32[2,3,576]{0,2,1} transpose(%p), dimensions={0,1,2}", ("transpose",), True),
    ],
)
def test_lines(line, also, found):
    assert cache_copies(f"HloModule x\n{line}\n", {"a": _CACHE}, also=also) == [line] * found


def test_a_cache_that_is_kept_is_copied_and_one_that_is_given_away_is_not():
    cache = jnp.zeros(_CACHE.shape)
    for donated, copies in (((), 1), ((0,), 0)):
        step = jax.jit(lambda x: x.at[0, 1].set(1.0), donate_argnums=donated)
        assert len(cache_copies(step.lower(cache).compile().as_text(), cache)) == copies


def test_collectives_are_named_with_the_type_of_their_result():
    text = """
      %all-reduce.1 = f32[2,9,64]{2,1,0} all-reduce(%x), channel_id=3, to_apply=%add
      ROOT %g = (f32[8,48]{0,1:T(8,128)}, s32[]) all-gather-start(%x), dimensions={1}
      %h = f32[8,48]{0,1} all-gather-done(%g)
      %add.3 = f32[9] add(f32[9] %all-reduce(x), %p)
    """
    assert collectives(text) == [
        ("all-reduce", "f32[2,9,64]"),
        ("all-gather", "(f32[8,48], s32[])"),
    ]
