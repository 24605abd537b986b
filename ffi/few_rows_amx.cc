// The product of a few rows of float32 with a matrix of bfloat16 by AMX, which multiplies tiles of bfloat16 and adds in
// float32.
//
// A float32 is the sum of three bfloat16 exactly: its significand's upper, middle and lower eight bits. The products of
// the three parts have sums of their own, added at the end, so that they are the rows of one product three times as
// high: up to five rows of x, fifteen of parts, are one tile and cost no more than one row. Each sum takes 16 pairs of
// inputs at a time, within which even and odd inputs are summed apart. That order is the same wherever a row stands, so
// that its result depends neither on the other rows nor on the number of tasks.
//
// AMX takes subnormal numbers for zero, whatever the thread's mode, and makes zero of subnormal sums: a part below 2^-126
// is lost, that is the lowest eight bits of an x below 2^-110, the lowest sixteen below 2^-118. What is lost of x @ matrix
// is less than 2^-123 (|x| + |matrix| + 1) an input.
#include <algorithm>

#include "ffi/cpu/kernels.h"

// GCC has the intrinsics since 11, Clang since 12.
#if defined(__x86_64__) && defined(__linux__) && \
    (defined(__clang__) ? __clang_major__ >= 12 : defined(__GNUC__) && __GNUC__ >= 11)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#define DDTREE_AMX __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw")))
#endif

namespace ddtree {
namespace {

constexpr int64_t kTileRows = 16, kTileInputs = 32;      // a tile: rows of 64 bytes
constexpr int64_t kTileNumbers = kTileRows * kTileInputs;  // of bfloat16
constexpr int64_t kChunk = 16;                           // rows whose parts are whole tiles together

int64_t Steps(int64_t inputs) { return (inputs + kTileInputs - 1) / kTileInputs; }
int64_t PartTiles(int64_t rows) { return (3 * rows + kTileRows - 1) / kTileRows; }

}  // namespace

int64_t FewRowsParts(int64_t batch, int64_t rows, int64_t inputs) {
  return batch * PartTiles(rows) * Steps(inputs) * kTileNumbers;
}

#ifndef DDTREE_AMX

bool HasFewRowsAmx() { return false; }
void SplitFewRows(const FewRowsArgs&) {}
int64_t FewRowsAmxItems(const FewRowsArgs&) { return 0; }
void FewRowsAmx(const FewRowsArgs&, int64_t, int64_t) {}

#else

namespace {

constexpr int64_t kBlock = 64;       // inputs that a tile of sums takes between a load and a store
constexpr int64_t kColumns = 32;     // columns of a matrix that fill a cache line, and two tiles
constexpr int64_t kWidest = 128;     // columns of a work item
constexpr int64_t kMostRows = 3 * kChunk;  // rows that share the matrix's way through the registers
constexpr int64_t kMostTiles = 3 * kMostRows / kTileRows;

int64_t Width(int64_t outputs) { return outputs >= 512 ? kWidest : 64; }

bool Permitted() {
  const char* wanted = std::getenv("DDTREE_CPU_AMX");
  if (wanted != nullptr && wanted[0] == '0') return false;
  if (!__builtin_cpu_supports("avx512bw")) return false;
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 22 & 1) == 0 || (d >> 24 & 1) == 0) return false;
  __asm__("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
  if ((a >> 17 & 3) != 3) return false;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // <asm/prctl.h> of Linux 5.16
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Rows of the matrix that come next, which are fetched while others are worked on: a column is no stream to hardware.
struct Ahead {
  const uint16_t* row;
  int64_t rows, stride, lines, line;
};

DDTREE_AMX inline void Fetch(Ahead& ahead) {
  if (ahead.rows == 0) return;
  _mm_prefetch(ahead.row + kColumns * ahead.line, _MM_HINT_T0);
  if (++ahead.line == ahead.lines) ahead.line = 0, ahead.row += ahead.stride, --ahead.rows;
}

// 32 inputs of 32 columns as two tiles of pairs of inputs: columns 0 to 3, 8 to 11, 16 to 19, 24 to 27, and the others.
template <bool kWhole>
DDTREE_AMX inline void Interleave(const uint16_t* matrix, int64_t stride, int64_t inputs, int64_t columns,
                                  uint16_t* tiles, Ahead& ahead) {
  const __mmask32 mask = columns >= 32 ? 0xffffffffu : (1u << columns) - 1;
  for (int64_t pair = 0; pair < kTileRows; ++pair, matrix += 2 * stride) {
    __m512i even, odd;
    if (kWhole) {
      even = _mm512_loadu_si512(matrix), odd = _mm512_loadu_si512(matrix + stride);
    } else {
      even = _mm512_maskz_loadu_epi16(2 * pair < inputs ? mask : 0, matrix);
      odd = _mm512_maskz_loadu_epi16(2 * pair + 1 < inputs ? mask : 0, matrix + stride);
    }
    Fetch(ahead), Fetch(ahead);
    _mm512_store_si512(tiles + kTileInputs * pair, _mm512_unpacklo_epi16(even, odd));
    _mm512_store_si512(tiles + kTileNumbers + kTileInputs * pair, _mm512_unpackhi_epi16(even, odd));
  }
}

// Adds the products of one or two tiles of parts and the two of the matrix to four or two tiles of sums, for `steps`
// tiles of inputs. Sums: [2 of the matrix][`tiles` of parts].
template <int kParts>
DDTREE_AMX inline void Multiply(const uint16_t* parts, int64_t tiles, const uint16_t* matrix, int64_t steps, bool first,
                                float* sums) {
  float *low = sums, *high = sums + tiles * 256;
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    if (kParts == 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, low, 64);
    _tile_loadd(1, high, 64);
    if (kParts == 2) {
      _tile_loadd(2, low + 256, 64);
      _tile_loadd(3, high + 256, 64);
    }
  }
  for (int64_t step = 0; step < steps; ++step, parts += tiles * kTileNumbers, matrix += 2 * kTileNumbers) {
    _tile_loadd(4, parts, 64);
    _tile_loadd(6, matrix, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, matrix + kTileNumbers, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (kParts == 2) {
      _tile_loadd(5, parts + kTileNumbers, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, low, 64);
  _tile_stored(1, high, 64);
  if (kParts == 2) {
    _tile_stored(2, low + 256, 64);
    _tile_stored(3, high + 256, 64);
  }
}

// The three sums of `rows` rows as one, 32 columns or 16 of them. What is infinite or no number is so by the upper part.
DDTREE_AMX void Add(const float* sums, int64_t tiles, int64_t rows, int64_t columns, int64_t stride, float* out) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int64_t row = 0; row < rows; ++row, out += stride) {
    __m512 halves[2];
    for (int half = 0; half < 2; ++half) {
      const float* own = sums + half * tiles * 256 + 16 * row;
      const __m512 upper = _mm512_load_ps(own), middle = _mm512_load_ps(own + 16 * rows);
      const __m512 lower = _mm512_load_ps(own + 32 * rows);
      const __mmask16 finite =
          _mm512_cmp_ps_mask(_mm512_abs_ps(upper), _mm512_set1_ps(__builtin_inff()), _CMP_LT_OQ);
      halves[half] = _mm512_mask_add_ps(upper, finite, upper, _mm512_add_ps(middle, lower));
    }
    _mm512_storeu_ps(out, _mm512_permutex2var_ps(halves[0], first, halves[1]));
    if (columns >= 32) _mm512_storeu_ps(out + 16, _mm512_permutex2var_ps(halves[0], second, halves[1]));
  }
}

// One work item: `width` columns from `column` on, kMostRows rows at a time.
DDTREE_AMX void Panel(const FewRowsArgs& a, int64_t batch, int64_t column, int64_t width, const uint16_t* next) {
  alignas(64) uint16_t tiles[2 * kBlock / kTileInputs * kTileNumbers];
  alignas(64) float sums[kWidest / kTileRows * kMostTiles * 256];
  const int64_t steps = Steps(a.inputs), lines = (width + kColumns - 1) / kColumns;
  const uint16_t* matrix = a.bfloat_matrix + batch * a.inputs * a.outputs + column;
  for (int64_t row = 0; row < a.rows; row += kMostRows) {
    const int64_t rows = std::min(kMostRows, a.rows - row), part_tiles = PartTiles(rows);
    const uint16_t* parts = a.parts + (batch * PartTiles(a.rows) + row / kChunk * 3) * steps * kTileNumbers;
    for (int64_t input = 0; input < a.inputs; input += kBlock) {
      const int64_t inputs = std::min(kBlock, a.inputs - input), block_steps = Steps(inputs);
      const bool last = input + kBlock >= a.inputs;
      Ahead ahead{last ? next : matrix + (input + kBlock) * a.outputs,
                  last ? (next == nullptr ? 0 : std::min(kBlock, a.inputs)) : std::min(kBlock, a.inputs - input - kBlock),
                  a.outputs, lines, 0};
      for (int64_t at = 0; at < width; at += kColumns) {
        const int64_t columns = std::min(kColumns, width - at);
        for (int64_t step = 0; step < block_steps; ++step) {
          const int64_t left = inputs - step * kTileInputs;
          const uint16_t* from = matrix + (input + step * kTileInputs) * a.outputs + at;
          uint16_t* to = tiles + 2 * step * kTileNumbers;
          if (columns == kColumns && left >= kTileInputs) {
            Interleave<true>(from, a.outputs, left, columns, to, ahead);
          } else {
            Interleave<false>(from, a.outputs, left, columns, to, ahead);
          }
        }
        __asm__ volatile("" ::: "memory");  // GCC does not know that the tiles' loads read what was stored
        for (int64_t chunk = 0; chunk < rows; chunk += kChunk) {
          const int64_t chunk_rows = std::min(kChunk, rows - chunk), own_tiles = PartTiles(chunk_rows);
          const uint16_t* own = parts + chunk / kChunk * 3 * steps * kTileNumbers +
                                input / kTileInputs * own_tiles * kTileNumbers;
          float* own_sums = sums + (at / kColumns * part_tiles + chunk / kChunk * 3) * 2 * 256;
          int64_t tile = 0;
          for (; tile + 2 <= own_tiles; tile += 2) {
            Multiply<2>(own + tile * kTileNumbers, own_tiles, tiles, block_steps, input == 0, own_sums + tile * 256);
          }
          if (tile < own_tiles) {
            Multiply<1>(own + tile * kTileNumbers, own_tiles, tiles, block_steps, input == 0, own_sums + tile * 256);
          }
        }
      }
    }
    __asm__ volatile("" ::: "memory");
    for (int64_t at = 0; at < width; at += kColumns) {
      for (int64_t chunk = 0; chunk < rows; chunk += kChunk) {
        const int64_t chunk_rows = std::min(kChunk, rows - chunk);
        Add(sums + (at / kColumns * part_tiles + chunk / kChunk * 3) * 2 * 256, PartTiles(chunk_rows), chunk_rows,
            std::min(kColumns, width - at), a.outputs,
            a.out + (batch * a.rows + row + chunk) * a.outputs + column + at);
      }
    }
  }
}

}  // namespace

bool HasFewRowsAmx() {
  static const bool permitted = Permitted();
  return permitted;
}

// Parts: [batch][chunk of rows][32 inputs][tile of parts][16][32], a chunk's upper parts first, then its middle ones.
DDTREE_AMX void SplitFewRows(const FewRowsArgs& a) {
  const int64_t steps = Steps(a.inputs);
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u)), quiet = _mm512_set1_epi32(0x00400000);
  const __m512 infinity = _mm512_set1_ps(__builtin_inff());
  uint16_t* parts = a.parts;
  for (int64_t batch = 0; batch < a.batch; ++batch) {
    for (int64_t chunk = 0; chunk < a.rows; chunk += kChunk) {
      const int64_t rows = std::min(kChunk, a.rows - chunk), tiles = PartTiles(rows);
      for (int64_t row = 0; row < rows; ++row) {
        const float* x = a.x + (batch * a.rows + chunk + row) * a.inputs;
        uint16_t* out = parts + row * kTileInputs;
        for (int64_t input = 0; input < a.inputs; input += 16) {
          const __mmask16 mask = a.inputs - input >= 16 ? 0xffff : (1u << (a.inputs - input)) - 1;
          const __m512 whole = _mm512_maskz_loadu_ps(mask, x + input);
          const __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(whole), infinity, _CMP_LT_OQ);
          const __mmask16 none = _mm512_cmp_ps_mask(whole, whole, _CMP_UNORD_Q);
          // Cut, not rounded: what is left is exact, and no number becomes infinite. NaN stays NaN.
          __m512i bits = _mm512_and_si512(_mm512_castps_si512(whole), upper);
          bits = _mm512_mask_or_epi32(bits, none, bits, quiet);
          const __m512 rest = _mm512_maskz_sub_ps(finite, whole, _mm512_castsi512_ps(bits));
          const __m512i middle = _mm512_and_si512(_mm512_castps_si512(rest), upper);
          const __m512 least = _mm512_sub_ps(rest, _mm512_castsi512_ps(middle));
          uint16_t* to = out + input / kTileInputs * tiles * kTileNumbers + input % kTileInputs;
          const __m512i all[3] = {bits, middle, _mm512_castps_si512(least)};
          for (int part = 0; part < 3; ++part) {
            _mm512_mask_cvtepi32_storeu_epi16(to + part * rows * kTileInputs, 0xffff,
                                              _mm512_maskz_srli_epi32(0xffff, all[part], 16));
          }
        }
        if ((a.inputs + 15) / 16 % 2 == 1) {  // the other half of the last 32 inputs
          uint16_t* to = out + (steps - 1) * tiles * kTileNumbers + 16;
          for (int part = 0; part < 3; ++part) std::fill_n(to + part * rows * kTileInputs, 16, 0);
        }
      }
      for (int64_t step = 0; step < steps; ++step, parts += tiles * kTileNumbers) {
        std::fill(parts + 3 * rows * kTileInputs, parts + tiles * kTileNumbers, 0);
      }
    }
  }
}

int64_t FewRowsAmxItems(const FewRowsArgs& a) {
  const int64_t width = Width(a.outputs);
  return a.batch * ((a.outputs + width - 1) / width);
}

DDTREE_AMX void FewRowsAmx(const FewRowsArgs& a, int64_t begin, int64_t end) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  const int64_t width = Width(a.outputs), panels = (a.outputs + width - 1) / width;
  const auto matrix = [&](int64_t item) {
    return a.bfloat_matrix + item / panels * a.inputs * a.outputs + item % panels * width;
  };
  _tile_loadconfig(&config);
  const uint16_t* first = matrix(begin);
  for (int64_t input = 0; input < std::min(kBlock, a.inputs); ++input, first += a.outputs) {
    for (int64_t at = 0; at < width; at += kColumns) _mm_prefetch(first + at, _MM_HINT_T0);
  }
  for (int64_t item = begin; item < end; ++item) {
    const int64_t column = item % panels * width;
    Panel(a, item / panels, column, std::min(width, a.outputs - column), item + 1 < end ? matrix(item + 1) : nullptr);
  }
  _tile_release();
}

#endif

}  // namespace ddtree
