#include "random.hpp"

#include <ATen/CPUGeneratorImpl.h>

#include "torch_npu/csrc/aten/NPUGeneratorImpl.h"

namespace ascend {
namespace {

// What torch_npu's operators take from the sequence for each of theirs.
constexpr uint64_t kOffsetStep = 10;

// SplitMix64's finalizer: neighbouring offsets give unrelated seeds.
uint64_t scattered(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

}  // namespace

at::Generator host_generator(const std::optional<at::Generator>& given, c10::DeviceIndex device) {
  auto* generator = at::get_generator_or_default<at_npu::NPUGeneratorImpl>(
      given, at_npu::detail::getDefaultNPUGenerator(device));
  const std::lock_guard hold(generator->mutex_);
  const auto [seed, offset] = generator->philox_engine_inputs(kOffsetStep);
  return at::detail::createCPUGenerator(scattered(seed + scattered(offset)));
}

}  // namespace ascend
