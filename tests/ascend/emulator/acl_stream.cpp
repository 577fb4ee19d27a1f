// Streams, and waiting for them.
#include "machine.hpp"

using namespace ascend;

namespace {

// What keeps a stream from ever ending its work, or 0.
Error trouble(const Stream& stream, uint64_t aborts_before) {
  const Device& device = stream.device;
  if (device.aborts != aborts_before) return ACL_ERROR_RT_DEVICE_TASK_ABORT;
  if (device.failure != kSuccess) return device.failure;
  return stream.failure;
}

std::string text_of(const Stream& stream, Error error, const char* call) {
  if (error == stream.device.failure) return stream.device.failure_text;
  if (error == stream.failure) return stream.failure_text;
  return inner_error(call, reason_of(error));
}

Error synchronize(Lock& lock, const std::shared_ptr<Stream>& stream, int64_t timeout_ms,
                  const char* call) {
  const uint64_t target = stream->submitted;
  const uint64_t aborts = stream->device.aborts;
  const bool is_over = wait_for_progress(lock, timeout_ms, [&] {
    return stream->completed >= target || stream->destroyed || trouble(*stream, aborts) != kSuccess;
  });
  if (const Error error = trouble(*stream, aborts); error != kSuccess)
    return failed(error, text_of(*stream, error, call));
  if (is_over) return kSuccess;
  const Error error = ACL_ERROR_RT_STREAM_SYNC_TIMEOUT;
  return failed(error, "EE1002: Stream synchronize timeout. " + inner_error(call, reason_of(error)));
}

}  // namespace

aclError aclrtCreateStream(aclrtStream* stream) {
  Device* device = find_device(current_device());
  if (device == nullptr) return failed(ACL_ERROR_RT_CONTEXT_NULL);
  Lock lock(machine().lock);
  *stream = new_stream(lock, *device).get();
  return kSuccess;
}

// Priorities and launch flags are about speed.
aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  return aclrtCreateStream(stream);
}

aclError aclrtDestroyStream(aclrtStream handle) {
  Lock lock(machine().lock);
  const auto stream = find_stream(lock, handle);
  if (!stream || handle == nullptr) return failed(ACL_ERROR_RT_INVALID_HANDLE);
  const Error error = synchronize(lock, stream, -1, "rtStreamDestroy");
  end_stream(lock, stream);
  return error;
}

aclError aclrtDestroyStreamForce(aclrtStream handle) {
  Lock lock(machine().lock);
  const auto stream = find_stream(lock, handle);
  if (!stream || handle == nullptr) return failed(ACL_ERROR_RT_INVALID_HANDLE);
  end_stream(lock, stream);
  return kSuccess;
}

aclError aclrtSynchronizeStream(aclrtStream handle) {
  return aclrtSynchronizeStreamWithTimeout(handle, -1);
}

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t timeout_ms) {
  Lock lock(machine().lock);
  const auto stream = find_stream(lock, handle);
  if (!stream) return failed(ACL_ERROR_RT_INVALID_HANDLE);
  return synchronize(lock, stream, timeout_ms, "rtStreamSynchronizeWithTimeout");
}

aclError aclrtSynchronizeDevice() { return aclrtSynchronizeDeviceWithTimeout(-1); }

aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms) {
  Device* device = find_device(current_device());
  if (device == nullptr) return failed(ACL_ERROR_RT_CONTEXT_NULL);
  Lock lock(machine().lock);
  std::vector<std::shared_ptr<Stream>> streams;
  for (const auto& [handle, stream] : device->streams) streams.push_back(stream);
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  for (const auto& stream : streams) {
    int64_t left_ms = -1;
    if (timeout_ms >= 0) {
      const auto left = end - std::chrono::steady_clock::now();
      left_ms = std::max<int64_t>(
          0, std::chrono::duration_cast<std::chrono::milliseconds>(left).count());
    }
    const Error error = synchronize(lock, stream, left_ms, "rtDeviceSynchronizeWithTimeout");
    if (error != kSuccess) return error;
  }
  return kSuccess;
}

aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus* status) {
  Lock lock(machine().lock);
  const auto stream = find_stream(lock, handle);
  if (!stream) return failed(ACL_ERROR_RT_INVALID_HANDLE);
  if (const Error error = trouble(*stream, stream->device.aborts); error != kSuccess)
    return failed(error, text_of(*stream, error, "rtStreamQuery"));
  *status = stream->idle() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return kSuccess;
}

aclError aclrtStreamGetId(aclrtStream handle, int32_t* id) {
  Lock lock(machine().lock);
  const auto stream = find_stream(lock, handle);
  if (!stream) return failed(ACL_ERROR_RT_INVALID_HANDLE);
  *id = static_cast<int32_t>(stream->id);
  return kSuccess;
}

// Streams of the emulator always stop at a failure.
aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t mode) {
  return mode == ACL_STOP_ON_FAILURE ? kSuccess : failed(ACL_ERROR_INVALID_PARAM);
}

aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void* arguments) {
  return submit(stream, [=](const Interrupt&) {
    function(arguments);
    return kSuccess;
  });
}

aclError aclrtLaunchCallback(aclrtCallback function, void* data, aclrtCallbackBlockType,
                             aclrtStream stream) {
  return submit(stream, [=](const Interrupt&) {
    function(data);
    return kSuccess;
  });
}

// Callbacks run on their stream's thread, whichever thread has subscribed.
aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return kSuccess; }
aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return kSuccess; }
