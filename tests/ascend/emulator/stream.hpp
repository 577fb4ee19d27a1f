// Streams of the emulated device: work given to one runs later, in order, on a thread of its own.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace ascend {

using Error = int32_t;      // aclError: 0, or a code of acl_rt.h
using StreamHandle = void*;  // aclrtStream

// Whether work that waits has to give up: its device was stopped or lost.
class Interrupt {
 public:
  virtual ~Interrupt() = default;
  virtual bool requested() const = 0;
  // Becomes readable when `requested` becomes true; for poll(2).
  virtual int descriptor() const = 0;
  // What work returns that gave up for it.
  virtual Error error() const = 0;
};

// What a stream runs. A result other than 0 stays with the stream as its error, and what was
// submitted after it does not run.
using Work = std::function<Error(const Interrupt&)>;

// Give work to a stream; nullptr is the default stream of the calling thread's device.
// Returns an error at once where the stream or its device takes no work any more.
Error submit(StreamHandle stream, Work work);

// The text that aclGetRecentErrMsg of the calling thread gives next, in CANN's form
// ("EI0002: ..."); from work on a stream it goes to whoever synchronizes with that stream.
void set_error_message(const char* text);

// The device (by its index among ASCEND_RT_VISIBLE_DEVICES) that the calling thread has set.
int32_t current_device();

}  // namespace ascend
