#include "tensors.hpp"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

namespace ascend {
namespace {

at::Tensor keep_number(const at::Tensor& made, const at::Tensor& from) {
  // A number in the guise of a tensor does not take part in type promotion.
  if (from.unsafeGetTensorImpl()->is_wrapped_number())
    made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

}  // namespace

bool is_on_npu(const at::Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

at::Tensor host_view(const at::Tensor& tensor) {
  if (!is_on_npu(tensor)) return tensor;
  const auto options = tensor.options().device(at::kCPU).pinned_memory(false);
  void* address = tensor.numel() == 0 ? nullptr : tensor.data_ptr();
  const at::Tensor view = at::from_blob(address, tensor.sizes(), tensor.strides(), options);
  view.unsafeGetTensorImpl()->_set_conj(tensor.is_conj());
  view.unsafeGetTensorImpl()->_set_neg(tensor.is_neg());
  return keep_number(view, tensor);
}

at::Tensor own_copy(const at::Tensor& tensor) {
  return tensor.is_cpu() ? keep_number(tensor.clone(), tensor) : tensor;
}

at::Tensor without_memory(const at::Tensor& tensor) {
  // Kernels for "meta" that are written in Python take a number as one of the host.
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return host_view(tensor);
  const auto options = tensor.options().device(at::kMeta).pinned_memory(false);
  return keep_number(at::empty_strided(tensor.sizes(), tensor.strides(), options), tensor);
}

at::Tensor like_on_npu(const at::Tensor& shape, c10::Device device) {
  return at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(device));
}

c10::IValue changed(const c10::IValue& value, const Change& change) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    return tensor.defined() ? c10::IValue(change(tensor)) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector())
      list.push_back(tensor.defined() ? change(tensor) : tensor);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor && tensor->defined() ? std::optional(change(*tensor)) : tensor);
    return list;
  }
  return value;
}

void each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& call) {
  changed(value, [&](const at::Tensor& tensor) {
    call(tensor);
    return tensor;
  });
}

}  // namespace ascend
