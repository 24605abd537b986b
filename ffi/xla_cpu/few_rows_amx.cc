// The matmul of a few rows of float32 with a matrix of bfloat16 by AMX, which multiplies tiles of bfloat16 and adds in
// float32.
//
// A float32 is the sum of three bfloat16 exactly: its significand's upper, middle and lower eight bits. The parts of
// five rows are a tile of fifteen, which costs hardly more than one row's three.
//
// AMX multiplies pairs of inputs, but the matrix has pairs of columns side by side, and to interleave its rows takes
// longer than a second matmul. So each tile of the matrix, 16 inputs by 32 columns, is multiplied twice, by parts with
// zeros between them, for the even columns and for the odd ones. Should a column's weight be no finite number, zero
// times it makes NaN of the column beside it: where a sum is NaN, it is done again without AMX.
//
// The three parts have sums of their own, added at the end, and each goes over 16 inputs at a time. That order is the
// same wherever a row or a column stands, so that a row's result depends neither on the other rows nor on the number of
// tasks.
//
// AMX takes subnormal numbers for zero, whatever the thread's mode, and makes zero of subnormal sums. So a part below
// 2^-126 is lost, that is the lowest eight bits of an x below 2^-110, the lowest sixteen below 2^-118. What is lost of
// x @ matrix is less than 2^-123 (|x| + |matrix| + 1) an input.
#include <algorithm>

#include "ffi/cpu/kernels.h"
#include "ffi/xla_cpu/few_rows.h"

// GCC has the intrinsics since 11, Clang since 12.
#if defined(__x86_64__) && defined(__linux__) && \
    (defined(__clang__) ? __clang_major__ >= 12 : defined(__GNUC__) && __GNUC__ >= 11)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <vector>
#define DDTREE_AMX __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw")))
#endif

namespace ddtree {

#ifndef DDTREE_AMX

bool HasFewRowsAmx() { return false; }
int64_t FewRowsAmxItems(const FewRowsArgs&) { return 0; }
void FewRowsAmx(const FewRowsArgs&, int64_t, int64_t) {}

#else

namespace {

constexpr int64_t kStep = 16;       // inputs of a tile
constexpr int64_t kChunk = 5;       // rows of x whose parts are a tile
constexpr int64_t kTile = 16 * 16;  // sums of a tile
constexpr int64_t kColumns = 32;    // of a tile of the matrix
constexpr int64_t kPanel = 64;      // columns of a work item, two tiles
constexpr int64_t kMostChunks = 8;  // that share the matrix's way into the first-level cache
constexpr int64_t kBlock = 8;       // steps of each chunk in turn, where there are several
constexpr int64_t kAhead = 5;       // steps between a load of the matrix and its prefetch

bool Permitted() {
  const char* wanted = std::getenv("DDTREE_CPU_AMX");
  if (wanted != nullptr && wanted[0] == '0') return false;
  if (!__builtin_cpu_supports("avx512bw")) return false;
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 22 & 1) == 0 || (d >> 24 & 1) == 0) return false;
  __asm__("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
  if ((a >> 17 & 3) != 3) return false;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // <asm/prctl.h> since Linux 5.16
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

int64_t Steps(int64_t inputs) { return (inputs + kStep - 1) / kStep; }

// Columns of a matrix, and those that come next, or null.
struct Panel {
  const uint16_t *matrix, *next;
  int64_t inputs, stride, columns;
};

// A column is no stream to hardware.
DDTREE_AMX inline void Fetch(const Panel& panel, int64_t step) {
  const int64_t steps = Steps(panel.inputs);
  const uint16_t* matrix = panel.matrix;
  if (step >= steps) matrix = panel.next, step -= steps;
  if (matrix == nullptr || step >= steps) return;
  const int64_t rows = std::min(kStep, panel.inputs - step * kStep);
  matrix += step * kStep * panel.stride;
  for (int64_t row = 0; row < rows; ++row, matrix += panel.stride) {
    _mm_prefetch(matrix, _MM_HINT_T1);
    _mm_prefetch(matrix + kColumns, _MM_HINT_T1);
  }
}

// What a tile would read of a step beyond the matrix, as zeros: 16 inputs of two times 32 columns.
DDTREE_AMX void Pad(const Panel& panel, int64_t step, uint16_t* padded) {
  for (int64_t tile = 0; tile < 2; ++tile) {
    const int64_t columns = std::clamp<int64_t>(panel.columns - tile * kColumns, 0, kColumns);
    const __mmask32 mask = static_cast<__mmask32>((uint64_t{1} << columns) - 1);
    for (int64_t row = 0; row < kStep; ++row, padded += kColumns) {
      const int64_t input = step * kStep + row;
      const __mmask32 own = input < panel.inputs ? mask : 0;
      _mm512_store_si512(padded, _mm512_maskz_loadu_epi16(own, panel.matrix + input * panel.stride + tile * kColumns));
    }
  }
  __asm__ volatile("" ::: "memory");  // GCC does not know that loads of tiles read memory
}

// A chunk's sums over steps [begin, end), of two tiles of the matrix' even and odd columns each.
DDTREE_AMX void Multiply(const Panel& panel, const float* parts, int64_t parts_stride, int64_t begin, int64_t end,
                         bool fetches, float* sums) {
  if (begin == 0) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + kTile, 64);
    _tile_loadd(2, sums + 2 * kTile, 64);
    _tile_loadd(3, sums + 3 * kTile, 64);
  }
  alignas(64) uint16_t padded[2 * kStep * kColumns];
  const int64_t whole = panel.columns == kPanel ? panel.inputs / kStep : 0;  // steps
  parts += begin * parts_stride;
  for (int64_t step = begin; step < end; ++step, parts += parts_stride) {
    const uint16_t* matrix = panel.matrix + step * kStep * panel.stride;
    int64_t stride = panel.stride * 2, other = kColumns;
    if (step >= whole) {
      Pad(panel, step, padded);
      matrix = padded, stride = 2 * kColumns, other = kStep * kColumns;
    }
    if (fetches) Fetch(panel, step + kAhead);
    // A part is the upper half of 32 bits, its partner zero: two bytes on, the pair is the other way round.
    _tile_loadd(4, reinterpret_cast<const char*>(parts) + 2, 64);
    _tile_loadd(5, parts, 64);
    _tile_loadd(6, matrix, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
    _tile_loadd(7, matrix + other, stride);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + kTile, 64);
  _tile_stored(2, sums + 2 * kTile, 64);
  _tile_stored(3, sums + 3 * kTile, 64);
}

// 16 columns of a row without AMX.
DDTREE_AMX __m512 Widened(const float* x, const uint16_t* matrix, int64_t inputs, int64_t stride) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t input = 0; input < inputs; ++input, matrix += stride) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(matrix));
    // Masks that leave all in: GCC warns of what the functions without them leave undefined.
    const __m512i bits = _mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, halves), 16);
    sum = _mm512_fmadd_ps(_mm512_set1_ps(x[input]), _mm512_castsi512_ps(bits), sum);
  }
  return sum;
}

// A chunk's three sums as one, for a panel.
DDTREE_AMX void Add(const Panel& panel, const float* sums, const float* x, int64_t rows, float* out) {
  const __m512i orders[2] = {_mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23),
                             _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)};
  for (int64_t row = 0; row < rows; ++row, x += panel.inputs, out += panel.stride) {
    for (int64_t column = 0; column < panel.columns; column += 16) {
      const float* own = sums + column / kColumns * 2 * kTile + row * 3 * 16;
      __m512 whole[2];
      for (int odd = 0; odd < 2; ++odd, own += kTile) {
        const __m512 lower = _mm512_add_ps(_mm512_load_ps(own + 16), _mm512_load_ps(own + 32));
        whole[odd] = _mm512_add_ps(_mm512_load_ps(own), lower);
      }
      __m512 sum = _mm512_permutex2var_ps(whole[0], orders[column / 16 % 2], whole[1]);
      if (_mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q) != 0) {
        sum = Widened(x, panel.matrix + column, panel.inputs, panel.stride);
      }
      _mm512_storeu_ps(out + column, sum);
    }
  }
}

// The parts of the rows of one of a call's matrices: [steps][rows][3][16]. Every thread makes its own, once, since
// another's would come from another processor's cache.
class Parts {
 public:
  const float* Of(const FewRowsArgs& a, int64_t batch) {
    if (call_ != a.amx || batch_ != batch) {
      // The last chunk's tile, and its even columns', may end behind the last row.
      lines_.resize(Steps(a.inputs) * a.rows * 3 + 3 * kChunk + 1);
      Split(a.x + batch * a.rows * a.inputs, a.rows, a.inputs);
      call_ = a.amx, batch_ = batch;
    }
    return lines_[0].parts;
  }

 private:
  DDTREE_AMX void Split(const float* x, int64_t rows, int64_t inputs) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u)), quiet = _mm512_set1_epi32(0x00400000);
    const __m512 infinity = _mm512_set1_ps(__builtin_inff());
    for (int64_t row = 0; row < rows; ++row, x += inputs) {
      float* parts = lines_[row * 3].parts;
      for (int64_t input = 0; input < inputs; input += kStep, parts += rows * 3 * kStep) {
        const __mmask16 mask = inputs - input >= kStep ? 0xffff : (1u << (inputs - input)) - 1;
        const __m512 whole = _mm512_maskz_loadu_ps(mask, x + input);
        const __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(whole), infinity, _CMP_LT_OQ);
        const __mmask16 none = _mm512_cmp_ps_mask(whole, whole, _CMP_UNORD_Q);
        // Cut, not rounded: what is left is exact, and no number becomes infinite. NaN stays NaN.
        const __m512i cut = _mm512_and_si512(_mm512_castps_si512(whole), upper);
        const __m512 first = _mm512_castsi512_ps(_mm512_mask_or_epi32(cut, none, cut, quiet));
        const __m512 rest = _mm512_maskz_sub_ps(finite, whole, first);
        const __m512 second = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(rest), upper));
        const __m512 third = _mm512_sub_ps(rest, second);
        _mm512_store_ps(parts, first);
        _mm512_store_ps(parts + kStep, second);
        // A subnormal one may have more bits, which AMX would multiply by the column beside.
        _mm512_store_si512(parts + 2 * kStep, _mm512_and_si512(_mm512_castps_si512(third), upper));
      }
    }
    __asm__ volatile("" ::: "memory");
  }

  uint64_t call_ = 0;
  int64_t batch_ = 0;
  struct alignas(64) Line {  // of the first-level cache: tiles come slowly from across two
    float parts[kStep];
  };
  std::vector<Line> lines_;
};

// All rows of a panel.
DDTREE_AMX void Rows(const FewRowsArgs& a, const Panel& panel, const float* parts, int64_t chunk_rows, int64_t batch,
                     int64_t column) {
  alignas(64) float sums[kMostChunks * 4 * kTile];
  const int64_t steps = Steps(a.inputs), parts_stride = a.rows * 3 * kStep;
  const float* x = a.x + batch * a.rows * a.inputs;
  float* out = a.out + batch * a.rows * a.outputs + column;
  for (int64_t first = 0; first < a.rows; first += kMostChunks * chunk_rows) {
    const int64_t end = std::min(a.rows, first + kMostChunks * chunk_rows);
    const int64_t block = end - first > chunk_rows ? kBlock : steps;
    for (int64_t step = 0; step < steps; step += block) {
      for (int64_t row = first; row < end; row += chunk_rows) {
        Multiply(panel, parts + row * 3 * kStep, parts_stride, step, std::min(steps, step + block), row == first,
                 sums + (row - first) / chunk_rows * 4 * kTile);
      }
    }
    __asm__ volatile("" ::: "memory");
    for (int64_t row = first; row < end; row += chunk_rows) {
      Add(panel, sums + (row - first) / chunk_rows * 4 * kTile, x + row * a.inputs, std::min(chunk_rows, end - row),
          out + row * a.outputs);
    }
  }
}

}  // namespace

bool HasFewRowsAmx() {
  static const bool permitted = Permitted();
  return permitted;
}

int64_t FewRowsAmxItems(const FewRowsArgs& a) { return a.batch * ((a.outputs + kPanel - 1) / kPanel); }

DDTREE_AMX void FewRowsAmx(const FewRowsArgs& a, int64_t begin, int64_t end) {
  const int64_t panels = (a.outputs + kPanel - 1) / kPanel;
  const int64_t chunks = (a.rows + kChunk - 1) / kChunk, chunk_rows = (a.rows + chunks - 1) / chunks;
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};
  } config;
  for (int tile = 0; tile < 8; ++tile) config.rows[tile] = tile < 6 ? 3 * chunk_rows : kStep;
  __asm__ volatile("" : : "r"(&config) : "memory");  // GCC takes what is loaded next for eight bytes
  _tile_loadconfig(&config);
  thread_local Parts parts;
  const auto matrix = [&](int64_t item) {
    return a.bfloat_matrix + item / panels * a.inputs * a.outputs + item % panels * kPanel;
  };
  for (int64_t item = begin; item < end; ++item) {
    const int64_t column = item % panels * kPanel;
    const Panel panel{matrix(item), item + 1 < end ? matrix(item + 1) : nullptr, a.inputs, a.outputs,
                      std::min(kPanel, a.outputs - column)};
    if (item == begin) {
      for (int64_t step = 0; step < kAhead; ++step) Fetch(panel, step);
    }
    Rows(a, panel, parts.Of(a, item / panels), chunk_rows, item / panels, column);
  }
  _tile_release();
}

#endif

}  // namespace ddtree
