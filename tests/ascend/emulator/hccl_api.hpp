// What the functions of libhccl.so have in common.
#pragma once

#include "hccl_count.hpp"
#include "hccl_types.hpp"

#define HCCL_API extern "C" __attribute__((visibility("default")))

// First statement of each function; exceptions do not cross the boundary of C.
#define HCCL_CALLED ::hccl::count(__func__)

namespace hccl {

// Runs a call's body; what it throws is reported as an inner error.
template <typename Body>
Result guarded(Body body);

void report_exception(const char* what);

template <typename Body>
Result guarded(Body body) {
  try {
    return body();
  } catch (const std::exception& error) {
    report_exception(error.what());
    return Result::internal;
  }
}

}  // namespace hccl
