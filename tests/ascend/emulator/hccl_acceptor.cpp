#include "hccl_acceptor.hpp"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <thread>
#include <vector>

namespace hccl {
namespace {

constexpr int64_t kGreetingMs = 5000;

struct Caller {
  Descriptor fd;
  size_t rank;
  std::string secret;
};

struct Acceptor {
  pid_t process = getpid();
  std::string address;
  Descriptor listener = listen_anywhere(address);
  std::mutex lock;
  std::map<std::string, Accepted> communicators;
  std::map<std::string, std::vector<Caller>> early;
};

void greet(Acceptor& acceptor, Descriptor fd) {
  std::string greeting;
  if (!read_message(fd.get(), greeting, now_ms() + kGreetingMs)) return;
  std::istringstream words(greeting);
  std::string communicator;
  std::string secret;
  size_t rank = 0;
  if (!(words >> communicator >> secret >> rank)) return;
  std::unique_lock guard(acceptor.lock);
  const auto found = acceptor.communicators.find(communicator);
  if (found == acceptor.communicators.end()) {
    acceptor.early[communicator].push_back({std::move(fd), rank, std::move(secret)});
    return;
  }
  found->second(std::move(fd), rank, secret);
}

void accept_forever(Acceptor& acceptor) {
  while (true) {
    Descriptor fd(accept4(acceptor.listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (fd) {
      greet(acceptor, std::move(fd));
    } else if (errno != EINTR && errno != ECONNABORTED) {
      return;
    }
  }
}

// Never destroyed: its thread outlives main. A forked child gets one of its own.
Acceptor& of_this_process() {
  static std::mutex lock;
  static Acceptor* acceptor = nullptr;
  std::unique_lock guard(lock);
  if (acceptor == nullptr || acceptor->process != getpid()) {
    acceptor = new Acceptor;
    std::thread(accept_forever, std::ref(*acceptor)).detach();
  }
  return *acceptor;
}

}  // namespace

const std::string& listening_address() { return of_this_process().address; }

void accept_links(const std::string& communicator, Accepted accepted) {
  Acceptor& acceptor = of_this_process();
  std::unique_lock guard(acceptor.lock);
  auto early = acceptor.early.extract(communicator);
  if (!early.empty()) {
    for (Caller& caller : early.mapped()) accepted(std::move(caller.fd), caller.rank, caller.secret);
  }
  acceptor.communicators[communicator] = std::move(accepted);
}

void refuse_links(const std::string& communicator) {
  Acceptor& acceptor = of_this_process();
  std::unique_lock guard(acceptor.lock);
  acceptor.communicators.erase(communicator);
}

Descriptor dial_link(const std::string& address, const std::string& communicator,
                     const std::string& secret, size_t rank) {
  Descriptor fd = dial(address);
  std::ostringstream greeting;
  greeting << communicator << ' ' << secret << ' ' << rank;
  if (!fd || !write_message(fd.get(), greeting.str(), now_ms() + kGreetingMs)) return Descriptor();
  return fd;
}

}  // namespace hccl
