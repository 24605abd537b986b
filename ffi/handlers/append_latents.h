// cache [layers, B, S, width] with latents [B, N, width] written at lengths [B], in place
#ifndef DDTREE_FFI_HANDLERS_APPEND_LATENTS_H_
#define DDTREE_FFI_HANDLERS_APPEND_LATENTS_H_

#include "ffi/ddtree.h"
#include "ffi/handlers/handler.h"

namespace ddtree {

template <typename Device>
ffi::Error AppendLatents(Device device, CacheBuffer<4> cache, FloatBuffer<3> latents, In<ffi::S32, 1> lengths,
                         In<ffi::S32, 0> layer, In<ffi::F32, 1> cache_scale, CacheOut<4> out) {
  const int64_t layers = cache.dimensions()[0], batch = cache.dimensions()[1], rows = cache.dimensions()[2];
  const int64_t width = cache.dimensions()[3], nodes = latents.dimensions()[1];
  Checker check("ddtree_append_latents");
  check.Cache(cache, latents.element_type(), cache_scale)
      .Shape("latents", latents, {batch, nodes, width})
      .Shape("lengths", lengths, {batch})
      .Require(out->untyped_data() == cache.untyped_data(), "the cache must be aliased to the result");
  if (!check.ok()) return check.error();
  ddtree_append_latents_args args{};
  args.cache = out->untyped_data();
  args.latents = latents.untyped_data();
  args.lengths = lengths.typed_data();
  args.layer = layer.typed_data();
  args.layers = layers;
  args.batch = batch;
  args.rows = rows;
  args.nodes = nodes;
  args.width = width;
  args.dtype = Tag(latents.element_type());
  args.cache_dtype = Tag(cache.element_type());
  args.cache_scale = ScaleOf(cache_scale);
  if constexpr (Device::kIsCuda) {
    return Status(ddtree_append_latents_cuda(&args, device.stream));
  } else {
    return Status(ddtree_append_latents_cpu(&args, 0, 1));
  }
}

}  // namespace ddtree

#endif  // DDTREE_FFI_HANDLERS_APPEND_LATENTS_H_
