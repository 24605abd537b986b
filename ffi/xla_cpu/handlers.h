// The handlers of what only XLA's CPU backend needs: kernels without an entry in the C ABI.
#ifndef DDTREE_FFI_XLA_CPU_HANDLERS_H_
#define DDTREE_FFI_XLA_CPU_HANDLERS_H_

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "ffi/handlers/handler.h"
#include "ffi/sizes.h"
#include "ffi/xla_cpu/draft_attn.h"
#include "ffi/xla_cpu/few_rows.h"
#include "ffi/xla_cpu/spread.h"

namespace ddtree {

// x [batch, rows, inputs], matrix [batch, inputs, outputs] -> out [batch, rows, outputs]
inline ffi::Error FewRowsDot(In<ffi::F32, 3> x, FloatBuffer<3> matrix, Out<ffi::F32, 3> out) {
  const int64_t batch = x.dimensions()[0], rows = x.dimensions()[1], inputs = x.dimensions()[2];
  const int64_t outputs = matrix.dimensions()[2];
  Checker check("ddtree_few_rows_dot");
  check.Shape("matrix", matrix, {batch, inputs, outputs})
      .Shape("out", *out, {batch, rows, outputs})
      .Require(batch > 0, "batch must be at least 1")
      .Require(outputs % 16 == 0, "outputs must be a multiple of 16")
      .Require(HasFewRows(), "this processor lacks AVX-512");
  if (!check.ok()) return check.error();
  if (rows == 0 || outputs == 0) return ffi::Error::Success();
  FewRowsArgs args{};
  args.x = x.typed_data();
  args.out = out->typed_data();
  args.batch = batch;
  args.rows = rows;
  args.inputs = inputs;
  args.outputs = outputs;
  // Reading a float32 of the matrix takes as long as some eight multiply-adds, and AMX does four at the cost of one.
  // Its tasks are few, since they are short and begin with a wait for the matrix.
  double cost = std::max<int64_t>(rows, 8);  // of an element of the matrix
  int64_t tasks_a_thread = kTasksAThread;
  if (matrix.element_type() == ffi::F32) {
    args.matrix = static_cast<const float*>(matrix.untyped_data());
  } else {
    static std::atomic<uint64_t> calls{0};
    args.bfloat_matrix = static_cast<const uint16_t*>(matrix.untyped_data());
    args.amx = HasFewRowsAmx() ? calls.fetch_add(1, std::memory_order_relaxed) + 1 : 0;
    cost = std::max(args.amx != 0 ? rows / 4.0 : rows, 4.0);
    if (args.amx != 0) tasks_a_thread = 2;
  }
  return Spread(args, FewRows, cost * batch * inputs * outputs, FewRowsItems(args), tasks_a_thread);
}

// query [B, T, H, dim], keys and values [B, KV, S, dim], the block's own near_keys and near_values [B, T, KV, dim],
// visible [B, T, S + T] -> out [B, T, H, dim]
inline ffi::Error DraftAttention(In<ffi::F32, 4> query, In<ffi::F32, 4> keys, In<ffi::F32, 4> values,
                                 In<ffi::F32, 4> near_keys, In<ffi::F32, 4> near_values, In<ffi::PRED, 3> visible,
                                 Out<ffi::F32, 4> out) {
  const int64_t batch = query.dimensions()[0], slots = query.dimensions()[1], heads = query.dimensions()[2];
  const int64_t dim = query.dimensions()[3], kv_heads = keys.dimensions()[1], context = keys.dimensions()[2];
  Checker check("ddtree_draft_attn");
  check.Shape("keys", keys, {batch, kv_heads, context, dim})
      .Shape("values", values, {batch, kv_heads, context, dim})
      .Shape("near_keys", near_keys, {batch, slots, kv_heads, dim})
      .Shape("near_values", near_values, {batch, slots, kv_heads, dim})
      .Shape("visible", visible, {batch, slots, context + slots})
      .Shape("out", *out, {batch, slots, heads, dim})
      .Require(kv_heads > 0 && heads % kv_heads == 0, "heads must be a multiple of the keys' heads")
      .Require(dim <= kMostDim, "heads must be of at most 256 elements");
  if (!check.ok()) return check.error();
  if (Product({batch, slots, heads, dim}).value_or(0) == 0) return ffi::Error::Success();
  DraftAttnArgs args{};
  args.query = query.typed_data();
  args.keys = keys.typed_data();
  args.values = values.typed_data();
  args.near_keys = near_keys.typed_data();
  args.near_values = near_values.typed_data();
  args.visible = static_cast<const uint8_t*>(visible.untyped_data());
  args.out = out->typed_data();
  args.batch = batch;
  args.slots = slots;
  args.heads = heads;
  args.kv_heads = kv_heads;
  args.context = context;
  args.dim = dim;
  return Spread(args, DraftAttn, 2.0 * batch * slots * heads * (context + slots) * dim, DraftAttnItems(args));
}

}  // namespace ddtree

#endif  // DDTREE_FFI_XLA_CPU_HANDLERS_H_
