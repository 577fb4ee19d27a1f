#include "machine.hpp"

#include <cstdio>
#include <cstdlib>
#include <sstream>

namespace ascend {
namespace {

constexpr size_t kChips = 8;
constexpr size_t kMemoryBytes = size_t{64} << 30;  // of an Ascend 910B

// ASCEND_RT_VISIBLE_DEVICES: "0,2,5" or "1-3"; as in CANN, what follows an invalid one is ignored.
std::vector<int32_t> visible_chips(size_t num_chips) {
  std::vector<int32_t> chips;
  const char* given = getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (given == nullptr) {
    for (size_t chip = 0; chip < num_chips; ++chip) chips.push_back(static_cast<int32_t>(chip));
    return chips;
  }
  std::istringstream parts(given);
  for (std::string part; std::getline(parts, part, ',');) {
    int first = -1;
    int last = -1;
    const int count = sscanf(part.c_str(), "%d-%d", &first, &last);
    if (count < 1) break;
    if (count == 1) last = first;
    if (first < 0 || last < first || static_cast<size_t>(last) >= num_chips) break;
    for (int chip = first; chip <= last; ++chip) chips.push_back(chip);
  }
  return chips;
}

Machine* make_machine() {
  auto* all = new Machine;
  const size_t memory_bytes = setting("ASCEND_EMULATOR_MEMORY_BYTES", kMemoryBytes);
  for (const int32_t chip : visible_chips(setting("ASCEND_EMULATOR_DEVICES", kChips))) {
    auto device = std::make_unique<Device>();
    device->index = static_cast<int32_t>(all->devices.size());
    device->chip = chip;
    device->memory_bytes = memory_bytes;
    all->devices.push_back(std::move(device));
  }
  return all;
}

}  // namespace

Machine& machine() {
  static Machine* all = make_machine();
  return *all;
}

size_t setting(const char* name, size_t otherwise) {
  const char* given = getenv(name);
  return given == nullptr || *given == '\0' ? otherwise : strtoull(given, nullptr, 10);
}

Device* find_device(int32_t index) {
  const auto& devices = machine().devices;
  const bool is_there = index >= 0 && static_cast<size_t>(index) < devices.size();
  return is_there ? devices[static_cast<size_t>(index)].get() : nullptr;
}

void fail_device(Lock&, Device& device, Error error, const std::string& text) {
  device.failure = error;
  device.failure_text = text;
  if (error == ACL_ERROR_RT_LOST_HEARTBEAT) device.lost = true;
  for (auto& [handle, stream] : device.streams) stream->interrupt(error);
  machine().progress.notify_all();
}

}  // namespace ascend
