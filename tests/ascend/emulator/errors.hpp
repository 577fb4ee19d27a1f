// What a thread is told of an error: the code of its last one, and the text that goes with it.
#pragma once

#include <string>

#include "acl/acl_rt.h"
#include "stream.hpp"

namespace ascend {

constexpr Error kSuccess = ACL_SUCCESS;

// Remembers a call's error as the thread's last one, and returns it.
Error failed(Error code);
Error failed(Error code, const std::string& text);

// The text of an error in CANN's form. `reason` is what the runtime puts into "reason=[...]".
std::string inner_error(const std::string& call, const std::string& reason);

// What the runtime calls a code: the text in "reason=[...]".
std::string reason_of(Error code);

// The text that the thread has; it is left empty.
std::string take_error_message();

}  // namespace ascend
