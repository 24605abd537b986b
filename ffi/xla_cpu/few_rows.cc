// The matmul of a few rows with a matrix, which a decode step on a CPU mostly consists of.
//
// It is no entry point of the C ABI: only XLA's CPU backend, whose matmul packs the whole matrix for the sake of a few
// rows, has use for it. Sums run over the inputs in order, so that a row's result depends neither on the other rows nor
// on the number of tasks. A matrix of bfloat16 goes to few_rows_amx.cc where the processor has AMX.
#include <algorithm>

#include "ffi/cpu/kernels.h"
#include "ffi/ddtree.h"
#include "ffi/xla_cpu/few_rows.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define DDTREE_AVX512 __attribute__((target("avx512f")))
#endif

namespace ddtree {
namespace {

// What a block of sums holds in registers: vectors of 16 columns for each of so many rows at most. Numbers of two bytes
// get a fourth vector, since halves of cache lines would come slowly.
template <typename Weight>
constexpr int kVectors = sizeof(Weight) == 4 ? 3 : 4;
template <typename Weight>
constexpr int kRows = sizeof(Weight) == 4 ? 9 : 6;

template <typename Weight>
int64_t Tiles(const FewRowsArgs& a) {  // of columns, the work items
  return (a.outputs + 16 * kVectors<Weight> - 1) / (16 * kVectors<Weight>);
}

#ifdef DDTREE_AVX512
constexpr int64_t kAhead = 16;  // rows of the matrix between a load and its prefetch: a column is no stream to hardware

DDTREE_AVX512 inline __m512 Load(const float* x) { return _mm512_loadu_ps(x); }
DDTREE_AVX512 inline __m512 Load(const uint16_t* x) {  // bfloat16
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  // Masks that leave all in: GCC warns of what the functions without them leave undefined.
  return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, halves), 16));
}

// out[m] = x[m] @ matrix for kBlockRows rows and 16 * kBlockVectors columns; the sums stay in registers.
template <int kBlockRows, int kBlockVectors, typename Weight>
DDTREE_AVX512 void Block(const FewRowsArgs& a, const float* x, const Weight* matrix, float* out) {
  __m512 sums[kBlockRows][kBlockVectors];
  for (int m = 0; m < kBlockRows; ++m) {
    for (int v = 0; v < kBlockVectors; ++v) sums[m][v] = _mm512_setzero_ps();
  }
  for (int64_t k = 0; k < a.inputs; ++k, matrix += a.outputs) {
    const Weight* ahead = matrix + (k + kAhead < a.inputs ? kAhead * a.outputs : 0);
    constexpr int kLine = 64 / sizeof(Weight);
    for (int i = 0; i < 16 * kBlockVectors; i += kLine) _mm_prefetch(ahead + i, _MM_HINT_T0);
    __m512 columns[kBlockVectors];
    for (int v = 0; v < kBlockVectors; ++v) columns[v] = Load(matrix + 16 * v);
    for (int m = 0; m < kBlockRows; ++m) {
      const __m512 y = _mm512_set1_ps(x[m * a.inputs + k]);
      for (int v = 0; v < kBlockVectors; ++v) sums[m][v] = _mm512_fmadd_ps(y, columns[v], sums[m][v]);
    }
  }
  for (int m = 0; m < kBlockRows; ++m) {
    for (int v = 0; v < kBlockVectors; ++v) _mm512_storeu_ps(out + m * a.outputs + 16 * v, sums[m][v]);
  }
}

// A block of `rows` rows, of at most kBlockRows.
template <int kBlockRows, int kBlockVectors, typename Weight>
void Blocks(const FewRowsArgs& a, int64_t rows, const float* x, const Weight* matrix, float* out) {
  if constexpr (kBlockRows > 1) {
    if (rows < kBlockRows) return Blocks<kBlockRows - 1, kBlockVectors>(a, rows, x, matrix, out);
  }
  Block<kBlockRows, kBlockVectors>(a, x, matrix, out);
}

// All rows of 16 * kBlockVectors columns, as many at once as registers hold.
template <int kBlockVectors, typename Weight>
void Columns(const FewRowsArgs& a, const Weight* matrix, int64_t batch, int64_t column) {
  const float* x = a.x + batch * a.rows * a.inputs;
  float* out = a.out + batch * a.rows * a.outputs + column;
  matrix += batch * a.inputs * a.outputs + column;
  for (int64_t left = a.rows; left > 0;) {
    const int64_t blocks = (left + kRows<Weight> - 1) / kRows<Weight>, rows = (left + blocks - 1) / blocks;
    Blocks<kRows<Weight>, kBlockVectors>(a, rows, x, matrix, out);
    x += rows * a.inputs, out += rows * a.outputs, left -= rows;
  }
}

template <typename Weight>
void Items(const FewRowsArgs& a, const Weight* matrix, int64_t begin, int64_t end) {
  constexpr int64_t kTile = 16 * kVectors<Weight>;
  const int64_t tiles = Tiles<Weight>(a);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t batch = item / tiles;
    int64_t column = item % tiles * kTile;
    if (column + kTile <= a.outputs) {
      Columns<kVectors<Weight>>(a, matrix, batch, column);
    } else {
      for (; column < a.outputs; column += 16) Columns<1>(a, matrix, batch, column);
    }
  }
}
#endif

}  // namespace

bool HasFewRows() {
#ifdef DDTREE_AVX512
  return __builtin_cpu_supports("avx512f");
#else
  return false;
#endif
}

int64_t FewRowsItems(const FewRowsArgs& args) {
  if (args.amx != 0) return FewRowsAmxItems(args);
  return args.batch * (args.matrix != nullptr ? Tiles<float>(args) : Tiles<uint16_t>(args));
}

int FewRows(const FewRowsArgs* args, int64_t task, int64_t tasks) {
#ifdef DDTREE_AVX512
  const int64_t items = FewRowsItems(*args), begin = items * task / tasks, end = items * (task + 1) / tasks;
  if (args->amx != 0) {
    FewRowsAmx(*args, begin, end);
  } else if (args->matrix != nullptr) {
    Items(*args, args->matrix, begin, end);
  } else {
    Items(*args, args->bfloat_matrix, begin, end);
  }
  return DDTREE_OK;
#else
  return DDTREE_INVALID_ARGUMENT;
#endif
}

}  // namespace ddtree
