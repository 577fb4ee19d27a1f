// Events: a stream records one, others wait for it.
#include <atomic>
#include <chrono>
#include <unordered_map>

#include "machine.hpp"

using namespace ascend;

namespace {

using Clock = std::chrono::steady_clock;

// Lives on while work refers to it, also after the event has been destroyed.
struct Event {
  uint64_t asked = 0;     // how often a record was submitted
  uint64_t recorded = 0;  // the last of these that has run
  Clock::time_point recorded_at;
  Device* device = nullptr;
  uint64_t aborts = 0;  // of the device, when the record was submitted
};

// How long a stream waits for an event; 0 is without end.
std::atomic<uint32_t> op_wait_timeout_s = 0;

std::unordered_map<void*, std::shared_ptr<Event>>& events() {
  static auto* all = new std::unordered_map<void*, std::shared_ptr<Event>>;
  return *all;
}

std::shared_ptr<Event> find_event(Lock&, aclrtEvent handle) {
  const auto found = events().find(handle);
  return found == events().end() ? nullptr : found->second;
}

// Whether the record was dropped with the tasks of its device, or its device has failed.
Error trouble(const Event& event) {
  if (event.device == nullptr) return kSuccess;
  if (event.device->aborts != event.aborts) return ACL_ERROR_RT_DEVICE_TASK_ABORT;
  return event.device->failure;
}

Error wait_on_host(aclrtEvent handle, int64_t timeout_ms) {
  Lock lock(machine().lock);
  const auto event = find_event(lock, handle);
  if (!event) return failed(ACL_ERROR_RT_INVALID_HANDLE);
  const uint64_t target = event->asked;
  const bool is_over = wait_for_progress(lock, timeout_ms, [&] {
    return event->recorded >= target || trouble(*event) != kSuccess;
  });
  if (event->recorded >= target) return kSuccess;
  const Error error = is_over ? trouble(*event) : ACL_ERROR_RT_EVENT_SYNC_TIMEOUT;
  return failed(error, inner_error("rtEventSynchronizeWithTimeout", reason_of(error)));
}

Error create(aclrtEvent* handle) {
  Lock lock(machine().lock);
  auto event = std::make_shared<Event>();
  *handle = event.get();
  events().emplace(event.get(), std::move(event));
  return kSuccess;
}

}  // namespace

aclError aclrtCreateEvent(aclrtEvent* event) { return create(event); }
aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t) { return create(event); }
aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) { return create(event); }

aclError aclrtDestroyEvent(aclrtEvent handle) {
  Lock lock(machine().lock);
  return events().erase(handle) == 1 ? kSuccess : failed(ACL_ERROR_RT_INVALID_HANDLE);
}

aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream) {
  std::shared_ptr<Event> event;
  uint64_t order = 0;
  {
    Lock lock(machine().lock);
    event = find_event(lock, handle);
    const auto recorder = find_stream(lock, stream);
    if (!event || !recorder) return failed(ACL_ERROR_RT_INVALID_HANDLE);
    event->device = &recorder->device;
    event->aborts = recorder->device.aborts;
    order = ++event->asked;
  }
  return submit(stream, [event, order](const Interrupt&) {
    Lock lock(machine().lock);
    event->recorded = std::max(event->recorded, order);
    event->recorded_at = Clock::now();
    return kSuccess;
  });
}

aclError aclrtResetEvent(aclrtEvent handle, aclrtStream stream) {
  std::shared_ptr<Event> event;
  {
    Lock lock(machine().lock);
    event = find_event(lock, handle);
    if (!event) return failed(ACL_ERROR_RT_INVALID_HANDLE);
  }
  return submit(stream, [event](const Interrupt&) {
    Lock lock(machine().lock);
    event->recorded = 0;
    return kSuccess;
  });
}

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent handle) {
  std::shared_ptr<Event> event;
  uint64_t target = 0;
  {
    Lock lock(machine().lock);
    event = find_event(lock, handle);
    if (!event) return failed(ACL_ERROR_RT_INVALID_HANDLE);
    target = event->asked;
  }
  return submit(stream, [event, target, timeout_s = op_wait_timeout_s.load()](
                            const Interrupt& interrupt) -> Error {
    Lock lock(machine().lock);
    wait_for_progress(lock, timeout_s == 0 ? -1 : int64_t{timeout_s} * 1000,
                      [&] { return event->recorded >= target || interrupt.requested(); });
    if (event->recorded >= target) return kSuccess;
    return interrupt.requested() ? interrupt.error() : ACL_ERROR_RT_WAIT_TIMEOUT;
  });
}

aclError aclrtSetOpWaitTimeout(uint32_t timeout_s) {
  op_wait_timeout_s = timeout_s;
  return kSuccess;
}

aclError aclrtSynchronizeEvent(aclrtEvent event) { return wait_on_host(event, -1); }

aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t timeout_ms) {
  return wait_on_host(event, timeout_ms);
}

aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus* status) {
  Lock lock(machine().lock);
  const auto event = find_event(lock, handle);
  if (!event) return failed(ACL_ERROR_RT_INVALID_HANDLE);
  const bool is_complete = event->recorded >= event->asked;
  if (!is_complete && event->device != nullptr && event->device->failure != kSuccess)
    return failed(event->device->failure, event->device->failure_text);
  *status = is_complete ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return kSuccess;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent handle, aclrtEventWaitStatus* status) {
  Lock lock(machine().lock);
  const auto event = find_event(lock, handle);
  if (!event) return failed(ACL_ERROR_RT_INVALID_HANDLE);
  *status = event->recorded >= event->asked ? ACL_EVENT_WAIT_STATUS_COMPLETE
                                            : ACL_EVENT_WAIT_STATUS_NOT_READY;
  return kSuccess;
}

aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent from, aclrtEvent to) {
  Lock lock(machine().lock);
  const auto first = find_event(lock, from);
  const auto last = find_event(lock, to);
  if (!first || !last) return failed(ACL_ERROR_RT_INVALID_HANDLE);
  if (first->recorded == 0 || last->recorded == 0)
    return failed(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID);
  using Milliseconds = std::chrono::duration<float, std::milli>;
  *milliseconds = Milliseconds(last->recorded_at - first->recorded_at).count();
  return kSuccess;
}

aclError aclrtEventGetTimestamp(aclrtEvent handle, uint64_t* microseconds) {
  Lock lock(machine().lock);
  const auto event = find_event(lock, handle);
  if (!event) return failed(ACL_ERROR_RT_INVALID_HANDLE);
  if (event->recorded == 0) return failed(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID);
  const auto since = event->recorded_at.time_since_epoch();
  *microseconds = static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(since).count());
  return kSuccess;
}
