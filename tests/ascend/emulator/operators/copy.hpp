// Copies between tensors: torch_npu's own, apart from what it has kernels of the device for.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace ascend {

// aten::copy_. Between host and device torch_npu copies bytes (aclrtMemcpyAsync); what changes the
// type or the layout on the device, or copies within it, is the CPU's copy_ over its memory.
class Copy : public c10::OperatorKernel {
 public:
  explicit Copy(const c10::OperatorHandle& op);

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) const;

 private:
  void bytes(const at::Tensor& to, const at::Tensor& from, bool is_non_blocking) const;
  void to_device(const at::Tensor& to, const at::Tensor& from, bool is_non_blocking) const;
  void to_host(const at::Tensor& to, const at::Tensor& from, bool is_non_blocking) const;

  c10::OperatorHandle op_;
  c10::SafeKernelFunction of_torch_npu_;
};

}  // namespace ascend
