// How a call of HCCL becomes work of a stream.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "hccl_collectives.hpp"

namespace hccl {

// What a call says it is; equal on all ranks whose calls belong together.
struct Call {
  const char* name;
  DataType type;
  uint64_t count;
  uint64_t detail = 0;  // reduction, root
};

uint64_t signature_of(const Call& call);

// Submits a collective operation of all ranks of the communicator.
Result submit(void* handle, void* stream, const Call& call,
              std::function<void(const Operation&)> run);

// Submits messages to and from ranks, which all are under way at once.
Result submit_messages(void* handle, void* stream, const char* name,
                       const std::vector<SendReceive>& items);

}  // namespace hccl
