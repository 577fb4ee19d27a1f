#include <sys/eventfd.h>
#include <unistd.h>

#include <thread>

#include "fault.hpp"
#include "machine.hpp"

namespace ascend {

Stream::Stream(Device& device, uint32_t id)
    : device(device), id(id), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

Stream::~Stream() { close(wake_); }

void Stream::interrupt(Error error) {
  interrupted_ = error;
  eventfd_write(wake_, 1);
  has_work.notify_all();
}

void Stream::resume() {
  eventfd_t ignored;
  eventfd_read(wake_, &ignored);
  interrupted_ = kSuccess;
}

namespace {

// Runs one piece of work without the lock. What it leaves of an error text goes into `text`.
Error run(const Work& work, Stream& stream, std::string& text) {
  take_error_message();
  Error error = strike(stream.device.index, Site::kWork, stream);
  if (error == kSuccess) error = work(stream);
  if (error != kSuccess) text = take_error_message();
  return error;
}

}  // namespace

void run_stream(std::shared_ptr<Stream> stream) {
  Machine& all = machine();
  Lock lock(all.lock);
  while (true) {
    stream->has_work.wait(lock, [&] { return stream->destroyed || !stream->queue.empty(); });
    if (stream->destroyed) break;
    Item item = std::move(stream->queue.front());
    stream->queue.pop_front();
    stream->running = true;
    Error error = stream->device.failure != kSuccess ? stream->device.failure : stream->failure;
    std::string text;
    if (error == kSuccess) {
      lock.unlock();
      error = run(item.work, *stream, text);
      item.work = nullptr;  // what it holds is freed without the lock
      lock.lock();
    }
    stream->running = false;
    if (error == kSuccess) {
      stream->completed = item.order;
    } else if (stream->failure == kSuccess && !stream->requested()) {
      stream->failure = error;
      stream->failure_text = text.empty() ? inner_error("rtStreamSynchronize", reason_of(error)) : text;
    }
    if (all.num_waiting > 0) all.progress.notify_all();
  }
}

void Stream::push(Work work) {
  queue.push_back({std::move(work), ++submitted});
  if (!has_thread_) {
    has_thread_ = true;
    std::thread(run_stream, device.streams.at(static_cast<void*>(this))).detach();
  }
  has_work.notify_one();
}

std::shared_ptr<Stream> new_stream(Lock&, Device& device) {
  auto stream = std::make_shared<Stream>(device, machine().next_stream_id++);
  device.streams.emplace(stream.get(), stream);
  if (device.lost) stream->interrupt(device.failure);
  return stream;
}

std::shared_ptr<Stream> find_stream(Lock& lock, StreamHandle handle) {
  if (handle == nullptr) {
    Device* device = find_device(current_device());
    if (device == nullptr) return nullptr;
    if (!device->default_stream) device->default_stream = new_stream(lock, *device);
    return device->default_stream;
  }
  for (const auto& device : machine().devices) {
    const auto found = device->streams.find(handle);
    if (found != device->streams.end()) return found->second;
  }
  return nullptr;
}

void drop_queue(Lock& lock, Stream& stream) {
  std::deque<Item> dropped;
  dropped.swap(stream.queue);
  lock.unlock();
  dropped.clear();  // what work holds may call back
  lock.lock();
}

void end_stream(Lock& lock, const std::shared_ptr<Stream>& stream) {
  stream->destroyed = true;
  stream->interrupt(ACL_ERROR_RT_STREAM_ABORT);
  drop_queue(lock, *stream);
  wait_for_progress(lock, -1, [&] { return !stream->running; });
  stream->device.streams.erase(stream.get());
  machine().progress.notify_all();
}

Error submit(StreamHandle handle, Work work) {
  Lock lock(machine().lock);
  const auto stream = find_stream(lock, handle);
  if (!stream) return failed(ACL_ERROR_RT_INVALID_HANDLE);
  Device& device = stream->device;
  if (device.aborting) return failed(ACL_ERROR_RT_DEVICE_TASK_ABORT);
  if (device.failure != kSuccess) return failed(device.failure, device.failure_text);
  if (stream->failure != kSuccess) return failed(stream->failure, stream->failure_text);
  stream->push(std::move(work));
  return kSuccess;
}

}  // namespace ascend
