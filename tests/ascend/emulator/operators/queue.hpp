// Gives work of the host to torch_npu's task queue, which gives it to the current stream.
#pragma once

#include <functional>
#include <string>

namespace ascend {

// Runs later, in the stream's order. What it throws is the device's error: an AI Core exception.
void enqueue(const std::string& operator_name, std::function<void()> work);

// Waits for the current stream. Throws what torch_npu throws for a device's error.
void wait_for_current_stream();

}  // namespace ascend
