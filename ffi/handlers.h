// What the CPU and the CUDA handlers share: XLA buffers checked and laid into the argument blocks of the C ABI.
//
// Shapes and dtypes are checked in Python when a program is traced; that they fit each other is checked here again
// because a custom call can be made without that Python. Whether a kernel serves the sizes is left to the C ABI. What
// depends on the data is never an error: a failed call would already have consumed the buffers donated to it.
#ifndef DDTREE_FFI_HANDLERS_H_
#define DDTREE_FFI_HANDLERS_H_

#include <initializer_list>
#include <string>

#include "ffi/ddtree.h"
#include "xla/ffi/api/ffi.h"

static_assert(XLA_FFI_API_MAJOR == 0, "these handlers are written against XLA's FFI API 0.x");

namespace ddtree {

namespace ffi = ::xla::ffi;

using Any = ffi::AnyBuffer;
using Out = ffi::Result<ffi::AnyBuffer>;

inline ffi::Error Status(int status) {
  if (status == DDTREE_OK) return ffi::Error::Success();
  return status == DDTREE_INVALID_ARGUMENT ? ffi::Error::InvalidArgument(ddtree_error_string(status))
                                           : ffi::Error::Internal(ddtree_error_string(status));
}

// Collects the first thing that is wrong with a call's buffers.
class Checker {
 public:
  explicit Checker(const char* call) : call_(call) {}

  // A negative size matches anything and is returned through `Dim`.
  Checker& Shape(const char* name, const Any& buffer, std::initializer_list<int64_t> shape) {
    auto dims = buffer.dimensions();
    bool same = dims.size() == shape.size();
    size_t i = 0;
    for (int64_t want : shape) {
      if (same && want >= 0 && dims[i] != want) same = false;
      ++i;
    }
    if (!same) Fail(std::string(name) + " has the wrong shape");
    return *this;
  }
  Checker& Dtype(const char* name, const Any& buffer, ffi::DataType dtype) {
    if (buffer.element_type() != dtype) Fail(std::string(name) + " has the wrong dtype");
    return *this;
  }
  // float32 or bfloat16.
  Checker& Float(const char* name, const Any& buffer, int32_t* tag) {
    if (buffer.element_type() == ffi::DataType::F32) {
      *tag = DDTREE_F32;
    } else if (buffer.element_type() == ffi::DataType::BF16) {
      *tag = DDTREE_BF16;
    } else {
      Fail(std::string(name) + " must be float32 or bfloat16");
    }
    return *this;
  }
  // A cache beside numbers of `like`: of the same dtype, or float8_e4m3fn with a scale for each layer or none.
  Checker& Cache(const Any& cache, const Any& like, const Any& scale, int32_t like_tag, int32_t* tag) {
    const bool e4m3 = cache.element_type() == ffi::DataType::F8E4M3FN;
    *tag = e4m3 ? static_cast<int32_t>(DDTREE_E4M3) : like_tag;
    if (!e4m3) Dtype("cache", cache, like.element_type());
    const bool given = scale.element_count() > 0;
    if (given && !e4m3) Fail("cache_scale is for a float8_e4m3fn cache");
    return Shape("cache_scale", scale, {given ? cache.dimensions()[0] : 0}).Dtype("cache_scale", scale, ffi::F32);
  }
  Checker& Require(bool ok, const char* what) {
    if (!ok) Fail(what);
    return *this;
  }
  bool ok() const { return message_.empty(); }
  ffi::Error error() const { return ffi::Error::InvalidArgument(std::string(call_) + ": " + message_); }

 private:
  void Fail(std::string message) {
    if (message_.empty()) message_ = std::move(message);
  }
  const char* call_;
  std::string message_;
};

template <typename T>
T* Data(const Any& buffer) {
  return static_cast<T*>(buffer.untyped_data());
}
template <typename T>
T* Data(Out& buffer) {
  return static_cast<T*>(buffer->untyped_data());
}

// The scale of a cache's layers; an array without elements stands for 1.
inline const float* ScaleOf(const Any& scale) { return scale.element_count() > 0 ? Data<float>(scale) : nullptr; }

inline bool HasRank(const Any& buffer, size_t rank) { return buffer.dimensions().size() == rank; }

// Each fills an argument block from the call's buffers, or says what is wrong. `workspace` is the trailing result that
// the CUDA lowering adds where the kernel wants scratch.

inline ffi::Error DraftTopkArgs(const Any& logits, Out& log_probs, Out& token_ids, ddtree_draft_topk_args* a) {
  Checker check("ddtree_draft_topk");
  if (!HasRank(logits, 2) || !HasRank(*log_probs, 2)) return check.Require(false, "logits must be [rows, V]").error();
  a->rows = logits.dimensions()[0], a->vocab = logits.dimensions()[1], a->k = log_probs->dimensions()[1];
  check.Float("logits", logits, &a->dtype)
      .Shape("log_probs", *log_probs, {a->rows, a->k}).Dtype("log_probs", *log_probs, ffi::F32)
      .Shape("token_ids", *token_ids, {a->rows, a->k}).Dtype("token_ids", *token_ids, ffi::S32);
  a->logits = Data<void>(logits), a->log_probs = Data<float>(log_probs), a->token_ids = Data<int32_t>(token_ids);
  return check.ok() ? ffi::Error::Success() : check.error();
}

inline ffi::Error TreeBuildArgs(const Any& log_probs, const Any& token_ids, const Any& root_tokens, const Any& budgets,
                                Out& tokens, Out& parents, Out& depths, Out& next_token, Out& next_sibling,
                                Out& ancestors, Out& out_log_probs, Out& num_nodes, bool keep_spine,
                                ddtree_tree_build_args* a) {
  Checker check("ddtree_tree_build");
  if (!HasRank(log_probs, 3) || !HasRank(*tokens, 2)) return check.Require(false, "log_probs must be [B, L, K]").error();
  const int64_t b = log_probs.dimensions()[0], n = tokens->dimensions()[1], w = (n + 31) / 32;
  a->batch = b, a->depth = log_probs.dimensions()[1], a->k = log_probs.dimensions()[2], a->budget = n - 1;
  a->keep_spine = keep_spine;
  check.Dtype("log_probs", log_probs, ffi::F32)
      .Shape("token_ids", token_ids, {b, a->depth, a->k}).Dtype("token_ids", token_ids, ffi::S32)
      .Shape("root_tokens", root_tokens, {b}).Dtype("root_tokens", root_tokens, ffi::S32)
      .Shape("budgets", budgets, {b}).Dtype("budgets", budgets, ffi::S32)
      .Dtype("tokens", *tokens, ffi::S32)
      .Shape("parents", *parents, {b, n}).Dtype("parents", *parents, ffi::S32)
      .Shape("depths", *depths, {b, n}).Dtype("depths", *depths, ffi::S32)
      .Shape("next_token", *next_token, {b, n}).Dtype("next_token", *next_token, ffi::S32)
      .Shape("next_sibling", *next_sibling, {b, n}).Dtype("next_sibling", *next_sibling, ffi::S32)
      .Shape("ancestors", *ancestors, {b, n, w}).Dtype("ancestors", *ancestors, ffi::U32)
      .Shape("log_probs", *out_log_probs, {b, n}).Dtype("log_probs", *out_log_probs, ffi::F32)
      .Shape("num_nodes", *num_nodes, {b}).Dtype("num_nodes", *num_nodes, ffi::S32);
  a->log_probs = Data<float>(log_probs), a->token_ids = Data<int32_t>(token_ids);
  a->root_tokens = Data<int32_t>(root_tokens), a->budgets = Data<int32_t>(budgets);
  a->tokens = Data<int32_t>(tokens), a->parents = Data<int32_t>(parents), a->depths = Data<int32_t>(depths);
  a->next_token = Data<int32_t>(next_token), a->next_sibling = Data<int32_t>(next_sibling);
  a->ancestors = Data<uint32_t>(ancestors), a->out_log_probs = Data<float>(out_log_probs);
  a->num_nodes = Data<int32_t>(num_nodes);
  return check.ok() ? ffi::Error::Success() : check.error();
}

inline ffi::Error VerifyAttnArgs(const Any& query, const Any& cache, const Any& ancestors, const Any& lengths,
                                 const Any& num_nodes, const Any& layer, const Any& cache_scale, Out& out, float scale,
                                 int32_t path, ddtree_verify_attn_args* a) {
  Checker check("ddtree_verify_attn");
  if (!HasRank(query, 4) || !HasRank(cache, 4)) return check.Require(false, "query and cache must have 4 axes").error();
  const auto q = query.dimensions(), c = cache.dimensions();
  a->layers = c[0], a->batch = q[0], a->rows = c[2], a->nodes = q[1], a->heads = q[2];
  a->scale = scale, a->path = path;
  check.Float("query", query, &a->dtype).Dtype("out", *out, query.element_type())
      .Shape("query", query, {-1, -1, -1, DDTREE_ROW_DIM})
      .Shape("cache", cache, {-1, q[0], -1, DDTREE_ROW_DIM})
      .Shape("out", *out, {q[0], q[1], q[2], DDTREE_LATENT_DIM})
      .Shape("ancestors", ancestors, {q[0], q[1], (q[1] + 31) / 32}).Dtype("ancestors", ancestors, ffi::U32)
      .Shape("lengths", lengths, {q[0]}).Dtype("lengths", lengths, ffi::S32)
      .Shape("num_nodes", num_nodes, {q[0]}).Dtype("num_nodes", num_nodes, ffi::S32)
      .Shape("layer", layer, {}).Dtype("layer", layer, ffi::S32)
      .Cache(cache, query, cache_scale, a->dtype, &a->cache_dtype);
  a->cache_scale = ScaleOf(cache_scale);
  a->query = Data<void>(query), a->cache = Data<void>(cache), a->ancestors = Data<uint32_t>(ancestors);
  a->lengths = Data<int32_t>(lengths), a->num_nodes = Data<int32_t>(num_nodes), a->layer = Data<int32_t>(layer);
  a->out = Data<void>(out);
  return check.ok() ? ffi::Error::Success() : check.error();
}

inline ffi::Error AppendLatentsArgs(const Any& cache, const Any& latents, const Any& lengths, const Any& layer,
                                    const Any& cache_scale, Out& out, ddtree_append_latents_args* a) {
  Checker check("ddtree_append_latents");
  if (!HasRank(cache, 4) || !HasRank(latents, 3)) return check.Require(false, "cache must have 4 axes").error();
  const auto c = cache.dimensions();
  a->layers = c[0], a->batch = c[1], a->rows = c[2], a->width = c[3], a->nodes = latents.dimensions()[1];
  check.Float("latents", latents, &a->dtype).Cache(cache, latents, cache_scale, a->dtype, &a->cache_dtype)
      .Shape("latents", latents, {c[1], -1, c[3]})
      .Shape("lengths", lengths, {c[1]}).Dtype("lengths", lengths, ffi::S32)
      .Shape("layer", layer, {}).Dtype("layer", layer, ffi::S32)
      .Require(out->untyped_data() == cache.untyped_data(), "the cache must be aliased to the result");
  a->cache = Data<void>(out), a->latents = Data<void>(latents), a->cache_scale = ScaleOf(cache_scale);
  a->lengths = Data<int32_t>(lengths), a->layer = Data<int32_t>(layer);
  return check.ok() ? ffi::Error::Success() : check.error();
}

inline ffi::Error TreeAcceptArgs(const Any& tokens, const Any& next_token, const Any& next_sibling,
                                 const Any& num_nodes, const Any& target_tokens, const Any& stop_tokens,
                                 const Any& max_new, Out& nodes, Out& out_tokens, Out& num_emitted, Out& finished,
                                 ddtree_tree_accept_args* a) {
  Checker check("ddtree_tree_accept");
  if (!HasRank(tokens, 2) || !HasRank(*nodes, 2) || !HasRank(stop_tokens, 1)) {
    return check.Require(false, "tokens must be [B, N]").error();
  }
  const int64_t b = tokens.dimensions()[0], n = tokens.dimensions()[1], path = nodes->dimensions()[1];
  a->batch = b, a->max_nodes = n, a->depth = path - 1, a->num_stops = stop_tokens.dimensions()[0];
  check.Dtype("tokens", tokens, ffi::S32)
      .Shape("next_token", next_token, {b, n}).Dtype("next_token", next_token, ffi::S32)
      .Shape("next_sibling", next_sibling, {b, n}).Dtype("next_sibling", next_sibling, ffi::S32)
      .Shape("num_nodes", num_nodes, {b}).Dtype("num_nodes", num_nodes, ffi::S32)
      .Shape("target_tokens", target_tokens, {b, n}).Dtype("target_tokens", target_tokens, ffi::S32)
      .Dtype("stop_tokens", stop_tokens, ffi::S32)
      .Shape("max_new", max_new, {b}).Dtype("max_new", max_new, ffi::S32)
      .Shape("nodes", *nodes, {b, path}).Dtype("nodes", *nodes, ffi::S32)
      .Shape("out_tokens", *out_tokens, {b, path}).Dtype("out_tokens", *out_tokens, ffi::S32)
      .Shape("num_emitted", *num_emitted, {b}).Dtype("num_emitted", *num_emitted, ffi::S32)
      .Shape("finished", *finished, {b}).Dtype("finished", *finished, ffi::PRED);
  a->tokens = Data<int32_t>(tokens), a->next_token = Data<int32_t>(next_token);
  a->next_sibling = Data<int32_t>(next_sibling), a->num_nodes = Data<int32_t>(num_nodes);
  a->target_tokens = Data<int32_t>(target_tokens), a->stop_tokens = Data<int32_t>(stop_tokens);
  a->max_new = Data<int32_t>(max_new), a->nodes = Data<int32_t>(nodes), a->out_tokens = Data<int32_t>(out_tokens);
  a->num_emitted = Data<int32_t>(num_emitted), a->finished = Data<uint8_t>(finished);
  return check.ok() ? ffi::Error::Success() : check.error();
}

inline ffi::Error CommitPathArgs(const Any& cache, const Any& nodes, const Any& num_emitted, const Any& lengths,
                                 Out& out, ddtree_commit_path_args* a) {
  Checker check("ddtree_commit_path");
  if (!HasRank(cache, 4) || !HasRank(nodes, 2)) return check.Require(false, "cache must have 4 axes").error();
  const auto c = cache.dimensions();
  a->layers = c[0], a->batch = c[1], a->rows = c[2], a->width = c[3], a->path = nodes.dimensions()[1];
  if (cache.element_type() == ffi::DataType::F8E4M3FN) {
    a->dtype = DDTREE_E4M3;
  } else {
    check.Float("cache", cache, &a->dtype);
  }
  check.Shape("nodes", nodes, {c[1], -1}).Dtype("nodes", nodes, ffi::S32)
      .Shape("num_emitted", num_emitted, {c[1]}).Dtype("num_emitted", num_emitted, ffi::S32)
      .Shape("lengths", lengths, {c[1]}).Dtype("lengths", lengths, ffi::S32)
      .Require(out->untyped_data() == cache.untyped_data(), "the cache must be aliased to the result");
  a->cache = Data<void>(out), a->nodes = Data<int32_t>(nodes), a->num_emitted = Data<int32_t>(num_emitted);
  a->lengths = Data<int32_t>(lengths);
  return check.ok() ? ffi::Error::Success() : check.error();
}

inline ffi::Error ExpertMlpArgs(const Any& x, const Any& ids, const Any& weights, const Any& gate_up,
                                const Any& gate_up_scale, const Any& down, const Any& down_scale, Out& out,
                                ddtree_expert_mlp_args* a) {
  Checker check("ddtree_expert_mlp");
  if (!HasRank(x, 2) || !HasRank(ids, 2) || !HasRank(down, 3)) return check.Require(false, "x must be [T, D]").error();
  const int64_t t = x.dimensions()[0], d = x.dimensions()[1], k = ids.dimensions()[1];
  const int64_t e = down.dimensions()[0], i = down.dimensions()[2] * 8;
  a->tokens = t, a->top_k = k, a->experts = e, a->hidden = d, a->inner = i;
  check.Float("x", x, &a->dtype).Shape("out", *out, {t, d}).Dtype("out", *out, x.element_type())
      .Shape("expert_ids", ids, {t, k}).Dtype("expert_ids", ids, ffi::S32)
      .Shape("expert_weights", weights, {t, k}).Dtype("expert_weights", weights, ffi::F32)
      .Shape("gate_up", gate_up, {e, 2 * i, d / 8}).Dtype("gate_up", gate_up, ffi::S32)
      .Shape("gate_up_scale", gate_up_scale, {e, 2 * i, d / 32}).Dtype("gate_up_scale", gate_up_scale, ffi::BF16)
      .Shape("down", down, {e, d, i / 8}).Dtype("down", down, ffi::S32)
      .Shape("down_scale", down_scale, {e, d, i / 32}).Dtype("down_scale", down_scale, ffi::BF16);
  a->x = Data<void>(x), a->expert_ids = Data<int32_t>(ids), a->expert_weights = Data<float>(weights);
  a->gate_up = Data<int32_t>(gate_up), a->gate_up_scale = Data<uint16_t>(gate_up_scale);
  a->down = Data<int32_t>(down), a->down_scale = Data<uint16_t>(down_scale), a->out = Data<void>(out);
  return check.ok() ? ffi::Error::Success() : check.error();
}

}  // namespace ddtree

#endif  // DDTREE_FFI_HANDLERS_H_
