// cache [layers, B, S, width] with the accepted rows of nodes [B, path] moved up, in place
#ifndef DDTREE_FFI_HANDLERS_COMMIT_PATH_H_
#define DDTREE_FFI_HANDLERS_COMMIT_PATH_H_

#include "ffi/ddtree.h"
#include "ffi/handlers/handler.h"

namespace ddtree {

template <typename Device>
ffi::Error CommitPath(Device device, CacheBuffer<4> cache, In<ffi::S32, 2> nodes, In<ffi::S32, 1> num_emitted,
                      In<ffi::S32, 1> lengths, CacheOut<4> out) {
  const int64_t batch = cache.dimensions()[1], path = nodes.dimensions()[1];
  Checker check("ddtree_commit_path");
  check.Shape("nodes", nodes, {batch, path})
      .Shape("num_emitted", num_emitted, {batch})
      .Shape("lengths", lengths, {batch})
      .Require(out->untyped_data() == cache.untyped_data(), "the cache must be aliased to the result");
  if (!check.ok()) return check.error();
  ddtree_commit_path_args args{};
  args.cache = out->untyped_data();
  args.nodes = nodes.typed_data();
  args.num_emitted = num_emitted.typed_data();
  args.lengths = lengths.typed_data();
  args.layers = cache.dimensions()[0];
  args.batch = batch;
  args.rows = cache.dimensions()[2];
  args.width = cache.dimensions()[3];
  args.path = path;
  args.dtype = Tag(cache.element_type());
  if constexpr (Device::kIsCuda) {
    return Status(ddtree_commit_path_cuda(&args, device.stream));
  } else {
    return Status(ddtree_commit_path_cpu(&args, 0, 1));
  }
}

}  // namespace ddtree

#endif  // DDTREE_FFI_HANDLERS_COMMIT_PATH_H_
