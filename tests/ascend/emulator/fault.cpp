#include "fault.hpp"

#include <poll.h>
#include <sys/time.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <list>
#include <mutex>
#include <sstream>

#include "memory.hpp"

namespace ascend {
namespace {

enum class Scope { kStream, kDevice };

struct Kind {
  const char* name;
  Error code;
  Scope scope;
  Site site;
};

constexpr Error kNeverEnds = -1;
constexpr Error kTakenByName = -2;

// Codes of ACL_ERROR_RT_*. Those taken by name are for HCCL and for the allocator.
constexpr Kind kKinds[] = {
    {"aicore", ACL_ERROR_RT_AICORE_EXCEPTION, Scope::kStream, Site::kOperator},
    {"aicore-timeout", ACL_ERROR_RT_AICORE_TIMEOUT, Scope::kStream, Site::kOperator},
    {"hang", kNeverEnds, Scope::kStream, Site::kWork},
    {"uce", ACL_ERROR_RT_DEVICE_MEM_ERROR, Scope::kDevice, Site::kWork},
    {"ecc", ACL_ERROR_RT_HBM_MULTI_BIT_ECC_ERROR, Scope::kDevice, Site::kWork},
    {"suspect-memory", ACL_ERROR_RT_SUSPECT_DEVICE_MEM_ERROR, Scope::kDevice, Site::kWork},
    {"lost", ACL_ERROR_RT_LOST_HEARTBEAT, Scope::kDevice, Site::kWork},
    {"link", ACL_ERROR_RT_LINK_ERROR, Scope::kDevice, Site::kCommunication},
    {"suspect-remote", ACL_ERROR_RT_SUSPECT_REMOTE_ERROR, Scope::kDevice, Site::kCommunication},
    {"retry-failed", ACL_ERROR_RT_COMM_OP_RETRY_FAIL, Scope::kDevice, Site::kCommunication},
    {"oom", kTakenByName, Scope::kDevice, Site::kWork},
    {"retry", kTakenByName, Scope::kStream, Site::kCommunication},
    {"network", kTakenByName, Scope::kStream, Site::kCommunication},
};

struct Fault {
  const Kind* kind;
  int32_t device = 0;
  uint64_t after = 0;  // pieces of work that it still spares
  char* address = nullptr;
  size_t size_bytes = 0;
};

std::mutex& armed_lock() {
  static auto* lock = new std::mutex;
  return *lock;
}

std::list<Fault>& armed() {
  static auto* faults = new std::list<Fault>;
  return *faults;
}

// Spares the lock where nothing is armed.
std::atomic<int> num_armed = 0;

// Takes the first fault that `is_meant` out of the list once its `after` is used up.
template <typename IsMeant>
bool take(Fault& taken, IsMeant is_meant) {
  if (num_armed == 0) return false;
  const std::lock_guard hold(armed_lock());
  for (auto fault = armed().begin(); fault != armed().end(); ++fault) {
    if (!is_meant(*fault)) continue;
    if (fault->after > 0) {
      --fault->after;
      continue;
    }
    taken = *fault;
    armed().erase(fault);
    --num_armed;
    return true;
  }
  return false;
}

std::string microseconds() {
  timeval time{};
  gettimeofday(&time, nullptr);
  return std::to_string(time.tv_sec * 1000000 + time.tv_usec);
}

// What the driver's report of the device adds to the runtime's line.
std::string report(const Fault& fault, int32_t chip) {
  const std::string from = "EZ9999: The error from device(chipId:" + std::to_string(chip) +
                           ", dieId:0), serial number is 1, ";
  switch (fault.kind->code) {
    case ACL_ERROR_RT_AICORE_EXCEPTION:
      return from +
             "there is an exception of aicore error, core id is 0, error code = 0x800000, dump "
             "info: pc start: 0x12c0c131862c, current: 0x12c0c1318780, vec error info: 0, mte "
             "error info: 0x61060000c3\n";
    case ACL_ERROR_RT_AICORE_TIMEOUT:
      return from + "there is an exception of aicore timeout, core id is 0, error code = 0\n";
    case ACL_ERROR_RT_HBM_MULTI_BIT_ECC_ERROR:
      return from + "hbm Multi-bit ECC error, time us= " + microseconds() + ".\n";
    case ACL_ERROR_RT_LOST_HEARTBEAT:
      return "EE9999: Device[" + std::to_string(fault.device) + "] lost heartbeat.\n";
    default: return "";
  }
}

// The bytes are gone, and where nobody names any, they were the runtime's own.
void damage(Lock& lock, Device& device, const Fault& fault) {
  static char elsewhere[512];
  const bool is_named = fault.address != nullptr;
  DamagedMemory memory{is_named ? fault.address : elsewhere,
                       is_named ? fault.size_bytes : sizeof elsewhere};
  if (is_named && is_device_memory(lock, device, memory.address, memory.size_bytes))
    memset(memory.address, 0xff, memory.size_bytes);
  device.damaged.push_back(memory);
}

Error wait_for(const Interrupt& interrupt) {
  pollfd until{interrupt.descriptor(), POLLIN, 0};
  while (!interrupt.requested()) poll(&until, 1, -1);
  return interrupt.error();
}

bool parse(const std::string& word, Fault& fault) {
  const auto equals = word.find('=');
  if (equals == std::string::npos) return false;
  const std::string name = word.substr(0, equals);
  char* end = nullptr;
  const uint64_t value = strtoull(word.c_str() + equals + 1, &end, 0);
  if (*end != '\0' || end == word.c_str() + equals + 1) return false;
  if (name == "device") fault.device = static_cast<int32_t>(value);
  else if (name == "after") fault.after = value;
  else if (name == "address") fault.address = reinterpret_cast<char*>(value);
  else if (name == "size") fault.size_bytes = value;
  else return false;
  return true;
}

void clear_faults() {
  const std::lock_guard hold(armed_lock());
  armed().clear();
  num_armed = 0;
}

}  // namespace

Error strike(int32_t index, Site site, const Interrupt& interrupt) {
  Fault fault;
  const auto is_meant = [&](const Fault& one) {
    return one.device == index && one.kind->site == site && one.kind->code != kTakenByName;
  };
  if (!take(fault, is_meant)) return kSuccess;
  const Error code = fault.kind->code;
  if (code == kNeverEnds) return wait_for(interrupt);
  Device& device = *find_device(index);
  const std::string text =
      inner_error("rtStreamSynchronize", reason_of(code)) + report(fault, device.chip);
  if (fault.kind->scope == Scope::kDevice) {
    Lock lock(machine().lock);
    if (code == ACL_ERROR_RT_DEVICE_MEM_ERROR || code == ACL_ERROR_RT_HBM_MULTI_BIT_ECC_ERROR)
      damage(lock, device, fault);
    fail_device(lock, device, code, text);
  }
  set_error_message(text.c_str());
  return code;
}

bool take_fault(int32_t device, const std::string& kind) {
  Fault fault;
  return take(fault, [&](const Fault& one) {
    return one.device == device && one.kind->name == kind;
  });
}

// Stays until it is cleared: torch_npu frees what it caches, and then tries again.
bool is_out_of_memory(int32_t device) {
  if (num_armed == 0) return false;
  const std::lock_guard hold(armed_lock());
  return std::ranges::any_of(armed(), [&](const Fault& one) {
    return one.device == device && strcmp(one.kind->name, "oom") == 0;
  });
}

std::string command_fault(const std::string& line) {
  std::istringstream words(line);
  std::string word;
  words >> word;
  if (word == "clear") {
    clear_faults();
    return "";
  }
  Fault fault{};
  for (const Kind& kind : kKinds)
    if (word == kind.name) fault.kind = &kind;
  if (fault.kind == nullptr) return "no such fault: " + word;
  while (words >> word)
    if (!parse(word, fault)) return "not understood: " + word;
  if (find_device(fault.device) == nullptr)
    return "no such device: " + std::to_string(fault.device);
  if ((fault.address == nullptr) != (fault.size_bytes == 0))
    return "address and size go together";
  const std::lock_guard hold(armed_lock());
  armed().push_back(fault);
  ++num_armed;
  return "";
}

}  // namespace ascend
