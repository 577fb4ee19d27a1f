// Faults of communication, and HCCL's own retry of an operation.
#pragma once

#include <string>

#include "hccl_comm.hpp"
#include "stream.hpp"

namespace hccl {

// HCCL_OP_RETRY_ENABLE and HCCL_OP_RETRY_PARAMS.
struct Retry {
  bool is_enabled = false;
  int64_t max_count = 1;
  int64_t hold_ms = 5000;
  int64_t interval_ms = 1000;

  // From a failure to the end of the last retry.
  int64_t total_ms() const { return hold_ms + (max_count - 1) * interval_ms; }
};

Retry read_retry();

// Has the device of the communicator fail: whoever waits for a stream of it hears of the error, also
// where that stream only waits for an event of the one whose operation failed.
ascend::Error fail_device(const Communicator& communicator, ascend::Error code,
                          const std::string& text);

// What strikes an operation that is about to run; 0 is nothing, or what a retry has mended.
ascend::Error strike(Communicator& communicator, const ascend::Interrupt& interrupt);

// Has the device of the communicator fail as one does whose operation was retried in vain, and
// tells the peers, on which the same operation fails in the same way.
ascend::Error fail_retry(Communicator& communicator, uint64_t epoch);

// Whether a peer told so; then this device has failed, too.
bool has_failed_elsewhere(Communicator& communicator, uint64_t epoch);

}  // namespace hccl
