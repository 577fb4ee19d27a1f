// Memory of devices, page-locked memory of the host, copies, and fills.
#include <cstdlib>
#include <cstring>

#include "fault.hpp"
#include "memory.hpp"

namespace ascend {
namespace {

constexpr size_t kAlignment = 512;

struct Block {
  size_t size_bytes;
  Device* device;  // nullptr: of the host
};

std::map<const char*, Block>& blocks() {
  static auto* all = new std::map<const char*, Block>;
  return *all;
}

// The block that an address lies in, or nullptr.
const Block* block_of(const void* address) {
  const char* wanted = static_cast<const char*>(address);
  auto after = blocks().upper_bound(wanted);
  if (after == blocks().begin()) return nullptr;
  const auto& [start, block] = *std::prev(after);
  return wanted < start + block.size_bytes ? &block : nullptr;
}

Error out_of_memory(size_t size_bytes) {
  return failed(ACL_ERROR_RT_MEMORY_ALLOCATION,
                "EL0004: Failed to allocate memory. alloc size: " + std::to_string(size_bytes) +
                    "\n        Possible Cause: Available memory is insufficient.\n");
}

Error allocate(void** address, size_t size_bytes, Device* device) {
  const size_t blocks_needed = (size_bytes + kAlignment - 1) / kAlignment;
  const size_t whole_bytes = blocks_needed * kAlignment;
  Lock lock(machine().lock);
  if (device != nullptr && device->lost) return failed(device->failure, device->failure_text);
  const bool fits = device == nullptr || (device->used_bytes + whole_bytes <= device->memory_bytes &&
                                          !is_out_of_memory(device->index));
  *address = fits ? aligned_alloc(kAlignment, whole_bytes) : nullptr;
  if (*address == nullptr) return out_of_memory(whole_bytes);
  if (device != nullptr) device->used_bytes += whole_bytes;
  blocks().emplace(static_cast<char*>(*address), Block{whole_bytes, device});
  return kSuccess;
}

Error release(void* address) {
  Lock lock(machine().lock);
  const auto found = blocks().find(static_cast<char*>(address));
  if (found == blocks().end()) return failed(ACL_ERROR_RT_PARAM_INVALID);
  if (found->second.device != nullptr) found->second.device->used_bytes -= found->second.size_bytes;
  blocks().erase(found);
  free(address);
  return kSuccess;
}

}  // namespace

bool is_device_memory(Lock&, const Device& device, const void* address, size_t size_bytes) {
  const Block* first = block_of(address);
  const Block* last = block_of(static_cast<const char*>(address) + size_bytes - 1);
  return first != nullptr && first == last && first->device == &device;
}

}  // namespace ascend

using namespace ascend;

aclError aclrtMalloc(void** address, size_t size_bytes, aclrtMemMallocPolicy) {
  Device* device = find_device(current_device());
  if (device == nullptr) return failed(ACL_ERROR_RT_CONTEXT_NULL);
  if (size_bytes == 0) return failed(ACL_ERROR_INVALID_PARAM);
  return allocate(address, size_bytes, device);
}

aclError aclrtMallocAlign32(void** address, size_t size_bytes, aclrtMemMallocPolicy policy) {
  return aclrtMalloc(address, size_bytes, policy);
}

aclError aclrtFree(void* address) { return release(address); }

aclError aclrtMallocHost(void** address, size_t size_bytes) {
  return size_bytes == 0 ? failed(ACL_ERROR_INVALID_PARAM) : allocate(address, size_bytes, nullptr);
}

aclError aclrtMallocHostWithCfg(void** address, uint64_t size_bytes, aclrtMallocConfig*) {
  return aclrtMallocHost(address, size_bytes);
}

aclError aclrtFreeHost(void* address) { return release(address); }

aclError aclrtHostRegister(void* address, uint64_t size_bytes, aclrtHostRegisterType,
                           void** device_address) {
  const Error error = aclrtHostRegisterV2(address, size_bytes, ACL_HOST_REG_MAPPED);
  if (error == kSuccess) *device_address = address;
  return error;
}

aclError aclrtHostRegisterV2(void* address, uint64_t size_bytes, uint32_t) {
  Lock lock(machine().lock);
  if (address == nullptr || size_bytes == 0 || block_of(address) != nullptr)
    return failed(ACL_ERROR_RT_PARAM_INVALID);
  blocks().emplace(static_cast<char*>(address), Block{size_bytes, nullptr});
  return kSuccess;
}

aclError aclrtHostUnregister(void* address) {
  Lock lock(machine().lock);
  return blocks().erase(static_cast<char*>(address)) == 1 ? kSuccess
                                                          : failed(ACL_ERROR_RT_PARAM_INVALID);
}

aclError aclrtPointerGetAttributes(const void* address, aclrtPtrAttributes* attributes) {
  Lock lock(machine().lock);
  *attributes = {};
  const Block* block = block_of(address);
  if (block == nullptr) {
    attributes->location.type = ACL_MEM_LOCATION_TYPE_UNREGISTERED;
  } else if (block->device == nullptr) {
    attributes->location.type = ACL_MEM_LOCATION_TYPE_HOST;
  } else {
    attributes->location.type = ACL_MEM_LOCATION_TYPE_DEVICE;
    attributes->location.id = static_cast<uint32_t>(block->device->index);
  }
  return kSuccess;
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free_bytes, size_t* total_bytes) {
  const Device* device = find_device(current_device());
  if (device == nullptr) return failed(ACL_ERROR_RT_CONTEXT_NULL);
  Lock lock(machine().lock);
  *total_bytes = device->memory_bytes;
  *free_bytes = device->memory_bytes - device->used_bytes;
  return kSuccess;
}

aclError aclrtMemcpy(void* to, size_t room_bytes, const void* from, size_t size_bytes,
                     aclrtMemcpyKind) {
  if (size_bytes > room_bytes) return failed(ACL_ERROR_RT_PARAM_INVALID);
  const Device* device = find_device(current_device());
  if (device != nullptr) {
    Lock lock(machine().lock);
    if (device->failure != kSuccess) return failed(device->failure, device->failure_text);
  }
  memmove(to, from, size_bytes);
  return kSuccess;
}

aclError aclrtMemcpyAsync(void* to, size_t room_bytes, const void* from, size_t size_bytes,
                          aclrtMemcpyKind, aclrtStream stream) {
  if (size_bytes > room_bytes) return failed(ACL_ERROR_RT_PARAM_INVALID);
  return submit(stream, [=](const Interrupt&) {
    memmove(to, from, size_bytes);
    return kSuccess;
  });
}

// Memory of the host that is not page-locked makes the copy a synchronous one.
aclError aclrtMemcpyAsyncWithCondition(void* to, size_t room_bytes, const void* from,
                                       size_t size_bytes, aclrtMemcpyKind kind,
                                       aclrtStream stream) {
  bool is_locked = true;
  {
    Lock lock(machine().lock);
    is_locked = block_of(to) != nullptr && block_of(from) != nullptr;
  }
  const Error error = aclrtMemcpyAsync(to, room_bytes, from, size_bytes, kind, stream);
  return error != kSuccess || is_locked ? error : aclrtSynchronizeStream(stream);
}

aclError aclrtMemset(void* address, size_t room_bytes, int32_t value, size_t size_bytes) {
  if (size_bytes > room_bytes) return failed(ACL_ERROR_RT_PARAM_INVALID);
  memset(address, value, size_bytes);
  return kSuccess;
}

aclError aclrtMemsetAsync(void* address, size_t room_bytes, int32_t value, size_t size_bytes,
                          aclrtStream stream) {
  if (size_bytes > room_bytes) return failed(ACL_ERROR_RT_PARAM_INVALID);
  return submit(stream, [=](const Interrupt&) {
    memset(address, value, size_bytes);
    return kSuccess;
  });
}
