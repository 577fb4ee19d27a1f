// Tensors of the device as others see them: on the host over the same memory, or without memory.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <functional>

namespace ascend {

using Change = std::function<at::Tensor(const at::Tensor&)>;

bool is_on_npu(const at::Tensor& tensor);

// The same memory as a tensor of the CPU. It does not keep the memory: as on the device, the
// allocator of torch_npu gives it to others only in the order of streams.
at::Tensor host_view(const at::Tensor& tensor);

// A copy of a tensor of the host; others are given back.
at::Tensor own_copy(const at::Tensor& tensor);

// Its shape, strides and type on the device "meta".
at::Tensor without_memory(const at::Tensor& tensor);

// A new one of the NPU with the shape, strides and type of another.
at::Tensor like_on_npu(const at::Tensor& shape, c10::Device device);

// A copy of an argument or result in which each defined tensor has been changed.
c10::IValue changed(const c10::IValue& value, const Change& change);

// Calls for each defined tensor.
void each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& call);

}  // namespace ascend
