// log_probs, token_ids [B, L, K], root_tokens, budgets [B] -> the draft tree of N nodes
#ifndef DDTREE_FFI_HANDLERS_TREE_BUILD_H_
#define DDTREE_FFI_HANDLERS_TREE_BUILD_H_

#include "ffi/ddtree.h"
#include "ffi/handlers/handler.h"

namespace ddtree {

inline constexpr char kKeepSpine[] = "keep_spine";

template <typename Device>
ffi::Error TreeBuild(Device device, In<ffi::F32, 3> log_probs, In<ffi::S32, 3> token_ids, In<ffi::S32, 1> root_tokens,
                     In<ffi::S32, 1> budgets, Out<ffi::S32, 2> tokens, Out<ffi::S32, 2> parents,
                     Out<ffi::S32, 2> depths, Out<ffi::S32, 2> next_token, Out<ffi::S32, 2> next_sibling,
                     Out<ffi::U32, 3> ancestors, Out<ffi::F32, 2> out_log_probs, Out<ffi::S32, 1> num_nodes,
                     typename Device::Workspace workspace, ffi::Attr<bool, kKeepSpine> keep_spine) {
  const int64_t batch = log_probs.dimensions()[0], depth = log_probs.dimensions()[1], k = log_probs.dimensions()[2];
  const int64_t nodes = tokens->dimensions()[1];
  Checker check("ddtree_tree_build");
  check.Shape("token_ids", token_ids, {batch, depth, k})
      .Shape("root_tokens", root_tokens, {batch})
      .Shape("budgets", budgets, {batch})
      .Shape("tokens", *tokens, {batch, nodes})
      .Shape("parents", *parents, {batch, nodes})
      .Shape("depths", *depths, {batch, nodes})
      .Shape("next_token", *next_token, {batch, nodes})
      .Shape("next_sibling", *next_sibling, {batch, nodes})
      .Shape("ancestors", *ancestors, {batch, nodes, (nodes + 31) / 32})
      .Shape("log_probs", *out_log_probs, {batch, nodes})
      .Shape("num_nodes", *num_nodes, {batch});
  if (!check.ok()) return check.error();
  ddtree_tree_build_args args{};
  args.log_probs = log_probs.typed_data();
  args.token_ids = token_ids.typed_data();
  args.root_tokens = root_tokens.typed_data();
  args.budgets = budgets.typed_data();
  args.tokens = tokens->typed_data();
  args.parents = parents->typed_data();
  args.depths = depths->typed_data();
  args.next_token = next_token->typed_data();
  args.next_sibling = next_sibling->typed_data();
  args.ancestors = ancestors->typed_data();
  args.out_log_probs = out_log_probs->typed_data();
  args.num_nodes = num_nodes->typed_data();
  args.batch = batch;
  args.depth = depth;
  args.k = k;
  args.budget = nodes - 1;
  args.keep_spine = *keep_spine;
  SetWorkspace(workspace, &args);
  if constexpr (Device::kIsCuda) {
    return Status(ddtree_tree_build_cuda(&args, device.stream));
  } else {
    return Status(ddtree_tree_build_cpu(&args, 0, 1));
  }
}

}  // namespace ddtree

#endif  // DDTREE_FFI_HANDLERS_TREE_BUILD_H_
