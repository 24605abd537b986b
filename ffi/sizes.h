// Products of sizes that a caller gave: every one that could wrap around is formed here.
#ifndef DDTREE_FFI_SIZES_H_
#define DDTREE_FFI_SIZES_H_

#include <stdint.h>

#include <initializer_list>
#include <optional>

namespace ddtree {

inline bool Between(int64_t low, int64_t value, int64_t high) { return low <= value && value <= high; }

// `unit` (1, or the bytes of an element) times all sizes. Nothing where a size is negative, or where int64 does not
// hold the product of those that are not 0: kernels multiply some of the sizes without the others.
inline std::optional<int64_t> Product(std::initializer_list<int64_t> sizes, int64_t unit = 1) {
  int64_t product = unit;
  bool empty = false;
  for (const int64_t size : sizes) {
    if (size < 0 || (size > 0 && __builtin_mul_overflow(product, size, &product))) return std::nullopt;
    empty = empty || size == 0;
  }
  return empty ? 0 : product;
}

// Whether there is such a product, and no size makes it more than `most`.
inline bool ProductWithin(int64_t most, std::initializer_list<int64_t> sizes) {
  const std::optional<int64_t> product = Product(sizes);
  return product && *product <= most;
}

}  // namespace ddtree

#endif  // DDTREE_FFI_SIZES_H_
