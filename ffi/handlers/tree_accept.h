// The tree's links, target_tokens [B, N], stop_tokens [M], max_new [B] -> the accepted path of up to L + 1 nodes
#ifndef DDTREE_FFI_HANDLERS_TREE_ACCEPT_H_
#define DDTREE_FFI_HANDLERS_TREE_ACCEPT_H_

#include "ffi/ddtree.h"
#include "ffi/handlers/handler.h"

namespace ddtree {

template <typename Device>
ffi::Error TreeAccept(Device device, In<ffi::S32, 2> tokens, In<ffi::S32, 2> next_token, In<ffi::S32, 2> next_sibling,
                      In<ffi::S32, 1> num_nodes, In<ffi::S32, 2> target_tokens, In<ffi::S32, 1> stop_tokens,
                      In<ffi::S32, 1> max_new, Out<ffi::S32, 2> nodes, Out<ffi::S32, 2> out_tokens,
                      Out<ffi::S32, 1> num_emitted, Out<ffi::PRED, 1> finished) {
  const int64_t batch = tokens.dimensions()[0], max_nodes = tokens.dimensions()[1], path = nodes->dimensions()[1];
  Checker check("ddtree_tree_accept");
  check.Shape("next_token", next_token, {batch, max_nodes})
      .Shape("next_sibling", next_sibling, {batch, max_nodes})
      .Shape("num_nodes", num_nodes, {batch})
      .Shape("target_tokens", target_tokens, {batch, max_nodes})
      .Shape("max_new", max_new, {batch})
      .Shape("nodes", *nodes, {batch, path})
      .Shape("out_tokens", *out_tokens, {batch, path})
      .Shape("num_emitted", *num_emitted, {batch})
      .Shape("finished", *finished, {batch});
  if (!check.ok()) return check.error();
  ddtree_tree_accept_args args{};
  args.tokens = tokens.typed_data();
  args.next_token = next_token.typed_data();
  args.next_sibling = next_sibling.typed_data();
  args.num_nodes = num_nodes.typed_data();
  args.target_tokens = target_tokens.typed_data();
  args.stop_tokens = stop_tokens.typed_data();
  args.max_new = max_new.typed_data();
  args.nodes = nodes->typed_data();
  args.out_tokens = out_tokens->typed_data();
  args.num_emitted = num_emitted->typed_data();
  args.finished = static_cast<uint8_t*>(finished->untyped_data());
  args.batch = batch;
  args.max_nodes = max_nodes;
  args.depth = path - 1;
  args.num_stops = stop_tokens.dimensions()[0];
  if constexpr (Device::kIsCuda) {
    return Status(ddtree_tree_accept_cuda(&args, device.stream));
  } else {
    return Status(ddtree_tree_accept_cpu(&args, 0, 1));
  }
}

}  // namespace ddtree

#endif  // DDTREE_FFI_HANDLERS_TREE_ACCEPT_H_
