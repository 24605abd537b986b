// The kernels against the golden vectors of tests/ffi/golden.py, on the CPU and, where it was built for one and finds
// it, on a CUDA device. Integers must be equal, floats close. $DDTREE_GOLDEN is the vectors' folder.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <list>

#ifdef DDTREE_TEST_CUDA
#include <cuda_runtime_api.h>
#endif

#include "ffi/ddtree.h"
#include "tests/ffi/safetensors.h"

namespace {

// Where the kernels run, and the memory that they see there.
struct Cpu {
  static bool Present() { return true; }
  static void* Make(size_t bytes) { return std::malloc(bytes); }
  static void Free(void* data) { std::free(data); }
  static void Copy(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
  // In three shares, last first: any split does the whole.
  template <typename Args>
  static int Call(const Args& args, int (*cpu)(const Args*, int64_t, int64_t), int (*)(const Args*, void*)) {
    for (int64_t task = 2; task >= 0; --task) {
      if (const int status = cpu(&args, task, 3); status != DDTREE_OK) return status;
    }
    return DDTREE_OK;
  }
};

#ifdef DDTREE_TEST_CUDA
struct Cuda {
  static bool Present() {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
  }
  static void* Make(size_t bytes) {
    void* data = nullptr;
    return cudaMalloc(&data, bytes) == cudaSuccess ? data : nullptr;
  }
  static void Free(void* data) { cudaFree(data); }
  static void Copy(void* to, const void* from, size_t bytes) { cudaMemcpy(to, from, bytes, cudaMemcpyDefault); }
  template <typename Args>
  static int Call(const Args& args, int (*)(const Args*, int64_t, int64_t), int (*cuda)(const Args*, void*)) {
    const int status = cuda(&args, nullptr);
    return status == DDTREE_OK && cudaDeviceSynchronize() != cudaSuccess ? DDTREE_LAUNCH_FAILED : status;
  }
};
using Devices = ::testing::Types<Cpu, Cuda>;
#else
using Devices = ::testing::Types<Cpu>;
#endif

std::map<std::string, Tensor> Case(const std::string& name) {
  const char* named = std::getenv("DDTREE_GOLDEN");
  const std::string folder = named == nullptr ? "tests/data/golden_kernels" : named;
  return ReadSafetensors(folder + "/" + name + ".safetensors");
}

float Widen(uint16_t bf16) {
  const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

int32_t Tag(const Tensor& tensor) {
  return tensor.dtype == "BF16" ? DDTREE_BF16 : tensor.dtype == "F8_E4M3" ? DDTREE_E4M3 : DDTREE_F32;
}

// `values` equal `want` up to `tolerance`; infinities are equal to themselves alone.
void ExpectClose(const std::vector<float>& values, const std::vector<float>& want, float tolerance, const char* what) {
  ASSERT_EQ(values.size(), want.size()) << what;
  for (size_t i = 0; i < want.size(); ++i) {
    if (values[i] == want[i]) continue;
    ASSERT_LE(std::fabs(values[i] - want[i]), tolerance) << what << " at " << i;
  }
}

template <typename Device>
class GoldenTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!Device::Present()) GTEST_SKIP() << "no device";
  }
  void TearDown() override {
    for (void* data : kept_) Device::Free(data);
  }

  // A tensor's first `parts` of `of` equal parts, where the kernels see them.
  template <typename T>
  T* In(const Tensor& tensor, int64_t parts = 1, int64_t of = 1) {
    const size_t bytes = tensor.bytes.size() / of * parts;
    EXPECT_EQ(tensor.Count() * sizeof(T), tensor.bytes.size()) << tensor.dtype;
    T* data = Out<T>(bytes / sizeof(T));
    Device::Copy(data, tensor.bytes.data(), bytes);
    return data;
  }
  // The scale of a case's cache, if it has one.
  const float* Scale(const std::map<std::string, Tensor>& given) {
    const auto found = given.find("cache_scale");
    return found == given.end() ? nullptr : In<float>(found->second);
  }
  void* Any(const Tensor& tensor) {
    void* data = Out<char>(tensor.bytes.size());
    Device::Copy(data, tensor.bytes.data(), tensor.bytes.size());
    return data;
  }
  // Room for results, filled with what none of them is.
  template <typename T>
  T* Out(size_t count) {
    void* data = Device::Make(count * sizeof(T) + 16);
    kept_.push_back(data);
    const std::vector<char> fill(count * sizeof(T), 0x5a);
    Device::Copy(data, fill.data(), fill.size());
    return static_cast<T*>(data);
  }
  template <typename T>
  std::vector<T> Read(const T* data, size_t count) {
    std::vector<T> values(count);
    Device::Copy(values.data(), data, count * sizeof(T));
    return values;
  }
  // Results equal a tensor's first `parts` of `of` parts.
  template <typename T>
  void ExpectEqual(const T* data, const Tensor& tensor, const char* what, int64_t parts = 1, int64_t of = 1) {
    std::vector<T> want = tensor.As<T>();
    want.resize(want.size() / of * parts);
    EXPECT_EQ(Read(data, want.size()), want) << what;
  }
  void ExpectBytes(const void* data, const Tensor& tensor, const char* what) {
    EXPECT_EQ(Read(static_cast<const char*>(data), tensor.bytes.size()), tensor.bytes) << what;
  }

  // Builds the trees of the first `batch` requests of a case, compares them, and leaves the call's block.
  ddtree_tree_build_args Build(std::map<std::string, Tensor>& given, int64_t batch) {
    const int64_t all = given["log_probs"].shape[0], nodes = given["tokens"].shape[1];
    const int64_t words = given["ancestors"].shape[2];
    ddtree_tree_build_args args{};
    args.batch = batch, args.depth = given["log_probs"].shape[1], args.k = given["log_probs"].shape[2];
    args.budget = nodes - 1, args.keep_spine = static_cast<int32_t>(given["keep_spine"].As<int64_t>()[0]);
    args.log_probs = In<float>(given["log_probs"], batch, all);
    args.token_ids = In<int32_t>(given["token_ids"], batch, all);
    args.root_tokens = In<int32_t>(given["root_tokens"], batch, all);
    args.budgets = In<int32_t>(given["budgets"], batch, all);
    args.tokens = Out<int32_t>(batch * nodes), args.parents = Out<int32_t>(batch * nodes);
    args.depths = Out<int32_t>(batch * nodes), args.next_token = Out<int32_t>(batch * nodes);
    args.next_sibling = Out<int32_t>(batch * nodes), args.ancestors = Out<uint32_t>(batch * nodes * words);
    args.out_log_probs = Out<float>(batch * nodes), args.num_nodes = Out<int32_t>(batch);
    args.workspace_bytes = ddtree_tree_build_workspace(batch, args.depth, args.k, args.budget);
    args.workspace = Out<char>(args.workspace_bytes);
    EXPECT_EQ(Device::Call(args, ddtree_tree_build_cpu, ddtree_tree_build_cuda), DDTREE_OK);
    ExpectEqual(args.tokens, given["tokens"], "tokens", batch, all);
    ExpectEqual(args.parents, given["parents"], "parents", batch, all);
    ExpectEqual(args.depths, given["depths"], "depths", batch, all);
    ExpectEqual(args.next_token, given["next_token"], "next_token", batch, all);
    ExpectEqual(args.next_sibling, given["next_sibling"], "next_sibling", batch, all);
    ExpectEqual(args.ancestors, given["ancestors"], "ancestors", batch, all);
    ExpectEqual(args.out_log_probs, given["out_log_probs"], "out_log_probs", batch, all);
    ExpectEqual(args.num_nodes, given["num_nodes"], "num_nodes", batch, all);
    return args;
  }

 private:
  std::list<void*> kept_;
};
TYPED_TEST_SUITE(GoldenTest, Devices);

TYPED_TEST(GoldenTest, DraftTopk) {
  for (const char* name : {"draft_topk_f32", "draft_topk_bf16"}) {
    auto given = Case(name);
    ddtree_draft_topk_args args{};
    args.rows = given["logits"].shape[0], args.vocab = given["logits"].shape[1], args.k = given["token_ids"].shape[1];
    args.dtype = Tag(given["logits"]), args.logits = this->Any(given["logits"]);
    args.log_probs = this->template Out<float>(args.rows * args.k);
    args.token_ids = this->template Out<int32_t>(args.rows * args.k);
    args.workspace_bytes = ddtree_draft_topk_workspace(args.rows, args.vocab, args.k);
    args.workspace = this->template Out<char>(args.workspace_bytes);
    ASSERT_EQ(TypeParam::Call(args, ddtree_draft_topk_cpu, ddtree_draft_topk_cuda), DDTREE_OK);
    this->ExpectEqual(args.token_ids, given["token_ids"], name);
    ExpectClose(this->Read(args.log_probs, args.rows * args.k), given["log_probs"].template As<float>(), 2e-6f, name);
  }
}

TYPED_TEST(GoldenTest, TreeBuild) {
  for (const char* name : {"tree_build", "tree_build_spine"}) {
    SCOPED_TRACE(name);
    auto given = Case(name);
    this->Build(given, given["log_probs"].shape[0]);
  }
}

// The walk takes the tree from where the build left it.
TYPED_TEST(GoldenTest, BuildThenAccept) {
  for (const char* name : {"compose_32", "compose_64"}) {
    for (const int64_t batch : {1, 4, 16}) {
      SCOPED_TRACE(std::string(name) + ", batch " + std::to_string(batch));
      auto given = Case(name);
      const int64_t all = given["log_probs"].shape[0];
      ASSERT_EQ(all, 16);
      const ddtree_tree_build_args tree = this->Build(given, batch);
      ddtree_tree_accept_args args{};
      args.batch = batch, args.max_nodes = tree.budget + 1, args.depth = tree.depth;
      args.num_stops = given["stop_tokens"].shape[0];
      args.tokens = tree.tokens, args.next_token = tree.next_token, args.next_sibling = tree.next_sibling;
      args.num_nodes = tree.num_nodes;
      args.target_tokens = this->template In<int32_t>(given["target_tokens"], batch, all);
      args.stop_tokens = this->template In<int32_t>(given["stop_tokens"]);
      args.max_new = this->template In<int32_t>(given["max_new"], batch, all);
      args.nodes = this->template Out<int32_t>(batch * (args.depth + 1));
      args.out_tokens = this->template Out<int32_t>(batch * (args.depth + 1));
      args.num_emitted = this->template Out<int32_t>(batch), args.finished = this->template Out<uint8_t>(batch);
      ASSERT_EQ(TypeParam::Call(args, ddtree_tree_accept_cpu, ddtree_tree_accept_cuda), DDTREE_OK);
      this->ExpectEqual(args.nodes, given["nodes"], "nodes", batch, all);
      this->ExpectEqual(args.out_tokens, given["out_tokens"], "out_tokens", batch, all);
      this->ExpectEqual(args.num_emitted, given["num_emitted"], "num_emitted", batch, all);
      this->ExpectEqual(args.finished, given["finished"], "finished", batch, all);
    }
  }
}

TYPED_TEST(GoldenTest, VerifyAttn) {
  for (const char* name : {"verify_attn_f32", "verify_attn_bf16", "verify_attn_e4m3"}) {
    auto given = Case(name);
    ddtree_verify_attn_args args{};
    args.dtype = Tag(given["query"]), args.layers = given["cache"].shape[0], args.batch = given["query"].shape[0];
    args.rows = given["cache"].shape[2], args.nodes = given["query"].shape[1], args.heads = given["query"].shape[2];
    args.scale = given["scale"].template As<float>()[0];
    args.query = this->Any(given["query"]), args.cache = this->Any(given["cache"]);
    args.cache_dtype = Tag(given["cache"]), args.cache_scale = this->Scale(given);
    args.ancestors = this->template In<uint32_t>(given["ancestors"]);
    args.lengths = this->template In<int32_t>(given["lengths"]);
    args.num_nodes = this->template In<int32_t>(given["num_nodes"]);
    args.layer = this->template In<int32_t>(given["layer"]);
    const size_t count = given["out"].Count();
    args.workspace_bytes = ddtree_verify_attn_workspace(args.batch, args.rows, args.nodes, args.heads, args.dtype);
    args.workspace = this->template Out<char>(args.workspace_bytes);
    const bool wide = args.dtype == DDTREE_F32;
    args.out = wide ? static_cast<void*>(this->template Out<float>(count)) : this->template Out<uint16_t>(count);
    ASSERT_EQ(TypeParam::Call(args, ddtree_verify_attn_cpu, ddtree_verify_attn_cuda), DDTREE_OK);
    std::vector<float> got(count);
    if (wide) {
      got = this->Read(static_cast<const float*>(args.out), count);
    } else {
      const auto halves = this->Read(static_cast<const uint16_t*>(args.out), count);
      std::transform(halves.begin(), halves.end(), got.begin(), Widen);
    }
    // Latents are at most 4 in size, an e4m3 cache's 8 with their scale, and bfloat16 has eight bits.
    ExpectClose(got, given["out"].template As<float>(), wide ? 1e-4f : 4.0f / 128, name);
  }
}

TYPED_TEST(GoldenTest, AppendLatents) {
  for (const char* name : {"append_latents_f32", "append_latents_bf16", "append_latents_e4m3"}) {
    auto given = Case(name);
    ddtree_append_latents_args args{};
    args.dtype = Tag(given["latents"]), args.layers = given["cache"].shape[0], args.batch = given["cache"].shape[1];
    args.cache_dtype = Tag(given["cache"]), args.cache_scale = this->Scale(given);
    args.rows = given["cache"].shape[2], args.width = given["cache"].shape[3], args.nodes = given["latents"].shape[1];
    args.cache = this->Any(given["cache"]), args.latents = this->Any(given["latents"]);
    args.lengths = this->template In<int32_t>(given["lengths"]);
    args.layer = this->template In<int32_t>(given["layer"]);
    ASSERT_EQ(TypeParam::Call(args, ddtree_append_latents_cpu, ddtree_append_latents_cuda), DDTREE_OK);
    this->ExpectBytes(args.cache, given["want_cache"], name);
  }
}

TYPED_TEST(GoldenTest, CommitPath) {
  for (const char* name : {"commit_path_f32", "commit_path_bf16", "commit_path_e4m3"}) {
    auto given = Case(name);
    ddtree_commit_path_args args{};
    args.dtype = Tag(given["cache"]), args.layers = given["cache"].shape[0], args.batch = given["cache"].shape[1];
    args.rows = given["cache"].shape[2], args.width = given["cache"].shape[3], args.path = given["nodes"].shape[1];
    args.cache = this->Any(given["cache"]), args.nodes = this->template In<int32_t>(given["nodes"]);
    args.num_emitted = this->template In<int32_t>(given["num_emitted"]);
    args.lengths = this->template In<int32_t>(given["lengths"]);
    ASSERT_EQ(TypeParam::Call(args, ddtree_commit_path_cpu, ddtree_commit_path_cuda), DDTREE_OK);
    this->ExpectBytes(args.cache, given["want_cache"], name);
  }
}

TEST(GoldenCpuTest, ExpertMlp) {
  auto given = Case("expert_mlp");
  ddtree_expert_mlp_args args{};
  args.tokens = given["x"].shape[0], args.hidden = given["x"].shape[1], args.top_k = given["expert_ids"].shape[1];
  args.experts = given["down"].shape[0], args.inner = given["down"].shape[2] * 8, args.dtype = DDTREE_F32;
  const auto x = given["x"].As<float>(), weights = given["expert_weights"].As<float>();
  const auto ids = given["expert_ids"].As<int32_t>(), gate_up = given["gate_up"].As<int32_t>();
  const auto down = given["down"].As<int32_t>();
  const auto gate_up_scale = given["gate_up_scale"].As<uint16_t>(), down_scale = given["down_scale"].As<uint16_t>();
  std::vector<float> partial(args.tokens * args.top_k * args.hidden), out(args.tokens * args.hidden);
  args.x = x.data(), args.expert_ids = ids.data(), args.expert_weights = weights.data();
  args.gate_up = gate_up.data(), args.gate_up_scale = gate_up_scale.data();
  args.down = down.data(), args.down_scale = down_scale.data(), args.partial = partial.data(), args.out = out.data();
  for (int64_t task = 0; task < 2; ++task) ASSERT_EQ(ddtree_expert_mlp_cpu(&args, task, 2), DDTREE_OK);
  ASSERT_EQ(ddtree_expert_mlp_sum_cpu(&args), DDTREE_OK);
  const auto want = given["out"].As<float>();
  float largest = 0;
  for (const float value : want) largest = std::max(largest, std::fabs(value));
  ExpectClose(out, want, 1e-5f * largest, "out");
}

}  // namespace
