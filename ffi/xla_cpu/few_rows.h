// The matmul of a few rows with a matrix: with the processor's own vectors, or by AMX.
#ifndef DDTREE_FFI_XLA_CPU_FEW_ROWS_H_
#define DDTREE_FFI_XLA_CPU_FEW_ROWS_H_

#include <cstdint>

namespace ddtree {

// out[b] = x[b] @ matrix[b]; see few_rows.cc. Outputs are a multiple of 16.
struct FewRowsArgs {
  const float* x;                 // [batch, rows, inputs]
  const float* matrix;            // [batch, inputs, outputs]; null if it is bfloat16
  const uint16_t* bfloat_matrix;  // the same in bfloat16
  float* out;                     // [batch, rows, outputs]
  int64_t batch, rows, inputs, outputs;
  uint64_t amx;  // 0, or a number that is this call's alone: multiply by AMX, see few_rows_amx.cc
};
bool HasFewRows();  // whether this processor can run FewRows
int64_t FewRowsItems(const FewRowsArgs& args);
int FewRows(const FewRowsArgs* args, int64_t task, int64_t tasks);

bool HasFewRowsAmx();
int64_t FewRowsAmxItems(const FewRowsArgs& args);
void FewRowsAmx(const FewRowsArgs& args, int64_t begin, int64_t end);  // work items

}  // namespace ddtree

#endif  // DDTREE_FFI_XLA_CPU_FEW_ROWS_H_
