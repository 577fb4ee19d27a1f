// Communicators of this process: who is in them, what they are configured to, and their state.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "hccl_links.hpp"
#include "hccl_types.hpp"
#include "stream.hpp"

namespace hccl {

struct Settings {
  std::string name;
  int64_t connect_timeout_s = 120;
  int64_t exec_timeout_s = 1836;  // 0 is never
};

// Those of the environment and the configuration; a configuration may be nullptr.
// On an error it reports why and returns its code.
Result read_settings(const Config* config, Settings& settings);

struct MemoryRange {
  size_t size;
  std::map<char*, size_t> active;  // parts that the ranks may access
};

class Communicator {
 public:
  Communicator(std::string id, const std::string& secret, Settings settings, int32_t device,
               size_t rank, std::vector<Member> members);

  // Whether an operation may begin; connects the peers, whose ends have to do so too.
  // On an error it reports why and returns its code.
  Result prepare(const std::vector<size_t>& peers);

  // The tag of the next collective operation, and of the next message to or from a rank.
  Tag next_collective(uint64_t signature);
  Tag next_send(size_t peer, uint64_t signature);
  Tag next_receive(size_t peer, uint64_t signature);

  // Operations fail with `suspending` until the communicator resumes, which forgets what was in
  // flight. Stopping the device suspends all of its communicators (HcclCommResume's documentation).
  void suspend();
  Result resume();
  bool is_suspended();
  uint64_t epoch();  // grows with each resume

  // Ends what waits in it.
  void destroy();

  // Of a peer on another server that is gone: what its network reports after its retries.
  void find_remote_error(size_t peer);
  Result async_error();

  // "IP/device" of a member, as HCCL names ranks in its messages.
  std::string location(size_t peer) const;
  bool is_same_server(size_t peer) const;

  const std::string id;
  const std::string secret;
  const Settings settings;
  const size_t rank;
  const std::vector<Member> members;
  const int32_t device;  // index among the visible ones
  Links links;

  std::mutex lock;  // of what follows
  std::map<char*, MemoryRange> ranges;
  std::map<uint64_t, uint64_t> children;  // how often a sub-communicator of that number was made
  std::vector<bool> uses_backup_nic;

 private:
  std::mutex state_lock_;
  uint64_t epoch_ = 0;
  uint64_t num_collectives_ = 0;
  std::vector<uint64_t> num_sends_;
  std::vector<uint64_t> num_receives_;
  uint64_t aborts_seen_;
  bool is_suspended_ = false;
  int remote_error_peer_ = -1;
};

// What the process's handles stand for.
void* register_communicator(std::shared_ptr<Communicator> communicator);
std::shared_ptr<Communicator> find_communicator(void* handle);  // nullptr where there is none
std::shared_ptr<Communicator> take_communicator(void* handle);

}  // namespace hccl
