// Attention of a drafter's block over its context and itself.
#ifndef DDTREE_FFI_XLA_CPU_DRAFT_ATTN_H_
#define DDTREE_FFI_XLA_CPU_DRAFT_ATTN_H_

#include <cstdint>

namespace ddtree {

// Attention of a drafter's block; see draft_attn.cc. All float32; `heads` is a multiple of kv_heads.
struct DraftAttnArgs {
  const float* query;                        // [batch, slots, heads, dim]
  const float *keys, *values;                // [batch, kv_heads, context, dim]
  const float *near_keys, *near_values;      // [batch, slots, kv_heads, dim], the block's own
  const uint8_t* visible;                    // [batch, slots, context + slots]: what a slot sees
  float* out;                                // [batch, slots, heads, dim]
  int64_t batch, slots, heads, kv_heads, context, dim;
};
constexpr int64_t kMostDim = 256;
int64_t DraftAttnItems(const DraftAttnArgs& args);
int DraftAttn(const DraftAttnArgs* args, int64_t task, int64_t tasks);

}  // namespace ddtree

#endif  // DDTREE_FFI_XLA_CPU_DRAFT_ATTN_H_
