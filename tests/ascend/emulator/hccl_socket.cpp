#include "hccl_socket.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <system_error>

namespace hccl {
namespace {

constexpr size_t kMaxMessageBytes = 16 << 20;

struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

Address unix_address(const std::string& name) {
  Address result;
  auto& to = reinterpret_cast<sockaddr_un&>(result.storage);
  to.sun_family = AF_UNIX;
  // A first byte of zero makes it an abstract name, which vanishes with its socket.
  std::memcpy(to.sun_path + 1, name.data(), std::min(name.size(), sizeof(to.sun_path) - 1));
  result.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return result;
}

Address tcp_address(const std::string& ip, int port) {
  Address result;
  auto& to = reinterpret_cast<sockaddr_in&>(result.storage);
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(port));
  if (inet_pton(AF_INET, ip.c_str(), &to.sin_addr) != 1) {
    throw std::system_error(EINVAL, std::generic_category(), "not an IPv4 address: " + ip);
  }
  result.length = sizeof(sockaddr_in);
  return result;
}

Address parse(const std::string& address) {
  if (address.starts_with("unix:")) return unix_address(address.substr(5));
  const size_t colon = address.rfind(':');
  return tcp_address(address.substr(4, colon - 4), std::stoi(address.substr(colon + 1)));
}

bool wait_for(int fd, short events, int64_t until_ms) {
  while (true) {
    const int64_t left = until_ms - now_ms();
    if (left <= 0) return false;
    pollfd one{fd, events, 0};
    const int ready = poll(&one, 1, static_cast<int>(std::min<int64_t>(left, 1000)));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return false;
  }
}

bool transfer(int fd, char* data, size_t size, int64_t until_ms, bool is_write) {
  while (size > 0) {
    if (!wait_for(fd, is_write ? POLLOUT : POLLIN, until_ms)) return false;
    const ssize_t moved = is_write ? send(fd, data, size, MSG_NOSIGNAL | MSG_DONTWAIT)
                                   : recv(fd, data, size, MSG_DONTWAIT);
    if (moved == 0 && !is_write) return false;
    if (moved < 0 && errno != EAGAIN && errno != EINTR) return false;
    if (moved > 0) {
      data += moved;
      size -= static_cast<size_t>(moved);
    }
  }
  return true;
}

}  // namespace

Descriptor::~Descriptor() {
  if (fd_ >= 0) close(fd_);
}

WakeUp::WakeUp() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!fd_) throw std::system_error(errno, std::generic_category(), "eventfd");
}

void WakeUp::set() const {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(fd_.get(), &one, sizeof(one));
}

void WakeUp::clear() const {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = read(fd_.get(), &count, sizeof(count));
}

int64_t now_ms() {
  using namespace std::chrono;
  return duration_cast<milliseconds>(steady_clock::now().time_since_epoch()).count();
}

int64_t environment_number(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return otherwise;
  char* end = nullptr;
  const long long value = std::strtoll(text, &end, 10);
  if (*end != '\0') throw std::invalid_argument(std::string(name) + "=" + text);
  return value;
}

std::string server_ip() {
  const char* ip = std::getenv("HCCL_IF_IP");
  return ip == nullptr || *ip == '\0' ? "127.0.0.1" : ip;
}

bool is_same_secret(const std::string& one, const std::string& other) {
  if (one.size() != other.size()) return false;
  unsigned difference = 0;
  for (size_t i = 0; i < one.size(); i++) {
    difference |= static_cast<unsigned char>(one[i]) ^ static_cast<unsigned char>(other[i]);
  }
  return difference == 0;
}

std::string random_hex(size_t num_bytes) {
  std::string bytes(num_bytes, '\0');
  if (getrandom(bytes.data(), num_bytes, 0) != static_cast<ssize_t>(num_bytes)) {
    throw std::system_error(errno, std::generic_category(), "getrandom");
  }
  std::string text;
  for (const char byte : bytes) {
    text += "0123456789abcdef"[(byte >> 4) & 15];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

Descriptor listen_anywhere(std::string& address) {
  const std::string ip = server_ip();
  // Loopback addresses tell apart servers that are emulated on one machine.
  const bool is_unix = ip.starts_with("127.");
  const std::string name = "ascend-hccl-" + random_hex(12);
  const Address at = is_unix ? unix_address(name) : tcp_address(ip, 0);
  Descriptor fd(socket(at.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd || bind(fd.get(), at.get(), at.length) != 0 || listen(fd.get(), 512) != 0) {
    throw std::system_error(errno, std::generic_category(), "listen at " + ip);
  }
  if (is_unix) {
    address = "unix:" + name;
  } else {
    sockaddr_in bound{};
    socklen_t length = sizeof(bound);
    getsockname(fd.get(), reinterpret_cast<sockaddr*>(&bound), &length);
    address = "tcp:" + ip + ":" + std::to_string(ntohs(bound.sin_port));
  }
  return fd;
}

Descriptor dial(const std::string& address) {
  const Address to = parse(address);
  Descriptor fd(socket(to.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd || connect(fd.get(), to.get(), to.length) != 0) return Descriptor();
  if (to.storage.ss_family == AF_INET) {
    const int on = 1;
    setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  }
  return fd;
}

void set_nonblocking(int fd) { fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK); }

bool write_message(int fd, const std::string& text, int64_t until_ms) {
  // In one piece, so that whoever reads with a time-out finds all of a short message or none.
  const uint64_t size = text.size();
  std::string whole(reinterpret_cast<const char*>(&size), sizeof(size));
  whole += text;
  return transfer(fd, whole.data(), whole.size(), until_ms, true);
}

bool read_message(int fd, std::string& text, int64_t until_ms) {
  uint64_t size = 0;
  if (!transfer(fd, reinterpret_cast<char*>(&size), sizeof(size), until_ms, false)) return false;
  if (size > kMaxMessageBytes) return false;
  text.resize(size);
  return transfer(fd, text.data(), size, until_ms, false);
}

}  // namespace hccl
