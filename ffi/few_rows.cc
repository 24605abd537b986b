// The product of a few rows with a matrix of float32, which a decode step on a CPU mostly consists of.
//
// It is no entry point of the C ABI: only XLA's CPU backend, whose product packs the whole matrix for the sake of a few
// rows, has use for it. Sums run over the inputs in order, so that a row's result depends neither on the other rows nor
// on the number of tasks.
#include <algorithm>

#include "ffi/cpu/kernels.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define DDTREE_AVX512 __attribute__((target("avx512f")))
#endif

namespace ddtree {
namespace {

#ifdef DDTREE_AVX512
constexpr int64_t kAhead = 16;  // rows of the matrix between a load and its prefetch: a column is no stream to hardware

// out[m] = x[m] @ matrix for kRows rows and 16 * kVectors columns; the sums stay in registers.
template <int kRows, int kVectors>
DDTREE_AVX512 void Block(const FewRowsArgs& a, const float* x, const float* matrix, float* out) {
  __m512 sums[kRows][kVectors];
  for (int m = 0; m < kRows; ++m) {
    for (int v = 0; v < kVectors; ++v) sums[m][v] = _mm512_setzero_ps();
  }
  for (int64_t k = 0; k < a.inputs; ++k, matrix += a.outputs) {
    const float* ahead = matrix + (k + kAhead < a.inputs ? kAhead * a.outputs : 0);
    for (int v = 0; v < kVectors; ++v) _mm_prefetch(ahead + 16 * v, _MM_HINT_T0);
    __m512 columns[kVectors];
    for (int v = 0; v < kVectors; ++v) columns[v] = _mm512_loadu_ps(matrix + 16 * v);
    for (int m = 0; m < kRows; ++m) {
      const __m512 y = _mm512_set1_ps(x[m * a.inputs + k]);
      for (int v = 0; v < kVectors; ++v) sums[m][v] = _mm512_fmadd_ps(y, columns[v], sums[m][v]);
    }
  }
  for (int m = 0; m < kRows; ++m) {
    for (int v = 0; v < kVectors; ++v) _mm512_storeu_ps(out + m * a.outputs + 16 * v, sums[m][v]);
  }
}

// All rows of 16 * kVectors columns, as many at once as registers hold: nine, and three vectors of columns for each.
template <int kVectors>
void Columns(const FewRowsArgs& a, int64_t batch, int64_t column) {
  const float *x = a.x + batch * a.rows * a.inputs, *matrix = a.matrix + batch * a.inputs * a.outputs + column;
  float* out = a.out + batch * a.rows * a.outputs + column;
  for (int64_t left = a.rows; left > 0;) {
    const int64_t blocks = (left + 8) / 9, rows = (left + blocks - 1) / blocks;
    switch (rows) {
      case 1: Block<1, kVectors>(a, x, matrix, out); break;
      case 2: Block<2, kVectors>(a, x, matrix, out); break;
      case 3: Block<3, kVectors>(a, x, matrix, out); break;
      case 4: Block<4, kVectors>(a, x, matrix, out); break;
      case 5: Block<5, kVectors>(a, x, matrix, out); break;
      case 6: Block<6, kVectors>(a, x, matrix, out); break;
      case 7: Block<7, kVectors>(a, x, matrix, out); break;
      case 8: Block<8, kVectors>(a, x, matrix, out); break;
      default: Block<9, kVectors>(a, x, matrix, out); break;
    }
    x += rows * a.inputs, out += rows * a.outputs, left -= rows;
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

int FewRows(const FewRowsArgs* args, int64_t task, int64_t tasks) {
#ifdef DDTREE_AVX512
  const int64_t items = FewRowsItems(*args), tiles = items / args->batch;
  for (int64_t item = items * task / tasks; item < items * (task + 1) / tasks; ++item) {
    const int64_t batch = item / tiles, end = std::min(args->outputs, (item % tiles + 1) * kFewRowsTile);
    int64_t column = item % tiles * kFewRowsTile;
    for (; column + kFewRowsTile <= end; column += kFewRowsTile) Columns<3>(*args, batch, column);
    for (; column < end; column += 16) Columns<1>(*args, batch, column);
  }
  return DDTREE_OK;
#else
  return DDTREE_INVALID_ARGUMENT;
#endif
}

}  // namespace ddtree
