// Clusters of blocks: their barrier, and stores to the first block's shared memory (PTX ISA 8.1, sm_90).
#ifndef DDTREE_FFI_CUDA_CLUSTER_H_
#define DDTREE_FFI_CUDA_CLUSTER_H_

#include <stdint.h>

#include "ffi/cuda/ptx.h"

namespace ddtree {
namespace cluster {

// Arrives at the cluster's barrier, all threads of a warp at once. Orders nothing beyond what fences before it do: the
// ordering form waits for all of the thread's memory, loads that were just asked for included.
__device__ __forceinline__ void arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }

__device__ __forceinline__ void wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Waits for the first phase of a barrier whose bytes other blocks send.
__device__ __forceinline__ void wait_for_bytes(uint64_t* barrier) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(barrier))
      : "memory");
}

// Where the first block has the variable that lies at `pointer` in this one.
__device__ __forceinline__ uint32_t in_first_block(const void* pointer) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(address) : "r"(shared_address(pointer)));
  return address;
}

// Stores to the first block's variable, whose barrier counts the bytes when they have come.
__device__ __forceinline__ void send(uint32_t* to, uint32_t x, uint64_t* barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(in_first_block(to)),
               "r"(x), "r"(in_first_block(barrier))
               : "memory");
}

__device__ __forceinline__ void send(void* to, float x, float y, uint64_t* barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
                   in_first_block(to)),
               "f"(x), "f"(y), "r"(in_first_block(barrier))
               : "memory");
}

}  // namespace cluster
}  // namespace ddtree

#endif  // DDTREE_FFI_CUDA_CLUSTER_H_
