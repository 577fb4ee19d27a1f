// Devices, contexts, and what a device tells of itself.
#include <unistd.h>

#include <cstring>

#include "fault.hpp"
#include "machine.hpp"

namespace ascend {
namespace {

thread_local int32_t thread_device = -1;

// What the data sheet of an Ascend 910B3 says.
constexpr int64_t kCubeCores = 20;
constexpr int64_t kVectorCores = 40;
constexpr int64_t kL2Bytes = 192 << 20;

Error bad_device(const char* call, int32_t index) {
  return failed(ACL_ERROR_RT_INVALID_DEVICEID,
                "EE1001: The argument is invalid.Reason: " + std::string(call) +
                    " failed, invalid device, device=" + std::to_string(index) +
                    ", valid device range is [0, " +
                    std::to_string(machine().devices.size()) + ")\n");
}

}  // namespace

int32_t current_device() { return thread_device; }

}  // namespace ascend

using namespace ascend;

aclError aclInit(const char*) {
  static std::atomic<bool> initialized = false;
  if (initialized.exchange(true)) return failed(ACL_ERROR_REPEAT_INITIALIZE);
  serve_faults();
  return kSuccess;
}

aclError aclFinalize() { return kSuccess; }

aclError aclrtSetDevice(int32_t index) {
  Device* device = find_device(index);
  if (device == nullptr) return bad_device("Set device", index);
  Lock lock(machine().lock);
  if (device->lost) return failed(device->failure, device->failure_text);
  device->in_use = true;
  thread_device = index;
  return kSuccess;
}

aclError aclrtGetDevice(int32_t* index) {
  if (thread_device < 0) return failed(ACL_ERROR_RT_CONTEXT_NULL);
  *index = thread_device;
  return kSuccess;
}

aclError aclrtResetDevice(int32_t index) {
  Device* device = find_device(index);
  if (device == nullptr) return bad_device("Reset device", index);
  Lock lock(machine().lock);
  while (!device->streams.empty()) end_stream(lock, device->streams.begin()->second);
  device->default_stream.reset();
  device->in_use = false;
  return kSuccess;
}

aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = static_cast<uint32_t>(machine().devices.size());
  if (*count > 0) return kSuccess;
  return failed(ACL_ERROR_RT_NO_DEVICE, "EL0001: Device not found or invalid.\n");
}

// A context is a device's one, so the device stands for it.
aclError aclrtGetCurrentContext(aclrtContext* context) {
  *context = find_device(thread_device);
  return *context == nullptr ? failed(ACL_ERROR_RT_CONTEXT_NULL) : kSuccess;
}

aclError aclrtSetCurrentContext(aclrtContext context) {
  for (const auto& device : machine().devices) {
    if (device.get() != context) continue;
    thread_device = device->index;
    return kSuccess;
  }
  return failed(ACL_ERROR_RT_CONTEXT_NULL);
}

aclError aclrtGetPrimaryCtxState(int32_t index, uint32_t* flags, int32_t* active) {
  const Device* device = find_device(index);
  if (device == nullptr) return bad_device("Get primary context state", index);
  if (flags != nullptr) *flags = 0;
  if (active != nullptr) *active = device->in_use ? 1 : 0;
  return kSuccess;
}

const char* aclrtGetSocName() {
  const char* given = getenv("ASCEND_EMULATOR_SOC");
  return given == nullptr ? "Ascend910B3" : given;
}

aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo info, int64_t* value) {
  switch (info) {
    case ACL_DEVICE_INFO_AI_CORE_NUM: *value = kCubeCores; return kSuccess;
    case ACL_DEVICE_INFO_VECTOR_CORE_NUM: *value = kVectorCores; return kSuccess;
    case ACL_DEVICE_INFO_L2_SIZE: *value = kL2Bytes; return kSuccess;
    default: return failed(ACL_ERROR_INVALID_PARAM);
  }
}

aclError aclrtGetDeviceInfo(uint32_t index, aclrtDevAttr attribute, int64_t* value) {
  const Device* device = find_device(static_cast<int32_t>(index));
  if (device == nullptr) return bad_device("Get device info", static_cast<int32_t>(index));
  switch (attribute) {
    case ACL_DEV_ATTR_AICORE_CORE_NUM:
    case ACL_DEV_ATTR_CUBE_CORE_NUM: *value = kCubeCores; return kSuccess;
    case ACL_DEV_ATTR_VECTOR_CORE_NUM: *value = kVectorCores; return kSuccess;
    case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE:
      *value = static_cast<int64_t>(device->memory_bytes);
      return kSuccess;
    case ACL_DEV_ATTR_PHY_CHIP_ID: *value = device->chip; return kSuccess;
    default: return failed(ACL_ERROR_INVALID_PARAM);
  }
}

aclError aclrtGetDeviceUtilizationRate(int32_t index, aclrtUtilizationInfo* info) {
  const Device* device = find_device(index);
  if (device == nullptr) return bad_device("Get device utilization", index);
  Lock lock(machine().lock);
  bool is_busy = false;
  for (const auto& [handle, stream] : device->streams) is_busy |= !stream->idle();
  info->cubeUtilization = info->vectorUtilization = info->aicpuUtilization = is_busy ? 100 : 0;
  info->memoryUtilization = static_cast<int32_t>(device->used_bytes * 100 / device->memory_bytes);
  return kSuccess;
}

aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t from, int32_t to) {
  *can = from != to && find_device(from) != nullptr && find_device(to) != nullptr ? 1 : 0;
  return kSuccess;
}

// All memory is the process's own, so every device reaches it already.
aclError aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t) {
  return find_device(peer) == nullptr ? bad_device("Enable peer access", peer) : kSuccess;
}

aclError aclrtDeviceGetBareTgid(int32_t* pid) {
  *pid = getpid();
  return kSuccess;
}

aclError aclrtDeviceGetUuid(int32_t index, aclrtUuid* uuid) {
  const Device* device = find_device(index);
  if (device == nullptr) return bad_device("Get UUID", index);
  memset(uuid, 0, sizeof *uuid);
  snprintf(uuid->bytes, sizeof uuid->bytes, "emulated-npu-%d", device->chip);
  return kSuccess;
}

aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t* const logic) {
  if (find_device(user) == nullptr) return bad_device("Get logic device id", user);
  *logic = find_device(user)->chip;
  return kSuccess;
}
