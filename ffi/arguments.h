// What the entry points of both devices ask of an argument block before they touch any array of it.
#ifndef DDTREE_FFI_ARGUMENTS_H_
#define DDTREE_FFI_ARGUMENTS_H_

#include <stdint.h>

#include <initializer_list>
#include <optional>

#include "ffi/ddtree.h"
#include "ffi/sizes.h"

namespace ddtree {

// Of the arithmetic's elements; 0 for a tag that names none.
inline int64_t DtypeBytes(int32_t dtype) { return dtype == DDTREE_F32 ? 4 : dtype == DDTREE_BF16 ? 2 : 0; }

// Of a cache's elements beside those of `dtype`: the same, or e4m3. 0 for any other pair.
inline int64_t CacheBytes(int32_t cache_dtype, int32_t dtype) {
  if (cache_dtype == DDTREE_E4M3) return DtypeBytes(dtype) > 0 ? 1 : 0;
  return cache_dtype == dtype ? DtypeBytes(dtype) : 0;
}

// Of a cache whose rows only move; 0 for a tag that names no dtype.
inline int64_t RowElementBytes(int32_t dtype) { return dtype == DDTREE_E4M3 ? 1 : DtypeBytes(dtype); }

// The bytes of an array, or nothing if they cannot be counted. e4m3 counts as the bfloat16 that it is converted to.
inline std::optional<int64_t> ArrayBytes(int64_t element_bytes, std::initializer_list<int64_t> sizes) {
  if (element_bytes <= 0) return std::nullopt;
  return Product(sizes, element_bytes == 1 ? 2 : element_bytes);
}

// Whether an array can be there: its bytes can be counted and, if it has any, `data` leads to aligned elements that
// all have an address.
inline bool Array(const void* data, int64_t element_bytes, std::initializer_list<int64_t> sizes) {
  const std::optional<int64_t> bytes = ArrayBytes(element_bytes, sizes);
  if (!bytes || *bytes == 0) return bytes.has_value();
  const uintptr_t address = reinterpret_cast<uintptr_t>(data);
  return data != nullptr && address % element_bytes == 0 && static_cast<uintptr_t>(*bytes) <= UINTPTR_MAX - address;
}

// Whether a cache's scale can be there: none means 1, and only e4m3 has one.
inline bool CacheScale(const float* scale, int32_t cache_dtype, int64_t layers) {
  return scale == nullptr || (cache_dtype == DDTREE_E4M3 && Array(scale, 4, {layers}));
}

// Limits on sizes that a kernel's block and its workspace query share.
inline bool DraftTopkSizes(int64_t vocab, int64_t k) {
  return Between(1, vocab, INT32_MAX) && Between(1, k, DDTREE_MAX_CANDIDATES) && k <= vocab;
}
inline bool VerifyAttnSizes(int64_t rows, int64_t nodes, int64_t heads) {
  return Between(1, nodes, DDTREE_MAX_NODES) && nodes <= rows && heads >= 1;
}
inline bool ExpertMlpSizes(int64_t tokens, int64_t top_k, int64_t hidden, int64_t inner) {
  return hidden % 32 == 0 && inner % 32 == 0 && Product({hidden}, 16) && Product({inner}, 16) &&
         Product({tokens, top_k, inner}, 8) && Product({tokens, top_k, hidden}, 8);
}

inline bool Sound(const ddtree_draft_topk_args& a) {
  return DraftTopkSizes(a.vocab, a.k) && Array(a.logits, DtypeBytes(a.dtype), {a.rows, a.vocab}) &&
         Array(a.log_probs, 4, {a.rows, a.k}) && Array(a.token_ids, 4, {a.rows, a.k});
}

inline bool Sound(const ddtree_tree_build_args& a) {
  if (!Between(0, a.budget, DDTREE_MAX_NODES - 1) || !Between(0, a.depth, DDTREE_MAX_DEPTH) ||
      !Between(0, a.k, DDTREE_MAX_CANDIDATES)) {
    return false;
  }
  const int64_t nodes = a.budget + 1;
  for (const void* data : {static_cast<const void*>(a.tokens), static_cast<const void*>(a.parents),
                           static_cast<const void*>(a.depths), static_cast<const void*>(a.next_token),
                           static_cast<const void*>(a.next_sibling), static_cast<const void*>(a.out_log_probs)}) {
    if (!Array(data, 4, {a.batch, nodes})) return false;
  }
  return Array(a.log_probs, 4, {a.batch, a.depth, a.k}) && Array(a.token_ids, 4, {a.batch, a.depth, a.k}) &&
         Array(a.root_tokens, 4, {a.batch}) && Array(a.budgets, 4, {a.batch}) && Array(a.num_nodes, 4, {a.batch}) &&
         Array(a.ancestors, 4, {a.batch, nodes, (nodes + 31) / 32});
}

inline bool Sound(const ddtree_verify_attn_args& a) {
  const int64_t bytes = DtypeBytes(a.dtype);
  return a.layers >= 1 && VerifyAttnSizes(a.rows, a.nodes, a.heads) &&
         Between(DDTREE_PATH_AUTO, a.path, DDTREE_PATH_HOPPER) &&
         Array(a.query, bytes, {a.batch, a.nodes, a.heads, DDTREE_ROW_DIM}) &&
         Array(a.out, bytes, {a.batch, a.nodes, a.heads, DDTREE_LATENT_DIM}) &&
         Array(a.cache, CacheBytes(a.cache_dtype, a.dtype), {a.layers, a.batch, a.rows, DDTREE_ROW_DIM}) &&
         CacheScale(a.cache_scale, a.cache_dtype, a.layers) &&
         Array(a.ancestors, 4, {a.batch, a.nodes, (a.nodes + 31) / 32}) && Array(a.lengths, 4, {a.batch}) &&
         Array(a.num_nodes, 4, {a.batch}) && Array(a.layer, 4, {});
}

inline bool Sound(const ddtree_append_latents_args& a) {
  return a.width >= 1 &&
         Array(a.cache, CacheBytes(a.cache_dtype, a.dtype), {a.layers, a.batch, a.rows, a.width}) &&
         CacheScale(a.cache_scale, a.cache_dtype, a.layers) &&
         Array(a.latents, DtypeBytes(a.dtype), {a.batch, a.nodes, a.width}) && Array(a.lengths, 4, {a.batch}) &&
         Array(a.layer, 4, {});
}

inline bool Sound(const ddtree_tree_accept_args& a) {
  if (!Between(1, a.max_nodes, DDTREE_MAX_NODES) || !Between(0, a.depth, INT32_MAX - 1)) return false;
  for (const int32_t* data : {a.tokens, a.next_token, a.next_sibling, a.target_tokens}) {
    if (!Array(data, 4, {a.batch, a.max_nodes})) return false;
  }
  return Array(a.num_nodes, 4, {a.batch}) && Array(a.stop_tokens, 4, {a.num_stops}) && Array(a.max_new, 4, {a.batch}) &&
         Array(a.nodes, 4, {a.batch, a.depth + 1}) && Array(a.out_tokens, 4, {a.batch, a.depth + 1}) &&
         Array(a.num_emitted, 4, {a.batch}) && Array(a.finished, 1, {a.batch});
}

inline bool Sound(const ddtree_commit_path_args& a) {
  return a.width >= 1 && Between(0, a.path, INT32_MAX) &&
         Array(a.cache, RowElementBytes(a.dtype), {a.layers, a.batch, a.rows, a.width}) &&
         Array(a.nodes, 4, {a.batch, a.path}) && Array(a.num_emitted, 4, {a.batch}) && Array(a.lengths, 4, {a.batch});
}

inline bool Sound(const ddtree_expert_mlp_args& a) {
  const int64_t bytes = DtypeBytes(a.dtype), d = a.hidden, i = a.inner;
  return ExpertMlpSizes(a.tokens, a.top_k, d, i) && Array(a.x, bytes, {a.tokens, d}) &&
         Array(a.out, bytes, {a.tokens, d}) && Array(a.expert_ids, 4, {a.tokens, a.top_k}) &&
         Array(a.expert_weights, 4, {a.tokens, a.top_k}) && Array(a.gate_up, 4, {a.experts, 2, i, d / 8}) &&
         Array(a.gate_up_scale, 2, {a.experts, 2, i, d / 32}) && Array(a.down, 4, {a.experts, d, i / 8}) &&
         Array(a.down_scale, 2, {a.experts, d, i / 32});
}

// A ddtree_status for a block, and for a share of it on the CPU: few enough that stepping by `tasks` cannot overflow.
template <typename Args>
int Check(const Args* args) {
  if (args == nullptr) return DDTREE_INVALID_ARGUMENT;
  if (args->abi_version != DDTREE_ABI_VERSION) return DDTREE_WRONG_VERSION;
  return Sound(*args) ? DDTREE_OK : DDTREE_INVALID_ARGUMENT;
}
template <typename Args>
int Check(const Args* args, int64_t task, int64_t tasks) {
  return Between(1, tasks, INT32_MAX) && Between(0, task, tasks - 1) ? Check(args) : DDTREE_INVALID_ARGUMENT;
}

}  // namespace ddtree

#endif  // DDTREE_FFI_ARGUMENTS_H_
