// What recovery asks of a device: end its tasks, say which memory is damaged, repair that.
#include <algorithm>
#include <unordered_map>

#include "machine.hpp"

using namespace ascend;

namespace {

struct AbortCallback {
  aclrtDeviceTaskAbortCallback function;
  void* arguments;
};

std::mutex callbacks_lock;
std::unordered_map<std::string, AbortCallback> callbacks;

void call_back(int32_t device, aclrtDeviceTaskAbortStage stage, uint32_t timeout_ms) {
  std::unordered_map<std::string, AbortCallback> called;
  {
    const std::lock_guard hold(callbacks_lock);
    called = callbacks;
  }
  for (const auto& [name, one] : called) one.function(device, stage, timeout_ms, one.arguments);
}

bool is_still(const Device& device) {
  return std::ranges::none_of(device.streams, [](const auto& one) { return one.second->running; });
}

Error no_device() { return failed(ACL_ERROR_RT_INVALID_DEVICEID); }

}  // namespace

// Tasks that run are interrupted, those that wait are dropped, whoever waits for them gets the
// abort's code; then the device takes work again, unless it is lost.
aclError aclrtDeviceTaskAbort(int32_t index, uint32_t timeout_ms) {
  Device* device = find_device(index);
  if (device == nullptr) return no_device();
  call_back(index, ACL_RT_DEVICE_TASK_ABORT_PRE, timeout_ms);
  Lock lock(machine().lock);
  if (device->lost) return failed(device->failure, device->failure_text);
  device->aborting = true;
  ++device->aborts;
  std::vector<std::shared_ptr<Stream>> streams;
  for (const auto& [handle, stream] : device->streams) streams.push_back(stream);
  for (const auto& stream : streams) {
    stream->interrupt(ACL_ERROR_RT_DEVICE_TASK_ABORT);
    drop_queue(lock, *stream);
  }
  machine().progress.notify_all();
  const bool stopped = wait_for_progress(lock, timeout_ms == 0 ? -1 : int64_t{timeout_ms},
                                         [&] { return is_still(*device); });
  device->aborting = false;
  if (!stopped) return failed(ACL_ERROR_RT_TIMEOUT);
  for (const auto& [handle, stream] : device->streams) {
    stream->resume();
    stream->failure = kSuccess;
    stream->completed = stream->submitted;
  }
  device->failure = kSuccess;
  machine().progress.notify_all();
  lock.unlock();
  call_back(index, ACL_RT_DEVICE_TASK_ABORT_POST, timeout_ms);
  return kSuccess;
}

aclError aclrtSetDeviceTaskAbortCallback(const char* name, aclrtDeviceTaskAbortCallback function,
                                         void* arguments) {
  const std::lock_guard hold(callbacks_lock);
  if (function == nullptr) {
    callbacks.erase(name);
  } else {
    callbacks[name] = {function, arguments};
  }
  return kSuccess;
}

aclError aclrtGetMemUceInfo(int32_t index, aclrtMemUceInfo* infos, size_t room, size_t* count) {
  const Device* device = find_device(index);
  if (device == nullptr) return no_device();
  Lock lock(machine().lock);
  *count = std::min(room, device->damaged.size());
  for (size_t i = 0; i < *count; ++i) {
    infos[i] = {};
    infos[i].addr = device->damaged[i].address;
    infos[i].len = device->damaged[i].size_bytes;
  }
  return kSuccess;
}

// New pages take the place of the damaged ones; what was in them is gone.
aclError aclrtMemUceRepair(int32_t index, aclrtMemUceInfo* infos, size_t count) {
  Device* device = find_device(index);
  if (device == nullptr) return no_device();
  Lock lock(machine().lock);
  for (size_t i = 0; i < count; ++i) {
    const auto is_meant = [&](const DamagedMemory& one) { return one.address == infos[i].addr; };
    if (std::erase_if(device->damaged, is_meant) == 0) return failed(ACL_ERROR_RT_PARAM_INVALID);
  }
  return kSuccess;
}
