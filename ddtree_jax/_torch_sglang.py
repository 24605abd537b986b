"""Trees and accepted paths in the tensors that SGLang's tree verification speaks, bit for bit.

SGLang links a tree by first child and next sibling in node order, as `DraftTree` does, in int64 and under the spelling
`retrive_*`; an accepted path is a list of flat rows, `b * N + node`.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch

from ddtree_jax._torch_checks import instance, tensor
from ddtree_jax._torch_kernels import DraftTree, tree_accept

_PACKED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


class TreeMaskMode(enum.IntEnum):
    """SGLang's forms of the mask, under its own names and numbers."""

    FULL_MASK = 0
    QLEN_ONLY = 1
    QLEN_ONLY_BITPACKING = 2


class VerifyInputs(NamedTuple):
    """What SGLang's `build_tree_kernel_efficient` returns, in its order. B requests, N nodes.

    Attributes:
      tree_mask: which rows each node sees; bool, or for QLEN_ONLY_BITPACKING one word a node.
      positions: i64[B * N], the request's length plus the node's depth.
      retrive_index: i64[B, N], flat rows.
      retrive_next_token: i64[B, N], first child, -1 none.
      retrive_next_sibling: i64[B, N], -1 none.
      draft_tokens: i64[B * N], the root's first.
    """

    tree_mask: torch.Tensor
    positions: torch.Tensor
    retrive_index: torch.Tensor
    retrive_next_token: torch.Tensor
    retrive_next_sibling: torch.Tensor
    draft_tokens: torch.Tensor


def sglang_verify_inputs(
    tree: DraftTree,
    seq_lens: torch.Tensor,
    *,
    seq_lens_sum: int | None = None,
    mode: TreeMaskMode = TreeMaskMode.FULL_MASK,
) -> VerifyInputs:
    """A tree as SGLang's tree verification takes it.

    Rows past `num_nodes` are there, unlinked: they see the prefix and themselves, and no walk reaches them.

    Args:
      tree: from `tree_build`.
      seq_lens: i64[B], each request's length without the tree.
      seq_lens_sum: their sum, which a full mask's size needs on the host; SGLang keeps it in the batch.
      mode: FULL_MASK, a flat bool mask of N x (length + N) a request; QLEN_ONLY, flat N x N a request; or
        QLEN_ONLY_BITPACKING, [B * N] words of 8, 16 or 32 bits, for at most 32 nodes.

    Returns:
      `VerifyInputs`.

    Raises:
      ValueError: another dtype, shape or device; a full mask without `seq_lens_sum`; more nodes than bits.
      TypeError: `tree` is no `DraftTree`.
    """
    instance("tree", tree, DraftTree)
    tensor("tree.tokens", tree.tokens, ("B", "N"), torch.int32)
    batch, nodes = tree.tokens.shape
    tensor("seq_lens", seq_lens, (batch,), torch.int64, tree.tokens)
    device = tree.tokens.device
    if mode == TreeMaskMode.QLEN_ONLY_BITPACKING:
        mask = _packed(tree)
    elif mode == TreeMaskMode.QLEN_ONLY:
        mask = _visible(tree).reshape(-1)
    elif seq_lens_sum is None:
        raise ValueError("a full mask needs seq_lens_sum: give it, or ask for mode=QLEN_ONLY")
    else:
        mask = _full(_visible(tree), seq_lens, seq_lens_sum)
    return VerifyInputs(
        tree_mask=mask,
        positions=(seq_lens[:, None] + tree.depths).reshape(-1),
        retrive_index=torch.arange(batch * nodes, device=device).view(batch, nodes),
        retrive_next_token=tree.next_token.to(torch.int64),
        retrive_next_sibling=tree.next_sibling.to(torch.int64),
        draft_tokens=tree.tokens.to(torch.int64).view(-1),
    )


def verify_tree_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """SGLang's function of this name, by `tree_accept`: the same arguments, changed in the same places.

    Links ascend, as in every tree that SGLang builds; `target_predict` is an arg-max and so not negative.

    Args:
      predicts: i32[B * N], gets the target's token at each accepted row; others stay.
      accept_index: i32[B, S], gets the accepted nodes' flat rows, root first; the tail stays. S - 1 nodes below
        the root are accepted at most.
      accept_token_num: i32[B], gets how many, without the root.
      candidates: i64[B, N], the nodes' tokens.
      retrive_index: i64[B, N], flat rows.
      retrive_next_token, retrive_next_sibling: i64[B, N], -1 none.
      target_predict: i64[B, N], the target's token after each row.

    Raises:
      ValueError: another dtype, shape or device, or a tensor that is not contiguous.
    """
    tensor("candidates", candidates, ("B", "N"), torch.int64)
    shape = candidates.shape
    batch, nodes = shape
    tensor("retrive_index", retrive_index, shape, torch.int64, candidates)
    tensor("retrive_next_token", retrive_next_token, shape, torch.int64, candidates)
    tensor("retrive_next_sibling", retrive_next_sibling, shape, torch.int64, candidates)
    tensor("target_predict", target_predict, shape, torch.int64, candidates)
    tensor("predicts", predicts, (batch * nodes,), torch.int32, candidates)
    tensor("accept_index", accept_index, (batch, "S"), torch.int32, candidates)
    tensor("accept_token_num", accept_token_num, (batch,), torch.int32, candidates)
    if accept_index.shape[1] < 1:
        raise ValueError("accept_index must have a column for the root: S is at least 1")
    target = target_predict.view(-1)
    unread = torch.empty(0, device=candidates.device)
    tree = DraftTree(
        tokens=candidates.to(torch.int32),
        parents=unread,
        depths=unread,
        next_token=retrive_next_token.to(torch.int32),
        next_sibling=retrive_next_sibling.to(torch.int32),
        ancestors=unread,
        log_probs=unread,
        num_nodes=torch.full((batch,), nodes, dtype=torch.int32, device=candidates.device),
        max_depth=accept_index.shape[1] - 1,
    )
    path = tree_accept(tree, target[retrive_index].to(torch.int32))
    accepted = path.nodes >= 0
    # Places past the path stand for the root again, whose row gets its own token twice.
    rows = retrive_index.gather(1, path.nodes.clamp(min=0).to(torch.int64))
    flat = rows.view(-1)
    accept_index.copy_(torch.where(accepted, rows, accept_index))
    accept_token_num.copy_(path.num_emitted - 1)
    predicts.scatter_(0, flat, target[flat].to(torch.int32))


def _visible(tree: DraftTree) -> torch.Tensor:
    """bool[B, N, N]: column j is row i or an ancestor of it."""
    batch, nodes, words = tree.ancestors.shape
    bits = torch.arange(32, dtype=torch.int32, device=tree.ancestors.device)
    spread = (tree.ancestors[..., None] >> bits) & 1
    return spread.view(batch, nodes, 32 * words)[..., :nodes].to(torch.bool)


def _packed(tree: DraftTree) -> torch.Tensor:
    batch, nodes, _ = tree.ancestors.shape
    if nodes > 32:
        raise ValueError(
            f"QLEN_ONLY_BITPACKING holds 32 nodes, not {nodes}: ask for mode=QLEN_ONLY"
        )
    size = 1 if nodes <= 8 else 2 if nodes <= 16 else 4
    raw = tree.ancestors.contiguous().view(torch.uint8).view(batch * nodes, 4)
    return raw[:, :size].contiguous().view(_PACKED[size]).view(-1)


def _full(visible: torch.Tensor, seq_lens: torch.Tensor, seq_lens_sum: int) -> torch.Tensor:
    """Every node sees the prefix; its columns of the tree are written behind it."""
    batch, nodes, _ = visible.shape
    device = visible.device
    mask = torch.ones(nodes * (seq_lens_sum + batch * nodes), dtype=torch.bool, device=device)
    node = torch.arange(nodes, device=device)
    request = torch.arange(batch, device=device)
    start = nodes * (torch.cumsum(seq_lens, 0) - seq_lens + request * nodes)
    row = start[:, None] + node * (seq_lens[:, None] + nodes)
    places = (row + seq_lens[:, None])[..., None] + node
    return mask.scatter_(0, places.view(-1), visible.reshape(-1))
