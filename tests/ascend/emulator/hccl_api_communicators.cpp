// The functions of libhccl.so that make, ask and end communicators.
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include <unistd.h>

#include "hccl_acceptor.hpp"
#include "hccl_api.hpp"
#include "hccl_comm.hpp"
#include "hccl_errors.hpp"
#include "hccl_root.hpp"

using namespace hccl;

namespace {

// The number on its server of a device, which the process counts among the visible ones.
int physical_device(int32_t index) {
  const char* visible = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
  std::string left = visible == nullptr ? "" : visible;
  for (int i = 0; !left.empty(); i++) {
    if (i == index) return std::atoi(left.c_str());
    const size_t comma = left.find(',');
    left = comma == std::string::npos ? "" : left.substr(comma + 1);
  }
  return index;
}

Member member_on(int32_t device) {
  return {server_ip(), listening_address(), physical_device(device), getpid()};
}

Result make(const Root& root, uint32_t num_ranks, uint32_t rank, const Config* config,
            void** handle) {
  Settings settings{.name = root.identifier};
  if (const Result result = read_settings(config, settings); result != Result::success) {
    return result;
  }
  std::string error;
  const int32_t device = ascend::current_device();
  auto members =
      meet(root, num_ranks, rank, member_on(device), settings.connect_timeout_s, error);
  if (members.empty()) {
    report_negotiation_timeout(error);
    return Result::timeout;
  }
  *handle = register_communicator(std::make_shared<Communicator>(
      root.identifier, root.secret, std::move(settings), device, rank, std::move(members)));
  return Result::success;
}

Result make(const char* function, uint32_t num_ranks, const RootInfo* info, uint32_t rank,
            const Config* config, void** handle) {
  if (info == nullptr || handle == nullptr) return Result::pointer;
  const auto root = parse_root(*info);
  if (!root || num_ranks == 0 || rank >= num_ranks) {
    report_parameter(function, root ? "rank" : "rootInfo", std::to_string(rank),
                     "that of HcclGetRootInfo, and a rank less than " + std::to_string(num_ranks));
    return Result::parameter;
  }
  return guarded([&] { return make(*root, num_ranks, rank, config, handle); });
}

Result make_child(Communicator& parent, uint32_t num_ranks, const uint32_t* ranks, uint64_t number,
                  uint32_t rank, const Config* config, void** handle) {
  std::vector<Member> members;
  std::string of_ranks;
  for (uint32_t i = 0; i < num_ranks; i++) {
    if (ranks[i] >= parent.members.size()) return Result::parameter;
    members.push_back(parent.members[ranks[i]]);
    of_ranks += "." + std::to_string(ranks[i]);
  }
  if (rank >= num_ranks || ranks[rank] != parent.rank) return Result::parameter;
  uint64_t time = 0;
  {
    std::unique_lock guard(parent.lock);
    time = parent.children[number]++;
  }
  const std::string id =
      parent.id + "/" + std::to_string(number) + "." + std::to_string(time) + of_ranks;
  Settings settings{.name = id};
  if (const Result result = read_settings(config, settings); result != Result::success) {
    return result;
  }
  *handle = register_communicator(std::make_shared<Communicator>(
      id, parent.secret, std::move(settings), parent.device, rank, std::move(members)));
  return Result::success;
}

// All ranks of a communicator are of this process. They connect here: a thread that gives one
// operation after the other to each of them cannot wait in the first for the second.
Result make_all(uint32_t num_devices, const int32_t* devices, void** handles) {
  Settings settings;
  if (const Result result = read_settings(nullptr, settings); result != Result::success) {
    return result;
  }
  std::vector<Member> members;
  for (uint32_t i = 0; i < num_devices; i++) members.push_back(member_on(devices[i]));
  const std::string secret = random_hex(16);
  settings.name = server_ip() + "%lo_" + std::to_string(getpid()) + "_" + random_hex(4);
  std::vector<std::shared_ptr<Communicator>> communicators;
  for (uint32_t i = 0; i < num_devices; i++) {
    communicators.push_back(std::make_shared<Communicator>(settings.name, secret, settings,
                                                           devices[i], i, members));
  }
  std::vector<size_t> ranks(num_devices);
  std::iota(ranks.begin(), ranks.end(), 0);
  std::vector<Result> results(num_devices, Result::internal);
  std::vector<std::jthread> connecting;
  for (uint32_t i = 0; i < num_devices; i++) {
    connecting.emplace_back([&, i] { results[i] = communicators[i]->prepare(ranks); });
  }
  connecting.clear();
  for (const Result result : results) {
    if (result != Result::success) return result;
  }
  for (uint32_t i = 0; i < num_devices; i++) {
    handles[i] = register_communicator(std::move(communicators[i]));
  }
  return Result::success;
}

template <typename Use>
Result with(void* handle, Use use) {
  const auto communicator = find_communicator(handle);
  if (!communicator) return Result::pointer;
  return guarded([&] { return use(*communicator); });
}

struct Configuration {
  std::mutex lock;
  std::map<int32_t, int32_t> values;
};

Configuration& configuration() {
  static auto* const all = new Configuration;
  return *all;
}

constexpr int32_t kNumSettings = 2;  // HCCL_DETERMINISTIC, HCCL_ACCELERATOR

}  // namespace

void hccl::report_exception(const char* what) { report_inner(what); }

HCCL_API Result HcclGetRootInfo(RootInfo* info) {
  HCCL_CALLED;
  if (info == nullptr) return Result::pointer;
  return guarded([&] {
    Settings settings;
    if (const Result result = read_settings(nullptr, settings); result != Result::success) {
      return result;
    }
    *info = begin_root(physical_device(ascend::current_device()), settings.connect_timeout_s);
    return Result::success;
  });
}

HCCL_API Result HcclCommInitRootInfo(uint32_t num_ranks, const RootInfo* info, uint32_t rank,
                                     void** handle) {
  HCCL_CALLED;
  return make("HcclCommInitRootInfo", num_ranks, info, rank, nullptr, handle);
}

HCCL_API Result HcclCommInitRootInfoConfig(uint32_t num_ranks, const RootInfo* info, uint32_t rank,
                                           const Config* config, void** handle) {
  HCCL_CALLED;
  return make("HcclCommInitRootInfoConfig", num_ranks, info, rank, config, handle);
}

HCCL_API Result HcclCommInitAll(uint32_t num_devices, int32_t* devices, void** handles) {
  HCCL_CALLED;
  if (devices == nullptr || handles == nullptr) return Result::pointer;
  return guarded([&] { return make_all(num_devices, devices, handles); });
}

// Like the library, it makes nothing on a rank that is not in it: there `ranks` is nullptr.
HCCL_API Result HcclCreateSubCommConfig(void** parent, uint32_t num_ranks, const uint32_t* ranks,
                                        uint64_t number, uint32_t rank, const Config* config,
                                        void** handle) {
  HCCL_CALLED;
  if (parent == nullptr || handle == nullptr) return Result::pointer;
  if (ranks == nullptr) {
    *handle = nullptr;
    return Result::success;
  }
  return with(*parent, [&](Communicator& communicator) {
    return make_child(communicator, num_ranks, ranks, number, rank, config, handle);
  });
}

HCCL_API Result HcclCommDestroy(void* handle) {
  HCCL_CALLED;
  const auto communicator = take_communicator(handle);
  if (!communicator) return Result::pointer;
  communicator->destroy();
  return Result::success;
}

HCCL_API Result HcclGetCommName(void* handle, char* name) {
  HCCL_CALLED;
  return with(handle, [&](const Communicator& communicator) {
    std::memset(name, 0, kNameBytes);
    communicator.settings.name.copy(name, kNameBytes - 1);
    return Result::success;
  });
}

HCCL_API Result HcclGetRankSize(void* handle, uint32_t* size) {
  HCCL_CALLED;
  return with(handle, [&](const Communicator& communicator) {
    *size = static_cast<uint32_t>(communicator.members.size());
    return Result::success;
  });
}

HCCL_API Result HcclGetRankId(void* handle, uint32_t* rank) {
  HCCL_CALLED;
  return with(handle, [&](const Communicator& communicator) {
    *rank = static_cast<uint32_t>(communicator.rank);
    return Result::success;
  });
}

HCCL_API Result HcclGetCommAsyncError(void* handle, Result* error) {
  HCCL_CALLED;
  return with(handle, [&](Communicator& communicator) {
    *error = communicator.async_error();
    return Result::success;
  });
}

HCCL_API Result HcclCommSuspend(void* handle) {
  HCCL_CALLED;
  return with(handle, [](Communicator& communicator) {
    communicator.suspend();
    return Result::success;
  });
}

HCCL_API Result HcclCommResume(void* handle) {
  HCCL_CALLED;
  return with(handle, [](Communicator& communicator) { return communicator.resume(); });
}

HCCL_API uint32_t HcclGetCommConfigCapability() {
  HCCL_CALLED;
  return kConfigCapability;
}

// Results here are always deterministic, and nothing is accelerated: the values are only kept.
HCCL_API Result HcclSetConfig(int32_t setting, int32_t value) {
  HCCL_CALLED;
  if (setting < 0 || setting >= kNumSettings) return Result::parameter;
  std::unique_lock guard(configuration().lock);
  configuration().values[setting] = value;
  return Result::success;
}

HCCL_API Result HcclGetConfig(int32_t setting, int32_t* value) {
  HCCL_CALLED;
  if (setting < 0 || setting >= kNumSettings || value == nullptr) return Result::parameter;
  std::unique_lock guard(configuration().lock);
  *value = configuration().values[setting];
  return Result::success;
}

HCCL_API const char* HcclGetErrorString(Result code) {
  HCCL_CALLED;
  switch (code) {
    case Result::success: return "no error";
    case Result::parameter: return "parameter error";
    case Result::pointer: return "empty pointer";
    case Result::internal: return "internal error";
    case Result::not_supported: return "not support feature";
    case Result::not_found: return "not found specific resource";
    case Result::unavailable: return "resource unavailable";
    case Result::timeout: return "timeout";
    case Result::runtime: return "call runtime api fail";
    case Result::remote: return "error cqe";
    case Result::suspending: return "error communicator suspending";
  }
  return "unknown error";
}
