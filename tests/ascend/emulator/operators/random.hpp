// Random numbers by the state of torch_npu's generators: the same seed and offset, the same numbers.
#pragma once

#include <ATen/core/Generator.h>

#include <optional>

namespace ascend {

// A generator of the CPU for one operator. It takes its place in the sequence of the given
// generator of the NPU, or of the default one of the device.
at::Generator host_generator(const std::optional<at::Generator>& given, c10::DeviceIndex device);

}  // namespace ascend
