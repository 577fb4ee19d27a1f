#include "hccl_root.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <map>
#include <sstream>
#include <thread>

#include "hccl_acceptor.hpp"

namespace hccl {
namespace {

constexpr char kMagic[] = "ascend-emulator-hccl";
constexpr int64_t kMessageMs = 5000;
// The real library waits as much longer, to tell every node why it failed (HCCL_CONNECT_TIMEOUT's
// documentation); here it only has to reach ranks of the same machine.
constexpr int64_t kReportMs = 1000;

struct Called {
  Descriptor fd;
  std::string member;
};

std::string write_member(const Member& member) {
  std::ostringstream text;
  text << member.server << ' ' << member.address << ' ' << member.device << ' ' << member.pid;
  return text.str();
}

bool read_member(std::istream& text, Member& member) {
  return static_cast<bool>(text >> member.server >> member.address >> member.device >> member.pid);
}

std::string missing_ranks(const std::map<size_t, Called>& called, size_t num_ranks) {
  std::string ranks;
  for (size_t rank = 0; rank < num_ranks; rank++) {
    if (!called.contains(rank)) ranks += std::to_string(rank) + ",";
  }
  return ranks;
}

// Takes one rank's call: "SECRET NUM_RANKS RANK MEMBER".
void take_call(const Descriptor& listener, const std::string& secret, size_t& num_ranks,
               std::map<size_t, Called>& called) {
  Descriptor fd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  std::string message;
  if (!fd || !read_message(fd.get(), message, now_ms() + kMessageMs)) return;
  std::istringstream words(message);
  std::string given;
  size_t size = 0;
  size_t rank = 0;
  Member member;
  if (!(words >> given >> size >> rank) || !is_same_secret(given, secret)) return;
  if (!read_member(words, member) || rank >= size) return;
  if (num_ranks == 0) num_ranks = size;
  if (size != num_ranks || called.contains(rank)) {
    write_message(fd.get(), "error rank " + std::to_string(rank) + " of " + std::to_string(size) +
                                " does not fit the ranks that came before",
                  now_ms() + kMessageMs);
    return;
  }
  called[rank] = {std::move(fd), write_member(member)};
}

void serve_root(Descriptor listener, std::string secret, int64_t until_ms) {
  size_t num_ranks = 0;
  std::map<size_t, Called> called;
  while ((num_ranks == 0 || called.size() < num_ranks) && now_ms() < until_ms) {
    pollfd one{listener.get(), POLLIN, 0};
    if (poll(&one, 1, static_cast<int>(std::min<int64_t>(until_ms - now_ms(), 1000))) > 0) {
      take_call(listener, secret, num_ranks, called);
    }
  }
  std::string answer = "members";
  if (called.size() < num_ranks) {
    answer = "error Failed to connect agent[" + missing_ranks(called, num_ranks) + "]";
  } else {
    for (const auto& [rank, one] : called) answer += '\n' + one.member;
  }
  for (const auto& [rank, one] : called) write_message(one.fd.get(), answer, now_ms() + kMessageMs);
}

std::vector<Member> parse_members(const std::string& answer, size_t num_ranks) {
  std::istringstream text(answer.substr(answer.find('\n')));
  std::vector<Member> members(num_ranks);
  for (Member& member : members) {
    if (!read_member(text, member)) return {};
  }
  return members;
}

}  // namespace

std::optional<Root> parse_root(const RootInfo& info) {
  const std::string text(info.internal, strnlen(info.internal, sizeof(info.internal)));
  std::istringstream words(text);
  std::string magic;
  Root root;
  if (!(words >> magic >> root.address >> root.secret >> root.identifier) || magic != kMagic) {
    return std::nullopt;
  }
  return root;
}

RootInfo begin_root(int device, int64_t timeout_s) {
  std::string address;
  Descriptor listener = listen_anywhere(address);
  const std::string secret = random_hex(16);
  using namespace std::chrono;
  const auto time = duration_cast<microseconds>(system_clock::now().time_since_epoch()).count();
  std::ostringstream text;
  // The name is that of the real library: IP%interface_port_device_microseconds.
  text << kMagic << ' ' << address << ' ' << secret << ' ' << server_ip() << "%lo_" << getpid() << '_'
       << device << '_' << time;
  RootInfo info{};
  text.str().copy(info.internal, sizeof(info.internal) - 1);
  std::thread(serve_root, std::move(listener), secret, now_ms() + timeout_s * 1000).detach();
  return info;
}

std::vector<Member> meet(const Root& root, size_t num_ranks, size_t rank, const Member& self,
                         int64_t timeout_s, std::string& error) {
  const int64_t until_ms = now_ms() + timeout_s * 1000;
  std::ostringstream call;
  call << root.secret << ' ' << num_ranks << ' ' << rank << ' ' << write_member(self);
  Descriptor fd = dial(root.address);
  error = "topo exchange agent get socket timeout! timeout[" + std::to_string(timeout_s) + "]";
  while (!fd && now_ms() < until_ms) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    fd = dial(root.address);
  }
  if (!fd || !write_message(fd.get(), call.str(), until_ms)) return {};
  std::string answer;
  if (!read_message(fd.get(), answer, until_ms + kReportMs)) return {};
  if (answer.starts_with("error ")) {
    error = answer.substr(6);
    return {};
  }
  return parse_members(answer, num_ranks);
}

}  // namespace hccl
