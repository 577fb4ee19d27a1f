// Events: a stream records one, others wait for it.
#include <atomic>
#include <chrono>
#include <unordered_map>

#include "machine.hpp"

using namespace ascend;

namespace {

using Clock = std::chrono::steady_clock;

// One record of an event; the next one may run earlier, on another stream.
struct Record {
  bool is_done = false;
  Clock::time_point done_at;
  Device* device = nullptr;
  uint64_t aborts = 0;  // of the device, when the record was submitted
};

// Lives on while work refers to it, also after the event has been destroyed.
struct Event {
  std::shared_ptr<Record> last;  // what was submitted last; who waits, waits for that

  bool is_complete() const { return !last || last->is_done; }
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
Error trouble(const Record& record) {
  if (record.device->aborts != record.aborts) return ACL_ERROR_RT_DEVICE_TASK_ABORT;
  return record.device->failure;
}

Error wait_on_host(aclrtEvent handle, int64_t timeout_ms) {
  Lock lock(machine().lock);
  const auto event = find_event(lock, handle);
  if (!event) return failed(ACL_ERROR_RT_INVALID_HANDLE);
  const auto record = event->last;
  if (!record) return kSuccess;
  const bool is_over = wait_for_progress(
      lock, timeout_ms, [&] { return record->is_done || trouble(*record) != kSuccess; });
  if (record->is_done) return kSuccess;
  const Error error = is_over ? trouble(*record) : ACL_ERROR_RT_EVENT_SYNC_TIMEOUT;
  return failed(error, inner_error("rtEventSynchronizeWithTimeout", reason_of(error)));
}

bool has_time(const Event& event) { return event.last && event.last->is_done; }

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
  const auto record = std::make_shared<Record>();
  {
    Lock lock(machine().lock);
    const auto event = find_event(lock, handle);
    const auto recorder = find_stream(lock, stream);
    if (!event || !recorder) return failed(ACL_ERROR_RT_INVALID_HANDLE);
    record->device = &recorder->device;
    record->aborts = recorder->device.aborts;
    event->last = record;
  }
  return submit(stream, [record](const Interrupt&) {
    Lock lock(machine().lock);
    record->is_done = true;
    record->done_at = Clock::now();
    return kSuccess;
  });
}

aclError aclrtResetEvent(aclrtEvent handle, aclrtStream stream) {
  std::shared_ptr<Record> record;
  {
    Lock lock(machine().lock);
    const auto event = find_event(lock, handle);
    if (!event) return failed(ACL_ERROR_RT_INVALID_HANDLE);
    record = event->last;
  }
  return submit(stream, [record](const Interrupt&) {
    Lock lock(machine().lock);
    if (record) record->is_done = false;
    return kSuccess;
  });
}

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent handle) {
  std::shared_ptr<Record> record;
  {
    Lock lock(machine().lock);
    const auto event = find_event(lock, handle);
    if (!event) return failed(ACL_ERROR_RT_INVALID_HANDLE);
    record = event->last;
  }
  if (!record) return kSuccess;
  return submit(stream, [record, timeout_s = op_wait_timeout_s.load()](
                            const Interrupt& interrupt) -> Error {
    Lock lock(machine().lock);
    wait_for_progress(lock, timeout_s == 0 ? -1 : int64_t{timeout_s} * 1000,
                      [&] { return record->is_done || interrupt.requested(); });
    if (record->is_done) return kSuccess;
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
  if (!event->is_complete() && event->last->device->failure != kSuccess)
    return failed(event->last->device->failure, event->last->device->failure_text);
  *status = event->is_complete() ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return kSuccess;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent handle, aclrtEventWaitStatus* status) {
  Lock lock(machine().lock);
  const auto event = find_event(lock, handle);
  if (!event) return failed(ACL_ERROR_RT_INVALID_HANDLE);
  *status = event->is_complete() ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
  return kSuccess;
}

aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent from, aclrtEvent to) {
  Lock lock(machine().lock);
  const auto first = find_event(lock, from);
  const auto last = find_event(lock, to);
  if (!first || !last) return failed(ACL_ERROR_RT_INVALID_HANDLE);
  if (!has_time(*first) || !has_time(*last)) return failed(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID);
  using Milliseconds = std::chrono::duration<float, std::milli>;
  *milliseconds = Milliseconds(last->last->done_at - first->last->done_at).count();
  return kSuccess;
}

aclError aclrtEventGetTimestamp(aclrtEvent handle, uint64_t* microseconds) {
  Lock lock(machine().lock);
  const auto event = find_event(lock, handle);
  if (!event) return failed(ACL_ERROR_RT_INVALID_HANDLE);
  if (!has_time(*event)) return failed(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID);
  const auto since = event->last->done_at.time_since_epoch();
  *microseconds = static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(since).count());
  return kSuccess;
}
