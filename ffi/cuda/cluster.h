// Clusters of blocks: their barrier, and the shared memory of their other blocks (PTX ISA 8.1, sm_90).
#ifndef DDTREE_FFI_CUDA_CLUSTER_H_
#define DDTREE_FFI_CUDA_CLUSTER_H_

#include <stdint.h>

#include "ffi/cuda/ptx.h"

namespace ddtree {
namespace cluster {

// Blocks of this block's cluster.
__device__ __forceinline__ int size() {
  uint32_t blocks;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return static_cast<int>(blocks);
}

// A barrier of all threads of a cluster that have not ended, all threads of a warp at once: what they wrote before they
// arrived is seen by those that have waited.
__device__ __forceinline__ void arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }

// Where nothing need be seen beyond what fences before it order: the ordering form waits for all of the thread's
// memory, loads that were just asked for included.
__device__ __forceinline__ void arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

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

// Where block `rank` of the cluster has what lies at `address` here.
__device__ __forceinline__ uint32_t address_in(uint32_t address, int rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

__device__ __forceinline__ uint32_t in_first_block(const void* pointer) {
  return address_in(shared_address(pointer), 0);
}

// Reads the shared memory of a block of the cluster.
__device__ __forceinline__ uint4 load(uint32_t address) {
  uint4 x;
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
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
