// query [B, N, H, 576], cache [layers, B, S, 576], the tree's masks -> out [B, N, H, 512]
#ifndef DDTREE_FFI_HANDLERS_VERIFY_ATTN_H_
#define DDTREE_FFI_HANDLERS_VERIFY_ATTN_H_

#include <algorithm>

#include "ffi/cpu/verify_attn.h"
#include "ffi/ddtree.h"
#include "ffi/handlers/handler.h"
#include "ffi/xla_cpu/spread.h"

namespace ddtree {

inline constexpr char kScale[] = "scale";
inline constexpr char kPath[] = "path";

template <typename Device>
ffi::Error VerifyAttn(Device device, FloatBuffer<4> query, CacheBuffer<4> cache, In<ffi::U32, 3> ancestors,
                      In<ffi::S32, 1> lengths, In<ffi::S32, 1> num_nodes, In<ffi::S32, 0> layer,
                      In<ffi::F32, 1> cache_scale, FloatOut<4> out, typename Device::Workspace workspace,
                      ffi::Attr<float, kScale> scale, ffi::Attr<int32_t, kPath> path) {
  const int64_t batch = query.dimensions()[0], nodes = query.dimensions()[1], heads = query.dimensions()[2];
  const int64_t layers = cache.dimensions()[0], rows = cache.dimensions()[2];
  Checker check("ddtree_verify_attn");
  check.Shape("query", query, {batch, nodes, heads, DDTREE_ROW_DIM})
      .Shape("cache", cache, {layers, batch, rows, DDTREE_ROW_DIM})
      .Shape("out", *out, {batch, nodes, heads, DDTREE_LATENT_DIM})
      .Require(out->element_type() == query.element_type(), "out has the wrong dtype")
      .Shape("ancestors", ancestors, {batch, nodes, (nodes + 31) / 32})
      .Shape("lengths", lengths, {batch})
      .Shape("num_nodes", num_nodes, {batch})
      .Cache(cache, query.element_type(), cache_scale);
  if (!check.ok()) return check.error();
  ddtree_verify_attn_args args{};
  args.query = query.untyped_data();
  args.cache = cache.untyped_data();
  args.ancestors = ancestors.typed_data();
  args.lengths = lengths.typed_data();
  args.num_nodes = num_nodes.typed_data();
  args.layer = layer.typed_data();
  args.out = out->untyped_data();
  args.layers = layers;
  args.batch = batch;
  args.rows = rows;
  args.nodes = nodes;
  args.heads = heads;
  args.scale = *scale;
  args.dtype = Tag(query.element_type());
  args.path = *path;
  args.cache_dtype = Tag(cache.element_type());
  args.cache_scale = ScaleOf(cache_scale);
  SetWorkspace(workspace, &args);
  if constexpr (Device::kIsCuda) {
    return Status(ddtree_verify_attn_cuda(&args, device.stream));
  } else {
    double keys = 0;
    for (int64_t b = 0; b < batch; ++b) keys += std::clamp<int64_t>(args.lengths[b], 0, rows) + 8;
    const int64_t step = VerifyAttnRows(nodes * heads);
    return Spread(args, ddtree_verify_attn_cpu, 1088.0 * keys * nodes * heads,
                  batch * ((nodes * heads + step - 1) / step));
  }
}

}  // namespace ddtree

#endif  // DDTREE_FFI_HANDLERS_VERIFY_ATTN_H_
