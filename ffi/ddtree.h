// The C ABI of ddtree: one argument block and two entry points per kernel.
//
// Every pointer is raw and caller-owned, device memory for *_cuda and host memory for *_cpu. Arrays are dense and row
// major in the shape that the field's comment gives. Nothing here allocates device memory, synchronises or reads device
// data on the host; sizes are host integers, everything that changes from round to round (lengths, budgets, a layer) is
// an array.
//
// A call checks its whole block before it touches an array: a null pointer to an array that has elements, one that is
// not aligned to them, a negative size, sizes whose product overflows, an unknown dtype, a size over the limits below
// or over what a CUDA grid and a kernel's 32-bit indices hold, too small a workspace or a share outside 0 .. tasks - 1
// is an error code. Sizes that claim more memory than an array has are the caller's to avoid: no call can see that.
// What arrays hold is never an error: indices in them that lead nowhere mean what each block's comment says. An array
// without elements may be null.
//
//   *_cuda(args, stream)       enqueues on `stream` (a cudaStream_t) and returns. DDTREE_NO_CUDA where the library was
//                              built without CUDA.
//   *_cpu(args, task, tasks)   does share `task` of `tasks` equal shares; call it for every task in 0..tasks-1, in any
//                              order and on any threads. (args, 0, 1) does all of it. At most INT32_MAX tasks.
//   *_workspace(...)           bytes of scratch that the CUDA entry point needs, aligned to 16; its contents need no
//                              initialisation. 0 for sizes that the entry point refuses or has nothing to do for, and
//                              where the library has no CUDA.
//
// Blocks begin with the version of the ABI that the caller was compiled against, so that a library of another version
// refuses them instead of misreading them. C++ fills it in; in C:
//
//   ddtree_tree_build_args args = {.abi_version = DDTREE_ABI_VERSION, .batch = 1, ...};
//
// Notation: B requests, L draft positions, V vocabulary, K candidates per position, N nodes (budget + 1, root at 0),
// W = ceil(N / 32) mask words, S cache rows per request, H heads. A latent row is 512 latent then 64 rope elements.
//
// A cache holds elements of the call's `dtype`, or of DDTREE_E4M3 in half the bytes of bf16: each stands for itself
// times `cache_scale` of its layer.
#ifndef DDTREE_FFI_DDTREE_H_
#define DDTREE_FFI_DDTREE_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define DDTREE_ARGS_VERSION uint32_t abi_version = DDTREE_ABI_VERSION
extern "C" {
#else
#define DDTREE_ARGS_VERSION uint32_t abi_version
#endif

// Everything declared here is exported, and nothing else is.
#pragma GCC visibility push(default)

enum {
  DDTREE_ABI_VERSION = 2,               // grows whenever a block, a limit's meaning or an entry point changes
  DDTREE_LATENT_DIM = 512,              // compressed K/V elements per row: what attention returns
  DDTREE_ROPE_DIM = 64,                 // shared rotary key elements per row
  DDTREE_ROW_DIM = 576,                 // one cache row and one query
  DDTREE_MAX_NODES = 257,               // budget 256 and the root
  DDTREE_MAX_WORDS = 9,                 // ceil(257 / 32)
  DDTREE_MAX_DEPTH = 31,                // L
  DDTREE_MAX_CANDIDATES = 256,          // K
};

typedef enum {
  DDTREE_F32 = 0,
  DDTREE_BF16 = 1,
  DDTREE_E4M3 = 2,  // 8 bits, "fn": largest 448, no infinity, NaN 0x7f and 0xff; of caches alone
} ddtree_dtype;

// Which of verify_attn's CUDA kernels runs. float32 has one kernel, whatever path is allowed.
typedef enum {
  DDTREE_PATH_AUTO = 0,
  DDTREE_PATH_PORTABLE = 1,  // sm_80 and up
  // sm_90a's code on sm_90 alone: refused elsewhere, and taken by AUTO where it can be.
  DDTREE_PATH_HOPPER = 2,
} ddtree_path;

typedef enum {
  DDTREE_OK = 0,
  DDTREE_INVALID_ARGUMENT = 1,  // a size, dtype or null pointer that the kernel cannot serve
  DDTREE_LAUNCH_FAILED = 2,     // the CUDA runtime refused the launch
  DDTREE_WRONG_VERSION = 3,     // the block is of another version of this header
  DDTREE_NO_CUDA = 4,           // the library was built without CUDA
  DDTREE_OUT_OF_MEMORY = 5,     // expert_mlp on the CPU, whose threads keep scratch of their own
} ddtree_status;

// The version of the ABI that the library speaks: DDTREE_ABI_VERSION of the header that it was built from.
uint32_t ddtree_version(void);

// The most nodes a tree may have, the root included.
int64_t ddtree_max_nodes(void);

// Static text for a ddtree_status.
const char* ddtree_error_string(int status);

// The k largest logits of each row, logit descending then id ascending, normalised over the whole row.
// NaN logits count as -inf; a row whose normaliser is not finite gives -inf throughout.
typedef struct ddtree_draft_topk_args {
  DDTREE_ARGS_VERSION;
  const void* logits;   // [rows, V] of `dtype`
  float* log_probs;     // [rows, K]
  int32_t* token_ids;   // [rows, K]
  void* workspace;      // CUDA only
  size_t workspace_bytes;
  int64_t rows, vocab, k;  // 1 <= K <= min(V, DDTREE_MAX_CANDIDATES)
  int32_t dtype;
} ddtree_draft_topk_args;
size_t ddtree_draft_topk_workspace(int64_t rows, int64_t vocab, int64_t k);
int ddtree_draft_topk_cpu(const ddtree_draft_topk_args* args, int64_t task, int64_t tasks);
int ddtree_draft_topk_cuda(const ddtree_draft_topk_args* args, void* stream);

// The best-first draft tree: nodes in the order in which the heap of the reference pops them. Keys are float64 sums of
// float32 log-probs added from the root down; ties go to the lexicographically smaller rank path, a prefix first.
// keep_spine reserves room for the all-rank-0 path in every request whose budget is at least L.
typedef struct ddtree_tree_build_args {
  DDTREE_ARGS_VERSION;
  const float* log_probs;      // [B, L, K], non-increasing in K, <= 0, no NaN
  const int32_t* token_ids;    // [B, L, K]
  const int32_t* root_tokens;  // [B]
  const int32_t* budgets;      // [B], clamped to 0..budget
  int32_t* tokens;             // [B, N]
  int32_t* parents;            // [B, N], -1 for the root and for rows past num_nodes
  int32_t* depths;             // [B, N], 0 past num_nodes
  int32_t* next_token;         // [B, N] first child, -1 none
  int32_t* next_sibling;       // [B, N] -1 none
  uint32_t* ancestors;         // [B, N, W] bit j of row i: node j is i or an ancestor of i; a row past num_nodes: bit i
  float* out_log_probs;        // [B, N] cumulative; 0 for the root, -inf past num_nodes
  int32_t* num_nodes;          // [B], root included
  void* workspace;             // CUDA only
  size_t workspace_bytes;
  int64_t batch, depth, k, budget;  // N = budget + 1
  int32_t keep_spine;
} ddtree_tree_build_args;
size_t ddtree_tree_build_workspace(int64_t batch, int64_t depth, int64_t k, int64_t budget);
int ddtree_tree_build_cpu(const ddtree_tree_build_args* args, int64_t task, int64_t tasks);
int ddtree_tree_build_cuda(const ddtree_tree_build_args* args, void* stream);

// Absorbed MLA attention of the tree's rows over the whole prefix and over their ancestors in the tree.
// Row i of request b sees cache rows [0, lengths[b]) and row lengths[b] + j for every ancestor bit j < num_nodes[b]. A
// row past num_nodes[b] sees only its own row. NaN or inf stays inside its own request. Scores and sums are float32; of
// an e4m3 cache each number is converted exactly, and its layer's scale multiplies the scores and the result.
typedef struct ddtree_verify_attn_args {
  DDTREE_ARGS_VERSION;
  const void* query;          // [B, N, H, 576] of `dtype`; on CUDA this, `cache` and `out` are aligned to 16 bytes
  const void* cache;          // [layers, B, S, 576] of `cache_dtype`, the tree's rows at lengths[b] ..
  const uint32_t* ancestors;  // [B, N, W]
  const int32_t* lengths;     // [B], clamped to 0 .. S - N
  const int32_t* num_nodes;   // [B]
  const int32_t* layer;       // [], clamped to 0 .. layers - 1
  void* out;                  // [B, N, H, 512] of `dtype`
  void* workspace;            // CUDA only
  size_t workspace_bytes;
  int64_t layers, batch, rows, nodes, heads;  // rows = S
  float scale;
  int32_t dtype;
  int32_t path;              // a ddtree_path; CUDA only
  int32_t cache_dtype;       // `dtype` or DDTREE_E4M3
  const float* cache_scale;  // [layers], or null for 1; null unless the cache is e4m3
} ddtree_verify_attn_args;
size_t ddtree_verify_attn_workspace(int64_t batch, int64_t rows, int64_t nodes, int64_t heads, int32_t dtype);
int ddtree_verify_attn_cpu(const ddtree_verify_attn_args* args, int64_t task, int64_t tasks);
int ddtree_verify_attn_cuda(const ddtree_verify_attn_args* args, void* stream);

// cache[layer, b, lengths[b] + i, :] = latents[b, i, :]; rows that fall outside 0 .. S - 1 are dropped. An e4m3 cache
// gets latent / cache_scale[layer], divided in float32, rounded to nearest even and saturated at +-448. NaN and inf
// become NaN, so that what is not finite stays visible. The scale must be finite, normal and above 0: by 0 or NaN
// elements become NaN or +-448, and a subnormal one counts as 0 on some devices.
typedef struct ddtree_append_latents_args {
  DDTREE_ARGS_VERSION;
  void* cache;             // [layers, B, S, width] of `cache_dtype`, in place
  const void* latents;     // [B, N, width] of `dtype`
  const int32_t* lengths;  // [B]
  const int32_t* layer;    // [], a value outside 0 .. layers - 1 writes nothing
  int64_t layers, batch, rows, nodes, width;
  int32_t dtype;
  int32_t cache_dtype;       // `dtype` or DDTREE_E4M3
  const float* cache_scale;  // [layers], or null for 1; null unless the cache is e4m3
} ddtree_append_latents_args;
int ddtree_append_latents_cpu(const ddtree_append_latents_args* args, int64_t task, int64_t tasks);
int ddtree_append_latents_cuda(const ddtree_append_latents_args* args, void* stream);

// Walks each tree from the root along the target's tokens. target_tokens[b, i] is the target's token after node i; a
// negative one means that the target has none there (its logits were not finite): the walk emits nothing more and
// finishes. Emission ends right after the first stop token and never exceeds max_new. Links must ascend and stay below
// num_nodes: one that does not ends the search among the siblings.
typedef struct ddtree_tree_accept_args {
  DDTREE_ARGS_VERSION;
  const int32_t* tokens;         // [B, N]
  const int32_t* next_token;     // [B, N]
  const int32_t* next_sibling;   // [B, N]
  const int32_t* num_nodes;      // [B]
  const int32_t* target_tokens;  // [B, N]
  const int32_t* stop_tokens;    // [M]
  const int32_t* max_new;        // [B]
  int32_t* nodes;                // [B, L + 1] root first; -1 at and past num_emitted
  int32_t* out_tokens;           // [B, L + 1] emitted; -1 past num_emitted
  int32_t* num_emitted;          // [B]
  uint8_t* finished;             // [B] 1 when a stop token, max_new or a negative token ended it
  int64_t batch, max_nodes, depth, num_stops;  // N, L, M
} ddtree_tree_accept_args;
int ddtree_tree_accept_cpu(const ddtree_tree_accept_args* args, int64_t task, int64_t tasks);
int ddtree_tree_accept_cuda(const ddtree_tree_accept_args* args, void* stream);

// cache[:, b, lengths[b] + j, :] = cache[:, b, lengths[b] + nodes[b, j], :] for j < num_emitted[b], in every layer.
// nodes[b, :num_emitted[b]] is strictly increasing, so nodes[b, j] >= j and ascending j may move in place. A node below
// 0 or a row outside the cache moves nothing.
typedef struct ddtree_commit_path_args {
  DDTREE_ARGS_VERSION;
  void* cache;                 // [layers, B, S, width], in place
  const int32_t* nodes;        // [B, path]
  const int32_t* num_emitted;  // [B]
  const int32_t* lengths;      // [B]
  int64_t layers, batch, rows, width, path;  // path = L + 1
  int32_t dtype;               // any: rows move as they are
} ddtree_commit_path_args;
int ddtree_commit_path_cpu(const ddtree_commit_path_args* args, int64_t task, int64_t tasks);
int ddtree_commit_path_cuda(const ddtree_commit_path_args* args, void* stream);

// out[t] = sum over j of expert_weights[t, j] * E_ids[t, j](x[t]), E(x) = down(silu(gate x) * up x), of routed experts
// whose weights are packed int4: word i of a row holds inputs 8i .. 8i + 7, the first in the lowest nibble, as q + 8,
// and q stands for q * scale of its group of 32 inputs. Only experts that some token chose are read.
typedef struct ddtree_expert_mlp_args {
  DDTREE_ARGS_VERSION;
  const void* x;                  // [T, D] of `dtype`
  const int32_t* expert_ids;      // [T, k], one outside 0 .. E - 1 contributes nothing
  const float* expert_weights;    // [T, k]
  const int32_t* gate_up;         // [E, 2 I, D / 8], gate rows before up rows
  const uint16_t* gate_up_scale;  // [E, 2 I, D / 32] bf16
  const int32_t* down;            // [E, D, I / 8]
  const uint16_t* down_scale;     // [E, D, I / 32] bf16
  float* partial;                 // [T, k, D] scratch, CPU only
  void* out;                      // [T, D] of `dtype`
  void* workspace;                // CUDA only
  size_t workspace_bytes;
  int64_t tokens, top_k, experts, hidden, inner;  // T, k, E, D, I; D and I multiples of 32
  int32_t dtype;
} ddtree_expert_mlp_args;
size_t ddtree_expert_mlp_workspace(int64_t tokens, int64_t top_k, int64_t experts, int64_t hidden, int64_t inner,
                                   int32_t dtype);
int ddtree_expert_mlp_cpu(const ddtree_expert_mlp_args* args, int64_t task, int64_t tasks);  // fills `partial`
int ddtree_expert_mlp_sum_cpu(const ddtree_expert_mlp_args* args);  // then, once: `partial` to `out`
// At most 2048 experts; x, gate_up, down, their scales and out at multiples of 16 bytes.
int ddtree_expert_mlp_cuda(const ddtree_expert_mlp_args* args, void* stream);

#undef DDTREE_ARGS_VERSION
#pragma GCC visibility pop

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // DDTREE_FFI_DDTREE_H_
