// What a handler is made of: XLA's buffers in, one call of the C ABI.
//
// A handler is one function template over the device, and its parameters are the binding: typed and ranked buffers,
// named attributes, and the device's own context. Both devices instantiate the same function.
//
// Shapes and dtypes are checked in Python when a program is traced. That they fit each other is checked here again,
// because a custom call can be made without that Python. Whether a kernel serves the sizes is left to the C ABI. What
// depends on the data is never an error: a failed call would already have consumed the buffers donated to it.
#ifndef DDTREE_FFI_HANDLERS_HANDLER_H_
#define DDTREE_FFI_HANDLERS_HANDLER_H_

#include <initializer_list>
#include <optional>
#include <string>
#include <utility>

#include "ffi/ddtree.h"
#include "xla/ffi/api/ffi.h"

static_assert(XLA_FFI_API_MAJOR == 0, "these handlers are written against XLA's FFI API 0.x");

namespace ddtree {

namespace ffi = ::xla::ffi;

// A buffer of one of several dtypes, as ffi::Buffer is of one.
template <size_t rank, ffi::DataType... dtypes>
class BufferOf : public ffi::AnyBuffer {
 public:
  using ffi::AnyBuffer::AnyBuffer;

  static std::optional<BufferOf> Decode(XLA_FFI_Buffer* buffer, ffi::DiagnosticEngine& diagnostic) {
    const auto dtype = static_cast<ffi::DataType>(buffer->dtype);
    if (((dtype != dtypes) && ...)) {
      auto message = diagnostic.Emit("Wrong buffer dtype: expected one of");
      ((message << " " << dtypes), ...);
      return message << " but got " << dtype;
    }
    if (buffer->rank != rank) {
      return diagnostic.Emit("Wrong buffer rank: expected ") << rank << " but got " << buffer->rank;
    }
    return BufferOf(buffer);
  }
};

// What kernels compute in.
template <size_t rank>
using FloatBuffer = BufferOf<rank, ffi::F32, ffi::BF16>;
// What caches hold.
template <size_t rank>
using CacheBuffer = BufferOf<rank, ffi::F32, ffi::BF16, ffi::F8E4M3FN>;

template <ffi::DataType dtype, size_t rank>
using In = ffi::Buffer<dtype, rank>;
template <ffi::DataType dtype, size_t rank>
using Out = ffi::ResultBuffer<dtype, rank>;
template <size_t rank>
using FloatOut = ffi::Result<FloatBuffer<rank>>;
template <size_t rank>
using CacheOut = ffi::Result<CacheBuffer<rank>>;
// Memory of XLA's that a kernel uses while it runs: a result that the lowering adds.
using Scratch = Out<ffi::U8, 1>;

// Where a handler runs. `Workspace` is the scratch of the kernels that want some on CUDA alone.
struct Cpu {
  static constexpr bool kIsCuda = false;
  struct Workspace {};
};
struct Cuda {
  static constexpr bool kIsCuda = true;
  using Workspace = Scratch;
  void* stream;
};

template <typename Args>
void SetWorkspace(Cpu::Workspace, Args*) {}
template <typename Args>
void SetWorkspace(Scratch workspace, Args* args) {
  args->workspace = workspace->untyped_data();
  args->workspace_bytes = workspace->size_bytes();
}

inline ffi::Error Status(int status) {
  if (status == DDTREE_OK) return ffi::Error::Success();
  return status == DDTREE_INVALID_ARGUMENT ? ffi::Error::InvalidArgument(ddtree_error_string(status))
                                           : ffi::Error::Internal(ddtree_error_string(status));
}

// The tag of a dtype that some buffer above may have.
inline int32_t Tag(ffi::DataType dtype) {
  return dtype == ffi::F32 ? DDTREE_F32 : dtype == ffi::BF16 ? DDTREE_BF16 : DDTREE_E4M3;
}

// Collects the first thing that is wrong with how a call's buffers fit each other.
class Checker {
 public:
  explicit Checker(const char* call) : call_(call) {}

  template <typename Buffer>
  Checker& Shape(const char* name, const Buffer& buffer, std::initializer_list<int64_t> shape) {
    const auto dims = buffer.dimensions();
    bool same = dims.size() == shape.size();
    for (size_t i = 0; same && i < shape.size(); ++i) same = dims[i] == shape.begin()[i];
    return Require(same, std::string(name) + " has the wrong shape");
  }

  // A cache beside elements of dtype `like`: the same dtype, or float8_e4m3fn with a scale for each layer or none.
  Checker& Cache(const CacheBuffer<4>& cache, ffi::DataType like, const In<ffi::F32, 1>& scale) {
    const bool e4m3 = cache.element_type() == ffi::F8E4M3FN, given = scale.element_count() > 0;
    return Require(e4m3 || cache.element_type() == like, "cache has the wrong dtype")
        .Require(e4m3 || !given, "cache_scale is for a float8_e4m3fn cache")
        .Shape("cache_scale", scale, {given ? cache.dimensions()[0] : 0});
  }

  Checker& Require(bool ok, std::string what) {
    if (!ok && message_.empty()) message_ = std::move(what);
    return *this;
  }

  bool ok() const { return message_.empty(); }
  ffi::Error error() const { return ffi::Error::InvalidArgument(std::string(call_) + ": " + message_); }

 private:
  const char* call_;
  std::string message_;
};

// The scale of a cache's layers; an array without elements stands for 1.
inline const float* ScaleOf(const In<ffi::F32, 1>& scale) {
  return scale.element_count() > 0 ? scale.typed_data() : nullptr;
}

// A handler as XLA calls it.
template <auto handler, ffi::Traits... traits>
XLA_FFI_Error* Entry(XLA_FFI_CallFrame* frame) {
  static auto* bound = ffi::Ffi::BindTo(handler, {traits...}).release();
  return bound->Call(frame);
}

}  // namespace ddtree

// How XLA binds the types above.
namespace xla::ffi {

template <size_t rank, DataType... dtypes>
struct ArgBinding<ddtree::BufferOf<rank, dtypes...>> {
  using Arg = ddtree::BufferOf<rank, dtypes...>;
};

template <size_t rank, DataType... dtypes>
struct RetBinding<Result<ddtree::BufferOf<rank, dtypes...>>> {
  using Ret = ddtree::BufferOf<rank, dtypes...>;
};

template <size_t rank, DataType... dtypes>
struct ArgDecoding<ddtree::BufferOf<rank, dtypes...>> {
  static std::optional<ddtree::BufferOf<rank, dtypes...>> Decode(XLA_FFI_ArgType, void* arg,
                                                                 DiagnosticEngine& diagnostic) {
    return ddtree::BufferOf<rank, dtypes...>::Decode(static_cast<XLA_FFI_Buffer*>(arg), diagnostic);
  }
};

template <size_t rank, DataType... dtypes>
struct RetDecoding<ddtree::BufferOf<rank, dtypes...>> {
  static std::optional<Result<ddtree::BufferOf<rank, dtypes...>>> Decode(XLA_FFI_RetType, void* ret,
                                                                         DiagnosticEngine& diagnostic) {
    return ddtree::BufferOf<rank, dtypes...>::Decode(static_cast<XLA_FFI_Buffer*>(ret), diagnostic);
  }
};

template <>
struct CtxBinding<ddtree::Cpu> {
  using Ctx = ddtree::Cpu;
};
template <>
struct CtxBinding<ddtree::Cpu::Workspace> {
  using Ctx = ddtree::Cpu::Workspace;
};
template <>
struct CtxBinding<ddtree::Cuda> {
  using Ctx = ddtree::Cuda;
};

template <>
struct CtxDecoding<ddtree::Cpu> {
  using Type = ddtree::Cpu;
  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*, DiagnosticEngine&) {
    return Type{};
  }
};
template <>
struct CtxDecoding<ddtree::Cpu::Workspace> {
  using Type = ddtree::Cpu::Workspace;
  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*, DiagnosticEngine&) {
    return Type{};
  }
};
template <>
struct CtxDecoding<ddtree::Cuda> {
  using Type = ddtree::Cuda;
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context,
                                    DiagnosticEngine& diagnostic) {
    const auto stream = CtxDecoding<PlatformStream<void*>>::Decode(api, context, diagnostic);
    if (!stream) return std::nullopt;
    return Type{*stream};
  }
};

}  // namespace xla::ffi

#endif  // DDTREE_FFI_HANDLERS_HANDLER_H_
