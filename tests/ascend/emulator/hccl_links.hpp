// The connections of one communicator: a stream of frames to and from each of its ranks.
//
// Sending never waits: what the socket does not take is kept and sent by a thread of the
// communicator's own, which also receives. So no order of operations can block the transport, and
// work that waits has one thing to wait for: a frame of a peer.
#pragma once

#include <compare>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "hccl_socket.hpp"

namespace hccl {

struct Member {
  std::string server;   // IP of its host
  std::string address;  // where its process listens
  int device = 0;       // number on its host
  int pid = 0;
};

// Which frame of a peer: the operation's number and what it is, so that different operations of
// two ranks never take each other's data, and wait until they time out as on a device.
struct Tag {
  uint64_t epoch;      // grows when the communicator resumes
  uint64_t number;     // of the operation in the communicator
  uint64_t signature;  // of the operation, its type and count
  auto operator<=>(const Tag&) const = default;
};

struct Buffer {
  std::unique_ptr<char[]> bytes;
  size_t size = 0;
};

enum class LinkState { none, up, lost, closed };

class Links {
 public:
  Links(std::string id, std::string secret, size_t rank, std::vector<Member> members);
  ~Links();
  Links(const Links&) = delete;

  // Connects what is not connected yet; both ends have to. False where `until_ms` passed first
  // or the communicator was closed; `missing` is the peer that did not come.
  bool connect(const std::vector<size_t>& peers, int64_t until_ms, size_t& missing);

  void send(size_t peer, const Tag& tag, const void* data, size_t size);

  // The frame, if it is here.
  std::optional<Buffer> take(size_t peer, const Tag& tag);

  struct Peer {
    LinkState state;
    int64_t lost_ms;  // when the link was lost
  };
  Peer peer(size_t rank);

  // Set whenever a frame came or a link changed.
  void watch(const WakeUp& wake);
  void unwatch(const WakeUp& wake);

  // Forgets frames of earlier epochs, also of those to come.
  void begin_epoch(uint64_t epoch);

  // Breaks the links, as a network that is down does; `peers` find them lost, and frames that no
  // operation has taken yet are lost with them.
  void cut(const std::vector<size_t>& peers);

  // Sends what is left and ends the links; peers are told.
  void close();
  bool is_closed();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace hccl
