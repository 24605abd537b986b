// Runs every CUDA kernel on small random inputs, for compute-sanitizer and for a check that results depend neither on
// what outputs and workspaces held before nor on the run: all is done twice over memory filled with different bytes.
//
//   kernel_driver [CASE]                 all cases, or one, twice over filled memory
//   kernel_driver uninitialised [CASE]   once, over memory as it was allocated
//   kernel_driver count                  prints how many cases there are
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "ffi/ddtree.h"

namespace {

std::mt19937 generator;
bool failed = false;

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}

void check(int status, const char* what) {
  if (status == DDTREE_OK) return;
  std::printf("%s: %s\n", what, ddtree_error_string(status));
  failed = true;
}

template <typename T>
T* upload(const std::vector<T>& host) {
  T* device = nullptr;
  check(cudaMalloc(&device, host.size() * sizeof(T) + 16), "cudaMalloc");
  check(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  return device;
}

// Memory that a kernel writes. `filled` says whether it starts as a byte pattern or as cudaMalloc left it, which is
// what initcheck needs.
struct Results {
  int pattern;  // -1 none
  std::vector<std::pair<void*, size_t>> kept;

  template <typename T>
  T* make(size_t count, bool keep = true) {
    T* device = nullptr;
    check(cudaMalloc(&device, count * sizeof(T) + 16), "cudaMalloc");
    if (pattern >= 0) check(cudaMemset(device, pattern, count * sizeof(T)), "cudaMemset");
    if (keep) kept.push_back({device, count * sizeof(T)});
    return device;
  }
  std::vector<std::vector<char>> read() const {
    check(cudaDeviceSynchronize(), "a kernel");
    std::vector<std::vector<char>> all;
    for (const auto& [device, bytes] : kept) {
      all.emplace_back(bytes);
      check(cudaMemcpy(all.back().data(), device, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
    }
    return all;
  }
};

std::vector<float> normal(size_t count, float scale = 1) {
  std::normal_distribution<float> distribution(0, scale);
  std::vector<float> values(count);
  for (float& x : values) x = distribution(generator);
  return values;
}

std::vector<uint16_t> bf16(const std::vector<float>& wide) {
  std::vector<uint16_t> values(wide.size());
  for (size_t i = 0; i < wide.size(); ++i) {
    uint32_t bits;
    std::memcpy(&bits, &wide[i], 4);
    values[i] = static_cast<uint16_t>(bits >> 16);
  }
  return values;
}

const void* numbers(const std::vector<float>& wide, int32_t dtype) {
  return dtype == DDTREE_F32 ? static_cast<const void*>(upload(wide)) : upload(bf16(wide));
}

struct Shape {
  int64_t batch, depth, vocab, k, budget, heads, rows, layers;
  int32_t dtype, path, cache_dtype;
};

// A cache's rows: of e4m3 any finite bytes.
void* cache_rows(size_t count, int32_t dtype) {
  if (dtype != DDTREE_E4M3) return const_cast<void*>(numbers(normal(count), dtype));
  std::vector<uint8_t> bytes(count);
  for (uint8_t& x : bytes) x = static_cast<uint8_t>(generator() % 0x48 | generator() % 2 << 7);
  return upload(bytes);
}

// A round: candidates, tree, attention, acceptance, both cache updates.
std::vector<std::vector<char>> run(const Shape& s, int pattern) {
  Results r{pattern, {}};
  const int64_t nodes = s.budget + 1, words = (nodes + 31) / 32;
  std::vector<float> logits = normal(s.batch * s.depth * s.vocab, 3);
  for (int i = 0; i < 3; ++i) logits[generator() % logits.size()] = NAN;
  ddtree_draft_topk_args top{};
  top.rows = s.batch * s.depth, top.vocab = s.vocab, top.k = s.k, top.dtype = s.dtype;
  top.logits = numbers(logits, s.dtype);
  top.log_probs = r.make<float>(top.rows * s.k), top.token_ids = r.make<int32_t>(top.rows * s.k);
  top.workspace_bytes = ddtree_draft_topk_workspace(top.rows, s.vocab, s.k);
  top.workspace = r.make<char>(top.workspace_bytes, false);
  check(ddtree_draft_topk_cuda(&top, nullptr), "draft_topk");

  std::vector<int32_t> budgets(s.batch, static_cast<int32_t>(s.budget));
  if (s.batch > 1) budgets[1] /= 2;
  ddtree_tree_build_args tree{};
  tree.batch = s.batch, tree.depth = s.depth, tree.k = s.k, tree.budget = s.budget, tree.keep_spine = 1;
  tree.log_probs = top.log_probs, tree.token_ids = top.token_ids;
  tree.root_tokens = upload(std::vector<int32_t>(s.batch, 5)), tree.budgets = upload(budgets);
  const size_t all = s.batch * nodes;
  tree.tokens = r.make<int32_t>(all), tree.parents = r.make<int32_t>(all), tree.depths = r.make<int32_t>(all);
  tree.next_token = r.make<int32_t>(all), tree.next_sibling = r.make<int32_t>(all);
  tree.ancestors = r.make<uint32_t>(all * words), tree.out_log_probs = r.make<float>(all);
  tree.num_nodes = r.make<int32_t>(s.batch);
  check(ddtree_tree_build_cuda(&tree, nullptr), "tree_build");

  std::vector<int32_t> lengths(s.batch);
  for (int64_t b = 0; b < s.batch; ++b) lengths[b] = static_cast<int32_t>(b * (s.rows - nodes) / s.batch);
  const int32_t* device_lengths = upload(lengths);
  const int32_t* layer = upload(std::vector<int32_t>{static_cast<int32_t>(s.layers - 1)});
  const size_t cache = s.layers * s.batch * s.rows * DDTREE_ROW_DIM;
  void* device_cache = cache_rows(cache, s.cache_dtype);
  r.kept.push_back({device_cache, cache * (s.cache_dtype == DDTREE_F32 ? 4 : s.cache_dtype == DDTREE_BF16 ? 2 : 1)});
  const float* cache_scale = nullptr;
  if (s.cache_dtype == DDTREE_E4M3) cache_scale = upload(std::vector<float>(s.layers, 0.5f));
  ddtree_append_latents_args append{};
  append.cache = device_cache, append.latents = numbers(normal(all * DDTREE_ROW_DIM), s.dtype);
  append.lengths = device_lengths, append.layer = layer, append.dtype = s.dtype;
  append.layers = s.layers, append.batch = s.batch, append.rows = s.rows, append.nodes = nodes;
  append.width = DDTREE_ROW_DIM, append.cache_dtype = s.cache_dtype, append.cache_scale = cache_scale;
  check(ddtree_append_latents_cuda(&append, nullptr), "append_latents");

  ddtree_verify_attn_args attn{};
  attn.query = numbers(normal(all * s.heads * DDTREE_ROW_DIM), s.dtype), attn.cache = device_cache;
  attn.ancestors = tree.ancestors, attn.lengths = device_lengths, attn.num_nodes = tree.num_nodes, attn.layer = layer;
  const size_t out = all * s.heads * DDTREE_LATENT_DIM;
  attn.out = s.dtype == DDTREE_F32 ? static_cast<void*>(r.make<float>(out)) : r.make<uint16_t>(out);
  attn.workspace_bytes = ddtree_verify_attn_workspace(s.batch, s.rows, nodes, s.heads, s.dtype);
  attn.workspace = r.make<char>(attn.workspace_bytes, false);
  attn.layers = s.layers, attn.batch = s.batch, attn.rows = s.rows, attn.nodes = nodes, attn.heads = s.heads;
  attn.scale = 0.07f, attn.dtype = s.dtype, attn.path = s.path;
  attn.cache_dtype = s.cache_dtype, attn.cache_scale = cache_scale;
  check(ddtree_verify_attn_cuda(&attn, nullptr), "verify_attn");

  // The target agrees with every first child.
  check(cudaDeviceSynchronize(), "a kernel");
  std::vector<int32_t> tokens(all), child(all), target(all, 0);
  check(cudaMemcpy(tokens.data(), tree.tokens, all * 4, cudaMemcpyDeviceToHost), "cudaMemcpy");
  check(cudaMemcpy(child.data(), tree.next_token, all * 4, cudaMemcpyDeviceToHost), "cudaMemcpy");
  for (size_t i = 0; i < all; ++i) {
    if (child[i] >= 0) target[i] = tokens[i / nodes * nodes + child[i]];
  }
  ddtree_tree_accept_args accept{};
  accept.tokens = tree.tokens, accept.next_token = tree.next_token, accept.next_sibling = tree.next_sibling;
  accept.num_nodes = tree.num_nodes, accept.target_tokens = upload(target);
  accept.stop_tokens = upload(std::vector<int32_t>{-7}), accept.num_stops = 1;
  accept.max_new = upload(std::vector<int32_t>(s.batch, 100));
  const size_t path = s.batch * (s.depth + 1);
  accept.nodes = r.make<int32_t>(path), accept.out_tokens = r.make<int32_t>(path);
  accept.num_emitted = r.make<int32_t>(s.batch), accept.finished = r.make<uint8_t>(s.batch);
  accept.batch = s.batch, accept.max_nodes = nodes, accept.depth = s.depth;
  check(ddtree_tree_accept_cuda(&accept, nullptr), "tree_accept");
  ddtree_commit_path_args commit{};
  commit.cache = device_cache, commit.nodes = accept.nodes, commit.num_emitted = accept.num_emitted;
  commit.lengths = device_lengths, commit.layers = s.layers, commit.batch = s.batch, commit.rows = s.rows;
  commit.width = DDTREE_ROW_DIM, commit.path = s.depth + 1, commit.dtype = s.cache_dtype;
  check(ddtree_commit_path_cuda(&commit, nullptr), "commit_path");
  return r.read();
}

struct ExpertShape {
  int64_t tokens, top_k, experts, hidden, inner;
  int32_t dtype;
};

// The routed experts alone: routing with holes, so that some choices, experts and parts of a chunk are empty.
std::vector<std::vector<char>> run(const ExpertShape& s, int pattern) {
  Results r{pattern, {}};
  const int64_t pairs = s.tokens * s.top_k;
  std::vector<int32_t> ids(pairs);
  for (int32_t& id : ids) id = static_cast<int32_t>(generator() % (s.experts + 2)) - 1;
  const auto words = [](int64_t count) {
    std::vector<int32_t> values(count);
    for (int32_t& x : values) x = static_cast<int32_t>(generator());
    return upload(values);
  };
  ddtree_expert_mlp_args mlp{};
  mlp.tokens = s.tokens, mlp.top_k = s.top_k, mlp.experts = s.experts, mlp.hidden = s.hidden, mlp.inner = s.inner;
  mlp.dtype = s.dtype;
  mlp.x = numbers(normal(s.tokens * s.hidden), s.dtype);
  mlp.expert_ids = upload(ids), mlp.expert_weights = upload(normal(pairs));
  const int64_t weights = s.experts * s.inner * s.hidden;
  mlp.gate_up = words(2 * weights / 8), mlp.gate_up_scale = upload(bf16(normal(2 * weights / 32, 0.02f)));
  mlp.down = words(weights / 8), mlp.down_scale = upload(bf16(normal(weights / 32, 0.02f)));
  const size_t out = s.tokens * s.hidden;
  mlp.out = s.dtype == DDTREE_F32 ? static_cast<void*>(r.make<float>(out)) : r.make<uint16_t>(out);
  mlp.workspace_bytes = ddtree_expert_mlp_workspace(s.tokens, s.top_k, s.experts, s.hidden, s.inner, s.dtype);
  mlp.workspace = r.make<char>(mlp.workspace_bytes, false);
  check(ddtree_expert_mlp_cuda(&mlp, nullptr), "expert_mlp");
  return r.read();
}

// Runs a shape over memory filled with two patterns, or once over memory as it comes.
template <typename S>
void compare(const S& shape, bool plain) {
  const unsigned seed = std::random_device{}();
  generator.seed(seed);
  const auto first = run(shape, plain ? -1 : 0x00);
  if (plain) return;
  generator.seed(seed);
  const auto second = run(shape, 0xff);
  for (size_t i = 0; i < first.size(); ++i) {
    if (first[i] != second[i]) std::printf("result %zu differs, seed %u\n", i, seed), failed = true;
  }
}

}  // namespace

int main(int argc, char** argv) {
  const bool plain = argc > 1 && std::strcmp(argv[1], "uninitialised") == 0;
  const char* last = argc > 1 + plain ? argv[1 + plain] : nullptr;
  cudaDeviceProp card;
  check(cudaGetDeviceProperties(&card, 0), "cudaGetDeviceProperties");
  const bool hopper = card.major == 9 && card.minor == 0;
  const Shape shapes[] = {
      {2, 7, 5000, 16, 16, 8, 200, 2, DDTREE_BF16, DDTREE_PATH_PORTABLE, DDTREE_BF16},
      {3, 5, 701, 64, 64, 5, 150, 2, DDTREE_BF16, DDTREE_PATH_PORTABLE, DDTREE_BF16},
      {1, 7, 9000, 16, 16, 64, 900, 1, DDTREE_BF16, DDTREE_PATH_PORTABLE, DDTREE_BF16},
      {2, 7, 5000, 16, 16, 8, 200, 2, DDTREE_BF16, DDTREE_PATH_PORTABLE, DDTREE_E4M3},
      {1, 7, 9000, 16, 16, 64, 900, 1, DDTREE_BF16, DDTREE_PATH_PORTABLE, DDTREE_E4M3},
      {2, 7, 3000, 256, 256, 2, 300, 1, DDTREE_F32, DDTREE_PATH_AUTO, DDTREE_F32},
      {2, 5, 701, 16, 16, 2, 100, 1, DDTREE_F32, DDTREE_PATH_AUTO, DDTREE_E4M3},
      {2, 7, 5000, 16, 16, 8, 200, 2, DDTREE_BF16, DDTREE_PATH_HOPPER, DDTREE_BF16},
      {3, 5, 701, 64, 64, 5, 150, 2, DDTREE_BF16, DDTREE_PATH_HOPPER, DDTREE_BF16},
      {1, 7, 9000, 16, 16, 64, 900, 1, DDTREE_BF16, DDTREE_PATH_HOPPER, DDTREE_BF16},
      {2, 7, 5000, 16, 16, 8, 200, 2, DDTREE_BF16, DDTREE_PATH_HOPPER, DDTREE_E4M3},
      {3, 5, 701, 64, 64, 5, 150, 2, DDTREE_BF16, DDTREE_PATH_HOPPER, DDTREE_E4M3},
      {4, 7, 701, 16, 16, 64, 900, 1, DDTREE_BF16, DDTREE_PATH_HOPPER, DDTREE_E4M3},
      {2, 3, 301, 4, 1, 8, 400, 1, DDTREE_BF16, DDTREE_PATH_HOPPER, DDTREE_E4M3},
      // The same with many segments a block.
      {64, 3, 301, 16, 16, 64, 100, 1, DDTREE_BF16, DDTREE_PATH_HOPPER, DDTREE_E4M3},
      {500, 3, 301, 4, 1, 8, 140, 1, DDTREE_BF16, DDTREE_PATH_HOPPER, DDTREE_E4M3},
      {450, 3, 301, 4, 3, 8, 140, 1, DDTREE_BF16, DDTREE_PATH_HOPPER, DDTREE_E4M3},
      // Too many tiles for clusters; then few rows, in clusters and in too many tiles for them.
      {3, 5, 701, 16, 64, 48, 150, 1, DDTREE_BF16, DDTREE_PATH_HOPPER, DDTREE_BF16},
      {4, 7, 701, 16, 16, 64, 900, 1, DDTREE_BF16, DDTREE_PATH_HOPPER, DDTREE_BF16},
      {2, 3, 301, 4, 1, 8, 400, 1, DDTREE_BF16, DDTREE_PATH_HOPPER, DDTREE_BF16},
      {3, 3, 301, 4, 3, 8, 300, 1, DDTREE_BF16, DDTREE_PATH_HOPPER, DDTREE_BF16},
      {140, 3, 301, 4, 1, 8, 70, 1, DDTREE_BF16, DDTREE_PATH_HOPPER, DDTREE_BF16},
      {140, 3, 301, 4, 2, 8, 140, 1, DDTREE_BF16, DDTREE_PATH_HOPPER, DDTREE_BF16},
  };
  const ExpertShape expert_shapes[] = {
      {3, 2, 40, 512, 128, DDTREE_BF16},
      {17, 3, 5, 288, 96, DDTREE_BF16},
      {65, 4, 9, 1024, 64, DDTREE_BF16},
      {9, 2, 4, 96, 32, DDTREE_F32},
  };
  std::vector<std::function<void()>> cases;
  for (const Shape& shape : shapes) {
    if (shape.path != DDTREE_PATH_HOPPER || hopper) cases.push_back([&shape, plain] { compare(shape, plain); });
  }
  for (const ExpertShape& shape : expert_shapes) cases.push_back([&shape, plain] { compare(shape, plain); });
  if (last && std::strcmp(last, "count") == 0) return std::printf("%zu\n", cases.size()), 0;
  for (size_t i = 0; i < cases.size(); ++i) {
    if (!last || i == std::strtoul(last, nullptr, 10)) cases[i]();
  }
  std::printf(failed ? "FAILED\n" : "all kernels ran\n");
  return failed;
}
