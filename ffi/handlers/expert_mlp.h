// x [T, D], expert_ids and expert_weights [T, k], packed weights of E experts -> out [T, D]
#ifndef DDTREE_FFI_HANDLERS_EXPERT_MLP_H_
#define DDTREE_FFI_HANDLERS_EXPERT_MLP_H_

#include <algorithm>

#include "ffi/ddtree.h"
#include "ffi/handlers/handler.h"
#include "ffi/sizes.h"
#include "ffi/xla_cpu/spread.h"

namespace ddtree {

// Both devices have scratch: CUDA's workspace, the CPU's float32 [T, k, D] of what each choice gives.
template <typename Device>
ffi::Error ExpertMlp(Device device, FloatBuffer<2> x, In<ffi::S32, 2> expert_ids, In<ffi::F32, 2> expert_weights,
                     In<ffi::S32, 3> gate_up, In<ffi::BF16, 3> gate_up_scale, In<ffi::S32, 3> down,
                     In<ffi::BF16, 3> down_scale, FloatOut<2> out, Scratch scratch) {
  const int64_t tokens = x.dimensions()[0], hidden = x.dimensions()[1], top_k = expert_ids.dimensions()[1];
  const int64_t experts = down.dimensions()[0], inner = Product({down.dimensions()[2]}, 8).value_or(-1);
  Checker check("ddtree_expert_mlp");
  check.Shape("out", *out, {tokens, hidden})
      .Require(out->element_type() == x.element_type(), "out has the wrong dtype")
      .Shape("expert_ids", expert_ids, {tokens, top_k})
      .Shape("expert_weights", expert_weights, {tokens, top_k})
      .Shape("gate_up", gate_up, {experts, Product({inner}, 2).value_or(-1), hidden / 8})
      .Shape("gate_up_scale", gate_up_scale, {experts, Product({inner}, 2).value_or(-1), hidden / 32})
      .Shape("down", down, {experts, hidden, inner / 8})
      .Shape("down_scale", down_scale, {experts, hidden, inner / 32});
  if constexpr (!Device::kIsCuda) {
    check.Shape("partial", *scratch, {Product({tokens, top_k, hidden}, sizeof(float)).value_or(-1)});
  }
  if (!check.ok()) return check.error();
  ddtree_expert_mlp_args args{};
  args.x = x.untyped_data();
  args.expert_ids = expert_ids.typed_data();
  args.expert_weights = expert_weights.typed_data();
  args.gate_up = gate_up.typed_data();
  args.gate_up_scale = gate_up_scale.typed_data();
  args.down = down.typed_data();
  args.down_scale = down_scale.typed_data();
  args.out = out->untyped_data();
  args.tokens = tokens;
  args.top_k = top_k;
  args.experts = experts;
  args.hidden = hidden;
  args.inner = inner;
  args.dtype = Tag(x.element_type());
  if constexpr (Device::kIsCuda) {
    SetWorkspace(scratch, &args);
    return Status(ddtree_expert_mlp_cuda(&args, device.stream));
  } else {
    args.partial = static_cast<float*>(scratch->untyped_data());
    const int64_t pairs = tokens * top_k;
    ffi::Error error =
        Spread(args, ddtree_expert_mlp_cpu, 3.0 * pairs * hidden * inner, std::min(experts, pairs));
    return error.failure() ? error : Status(ddtree_expert_mlp_sum_cpu(&args));
  }
}

}  // namespace ddtree

#endif  // DDTREE_FFI_HANDLERS_EXPERT_MLP_H_
