// logits [rows, V] -> log_probs, token_ids [rows, K]
#ifndef DDTREE_FFI_HANDLERS_DRAFT_TOPK_H_
#define DDTREE_FFI_HANDLERS_DRAFT_TOPK_H_

#include "ffi/ddtree.h"
#include "ffi/handlers/handler.h"
#include "ffi/xla_cpu/spread.h"

namespace ddtree {

template <typename Device>
ffi::Error DraftTopk(Device device, FloatBuffer<2> logits, Out<ffi::F32, 2> log_probs, Out<ffi::S32, 2> token_ids,
                     typename Device::Workspace workspace) {
  ddtree_draft_topk_args args{};
  args.rows = logits.dimensions()[0];
  args.vocab = logits.dimensions()[1];
  args.k = log_probs->dimensions()[1];
  Checker check("ddtree_draft_topk");
  check.Shape("log_probs", *log_probs, {args.rows, args.k}).Shape("token_ids", *token_ids, {args.rows, args.k});
  if (!check.ok()) return check.error();
  args.dtype = Tag(logits.element_type());
  args.logits = logits.untyped_data();
  args.log_probs = log_probs->typed_data();
  args.token_ids = token_ids->typed_data();
  SetWorkspace(workspace, &args);
  if constexpr (Device::kIsCuda) {
    return Status(ddtree_draft_topk_cuda(&args, device.stream));
  } else {
    // An exponential and the filter take as long as some forty multiply-adds.
    return Spread(args, ddtree_draft_topk_cpu, 40.0 * args.rows * args.vocab, args.rows);
  }
}

}  // namespace ddtree

#endif  // DDTREE_FFI_HANDLERS_DRAFT_TOPK_H_
