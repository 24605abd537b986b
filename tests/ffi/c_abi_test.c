/* A C99 program on the CPU entry points: one small round whose numbers are worked out by hand, and refused calls. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "ffi/ddtree.h"

static int failures = 0;

static void check(int ok, const char *what) {
  if (ok) return;
  printf("FAILED: %s\n", what);
  ++failures;
}

/* logits 0, 1, 1, -inf: the two ones come first, by id; the normaliser is log(1 + 2e). */
static void draft_topk(void) {
  const float logits[4] = {0.0f, 1.0f, 1.0f, -INFINITY};
  float log_probs[3];
  int32_t token_ids[3];
  const float normaliser = (float)log(1.0 + 2.0 * exp(1.0));
  ddtree_draft_topk_args args = {.abi_version = DDTREE_ABI_VERSION, .rows = 1, .vocab = 4, .k = 3, .dtype = DDTREE_F32};
  args.logits = logits, args.log_probs = log_probs, args.token_ids = token_ids;
  check(ddtree_draft_topk_cpu(&args, 0, 1) == DDTREE_OK, "draft_topk");
  check(token_ids[0] == 1 && token_ids[1] == 2 && token_ids[2] == 0, "draft_topk: ids");
  check(log_probs[0] == log_probs[1], "draft_topk: equal logits stay equal");
  check(fabsf(log_probs[0] - (1.0f - normaliser)) < 1e-6f, "draft_topk: log-probability of 1");
  check(fabsf(log_probs[2] + normaliser) < 1e-6f, "draft_topk: log-probability of 0");
}

/* Position 1 offers 10 (-1) and 11 (-1.5), position 2 offers 20 (-0.25) and 21 (-2). Sums in order: 10 -1, 10 20 -1.25,
   11 -1.5, 11 20 -1.75, and with room for three more 10 21 -3, 11 21 -3.5. The target says 11, then 20, then 7. */
static void build_and_accept(void) {
  const float log_probs[4] = {-1.0f, -1.5f, -0.25f, -2.0f};
  const int32_t token_ids[4] = {10, 11, 20, 21};
  const int32_t root = 5, budget = 4, stop = 99, max_new = 100;
  int32_t tokens[5], parents[5], depths[5], next_token[5], next_sibling[5], num_nodes;
  uint32_t ancestors[5];
  float sums[5];
  const int32_t want_tokens[5] = {5, 10, 20, 11, 20}, want_parents[5] = {-1, 0, 1, 0, 3};
  const int32_t want_next[5] = {1, 2, -1, 4, -1}, want_sibling[5] = {-1, 3, -1, -1, -1};
  const uint32_t want_ancestors[5] = {1, 3, 7, 9, 25};
  const float want_sums[5] = {0.0f, -1.0f, -1.25f, -1.5f, -1.75f};
  const int32_t target[5] = {11, 0, 0, 20, 7};
  int32_t nodes[3], emitted[3], num_emitted;
  uint8_t finished;
  ddtree_tree_build_args build = {.abi_version = DDTREE_ABI_VERSION, .batch = 1, .depth = 2, .k = 2, .budget = 4};
  ddtree_tree_accept_args accept = {.abi_version = DDTREE_ABI_VERSION, .batch = 1, .max_nodes = 5, .depth = 2};

  build.log_probs = log_probs, build.token_ids = token_ids, build.root_tokens = &root, build.budgets = &budget;
  build.tokens = tokens, build.parents = parents, build.depths = depths, build.next_token = next_token;
  build.next_sibling = next_sibling, build.ancestors = ancestors, build.out_log_probs = sums;
  build.num_nodes = &num_nodes;
  check(ddtree_tree_build_cpu(&build, 0, 1) == DDTREE_OK, "tree_build");
  check(num_nodes == 5, "tree_build: number of nodes");
  check(!memcmp(tokens, want_tokens, sizeof tokens), "tree_build: tokens");
  check(!memcmp(parents, want_parents, sizeof parents), "tree_build: parents");
  check(!memcmp(next_token, want_next, sizeof next_token), "tree_build: first children");
  check(!memcmp(next_sibling, want_sibling, sizeof next_sibling), "tree_build: siblings");
  check(!memcmp(ancestors, want_ancestors, sizeof ancestors), "tree_build: ancestors");
  check(!memcmp(sums, want_sums, sizeof sums), "tree_build: log-probabilities");

  accept.tokens = tokens, accept.next_token = next_token, accept.next_sibling = next_sibling;
  accept.num_nodes = &num_nodes, accept.target_tokens = target, accept.stop_tokens = &stop, accept.num_stops = 1;
  accept.max_new = &max_new, accept.nodes = nodes, accept.out_tokens = emitted, accept.num_emitted = &num_emitted;
  accept.finished = &finished;
  check(ddtree_tree_accept_cpu(&accept, 0, 1) == DDTREE_OK, "tree_accept");
  check(num_emitted == 3 && nodes[0] == 0 && nodes[1] == 3 && nodes[2] == 4, "tree_accept: nodes");
  check(emitted[0] == 11 && emitted[1] == 20 && emitted[2] == 7 && !finished, "tree_accept: tokens");

  build.budget = DDTREE_MAX_NODES;
  check(ddtree_tree_build_cpu(&build, 0, 1) == DDTREE_INVALID_ARGUMENT, "tree_build: a budget over the limit");
  build.budget = 4, build.tokens = NULL;
  check(ddtree_tree_build_cpu(&build, 0, 1) == DDTREE_INVALID_ARGUMENT, "tree_build: a null pointer");
  build.tokens = tokens, build.abi_version = DDTREE_ABI_VERSION + 1;
  check(ddtree_tree_build_cpu(&build, 0, 1) == DDTREE_WRONG_VERSION, "tree_build: a block of a newer header");
}

/* One layer of four rows of one number: row 1 is appended to, then the accepted row 3 moves up to row 2. */
static void cache_rows(void) {
  float cache[4] = {1.0f, 0.0f, 0.0f, 0.0f};
  const float latents[3] = {2.0f, 3.0f, 4.0f}, scale = 0.5f;
  unsigned char bytes[4] = {0, 0, 0, 0};
  const int32_t length = 1, layer = 0, nodes[2] = {0, 2}, num_emitted = 2;
  const float appended[4] = {1.0f, 2.0f, 3.0f, 4.0f}, committed[4] = {1.0f, 2.0f, 4.0f, 4.0f};
  ddtree_append_latents_args append = {
      .abi_version = DDTREE_ABI_VERSION, .layers = 1, .batch = 1, .rows = 4, .nodes = 3, .width = 1, .dtype = DDTREE_F32};
  ddtree_commit_path_args commit = {
      .abi_version = DDTREE_ABI_VERSION, .layers = 1, .batch = 1, .rows = 4, .width = 1, .path = 2, .dtype = DDTREE_F32};
  append.cache_dtype = DDTREE_F32;
  append.cache = cache, append.latents = latents, append.lengths = &length, append.layer = &layer;
  check(ddtree_append_latents_cpu(&append, 0, 1) == DDTREE_OK, "append_latents");
  check(!memcmp(cache, appended, sizeof cache), "append_latents: rows");
  commit.cache = cache, commit.nodes = nodes, commit.num_emitted = &num_emitted, commit.lengths = &length;
  check(ddtree_commit_path_cpu(&commit, 0, 1) == DDTREE_OK, "commit_path");
  check(!memcmp(cache, committed, sizeof cache), "commit_path: rows");

  /* In e4m3 of scale 1/2, 2 is 4 = 0x48, 3 is 6 = 0x4c and 4 is 8 = 0x50. */
  append.cache = bytes, append.cache_dtype = DDTREE_E4M3, append.cache_scale = &scale;
  check(ddtree_append_latents_cpu(&append, 0, 1) == DDTREE_OK, "append_latents: e4m3");
  check(bytes[0] == 0 && bytes[1] == 0x48 && bytes[2] == 0x4c && bytes[3] == 0x50, "append_latents: e4m3 rows");
  commit.cache = bytes, commit.dtype = DDTREE_E4M3;
  check(ddtree_commit_path_cpu(&commit, 0, 1) == DDTREE_OK, "commit_path: e4m3");
  check(bytes[1] == 0x48 && bytes[2] == 0x50 && bytes[3] == 0x50, "commit_path: e4m3 rows");
  append.cache = cache, append.cache_dtype = DDTREE_F32;
  check(ddtree_append_latents_cpu(&append, 0, 1) == DDTREE_INVALID_ARGUMENT, "append_latents: a scale of float32");
  commit.cache = cache, commit.dtype = 7;
  check(ddtree_commit_path_cpu(&commit, 0, 1) == DDTREE_INVALID_ARGUMENT, "commit_path: an unknown dtype");
}

/* A zero query weighs every visible row alike: rows of ones and threes give two. */
static void attention(void) {
  static float query[DDTREE_ROW_DIM], cache[2 * DDTREE_ROW_DIM], out[DDTREE_LATENT_DIM];
  const uint32_t ancestors = 1;
  const int32_t length = 1, num_nodes = 1, layer = 0;
  int i, same = 1;
  ddtree_verify_attn_args args = {.abi_version = DDTREE_ABI_VERSION, .layers = 1, .batch = 1, .rows = 2, .nodes = 1,
                                  .heads = 1, .scale = 1.0f, .dtype = DDTREE_F32, .cache_dtype = DDTREE_F32};
  for (i = 0; i < DDTREE_ROW_DIM; ++i) cache[i] = 1.0f, cache[DDTREE_ROW_DIM + i] = 3.0f;
  args.query = query, args.cache = cache, args.ancestors = &ancestors, args.lengths = &length;
  args.num_nodes = &num_nodes, args.layer = &layer, args.out = out;
  check(ddtree_verify_attn_cpu(&args, 0, 1) == DDTREE_OK, "verify_attn");
  for (i = 0; i < DDTREE_LATENT_DIM; ++i) same = same && fabsf(out[i] - 2.0f) < 1e-6f;
  check(same, "verify_attn: the mean of two rows");
}

int main(void) {
  check(ddtree_version() == DDTREE_ABI_VERSION, "the library is of another version than the header");
  check(ddtree_max_nodes() == DDTREE_MAX_NODES, "ddtree_max_nodes");
  check(strcmp(ddtree_error_string(DDTREE_OK), "success") == 0, "ddtree_error_string");
  draft_topk();
  build_and_accept();
  cache_rows();
  attention();
  if (failures == 0) printf("all checks passed\n");
  return failures != 0;
}
