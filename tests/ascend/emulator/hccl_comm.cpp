#include "hccl_comm.hpp"

#include <unistd.h>

#include <cstring>
#include <stdexcept>

#include "hccl_errors.hpp"
#include "machine.hpp"

namespace hccl {
namespace {

constexpr int64_t kMaxConnectTimeoutS = 7200;
constexpr int64_t kMaxExecTimeoutS = 2147483647;

// How often the tasks of a device were aborted.
uint64_t num_aborts(int32_t index) {
  ascend::Lock guard(ascend::machine().lock);
  const ascend::Device* device = ascend::find_device(index);
  return device == nullptr ? 0 : device->aborts;
}

bool read_seconds(const char* variable, int64_t least, int64_t most, int64_t& value) {
  try {
    value = environment_number(variable, value);
    if (value >= least && value <= most) return true;
  } catch (const std::invalid_argument&) {
  }
  report_environment(variable, std::getenv(variable),
                     "a number from " + std::to_string(least) + " to " + std::to_string(most));
  return false;
}

// Tags of messages from one rank to another do not mix with those of collectives.
constexpr uint64_t kMessage = 1ull << 63;

}  // namespace

Result read_settings(const Config* config, Settings& settings) {
  // The real library allows no less than 120 s to connect; tests cannot wait that long.
  if (!read_seconds("HCCL_CONNECT_TIMEOUT", 1, kMaxConnectTimeoutS, settings.connect_timeout_s) ||
      !read_seconds("HCCL_EXEC_TIMEOUT", 0, kMaxExecTimeoutS, settings.exec_timeout_s)) {
    return Result::parameter;
  }
  if (config == nullptr) return Result::success;
  if (config->magic != kConfigMagic) {
    report_parameter("HcclCommInitRootInfoConfig", "config.magicWord", std::to_string(config->magic),
                     std::to_string(kConfigMagic));
    return Result::parameter;
  }
  const auto has = [&](size_t member_end) { return config->size >= member_end; };
  if (has(offsetof(Config, user_name)) && config->name[0] != '\0') {
    settings.name.assign(config->name, strnlen(config->name, kNameBytes));
  }
  if (has(offsetof(Config, exec_timeout_s) + sizeof(int32_t)) &&
      config->exec_timeout_s != kExecTimeoutNotSet) {
    settings.exec_timeout_s = config->exec_timeout_s;
  }
  return Result::success;
}

Communicator::Communicator(std::string id, const std::string& secret, Settings settings,
                           int32_t device, size_t rank, std::vector<Member> members)
    : id(std::move(id)),
      secret(secret),
      settings(std::move(settings)),
      rank(rank),
      members(std::move(members)),
      device(device),
      links(this->id, secret, rank, this->members),
      uses_backup_nic(this->members.size(), false),
      num_sends_(this->members.size(), 0),
      num_receives_(this->members.size(), 0),
      aborts_seen_(num_aborts(device)) {}

Result Communicator::prepare(const std::vector<size_t>& peers) {
  if (is_suspended()) return Result::suspending;
  size_t missing = 0;
  const int64_t until_ms = now_ms() + settings.connect_timeout_s * 1000;
  if (links.connect(peers, until_ms, missing)) return Result::success;
  if (links.is_closed()) return Result::unavailable;
  report_link_timeout(location(rank), location(missing), settings.connect_timeout_s);
  return Result::timeout;
}

Tag Communicator::next_collective(uint64_t signature) {
  std::unique_lock guard(state_lock_);
  return {epoch_, num_collectives_++, signature};
}

Tag Communicator::next_send(size_t peer, uint64_t signature) {
  std::unique_lock guard(state_lock_);
  return {epoch_, kMessage | num_sends_[peer]++, signature};
}

Tag Communicator::next_receive(size_t peer, uint64_t signature) {
  std::unique_lock guard(state_lock_);
  return {epoch_, kMessage | num_receives_[peer]++, signature};
}

void Communicator::suspend() {
  std::unique_lock guard(state_lock_);
  is_suspended_ = true;
}

bool Communicator::is_suspended() {
  const uint64_t aborts = num_aborts(device);
  std::unique_lock guard(state_lock_);
  return is_suspended_ || aborts != aborts_seen_;
}

Result Communicator::resume() {
  const uint64_t aborts = num_aborts(device);
  std::unique_lock guard(state_lock_);
  aborts_seen_ = aborts;
  is_suspended_ = false;
  remote_error_peer_ = -1;
  num_collectives_ = 0;
  num_sends_.assign(members.size(), 0);
  num_receives_.assign(members.size(), 0);
  links.begin_epoch(++epoch_);
  return Result::success;
}

uint64_t Communicator::epoch() {
  std::unique_lock guard(state_lock_);
  return epoch_;
}

void Communicator::destroy() { links.close(); }

void Communicator::find_remote_error(size_t peer) {
  std::unique_lock guard(state_lock_);
  if (remote_error_peer_ < 0) remote_error_peer_ = static_cast<int>(peer);
}

Result Communicator::async_error() {
  std::unique_lock guard(state_lock_);
  if (remote_error_peer_ < 0) return Result::success;
  const auto describe = [&](size_t member) {
    const Member& one = members[member];
    return "server " + one.server + ", device ID " + std::to_string(one.device) + ", device IP " +
           one.server;
  };
  report_error_cqe(describe(rank), describe(static_cast<size_t>(remote_error_peer_)));
  return Result::remote;
}

std::string Communicator::location(size_t peer) const {
  return members[peer].server + "/" + std::to_string(members[peer].device);
}

bool Communicator::is_same_server(size_t peer) const {
  return members[peer].server == members[rank].server;
}

namespace {

struct Registry {
  std::mutex lock;
  std::map<void*, std::shared_ptr<Communicator>> communicators;
};

// Never destroyed: torch_npu destroys communicators while the process ends.
Registry& registry() {
  static auto* const all = new Registry;
  return *all;
}

}  // namespace

void* register_communicator(std::shared_ptr<Communicator> communicator) {
  std::unique_lock guard(registry().lock);
  void* const handle = communicator.get();
  registry().communicators[handle] = std::move(communicator);
  return handle;
}

std::shared_ptr<Communicator> find_communicator(void* handle) {
  std::unique_lock guard(registry().lock);
  const auto found = registry().communicators.find(handle);
  return found == registry().communicators.end() ? nullptr : found->second;
}

std::shared_ptr<Communicator> take_communicator(void* handle) {
  std::unique_lock guard(registry().lock);
  auto found = registry().communicators.extract(handle);
  return found.empty() ? nullptr : found.mapped();
}

}  // namespace hccl
