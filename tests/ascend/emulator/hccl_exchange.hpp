// What one operation of a communicator sends and receives while its stream runs it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "hccl_comm.hpp"
#include "stream.hpp"

namespace hccl {

// Ends an operation; its error has been reported.
struct Stopped {
  ascend::Error error;
};

class Exchange {
 public:
  // `name` is the operation's, for messages.
  Exchange(Communicator& communicator, const ascend::Interrupt& interrupt, std::string name);
  ~Exchange();

  void send(size_t peer, const Tag& tag, const void* data, size_t size);

  // Waits for the frame. Throws Stopped where the wait takes longer than HCCL_EXEC_TIMEOUT, the
  // device is stopped or the communicator is destroyed.
  Buffer receive(size_t peer, const Tag& tag);
  void receive(size_t peer, const Tag& tag, void* into, size_t size);

 private:
  bool wait(int64_t until_ms);
  void look_for_remote_error(size_t peer, const Tag& tag);
  [[noreturn]] void time_out(size_t peer);

  Communicator& communicator_;
  const ascend::Interrupt& interrupt_;
  const std::string name_;
  const int64_t begun_ms_;
  WakeUp wake_;
};

}  // namespace hccl
