// Memory of devices and page-locked memory of the host, by address.
#pragma once

#include <cstddef>

#include "machine.hpp"

namespace ascend {

// Whether a range lies in memory that was allocated on the device, and is still.
bool is_device_memory(Lock&, const Device& device, const void* address, size_t size_bytes);

}  // namespace ascend
