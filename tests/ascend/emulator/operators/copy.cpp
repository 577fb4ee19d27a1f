#include "copy.hpp"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "queue.hpp"
#include "tensors.hpp"

namespace ascend {
namespace {

constexpr c10::DispatchKeySet kNpu{c10::DispatchKey::PrivateUse1};

// Whether it is one piece of bytes in both.
bool is_plain(const at::Tensor& to, const at::Tensor& from) {
  return to.scalar_type() == from.scalar_type() && to.sizes() == from.sizes() &&
         to.is_contiguous() && from.is_contiguous() && !from.is_conj() && !from.is_neg();
}

void within_device(const at::Tensor& to, const at::Tensor& from) {
  const c10::DeviceGuard guard(to.device());
  enqueue("aten::copy_",
          [to = host_view(to), from = host_view(from)] { to.copy_(from); });
}

}  // namespace

Copy::Copy(const c10::OperatorHandle& op)
    : op_(op), of_torch_npu_(op.getComputedKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {}

void Copy::operator()(const c10::OperatorHandle&, c10::DispatchKeySet, c10::Stack* stack) const {
  const bool is_non_blocking = torch::jit::pop(*stack).toBool();
  const at::Tensor from = torch::jit::pop(*stack).toTensor();
  const at::Tensor to = torch::jit::pop(*stack).toTensor();
  if (to.device() == from.device()) {
    within_device(to, from);
  } else if (is_on_npu(to)) {
    to_device(to, from, is_non_blocking);
  } else {
    to_host(to, from, is_non_blocking);
  }
  stack->emplace_back(to);
}

void Copy::bytes(const at::Tensor& to, const at::Tensor& from, bool is_non_blocking) const {
  c10::Stack stack{to, from, is_non_blocking};
  of_torch_npu_.callBoxed(op_, kNpu, &stack);
}

void Copy::to_device(const at::Tensor& to, const at::Tensor& from, bool is_non_blocking) const {
  if (is_plain(to, from)) return bytes(to, from, is_non_blocking);
  const at::Tensor plain = from.resolve_conj().resolve_neg().contiguous();
  const at::Tensor there = at::empty(plain.sizes(), plain.options().device(to.device()));
  bytes(there, plain, is_non_blocking);
  within_device(to, there);
}

void Copy::to_host(const at::Tensor& to, const at::Tensor& from, bool is_non_blocking) const {
  if (is_plain(to, from)) return bytes(to, from, is_non_blocking);
  const at::Tensor plain = from.contiguous();
  const at::Tensor here = at::empty(plain.sizes(), plain.options().device(at::kCPU));
  bytes(here, plain, false);
  to.copy_(here);
}

}  // namespace ascend
