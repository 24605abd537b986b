// The kernels of verify_attn for Hopper, each of which has a source of its own.
#ifndef DDTREE_FFI_CUDA_VERIFY_ATTN_HOPPER_H_
#define DDTREE_FFI_CUDA_VERIFY_ATTN_HOPPER_H_

#include <cuda_runtime.h>
#include <stdint.h>

#include "ffi/cuda/verify_attn/problem.h"

namespace ddtree {

// The sm_90a kernels, hopper.cu and hopper_few.cu; `p.step_rows` must be kHopperStep. With a `size` they run in
// clusters of so many blocks for each tile, and are done with it (cluster.h); with 0 in `blocks` blocks, and leave
// splits in float16 to launch_combine.
int attend_hopper(const Problem& p, int blocks, int size, cudaStream_t stream);

// Whether this device runs the kernels' own sm_90a code. If not, since the driver compiled another architecture's PTX,
// they are traps: call nothing else here.
bool hopper_built(int device);

// The size to take, 0 for e4m3. It looks at nothing but shapes, the cache's dtype and the card.
int hopper_cluster(const Problem& p, int device, int sms);

// What attend_hopper calls where a request has at most kFewRows query rows.
int attend_few_hopper(const Problem& p, int blocks, int size, cudaStream_t stream);

}  // namespace ddtree

#endif  // DDTREE_FFI_CUDA_VERIFY_ATTN_HOPPER_H_
