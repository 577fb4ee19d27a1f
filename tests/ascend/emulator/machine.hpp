// The emulated machine: its devices, what runs on them, and the one lock over all of it.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

#include "errors.hpp"

namespace ascend {

struct Device;

struct Item {
  Work work;
  uint64_t order;
};

// Work in order. The thread begins with the first work, since torch_npu makes streams in dozens.
class Stream : public Interrupt {
 public:
  Stream(Device& device, uint32_t id);
  ~Stream() override;

  bool requested() const override { return interrupted_ != kSuccess; }
  int descriptor() const override { return wake_; }
  Error error() const override { return interrupted_; }

  // The methods below are called with the machine's lock held.
  void push(Work work);
  bool idle() const { return queue.empty() && !running; }
  void interrupt(Error error);
  void resume();

  Device& device;
  const uint32_t id;
  std::deque<Item> queue;
  bool running = false;
  bool destroyed = false;
  uint64_t submitted = 0;
  uint64_t completed = 0;
  Error failure = kSuccess;
  std::string failure_text;
  std::condition_variable has_work;

 private:
  friend void run_stream(std::shared_ptr<Stream> stream);
  std::atomic<Error> interrupted_ = kSuccess;
  int wake_;
  bool has_thread_ = false;
};

struct DamagedMemory {
  char* address;
  size_t size_bytes;
};

struct Device {
  int32_t index = 0;  // among those of ASCEND_RT_VISIBLE_DEVICES
  int32_t chip = 0;   // on the machine
  bool in_use = false;
  size_t memory_bytes = 0;
  size_t used_bytes = 0;
  // Concerns all of its streams; it ends with the device's tasks being aborted, or not at all.
  Error failure = kSuccess;
  std::string failure_text;
  bool lost = false;
  bool aborting = false;
  uint64_t aborts = 0;
  std::vector<DamagedMemory> damaged;
  std::map<void*, std::shared_ptr<Stream>> streams;
  std::shared_ptr<Stream> default_stream;
};

struct Machine {
  std::mutex lock;
  // Work ended, an event was recorded, or a device was interrupted.
  std::condition_variable progress;
  int num_waiting = 0;
  std::vector<std::unique_ptr<Device>> devices;
  uint32_t next_stream_id = 0;
};

// Never destroyed: threads of streams may outlive main.
Machine& machine();

using Lock = std::unique_lock<std::mutex>;

// The device of an index, or nullptr.
Device* find_device(int32_t index);

// The stream of a handle, or nullptr; nullptr is the default stream of the thread's device.
std::shared_ptr<Stream> find_stream(Lock&, StreamHandle handle);

std::shared_ptr<Stream> new_stream(Lock&, Device& device);

// Drops what has not begun to run.
void drop_queue(Lock&, Stream& stream);

// Ends a stream; what has not run is dropped.
void end_stream(Lock&, const std::shared_ptr<Stream>& stream);

// Has every stream of the device fail with the error until the device's tasks are aborted.
void fail_device(Lock&, Device& device, Error error, const std::string& text);

// Waits until `is_done` or time is up: -1 waits forever. Whether it is done.
template <typename Done>
bool wait_for_progress(Lock& lock, int64_t timeout_ms, Done is_done);

// The number in a variable of the environment, or the default.
size_t setting(const char* name, size_t otherwise);

template <typename Done>
bool wait_for_progress(Lock& lock, int64_t timeout_ms, Done is_done) {
  Machine& all = machine();
  ++all.num_waiting;
  bool done = true;
  if (timeout_ms < 0) {
    all.progress.wait(lock, is_done);
  } else {
    done = all.progress.wait_for(lock, std::chrono::milliseconds(timeout_ms), is_done);
  }
  --all.num_waiting;
  return done;
}

}  // namespace ascend
