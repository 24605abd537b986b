// Bad arguments and random data into the CPU entry points. A refused call must say so and touch nothing; a call whose
// sizes are sound must succeed whatever its arrays hold. Arrays are exact allocations, so that AddressSanitizer sees
// every step outside.
//
// Blocks with two or three huge sizes at once are told apart in 128-bit arithmetic: those with an array whose bytes
// int64 does not hold must be refused; those whose arrays are no longer than what is there must be served or refused;
// the others claim memory that they do not have, which no library can see, and are not called.
//
//   fuzz_test [seed [seconds]]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "ffi/ddtree.h"

namespace {

std::mt19937_64 generator;

int64_t Pick(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(generator); }

void Expect(bool ok, const std::string& what) {
  if (ok) return;
  std::printf("FAILED: %s\n", what.c_str());
  std::exit(1);
}

// The sizes of an array as the header gives them, in integers that hold what is one more than any int64.
using Int = __int128;
using Shape = std::vector<Int>;
#define SHAPE(...) [](const Args& a) { return static_cast<void>(a), Shape{__VA_ARGS__}; }

// Bytes of an array; kTooMany stands for all that int64 does not hold.
constexpr Int kTooMany = Int{1} << 63;
Int Claimed(const Shape& shape, int64_t element) {
  for (const Int size : shape) {
    if (size == 0) return 0;
  }
  Int bytes = element;
  for (const Int size : shape) bytes = std::min(bytes * size, kTooMany);  // both factors are below 2^64
  return bytes;
}

// What a pointer field of a block leads to.
template <typename Args>
struct Pointer {
  size_t offset;  // of the field in the block
  std::vector<char> bytes;
  int64_t element;
  Shape (*shape)(const Args&);
};

template <typename Args, typename = void>
struct HasDtype : std::false_type {};
template <typename Args>
struct HasDtype<Args, std::void_t<decltype(Args::dtype)>> : std::true_type {};
template <typename Args, typename = void>
struct HasScale : std::false_type {};
template <typename Args>
struct HasScale<Args, std::void_t<decltype(Args::cache_scale)>> : std::true_type {};

// Blocks with several huge sizes, by what became of them.
struct {
  int64_t overflowing, served, refused, lying;
} huge_blocks;

// A block, its arrays, and where its sizes are.
template <typename Args>
struct Call {
  const char* name;
  int (*kernel)(const Args*, int64_t, int64_t);
  Args args{};
  std::vector<std::unique_ptr<Pointer<Args>>> pointers;
  std::vector<int64_t Args::*> sizes;
  int64_t unit = 1;  // of what huge sizes are multiples
  std::vector<int32_t> unknown = {-1, DDTREE_E4M3, 3, INT32_MAX, INT32_MIN};  // tags that `dtype` must not be

  // Random bits, mostly of numbers and indices that mean something.
  template <typename T>
  void Array(T* Args::*field, int64_t element, Shape (*shape)(const Args&), int64_t limit) {
    auto pointer = std::make_unique<Pointer<Args>>();
    pointer->offset = reinterpret_cast<char*>(&(args.*field)) - reinterpret_cast<char*>(&args);
    pointer->element = element;
    pointer->shape = shape;
    const int64_t bytes = static_cast<int64_t>(Claimed(shape(args), element));
    pointer->bytes.resize(bytes);
    const int64_t kind = Pick(0, 2);
    for (int64_t i = 0; i < bytes / 4 * 4; i += 4) {
      int32_t word = static_cast<int32_t>(generator());
      if (kind == 0) word = static_cast<int32_t>(Pick(-2, limit + 1));
      if (kind == 1 && Pick(0, 3) > 0) {
        const float number = -static_cast<float>(Pick(0, 1000)) / 64;
        std::memcpy(&word, &number, 4);
      }
      std::memcpy(&pointer->bytes[i], &word, 4);
    }
    void* data = pointer->bytes.empty() ? nullptr : pointer->bytes.data();
    std::memcpy(reinterpret_cast<char*>(&args) + pointer->offset, &data, sizeof data);
    pointers.push_back(std::move(pointer));
  }

  std::vector<std::vector<char>> Contents() const {
    std::vector<std::vector<char>> all;
    for (const auto& pointer : pointers) all.push_back(pointer->bytes);
    return all;
  }

  // Makes the call with `bad` in place of the block.
  void Refused(const Args* bad, int64_t task, int64_t tasks, const std::string& why, int want) {
    const auto before = Contents();
    const int status = kernel(bad, task, tasks);
    Expect(status == want, std::string(name) + " returned " + std::to_string(status) + " for " + why);
    Expect(Contents() == before, std::string(name) + " wrote before it refused " + why);
  }

  void AllRefused() {
    constexpr int64_t kMost = INT64_MAX, kLeast = INT64_MIN, kHuge = int64_t{1} << 62;
    Refused(nullptr, 0, 1, "no block", DDTREE_INVALID_ARGUMENT);
    const std::pair<int64_t, int64_t> shares[] = {{0, 0}, {-1, 1}, {1, 1}, {0, -1}, {kLeast, kMost}, {1, kMost}};
    for (const auto& [task, tasks] : shares) {
      Refused(&args, task, tasks, "a share that there is not", DDTREE_INVALID_ARGUMENT);
    }
    for (const uint32_t version : {0u, DDTREE_ABI_VERSION + 1u, ~0u}) {
      Args bad = args;
      bad.abi_version = version;
      Refused(&bad, 0, 1, "another version", DDTREE_WRONG_VERSION);
    }
    for (const auto& pointer : pointers) {
      if (pointer->bytes.empty()) continue;
      Args bad = args;
      char* field = reinterpret_cast<char*>(&bad) + pointer->offset;
      std::memset(field, 0, sizeof(void*));
      Refused(&bad, 0, 1, "a null pointer", DDTREE_INVALID_ARGUMENT);
      if (pointer->element == 1) continue;
      const void* odd = pointer->bytes.data() + 1;
      std::memcpy(field, &odd, sizeof odd);
      Refused(&bad, 0, 1, "a pointer between elements", DDTREE_INVALID_ARGUMENT);
    }
    for (const auto size : sizes) {
      for (const int64_t value : {int64_t{-1}, kLeast, -Pick(1, kMost), kHuge, kMost, Pick(kHuge, kMost)}) {
        Args bad = args;
        bad.*size = value;
        Refused(&bad, 0, 1, "a size of " + std::to_string(value), DDTREE_INVALID_ARGUMENT);
      }
    }
    // Anything at all, under the right version.
    for (int i = 0; i < 8; ++i) {
      Args bad;
      for (size_t at = 0; at < sizeof bad; ++at) reinterpret_cast<char*>(&bad)[at] = static_cast<char>(generator());
      bad.abi_version = DDTREE_ABI_VERSION;
      Refused(&bad, 0, 1, "random bits", DDTREE_INVALID_ARGUMENT);
    }
    if constexpr (HasDtype<Args>::value) {
      for (const int32_t tag : unknown) {
        Args bad = args;
        bad.dtype = tag;
        Refused(&bad, 0, 1, "an unknown dtype", DDTREE_INVALID_ARGUMENT);
      }
    }
  }

  // A size that is far too large, or that brings a product with `factor` to where int64 ends.
  int64_t Huge(int64_t factor) {
    if (Pick(0, 1)) return std::max<int64_t>(INT64_MAX / factor / Pick(1, 40) - Pick(0, 1), 0);
    const int64_t power = int64_t{1} << Pick(16, 62);
    return Pick(0, 2) ? power : power + Pick(-1, 1);
  }

  // Two or three sizes at once that are huge, whatever the others are.
  void SeveralHuge() {
    for (int i = 0; i < 24; ++i) {
      Args bad = args;
      std::string why = "sizes of";
      int64_t product = 1;
      std::vector<int64_t Args::*> chosen = sizes;
      std::shuffle(chosen.begin(), chosen.end(), generator);
      chosen.resize(std::min<int64_t>(chosen.size(), Pick(2, 3)));
      for (const auto size : chosen) {
        bad.*size = Huge(product) / unit * unit;
        if (__builtin_mul_overflow(product, std::max<int64_t>(bad.*size, 1), &product)) product = 1;
      }
      // What is not huge may be nothing, or as little as can be.
      for (const auto size : sizes) {
        if (std::find(chosen.begin(), chosen.end(), size) == chosen.end() && Pick(0, 1)) bad.*size = Pick(0, 1) * unit;
        why += " " + std::to_string(bad.*size);
      }
      bool overflows = false, lies = false;
      for (const auto& pointer : pointers) {
        const Int bytes = Claimed(pointer->shape(bad), pointer->element);
        overflows |= bytes == kTooMany;
        lies |= bytes > static_cast<Int>(pointer->bytes.size());
      }
      if constexpr (HasScale<Args>::value) lies |= bad.cache_scale != nullptr && bad.layers > args.layers;
      if (overflows) {
        ++huge_blocks.overflowing;
        Refused(&bad, 0, 1, why, DDTREE_INVALID_ARGUMENT);
      } else if (lies) {
        ++huge_blocks.lying;
      } else {
        const auto before = Contents();
        const int status = kernel(&bad, 0, 1);
        const bool refused = status == DDTREE_INVALID_ARGUMENT;
        const std::string what = std::string(name) + " returned " + std::to_string(status) + " for " + why;
        Expect(refused || status == DDTREE_OK, what);
        Expect(!refused || Contents() == before, std::string(name) + " wrote before it refused " + why);
        ++(refused ? huge_blocks.refused : huge_blocks.served);
      }
    }
  }

  void Runs() {
    const int64_t tasks = Pick(1, 4);
    for (int64_t task = 0; task < tasks; ++task) {
      Expect(kernel(&args, task, tasks) == DDTREE_OK, std::string(name) + " refused sound sizes");
    }
    // As many shares as there may be: most have nothing to do, and no scratch may grow with them.
    for (const int64_t task : {0, INT32_MAX - 1}) {
      Expect(kernel(&args, task, INT32_MAX) == DDTREE_OK, std::string(name) + " refused a share of many");
    }
  }

  // The cache's own dtype and scale: what does not go with `dtype`, with e4m3 or with the other must be refused.
  void CacheRefused() {
    for (const int32_t tag : {-1, 1 - args.dtype, 3, INT32_MAX}) {
      Args bad = args;
      bad.cache_dtype = tag;
      Refused(&bad, 0, 1, "a cache of another dtype", DDTREE_INVALID_ARGUMENT);
    }
    if (args.layers == 0) return;
    Args bad = args;
    std::vector<float> scale(args.layers + 1, 1.0f);
    if (args.cache_dtype == DDTREE_E4M3) {
      bad.cache_scale = reinterpret_cast<const float*>(reinterpret_cast<const char*>(scale.data()) + 1);
    } else {
      bad.cache_scale = scale.data();
    }
    Refused(&bad, 0, 1, "a scale that cannot be", DDTREE_INVALID_ARGUMENT);
  }

  // A value of a size that is one too far.
  void Limit(int64_t Args::*size, int64_t value, const char* why) {
    Args bad = args;
    bad.*size = value;
    Refused(&bad, 0, 1, why, DDTREE_INVALID_ARGUMENT);
  }

  void Fuzz() {
    AllRefused();
    SeveralHuge();
    Runs();
  }
};

int32_t Dtype() { return Pick(0, 1) ? DDTREE_BF16 : DDTREE_F32; }
int64_t Bytes(int32_t dtype) { return dtype == DDTREE_E4M3 ? 1 : dtype == DDTREE_BF16 ? 2 : 4; }
int32_t CacheDtype(int32_t dtype) { return Pick(0, 1) ? DDTREE_E4M3 : dtype; }

// Nothing, or a number of any bits for each layer of an e4m3 cache.
std::vector<float> CacheScale(int32_t cache_dtype, int64_t layers) {
  if (cache_dtype != DDTREE_E4M3 || Pick(0, 1)) return {};
  std::vector<float> scale(layers);
  for (float& x : scale) {
    const uint32_t bits = static_cast<uint32_t>(generator());
    if (Pick(0, 3)) x = static_cast<float>(Pick(0, 40)) / 16; else std::memcpy(&x, &bits, 4);
  }
  return scale;
}

void DraftTopk() {
  using Args = ddtree_draft_topk_args;
  Call<Args> call{"draft_topk", ddtree_draft_topk_cpu};
  Args& a = call.args;
  a.dtype = Dtype(), a.rows = Pick(0, 4), a.vocab = Pick(1, 3000), a.k = Pick(1, std::min<int64_t>(a.vocab, 256));
  call.Array(&Args::logits, Bytes(a.dtype), SHAPE(a.rows, a.vocab), 9);
  call.Array(&Args::log_probs, 4, SHAPE(a.rows, a.k), 9);
  call.Array(&Args::token_ids, 4, SHAPE(a.rows, a.k), 9);
  call.sizes = {&Args::rows, &Args::vocab, &Args::k};
  call.Fuzz();
  call.Limit(&Args::k, 0, "no candidates");
  call.Limit(&Args::k, a.vocab + 1, "more candidates than the vocabulary");
  call.Limit(&Args::k, DDTREE_MAX_CANDIDATES + 1, "too many candidates");
}

void TreeBuild() {
  using Args = ddtree_tree_build_args;
  Call<Args> call{"tree_build", ddtree_tree_build_cpu};
  Args& a = call.args;
  a.batch = Pick(0, 3), a.depth = Pick(0, DDTREE_MAX_DEPTH), a.k = Pick(0, Pick(0, 1) ? 8 : DDTREE_MAX_CANDIDATES);
  a.budget = Pick(0, DDTREE_MAX_NODES - 1), a.keep_spine = static_cast<int32_t>(Pick(0, 1));
  call.Array(&Args::log_probs, 4, SHAPE(a.batch, a.depth, a.k), 9);
  call.Array(&Args::token_ids, 4, SHAPE(a.batch, a.depth, a.k), 9);
  call.Array(&Args::root_tokens, 4, SHAPE(a.batch), 9);
  call.Array(&Args::budgets, 4, SHAPE(a.batch), a.budget);
  call.Array(&Args::tokens, 4, SHAPE(a.batch, Int{a.budget} + 1), 9);
  call.Array(&Args::parents, 4, SHAPE(a.batch, Int{a.budget} + 1), 9);
  call.Array(&Args::depths, 4, SHAPE(a.batch, Int{a.budget} + 1), 9);
  call.Array(&Args::next_token, 4, SHAPE(a.batch, Int{a.budget} + 1), 9);
  call.Array(&Args::next_sibling, 4, SHAPE(a.batch, Int{a.budget} + 1), 9);
  call.Array(&Args::ancestors, 4, SHAPE(a.batch, Int{a.budget} + 1, (Int{a.budget} + 32) / 32), 9);
  call.Array(&Args::out_log_probs, 4, SHAPE(a.batch, Int{a.budget} + 1), 9);
  call.Array(&Args::num_nodes, 4, SHAPE(a.batch), 9);
  call.sizes = {&Args::batch, &Args::depth, &Args::k, &Args::budget};
  call.Fuzz();
  call.Limit(&Args::budget, DDTREE_MAX_NODES, "too many nodes");
  call.Limit(&Args::depth, DDTREE_MAX_DEPTH + 1, "too deep a tree");
  call.Limit(&Args::k, DDTREE_MAX_CANDIDATES + 1, "too many candidates");
}

void VerifyAttn() {
  using Args = ddtree_verify_attn_args;
  Call<Args> call{"verify_attn", ddtree_verify_attn_cpu};
  Args& a = call.args;
  a.dtype = Dtype(), a.layers = Pick(1, 2), a.batch = Pick(0, 2), a.nodes = Pick(1, Pick(0, 3) ? 9 : 40);
  a.rows = a.nodes + Pick(0, 20), a.heads = Pick(1, 3), a.scale = 0.05f;
  call.Array(&Args::query, Bytes(a.dtype), SHAPE(a.batch, a.nodes, a.heads, DDTREE_ROW_DIM), 9);
  a.cache_dtype = CacheDtype(a.dtype);
  const std::vector<float> scale = CacheScale(a.cache_dtype, a.layers);
  a.cache_scale = scale.empty() ? nullptr : scale.data();
  call.Array(&Args::cache, Bytes(a.cache_dtype), SHAPE(a.layers, a.batch, a.rows, DDTREE_ROW_DIM), 9);
  call.Array(&Args::ancestors, 4, SHAPE(a.batch, a.nodes, (Int{a.nodes} + 31) / 32), 9);
  call.Array(&Args::lengths, 4, SHAPE(a.batch), a.rows);
  call.Array(&Args::num_nodes, 4, SHAPE(a.batch), a.nodes);
  call.Array(&Args::layer, 4, SHAPE(), a.layers);
  call.Array(&Args::out, Bytes(a.dtype), SHAPE(a.batch, a.nodes, a.heads, DDTREE_LATENT_DIM), 9);
  call.sizes = {&Args::layers, &Args::batch, &Args::rows, &Args::nodes, &Args::heads};
  call.Fuzz();
  call.CacheRefused();
  call.Limit(&Args::nodes, DDTREE_MAX_NODES + 1, "too many nodes");
  call.Limit(&Args::nodes, a.rows + 1, "more nodes than cache rows");
  call.Limit(&Args::heads, 0, "no heads");
  call.Limit(&Args::layers, 0, "no layers");
  for (const int32_t path : {-1, 3}) {
    Args bad = a;
    bad.path = path;
    call.Refused(&bad, 0, 1, "an unknown path", DDTREE_INVALID_ARGUMENT);
  }
}

void AppendLatents() {
  using Args = ddtree_append_latents_args;
  Call<Args> call{"append_latents", ddtree_append_latents_cpu};
  Args& a = call.args;
  a.dtype = Dtype(), a.layers = Pick(0, 3), a.batch = Pick(0, 3), a.rows = Pick(0, 20), a.nodes = Pick(0, 9);
  a.width = Pick(1, 9);
  a.cache_dtype = CacheDtype(a.dtype);
  const std::vector<float> scale = CacheScale(a.cache_dtype, a.layers);
  a.cache_scale = scale.empty() ? nullptr : scale.data();
  call.Array(&Args::cache, Bytes(a.cache_dtype), SHAPE(a.layers, a.batch, a.rows, a.width), 9);
  call.Array(&Args::latents, Bytes(a.dtype), SHAPE(a.batch, a.nodes, a.width), 9);
  call.Array(&Args::lengths, 4, SHAPE(a.batch), a.rows);
  call.Array(&Args::layer, 4, SHAPE(), a.layers);
  call.sizes = {&Args::layers, &Args::batch, &Args::rows, &Args::nodes, &Args::width};
  call.Fuzz();
  call.CacheRefused();
  call.Limit(&Args::width, 0, "rows without numbers");
}

void TreeAccept() {
  using Args = ddtree_tree_accept_args;
  Call<Args> call{"tree_accept", ddtree_tree_accept_cpu};
  Args& a = call.args;
  a.batch = Pick(0, 3), a.max_nodes = Pick(1, DDTREE_MAX_NODES), a.depth = Pick(0, 40), a.num_stops = Pick(0, 3);
  for (const auto field : {&Args::tokens, &Args::next_token, &Args::next_sibling, &Args::target_tokens}) {
    call.Array(field, 4, SHAPE(a.batch, a.max_nodes), Pick(0, 1) ? a.max_nodes : 3);
  }
  call.Array(&Args::num_nodes, 4, SHAPE(a.batch), a.max_nodes);
  call.Array(&Args::stop_tokens, 4, SHAPE(a.num_stops), 3);
  call.Array(&Args::max_new, 4, SHAPE(a.batch), 40);
  call.Array(&Args::nodes, 4, SHAPE(a.batch, Int{a.depth} + 1), 9);
  call.Array(&Args::out_tokens, 4, SHAPE(a.batch, Int{a.depth} + 1), 9);
  call.Array(&Args::num_emitted, 4, SHAPE(a.batch), 9);
  call.Array(&Args::finished, 1, SHAPE(a.batch), 9);
  call.sizes = {&Args::batch, &Args::max_nodes, &Args::depth, &Args::num_stops};
  call.Fuzz();
  call.Limit(&Args::max_nodes, DDTREE_MAX_NODES + 1, "too many nodes");
  call.Limit(&Args::max_nodes, 0, "no nodes");
}

void CommitPath() {
  using Args = ddtree_commit_path_args;
  Call<Args> call{"commit_path", ddtree_commit_path_cpu};
  Args& a = call.args;
  a.dtype = CacheDtype(Dtype()), a.layers = Pick(0, 3), a.batch = Pick(0, 3), a.rows = Pick(0, 20);
  a.width = Pick(1, 9), a.path = Pick(0, 9);
  call.unknown = {-1, 3, INT32_MAX, INT32_MIN};
  call.Array(&Args::cache, Bytes(a.dtype), SHAPE(a.layers, a.batch, a.rows, a.width), 9);
  call.Array(&Args::nodes, 4, SHAPE(a.batch, a.path), a.rows);
  call.Array(&Args::num_emitted, 4, SHAPE(a.batch), a.path);
  call.Array(&Args::lengths, 4, SHAPE(a.batch), a.rows);
  call.sizes = {&Args::layers, &Args::batch, &Args::rows, &Args::width, &Args::path};
  call.Fuzz();
  call.Limit(&Args::width, 0, "rows without numbers");
}

void ExpertMlp() {
  using Args = ddtree_expert_mlp_args;
  Call<Args> call{"expert_mlp", ddtree_expert_mlp_cpu};
  Args& a = call.args;
  a.dtype = Dtype(), a.tokens = Pick(0, 5), a.top_k = Pick(0, 3), a.experts = Pick(0, 4);
  a.hidden = 32 * Pick(0, 2), a.inner = 32 * Pick(0, 2);
  call.Array(&Args::x, Bytes(a.dtype), SHAPE(a.tokens, a.hidden), 9);
  call.Array(&Args::expert_ids, 4, SHAPE(a.tokens, a.top_k), a.experts);
  call.Array(&Args::expert_weights, 4, SHAPE(a.tokens, a.top_k), 9);
  call.Array(&Args::gate_up, 4, SHAPE(a.experts, 2 * Int{a.inner}, a.hidden / 8), 9);
  call.Array(&Args::gate_up_scale, 2, SHAPE(a.experts, 2 * Int{a.inner}, a.hidden / 32), 9);
  call.Array(&Args::down, 4, SHAPE(a.experts, a.hidden, a.inner / 8), 9);
  call.Array(&Args::down_scale, 2, SHAPE(a.experts, a.hidden, a.inner / 32), 9);
  call.Array(&Args::partial, 4, SHAPE(a.tokens, a.top_k, a.hidden), 9);
  call.Array(&Args::out, Bytes(a.dtype), SHAPE(a.tokens, a.hidden), 9);
  call.unit = 32;
  call.sizes = {&Args::tokens, &Args::top_k, &Args::experts, &Args::hidden, &Args::inner};
  call.Fuzz();
  call.Limit(&Args::hidden, a.hidden + 8, "an incomplete group of inputs");
  call.Limit(&Args::inner, a.inner + 1, "an incomplete group of inner numbers");
  Expect(ddtree_expert_mlp_sum_cpu(&a) == DDTREE_OK, "expert_mlp_sum refused sound sizes");
  call.kernel = [](const Args* args, int64_t, int64_t) { return ddtree_expert_mlp_sum_cpu(args); };
  call.SeveralHuge();
  Expect(ddtree_expert_mlp_sum_cpu(nullptr) == DDTREE_INVALID_ARGUMENT, "expert_mlp_sum took no block");
  a.dtype = 3;
  Expect(ddtree_expert_mlp_sum_cpu(&a) == DDTREE_INVALID_ARGUMENT, "expert_mlp_sum took an unknown dtype");
}

}  // namespace

int main(int argc, char** argv) {
  const unsigned long long seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : std::random_device{}();
  const double seconds = argc > 2 ? std::atof(argv[2]) : 4;
  std::printf("seed %llu\n", seed);
  std::fflush(stdout);
  generator.seed(seed);
  for (int status = -3; status < 9; ++status) Expect(*ddtree_error_string(status) != 0, "a status has no text");
  const auto start = std::chrono::steady_clock::now();
  int rounds = 0;
  do {
    DraftTopk(), TreeBuild(), VerifyAttn(), AppendLatents(), TreeAccept(), CommitPath(), ExpertMlp();
    ++rounds;
  } while (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < seconds);
  std::printf("%d rounds of every kernel; several huge sizes: %lld overflow, %lld refused, %lld served, %lld lie\n",
              rounds, static_cast<long long>(huge_blocks.overflowing), static_cast<long long>(huge_blocks.refused),
              static_cast<long long>(huge_blocks.served), static_cast<long long>(huge_blocks.lying));
  Expect(huge_blocks.overflowing > 0 && huge_blocks.served > 0, "no block of several huge sizes");
  return 0;
}
